"""``open_listening``, and ``HttpListener``: one HTTP port, with the limits of every such port of an index.

uvicorn bounds neither the arrival of a request nor the number and age of connections: ``_Connection`` does.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpool.errors import ConfigError
from kvpool.index.client.tls import ServerTls
from kvpool.text import parse_address

MAX_HEAD_NBYTES = 16 << 10
MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_OF_HOST = 256
HEAD_S = 5.0  # for a request's line and headers
REQUEST_S = 30.0  # from its headers to its answer
KEEP_ALIVE_S = 30
STOP_TIMEOUT_S = 5

JSON = "application/json"
NOTHING: Mapping[str, str] = MappingProxyType({})

_CLOSE = (b"connection", b"close")


class HttpRequest(NamedTuple):
    """``query``: of its URL, the last of each name. ``host``: of the client; empty: unknown."""

    raw: bytes
    query: Mapping[str, str] = NOTHING
    host: str = ""


class HttpReply(NamedTuple):
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = NOTHING


class Refused(Exception):
    """A status, as HTTP and as gRPC have it, and one line."""

    def __init__(self, status: int, name: str, line: str) -> None:
        super().__init__(line)
        self.status, self.name = status, name


class HttpListener:
    """Serves ``application``. One event loop: ``start``, ``stop``.

    ``tls``: None: without. ``max_age_s``: the first answer after so long ends its connection, so that callers
    spread over new replicas; 0: never.
    """

    def __init__(
        self, application: Starlette, *, tls: ServerTls | None = None, max_age_s: float = 0.0
    ) -> None:
        self._application, self._tls, self._max_age_s = application, tls, max_age_s
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None

    async def start(self, listen: str, what: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any free one. Returns the port. ``what``: for the error. Errors:
        ``ConfigError``.
        """

        class Connection(_Connection):
            max_age_s = self._max_age_s

        self._socket = open_listening(listen, what)
        self._socket.setblocking(False)
        config = uvicorn.Config(
            self._application,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # it warns of every request that is no HTTP
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            h11_max_incomplete_event_size=MAX_HEAD_NBYTES,
        )
        config.load()
        config.ssl = None if self._tls is None else self._tls.context
        server = uvicorn.Server(config)
        # Not serve(): it takes over the signals of the process.
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[self._socket])
        self._server = server
        return int(self._socket.getsockname()[1])

    async def stop(self) -> None:
        """Refuse new requests; running ones have a few seconds."""
        if self._server is not None:
            await self._server.shutdown(sockets=[] if self._socket is None else [self._socket])
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
        elif self._socket is not None:
            self._socket.close()


class _Connection(H11Protocol):
    """uvicorn's, with timeouts. ``_ends``: the timer that closes it, one at a time."""

    max_age_s = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._ends: asyncio.TimerHandle | None = None
        self._in_request = False
        self._made_s = self.loop.time()
        hosts = [one.client and one.client[0] for one in self.connections if isinstance(one, _Connection)]
        of_host = hosts.count(self.client and self.client[0])
        if len(self.connections) > MAX_CONNECTIONS or of_host > MAX_CONNECTIONS_OF_HOST:
            transport.abort()
        else:
            self._end_after(HEAD_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        in_request = self.cycle is not None and not self.cycle.response_complete
        if in_request != self._in_request or self._ends is None:
            self._in_request = in_request
            self._end_after(REQUEST_S if in_request else HEAD_S)

    def handle_events(self) -> None:
        super().handle_events()
        is_old = self.max_age_s and self.loop.time() - self._made_s >= self.max_age_s
        if is_old and self.cycle is not None and _CLOSE not in self.headers:
            self.headers.append(_CLOSE)  # as if the caller had sent it

    def on_response_complete(self) -> None:
        self._cancel()  # from now on uvicorn's timer for idle connections runs
        super().on_response_complete()
        self._in_request = not self.cycle.response_complete  # the next one was there already
        if self._in_request:
            self._end_after(REQUEST_S)

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # not close(): that waits for a client that does not read

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _end_after(self, seconds: float) -> None:
        self._cancel()
        self._ends = self.loop.call_later(seconds, self.transport.abort)

    def _cancel(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None


def open_listening(listen: str, what: str) -> socket.socket:
    """A socket that listens on ``HOST:PORT``; the caller closes it. ``what``: the action, for the error.

    Errors: ``ConfigError`` when the address cannot be bound.
    """
    host, port = parse_address(listen)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen()
        except BaseException:
            opened.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot {what} {listen}: {error.strerror}; choose another address, or {host}:0 for any free port"
        ) from error
    return opened


def is_loopback(listen: str) -> bool:
    """Whether only processes of this host reach ``HOST:PORT``."""
    host = parse_address(listen)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
