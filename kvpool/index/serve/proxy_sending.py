"""``Sending``: a request's body on its way to one worker, and what a lost connection says of it. One event loop.

aiohttp's ``sock_read`` begins when the whole body was written, so a worker that takes no bytes would hold a body larger
than the buffers of the sockets for ever.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING
from weakref import WeakSet

import aiohttp

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

SEND_S = 30.0  # for a worker to take a body: 16 MiB at 4.5 Mbit/s
PART_NBYTES = 1 << 20  # of a body, written at once: more would hold the event loop up


class Sending(aiohttp.Payload):
    """For one request of a session with ``WorkerConnector``.

    ``is_whole``: the connection has all of it, so its worker may have begun. ``is_reused``: the connection has carried
    a request before; the worker may have closed it because it was idle. ``is_late``: the worker did not take it within
    ``SEND_S``.
    """

    _autoclose = True

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)
        self._transport: asyncio.Transport | None = None
        self.is_whole = not body
        self.is_reused = self.is_late = False

    def begin(self, transport: asyncio.Transport | None, *, is_reused: bool) -> None:
        """It is to go over this connection."""
        self._transport, self.is_reused, self.is_whole = transport, is_reused, not self._size

    def abort(self) -> None:
        """End the connection at once: closing it would wait until the worker has taken what is written."""
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


class WorkerConnector(aiohttp.TCPConnector):
    """Tells each ``Sending`` about its connection. ``_used``: connections that have carried a request."""

    def __init__(self, *, keepalive_s: float, tls: ssl.SSLContext | None) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s, ssl=tls or True)
        self._used: WeakSet[asyncio.BaseProtocol] = WeakSet()

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        connection = await super().connect(req, traces, timeout)
        protocol = connection.protocol
        assert protocol is not None
        if isinstance(req.body, Sending):
            req.body.begin(connection.transport, is_reused=protocol in self._used)
        self._used.add(protocol)
        return connection
