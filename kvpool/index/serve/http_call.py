"""What a call over HTTP is given, and what it answers; ``HttpServer`` serves them, other modules have some."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvpool.index.serve.auth import Permissions
from kvpool.index.serve.encoding import Encoding

NOTHING: Mapping[str, str] = MappingProxyType({})


class HttpRequest(NamedTuple):
    """``query``: of its URL, the last of each name. ``host``: who sends it; empty: not known."""

    raw: bytes
    encoding: Encoding
    query: Mapping[str, str] = NOTHING
    host: str = ""


class HttpReply(NamedTuple):
    """Bytes, in the encoding of the request."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = NOTHING


HttpCall = Callable[[HttpRequest, Permissions], Awaitable[HttpReply]]


class Refused(Exception):
    """No answer, but a status, as HTTP and as gRPC have it, and one line."""

    def __init__(self, status: int, name: str, line: str) -> None:
        super().__init__(line)
        self.status, self.name = status, name
