"""``ProxyConnection``: one connection of a client of the proxy, with timeouts.

aiohttp bounds neither the arrival of a request, nor the number of connections, nor a response's wait for a
client that does not read. One event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from contextlib import ExitStack

from aiohttp import HttpVersion11, web

from kvpool.errors import KVPoolError
from kvpool.index.limits import Kind, Limits
from kvpool.index.place.placement import Refusal

CONNECTIONS = Kind("connections", "keep fewer open", 8192, 4096, 8192)  # a load balancer is one host
MAX_LINE_NBYTES = 8190
MAX_FIELD_NBYTES = 16 << 10  # of a header: keys of signed tokens are long
HEAD_S = 10.0  # for a request's line and headers, and for a TLS handshake
KEEP_ALIVE_S = 75
WRITE_S = 60.0  # for a client to read

logger = logging.getLogger("kvpool.index")


class ProxyConnection(web.RequestHandler):
    """``begin`` and ``end``: around a request. ``_late``, ``_unread``: timers that end the connection."""

    __slots__ = ("_busy", "_late", "_limits", "_opened", "_unread")

    def __init__(self, manager: web.Server, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=KEEP_ALIVE_S,
            auto_decompress=False,  # bodies pass as they are
            max_line_size=MAX_LINE_NBYTES,
            max_field_size=MAX_FIELD_NBYTES,
        )
        self._limits, self._opened = limits, ExitStack()
        self._busy = False
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._busy = True
        self._cancel_late()

    def end(self) -> None:
        self._busy = False

    def abort(self) -> None:
        """End the connection: the client must not take a part for the whole response."""
        if self.transport is not None:
            self.transport.abort()

    def reset(self) -> None:
        """``abort`` with a reset: in HTTP/1.0 a response without a length ends where its connection does."""
        if self.transport is not None:
            connected = self.transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    # ---- called by the event loop and aiohttp

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        try:
            host = str(peer[0]) if peer else ""
            self._opened.enter_context(self._limits.calls(CONNECTIONS, f"{host}:0", None))
        except KVPoolError:
            self.abort()
        else:
            self._end_late()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._busy and self._late is None:
            self._end_late()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._loop.call_later(WRITE_S, self.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
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
        """Broken HTTP, and faults of ours, in the form of OpenAI's API."""
        if status >= 500 and not isinstance(exc, ConnectionError):  # as where the client has gone
            logger.error("a request of %.200s failed", request.path, exc_info=exc)
        if request.writer.output_size > 0:  # too late for an error
            raise ConnectionError("the response had begun")
        text = "the router failed to answer; its log says why"
        if status < 500:
            text = f"the request cannot be read: {' '.join((message or 'it is no HTTP').split()):.300}"
        response = refused(Refusal(status, text))
        response.force_close()
        return response

    # ----

    def _end_late(self) -> None:
        self._late = self._loop.call_later(HEAD_S, self.abort)

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def refused(refusal: Refusal) -> web.Response:
    return web.Response(
        body=refusal.body, status=refusal.status, headers={**refusal.headers, "server": "kvpool"}
    )


def break_off(request: web.BaseRequest) -> None:
    """End an incomplete response so that its client notices."""
    connection = request.protocol
    assert isinstance(connection, ProxyConnection)
    if request.version >= HttpVersion11:
        connection.abort()
    else:
        connection.reset()
