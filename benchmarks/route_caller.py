"""``Caller``: sends requests over kept connections; ``call_all``: many callers, closed loop.

A few lines of HTTP instead of a client library, because its cost is part of every figure. One event loop.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

ASK_TIMEOUT_S = 60.0
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*([0-9]+)')
# A front with its own answers passes on the worker's text, without a fingerprint.
_WORKER = re.compile(rb'"(?:system_fingerprint|content)"\s*:\s*"(worker-[0-9]+)"')


@dataclass(frozen=True)
class Answer:
    """``status``: 0: no answer. ``first_s``, ``total_s``: until the body's first byte, and its end."""

    status: int
    first_s: float
    total_s: float
    worker: str = ""
    cached_tokens: int = 0


class Caller:
    """One request at a time. ``close`` it."""

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}

    async def ask(self, url: str, body: bytes) -> Answer:
        """The answer to a chat from the server at ``url``."""
        host = urlsplit(url).netloc
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n"
        ) % (host.encode(), len(body))
        began_s = time.perf_counter()
        try:
            connection = self._connections.get(host)
            if connection is None or connection.is_closed:
                name, port = host.split(":")
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, name, int(port)
                )
                self._connections[host] = connection
                began_s = time.perf_counter()
            status, first_s, said = await asyncio.wait_for(connection.send(head + body), ASK_TIMEOUT_S)
        except (OSError, TimeoutError, asyncio.TimeoutError):
            self._forget(host)
            return Answer(0, 0.0, time.perf_counter() - began_s)
        ended_s = time.perf_counter()
        cached, worker = _CACHED.search(said), _WORKER.search(said)
        return Answer(
            status,
            first_s - began_s,
            ended_s - began_s,
            worker[1].decode() if worker else "",
            int(cached[1]) if cached else 0,
        )

    def close(self) -> None:
        for host in list(self._connections):
            self._forget(host)

    def _forget(self, host: str) -> None:
        connection = self._connections.pop(host, None)
        if connection is not None:
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._answer: asyncio.Future[tuple[int, float, bytes]] | None = None
        self._parts: list[bytes] = []
        self._first_s = 0.0
        self.is_closed = False

    def send(self, request: bytes) -> asyncio.Future[tuple[int, float, bytes]]:
        """Status, start time of the body, and the body."""
        self._parser = httptools.HttpResponseParser(self)
        self._parts = []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        self.is_closed = True
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = True
        self._fail(error or ConnectionResetError("the connection ended"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(str(error)))
            self._transport.close()

    def on_body(self, part: bytes) -> None:
        if not self._parts:
            self._first_s = time.perf_counter()
        self._parts.append(part)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_closed = True
            self._transport.close()
        if self._answer is not None and not self._answer.done():
            status = self._parser.get_status_code()
            first_s = self._first_s if self._parts else time.perf_counter()
            self._answer.set_result((status, first_s, b"".join(self._parts)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error if isinstance(error, OSError) else ConnectionError(str(error)))


async def call_all(callers: int, next_call: Callable[[Caller], Awaitable[bool]]) -> float:
    """Run ``next_call`` in ``callers`` concurrent loops until it returns False. Returns the seconds taken."""

    async def go_on() -> None:
        caller = Caller()
        try:
            while await next_call(caller):
                pass
        finally:
            caller.close()

    began_s = time.perf_counter()
    await asyncio.gather(*(go_on() for _ in range(callers)))
    return time.perf_counter() - began_s
