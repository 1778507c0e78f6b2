"""``HttpListener``: one HTTP port, with the limits of every such port of an index or a router.

aiohttp bounds neither the arrival of a request and the size of its head, nor the number and age of connections,
nor a response's wait for a client that does not read: ``HttpConnection`` does. One event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import NamedTuple, cast

import msgspec
from aiohttp import HttpVersion, HttpVersion11, web

from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.client.tls import ServerTls
from kvpool.index.limits import Kind, Limits
from kvpool.text import parse_address

CONNECTIONS = Kind("connections", "keep fewer open", 1024, 256, 1024)
MAX_HEAD_NBYTES = 128 << 10
MAX_LINE_NBYTES = 8190
MAX_FIELD_NBYTES = 16 << 10  # of a header: keys of signed tokens are long
BACKLOG = 1024
HEAD_S = 10.0  # for a request's line and headers, and for a TLS handshake
REQUEST_S = 30.0  # from its headers to its answer
WRITE_S = 60.0  # for a client to read
LINGER_S = 10.0  # for the rest of a refused body: a client that still sends would not see the answer
KEEP_ALIVE_S = 75
STOP_TIMEOUT_S = 1.0

JSON = "application/json"
SERVER = {"server": "kvpool"}
NOTHING: Mapping[str, str] = MappingProxyType({})

_HEAD_END = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

logger = logging.getLogger("kvpool.index")


class HttpRequest(NamedTuple):
    """``query``: of its URL, the last of each name. ``host``: of the client; empty: unknown."""

    raw: bytes
    query: Mapping[str, str] = NOTHING
    host: str = ""


class Refused(Exception):
    """A status, as HTTP and as gRPC have it, and one line."""

    def __init__(self, status: int, name: str, line: str, headers: Mapping[str, str] = NOTHING) -> None:
        super().__init__(line)
        self.status, self.name, self.headers = status, name, headers


def json_reply(body: bytes, status: int = 200, headers: Mapping[str, str] = NOTHING) -> web.Response:
    return web.Response(body=body, status=status, headers={**SERVER, **headers}, content_type=JSON)


def refused_reply(status: int, line: str, headers: Mapping[str, str] = NOTHING) -> web.Response:
    return json_reply(msgspec.json.encode({"error": line}), status, headers)


class HttpListener:
    """Answers requests by ``serve``. One event loop: ``start``; ``leave`` and ``close`` before the end, ``stop``.

    ``tls``: None: without. ``max_age_s``: the first answer after so long ends its connection, so that callers
    spread over new replicas; 0: never. ``has_deadline``: whether an answer is due within ``REQUEST_S``.
    ``connections``: None: ``CONNECTIONS``. ``refused``: makes the response to broken HTTP and faults of ours.
    """

    def __init__(
        self,
        serve: Serve,
        *,
        tls: ServerTls | None = None,
        max_age_s: float = 0.0,
        has_deadline: bool = True,
        connections: Kind | None = None,
        refused: Callable[[int, str], web.Response] = refused_reply,
    ) -> None:
        self.has_deadline, self.connections, self.refused = has_deadline, connections, refused
        self.limits = Limits()  # of connections
        self._answer, self._tls, self._max_age_s = serve, tls, max_age_s
        self._leaving = False
        self._manager: web.Server | None = None
        self._listening: asyncio.AbstractServer | None = None

    async def start(self, listen: str, what: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any free one. Returns the port. ``what``: for the error. Errors:
        ``ConfigError``.
        """
        opened = open_listening(listen, what)
        opened.setblocking(False)
        loop = asyncio.get_running_loop()
        manager = self._manager = web.Server(self._serve, handler_cancellation=True)
        self._listening = await loop.create_server(
            lambda: HttpConnection(self, manager, loop),
            sock=opened,
            backlog=BACKLOG,
            ssl=None if self._tls is None else self._tls.context,
            ssl_handshake_timeout=None if self._tls is None else HEAD_S,
        )
        return int(opened.getsockname()[1])

    def leave(self) -> None:
        """From now on a response ends its connection, so that clients go elsewhere."""
        self._leaving = True

    def close(self) -> None:
        """Refuse connections; those that are open go on. Idempotent."""
        if self._listening is not None:
            self._listening.close()

    async def stop(self) -> None:
        """``close``, and end; running requests have a second or two."""
        self.close()
        if self._manager is not None:
            left = [one for one in self._manager.connections if isinstance(one, HttpConnection)]
            self._manager.pre_shutdown()
            await self._manager.shutdown(STOP_TIMEOUT_S)
            for connection in left:
                connection.abort()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, HttpConnection)
        connection.begin()
        try:
            response = await self._answer(request)
            if not request.content.is_eof() or self._leaving or 0 < self._max_age_s <= connection.age_s:
                response.force_close()
            return response
        finally:
            connection.end(has_rest=not request.content.is_eof())


class HttpConnection(web.RequestHandler):
    """``begin`` and ``end``: around a request. ``_late``, ``_unread``: timers that end the connection.

    ``_head``: the end of an incomplete head; None: it is complete. ``_head_nbytes``: of it.
    """

    __slots__ = (
        "_busy", "_connected", "_head", "_head_nbytes", "_late", "_listener", "_made_s", "_opened", "_unread",
    )  # fmt: skip

    def __init__(self, listener: HttpListener, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,  # bodies pass as they are
            max_line_size=MAX_LINE_NBYTES,
            max_field_size=MAX_FIELD_NBYTES,
        )
        self._listener, self._opened = listener, ExitStack()
        self._connected: asyncio.Transport | None = None
        self._made_s = loop.time()
        self._busy = False
        self._head: bytes | None = b""
        self._head_nbytes = 0
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def age_s(self) -> float:
        return self._loop.time() - self._made_s

    def begin(self) -> None:
        self._busy, self._head = True, None
        self._cancel_late()
        if self._listener.has_deadline:
            self._end_late(REQUEST_S)

    def end(self, *, has_rest: bool) -> None:
        """``has_rest``: of its body, so no other request follows."""
        self._busy = False
        self._head, self._head_nbytes = None if has_rest else b"", 0
        if self._listener.has_deadline:
            self._cancel_late()

    def abort(self) -> None:
        """Idempotent."""
        if self._connected is not None:
            self._connected.abort()

    def break_off(self, version: HttpVersion) -> None:
        """End an incomplete response so that its client notices."""
        if self._connected is not None and version < HttpVersion11:
            # Without a length it ends where its connection does, so with a reset.
            connected = self._connected.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    # ---- called by the event loop and aiohttp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connected = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        try:
            host = str(peer[0]) if peer else ""
            counted = self._listener.limits.calls(
                self._listener.connections or CONNECTIONS, f"{host}:0", None
            )
            self._opened.enter_context(counted)
        except KVPoolError:
            self.abort()
        else:
            self._end_late(HEAD_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None:
            self._head_nbytes += len(data)
            self._head = None if _HEAD_END in (head := self._head + data) else head[-len(_HEAD_END) :]
            if self._head is not None and self._head_nbytes > MAX_HEAD_NBYTES:
                self.abort()
        if not self._busy and self._late is None:
            self._end_late(HEAD_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._loop.call_later(WRITE_S, self.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connected = None
        self._opened.close()
        self._cancel_late()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Broken HTTP, and faults of ours."""
        if status >= 500 and not isinstance(exc, ConnectionError):  # as where the client has gone
            logger.error("a request of %.200s failed", request.path, exc_info=exc)
        if request.writer.output_size > 0:  # too late for an error
            raise ConnectionError("the response had begun")
        text = "the request failed; the log of this server says why"
        if status < 500:
            text = f"the request cannot be read: {' '.join((message or 'it is no HTTP').split()):.300}"
        response = self._listener.refused(status, text)
        response.force_close()
        return response

    # ----

    def _end_late(self, seconds: float) -> None:
        self._late = self._loop.call_later(seconds, self.abort)

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def ask_for_body(request: web.BaseRequest) -> None:
    """Tell a client that waits with a body to send it."""
    if not request.content.is_eof() and request.headers.get("expect", "").lower() == "100-continue":
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0  # no byte of the response is sent


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
