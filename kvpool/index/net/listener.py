"""``HttpListener``: one HTTP port, with the limits of every such port of an index or a router.

aiohttp bounds neither the arrival of a request, the size of its head and the memory of all heads, nor the number
and age of connections, nor a response's wait for a client that does not read: ``HttpConnection`` does. Connections
are counted before their TLS handshake. One event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import msgspec
from aiohttp import HttpVersion, HttpVersion11, StreamReader, web

from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.limits import HEADS, Kind, Limits
from kvpool.index.net.tls import ServerTls
from kvpool.text import parse_address

CONNECTIONS = Kind("connections", "keep fewer open", 1024, 256, 1024)
MAX_HEAD_NBYTES = 128 << 10
MAX_LINE_NBYTES = 8190
MAX_FIELD_NBYTES = 16 << 10  # of a header: keys of signed tokens are long
HEAD_COPIES, LINE_NBYTES = 2, 200  # of memory: for each byte of a head, and each line of it
SMALL_HEAD_NBYTES = 32 << 10  # of memory; smaller ones are bounded by the number of connections
BACKLOG = 1024
ACCEPTED = 64  # in a row, before others have their turn
ACCEPT_RETRY_S = 0.05  # without descriptors
HEAD_S = 10.0  # for a request's line and headers, and for a TLS handshake
REQUEST_S = 30.0  # from its headers to its answer
WRITE_S = 60.0  # for a client to read
LINGER_S = 10.0  # for the rest of a refused body: a client that still sends would not see the answer
KEEP_ALIVE_S = 75
STOP_TIMEOUT_S = 1.0

JSON = "application/json"
SERVER = {"server": "kvpool"}
NOTHING: Mapping[str, str] = MappingProxyType({})

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

    ``memory``: for heads of requests, until their answers; a host has three quarters of what ``HEADS`` may have.
    ``tls``: None: without. ``max_age_s``: the first answer after so long ends its connection, so that callers
    spread over new replicas; 0: never. ``has_deadline``: whether an answer is due within ``REQUEST_S``.
    ``connections``: None: ``CONNECTIONS``. ``refused``: makes the response to broken HTTP and faults of ours.
    """

    def __init__(
        self,
        serve: Serve,
        memory: Limits,
        *,
        tls: ServerTls | None = None,
        max_age_s: float = 0.0,
        has_deadline: bool = True,
        connections: Kind | None = None,
        refused: Callable[[int, str], web.Response] = refused_reply,
    ) -> None:
        self.has_deadline, self.connections, self.refused = has_deadline, connections, refused
        self.limits, self.memory = Limits(), memory  # of connections, of heads
        self._answer, self._tls, self._max_age_s = serve, tls, max_age_s
        self._leaving = False
        self._manager: web.Server | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._opening: set[asyncio.Task[Any]] = set()  # connections before the end of their handshake

    async def start(self, listen: str, what: str) -> int:
        """Listen on ``HOST:PORT``; port 0: any free one. Returns the port. ``what``: for the error. Errors:
        ``ConfigError``.
        """
        opened = open_listening(listen, what)
        opened.listen(BACKLOG)
        opened.setblocking(False)
        port = int(opened.getsockname()[1])
        self._manager = web.Server(self._serve, handler_cancellation=True)
        self._accepting = asyncio.create_task(self._accept(opened, self._manager))
        return port

    def leave(self) -> None:
        """From now on a response ends its connection, so that clients go elsewhere."""
        self._leaving = True

    def close(self) -> None:
        """Refuse connections; those that are open go on. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()

    async def stop(self) -> None:
        """``close``, and end; running requests have a second or two."""
        self.close()
        if self._manager is not None and self._accepting is not None:
            await asyncio.gather(self._accepting, return_exceptions=True)
            for opening in self._opening:
                opening.cancel()
            await asyncio.gather(*self._opening, return_exceptions=True)
            left = [one for one in self._manager.connections if isinstance(one, HttpConnection)]
            self._manager.pre_shutdown()
            await self._manager.shutdown(STOP_TIMEOUT_S)
            for connection in left:
                connection.abort()

    async def _accept(self, listening: socket.socket, manager: web.Server) -> None:
        loop, accepted = asyncio.get_running_loop(), 0
        with listening:
            while True:
                try:
                    made, peer = await loop.sock_accept(listening)
                except OSError:  # no descriptor is left, or the client has gone
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                host, counted = str(peer[0]), ExitStack()
                try:
                    counted.enter_context(
                        self.limits.calls(self.connections or CONNECTIONS, f"{host}:0", None)
                    )
                except KVPoolError:
                    made.close()
                else:
                    make = partial(HttpConnection, self, manager, loop, host, counted)
                    task = loop.create_task(self._open(made, make))
                    self._opening.add(task)
                    task.add_done_callback(partial(self._opened, counted))
                accepted += 1
                if accepted % ACCEPTED == 0:
                    await asyncio.sleep(0)

    async def _open(self, made: socket.socket, make: Callable[[], HttpConnection]) -> None:
        tls, handshake_s = (None, None) if self._tls is None else (self._tls.context, HEAD_S)
        await asyncio.get_running_loop().connect_accepted_socket(
            make, made, ssl=tls, ssl_handshake_timeout=handshake_s
        )

    def _opened(self, counted: ExitStack, task: asyncio.Task[Any]) -> None:
        self._opening.discard(task)
        if task.cancelled() or task.exception() is not None:  # of the handshake, or the client has gone
            counted.close()

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
            connection.end()


class HttpConnection(web.RequestHandler):
    """``begin`` and ``end``: around a request. ``_late``, ``_unread``: timers that end the connection.

    ``_body``: of the last head that has come; once it is whole, more bytes are of another head. ``_head_nbytes``: of
    an incomplete head. ``_heads_nbytes``: of memory, of all heads without an answer; ``_held_nbytes``: counted of it.
    """

    __slots__ = (
        "_body", "_busy", "_connected", "_counted", "_head_nbytes", "_heads_nbytes", "_held_nbytes", "_host", "_late",
        "_listener", "_made_s", "_unread",
    )  # fmt: skip

    def __init__(
        self,
        listener: HttpListener,
        manager: web.Server,
        loop: asyncio.AbstractEventLoop,
        host: str,
        counted: ExitStack,
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            auto_decompress=False,  # bodies pass as they are
            max_line_size=MAX_LINE_NBYTES,
            max_field_size=MAX_FIELD_NBYTES,
        )
        self._listener, self._host, self._counted = listener, host, counted
        self._connected: asyncio.Transport | None = None
        self._made_s = loop.time()
        self._busy = False
        self._body: StreamReader | None = None
        self._head_nbytes = self._heads_nbytes = self._held_nbytes = 0
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def age_s(self) -> float:
        return self._loop.time() - self._made_s

    def begin(self) -> None:
        self._busy = True
        self._cancel_late()
        if self._listener.has_deadline:
            self._end_late(REQUEST_S)

    def end(self) -> None:
        self._busy = False
        left = len(self._messages)
        self._heads_nbytes = max(HEAD_COPIES * self._head_nbytes, self._heads_nbytes * left // (left + 1))
        self._hold()
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
        self._end_late(HEAD_S)

    def data_received(self, data: bytes) -> None:
        of_head, before, nbytes = self._body is None or self._body.is_eof(), len(self._messages), len(data)
        super().data_received(data)
        if of_head:
            self._head_nbytes += nbytes
            if len(self._messages) > before:
                self._body, self._head_nbytes = self._messages[-1][1], 0
                nbytes -= min(nbytes, self._body.total_bytes)
            self._heads_nbytes += HEAD_COPIES * nbytes + LINE_NBYTES * data.count(b"\n", 0, nbytes)
            if self._head_nbytes > MAX_HEAD_NBYTES or not self._hold():
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
        self._counted.close()
        self._heads_nbytes = 0
        self._hold()
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

    def _hold(self) -> bool:
        """Whether there is room for the heads; without, what was held stays so."""
        wanted_nbytes = self._heads_nbytes if self._heads_nbytes > SMALL_HEAD_NBYTES else 0
        more_nbytes = wanted_nbytes - self._held_nbytes
        if more_nbytes > 0 and not self._listener.memory.take(more_nbytes, HEADS, host=self._host):
            return False
        if more_nbytes < 0:
            self._listener.memory.give(-more_nbytes, HEADS, host=self._host)
        self._held_nbytes = wanted_nbytes
        return True

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
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that is empty or too long
        why = error.strerror if isinstance(error, OSError) else "it is no host's name"
        raise ConfigError(
            f"cannot {what} {listen}: {why}; choose another address, or {host}:0 for any free port"
        ) from error
    return opened


def is_loopback(listen: str) -> bool:
    """Whether only processes of this host reach ``HOST:PORT``."""
    host = parse_address(listen)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
