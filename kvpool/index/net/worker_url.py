"""``Url``: where a worker serves requests. Pure."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from kvpool.errors import ConfigError
from kvpool.text import redact

MAX_NAMES = 16384  # with remembered addresses


class Url(NamedTuple):
    """Of a worker. ``host``: a name or a numeric address. ``endpoint``: ``IP:PORT``; empty: the host is a name."""

    is_tls: bool
    host: str
    port: int
    endpoint: str

    @property
    def scheme(self) -> str:
        return "https" if self.is_tls else "http"

    @property
    def authority(self) -> str:
        """For the header ``Host``: always with the port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@lru_cache(MAX_NAMES)
def parse_url(address: str) -> Url:
    """Errors: ``ConfigError`` for an address that cannot serve requests."""
    if not address:
        raise ConfigError("its address is not known: say where it serves requests, address=http://HOST:PORT")
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{redact(address):.200}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{redact(address):.200}: requests are served at http://HOST:PORT")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"{redact(address):.200}: an address has no user, path or query: write {parts.scheme}://HOST:PORT"
        )
    port = port or (443 if parts.scheme == "https" else 80)
    try:
        endpoint = numeric(parts.hostname, port)
    except ValueError:
        endpoint = ""
    return Url(parts.scheme == "https", parts.hostname, port, endpoint)


@lru_cache(MAX_NAMES)
def numeric(address: str, port: int) -> str:
    """``IP:PORT``. Errors: ``ValueError`` for a name."""
    return f"[{address}]:{port}" if ipaddress.ip_address(address).version == 6 else f"{address}:{port}"
