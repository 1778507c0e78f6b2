"""``read_page``: one answer over HTTP, as ``kvpool doctor`` reads them of workers and fronts.

One deadline holds for all of it, however it drips. No redirect is followed and no proxy asked: what is examined is what
was named.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvpool.errors import RepliesTooLarge
from kvpool.store.server.deadline_socket import DeadlineSocket, Room, dialled, under_tls
from kvpool.store.tls import Tls
from kvpool.text import redact

TIMEOUT_S = 3.0
MAX_NBYTES = 16 << 20  # of a body; with what is around it, of an answer twice as many


class Page(NamedTuple):
    """``away``: why there is none. ``headers``: names in lower case."""

    away: str = ""
    status: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = {}

    @property
    def excerpt(self) -> str:
        """What it says, in some words."""
        if 300 <= self.status < 400 and (place := self.headers.get("location")):
            return f"it sends on to {redact(place):.200}"
        return " ".join(self.body[:200].decode("utf-8", "replace").split()) or "nothing"


def read_page(url: str, tls_ca: str | None) -> Page:
    """Blocking, for ``TIMEOUT_S`` and what the host takes to find the name. Never raises."""
    end_s = time.monotonic() + TIMEOUT_S
    try:
        parts = urlsplit(url)
        host, is_https = parts.hostname or "", parts.scheme == "https"
        tls = Tls(ca=tls_ca or "")
        if is_https:
            tls.context()  # what is wrong with it here is told first
        plain = dialled((host, parts.port or (443 if is_https else 80)), end_s)
        if is_https:
            socket = under_tls(plain, tls, host, end_s)
        else:
            socket = DeadlineSocket(fileno=plain.detach())
        with socket:
            socket.deadline_s, socket.room = end_s, Room(2 * MAX_NBYTES)
            return _asked(socket, parts.netloc.rpartition("@")[2], parts.path or "/")
    except (OSError, RepliesTooLarge, http.client.HTTPException, ValueError) as error:  # ConfigError, too
        return Page(away=_words(error))


def _asked(socket: DeadlineSocket, host: str, path: str) -> Page:
    connection = http.client.HTTPConnection(host)
    connection.sock = socket
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"host": host, "connection": "close"})
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return Page("", answer.status, answer.read(MAX_NBYTES), headers)


def _words(error: Any) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
