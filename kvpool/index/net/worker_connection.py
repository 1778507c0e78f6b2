"""``WorkerConnector``: connections to workers, one request at a time, for the router, the renderer and the scraper.

What a worker sends unasked would answer the next request, another caller's: such a connection ends. ``Sending``
bounds the sending of a body: aiohttp's ``sock_read`` begins after it, so a worker that takes no bytes would hold a
body above the sockets' buffers for ever. A host that vanishes says nothing: the kernel asks it. One event loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

KEEP_ALIVE_S = 4.0  # less than the 5 s after which vLLM closes an idle connection
SEND_S = 30.0  # for a worker to take a body
PART_NBYTES = 1 << 20  # of a body, written at once: more would hold the event loop up
MAX_INTERIM = 16  # responses of 1xx before the response
MAX_EMPTY_NBYTES = 1 << 20  # of heads, and of a body's framing above EMPTY_A_BYTE for each of its bytes
EMPTY_A_BYTE = 8  # chunks of one byte take five
# Of a socket: a host that vanished is noticed after SEND_S, whether it owes an acknowledgement or an answer.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_S * 1000)),
)


class Sending(aiohttp.Payload):
    """For one request of a session with ``WorkerConnector``.

    ``is_whole``: all of it was written, so its worker may have begun. ``is_reused``: the connection carried a
    request before; the worker may have closed it as idle. ``is_late``: the worker did not take it within ``SEND_S``.
    ``is_again``: for such a one, on a new connection: others that are idle may have ended at the same moment.
    """

    _autoclose = True

    def __init__(self, body: bytes, *, is_again: bool = False) -> None:
        super().__init__(body)
        self.is_again = is_again
        self._size = len(body)
        self._transport: asyncio.Transport | None = None
        self.is_whole = not body
        self.is_reused = self.is_late = False

    def begin(self, transport: asyncio.Transport | None, *, is_reused: bool) -> None:
        self._transport, self.is_reused, self.is_whole = transport, is_reused, not self._size

    def abort(self) -> None:
        """End the connection at once: closing would wait for the worker to read."""
        if self._transport is not None:
            self._transport.abort()

    # ---- called by aiohttp

    async def write(self, writer: AbstractStreamWriter) -> None:
        timer = asyncio.get_running_loop().call_later(SEND_S, self._end_late)
        try:
            view = memoryview(self._value)
            for at in range(0, len(view), PART_NBYTES):
                await writer.write(view[at : at + PART_NBYTES])
        finally:
            timer.cancel()
        self.is_whole = True

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)

    def _end_late(self) -> None:
        self.is_late = True
        self.abort()


class WorkerConnection(ResponseHandler):
    """Ends with bytes that no request asked for, and above ``MAX_INTERIM`` or ``MAX_EMPTY_NBYTES``. aiohttp takes any
    number of these; nobody waits for a client to read bytes that are no body, so they keep the event loop busy.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._interim = self._nbytes = 0  # of the response, all that came of it
        self._is_answered = False  # the head of the response has come

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        for option in KEEPALIVE:
            transport.get_extra_info("socket").setsockopt(*option)

    def close(self) -> None:
        """At once: a close waits for the worker, to take what it was sent and, by TLS for 30 s, to end it too."""
        self.abort()

    def set_response_params(self, **params: Any) -> None:
        """Called by aiohttp before it sends a request."""
        self._interim, self._nbytes, self._is_answered = 0, 0, False
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if data and self._is_answered and (self._payload is None or self._payload.is_eof()):
            self._end()
            return
        super().data_received(data)
        self._nbytes += len(data)
        body_nbytes = 0 if self._payload is None else self._payload.total_bytes
        if self._nbytes - EMPTY_A_BYTE * body_nbytes > MAX_EMPTY_NBYTES:
            error = HttpProcessingError(message=f"over {MAX_EMPTY_NBYTES} bytes that are no body")
            if self._payload is not None and not self._payload.is_eof():
                self._payload.set_exception(aiohttp.ClientPayloadError(error.message))
            self.set_exception(error)
            self._end()

    def feed_data(self, data: Any, size: int = 0) -> None:
        """The head of a response."""
        self._interim += 100 <= data[0].code < 200
        if self._interim > MAX_INTERIM:
            self.set_exception(HttpProcessingError(message=f"over {MAX_INTERIM} responses of 1xx"))
        if self._is_answered or self._interim > MAX_INTERIM:
            self._end()
        else:
            self._is_answered = data[0].code >= 200
            super().feed_data(data, size)

    def _end(self) -> None:
        self.force_close()
        if self.transport is not None:
            self.transport.abort()


class WorkerConnector(aiohttp.TCPConnector):
    """Gives each ``Sending`` its connection. ``_used``: connections that have carried a request."""

    def __init__(self, *, keepalive_s: float, tls: ssl.SSLContext | None, limit: int = 0) -> None:
        super().__init__(limit=limit, keepalive_timeout=keepalive_s, ssl=tls or True)
        make: type[ResponseHandler] = WorkerConnection
        self._factory = partial(make, loop=asyncio.get_running_loop())
        self._used: WeakSet[asyncio.BaseProtocol] = WeakSet()

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        sending = req.body if isinstance(req.body, Sending) else None
        is_again = sending is not None and sending.is_again
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            assert protocol is not None
            if protocol not in self._used or not (is_again or _has_bytes(connection.transport)):
                break
            connection.close()
        if sending is not None:
            sending.begin(connection.transport, is_reused=protocol in self._used)
        self._used.add(protocol)
        return connection


def _has_bytes(transport: asyncio.BaseTransport | None) -> bool:
    """Unread by the event loop; or the connection has ended."""
    if transport is None or transport.is_closing():
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def why_not(error: BaseException) -> str:
    """Why a worker did not answer, in one line."""
    # str() of a ClientResponseError has URLs and several lines; of a connection error, names of calls.
    if isinstance(error, aiohttp.ClientSSLError):  # its errno is OpenSSL's
        cause = getattr(error, "certificate_error", None) or error.os_error
        text = f"TLS: {getattr(cause, 'verify_message', '') or getattr(cause, 'reason', '') or cause}"
    elif isinstance(error, aiohttp.ClientConnectorError) and (error.errno or 0) > 0:
        text = os.strerror(error.errno or 0)
    else:
        text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return f"{' '.join(text.split()) or type(error).__name__:.200}"
