"""``Endpoints``: where workers serve requests, as ``IP:PORT``: addresses name hosts, and proxies want numbers.

One event loop. A name that was resolved once is answered at once from then on, with the addresses that were found
last, so a name server that hangs or fails delays no request.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from kvpool.errors import ConfigError
from kvpool.index.fleet import Fleet
from kvpool.index.resolver import Addresses, Resolver, Unresolved

MAX_NAMES = 16384  # whose addresses are remembered


class Url(NamedTuple):
    """Of a worker: ``is_tls``, ``host`` (a name or a numeric address), ``port``."""

    is_tls: bool
    host: str
    port: int


@lru_cache(4096)
def parse_url(address: str) -> Url:
    """Errors: ``ConfigError`` for an address at which no request can be served."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{address:.200}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{address:.200}: requests are served at http://HOST:PORT")
    return Url(parts.scheme == "https", parts.hostname, port or (443 if parts.scheme == "https" else 80))


class Endpoints:
    """Of the workers of ``fleet``."""

    def __init__(self, fleet: Fleet, resolver: Resolver) -> None:
        self._fleet, self._resolver = fleet, resolver
        self._known: OrderedDict[tuple[str, str], Addresses] = OrderedDict()  # by tenant and host

    async def resolve(self, address: str, tenant: str, timeout_s: float) -> str:
        """``IP:PORT`` of a worker's address. Errors: ``ConfigError``; ``Unresolved``, also after ``timeout_s``."""
        url = parse_url(address)
        found = self._resolver.resolve(url.host, tenant)
        known = self._known.get((tenant, url.host))
        if not found.done() and known is None:
            await asyncio.wait({asyncio.wrap_future(found)}, timeout=timeout_s)
        if found.done() and found.exception() is None:
            known = found.result()
            self._remember((tenant, url.host), known)
        if known is None:
            if found.done():
                raise found.exception() or AssertionError
            raise Unresolved(f"the name {url.host} is not resolved within {timeout_s:g} s")
        return _numeric(known[0], url.port)

    async def names_at(self, wanted: frozenset[str], tenant: str, timeout_s: float) -> list[str]:
        """The workers of a tenant that serve at one of these ``IP:PORT``."""
        workers = [worker for worker in self._fleet.followed() if worker.tenant == tenant and worker.address]
        found = await asyncio.gather(
            *(self.resolve(worker.address, tenant, timeout_s) for worker in workers), return_exceptions=True
        )
        return [worker.name for worker, at in zip(workers, found, strict=True) if at in wanted]

    def _remember(self, key: tuple[str, str], addresses: Addresses) -> None:
        self._known[key] = addresses
        self._known.move_to_end(key)
        if len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)


@lru_cache(4096)
def _numeric(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ipaddress.ip_address(address).version == 6 else f"{address}:{port}"
