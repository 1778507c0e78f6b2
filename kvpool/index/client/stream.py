"""``LookupStream``: one prompt after another asked over one call of the index, from one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvpool.errors import KVPoolError
from kvpool.index.answer import Lookup
from kvpool.index.client import channel, codec
from kvpool.index.prompt import Prompt, PromptFields, as_prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_WAITING = 1024  # lookups that have no answer yet


class LookupStream:
    """Made by ``AsyncIndexClient.stream``; a context manager. Any number of tasks may ask at once.

    Answers come in the order of the questions, so one that takes long holds up those behind it. What ``lookup`` of a
    client would raise for a question ends the stream: those behind it get ``IndexUnavailable``, as does every later
    one; so may it itself, when another was being sent at that moment. Then make another stream, as after an
    ``IndexUnavailable`` of any kind.
    """

    def __init__(self, target: str, call: Any, timeout_s: float) -> None:
        self._target, self._call, self._timeout_s = target, call, timeout_s
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._turn = asyncio.Lock()
        self._write: asyncio.Task[None] | None = None
        self._ended: KVPoolError | None = None
        self._reader = asyncio.create_task(self._read())

    async def lookup(
        self,
        model: str | Prompt,
        *,
        timeout_s: float | None = None,
        **fields: Unpack[PromptFields],
    ) -> Lookup:
        """As ``IndexClient.lookup``. An answer that comes after its time is thrown away, and the stream goes on."""
        call = codec.lookup_call(as_prompt(model, fields))
        limit_s = self._timeout_s if timeout_s is None else channel.check_timeout_s(timeout_s)
        try:
            reply = await asyncio.wait_for(self._ask(call.request), limit_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise channel.late(self._target, limit_s) from error
        return channel.read(self._target, call, reply)

    async def close(self) -> None:
        """End the call. May be called again."""
        self._end(channel.closed(self._target))
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def __aenter__(self) -> LookupStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, request: Any) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        async with self._turn:
            if self._write is not None:  # of a caller that did not wait for its end
                await asyncio.wait({self._write})
            if self._ended is not None:
                raise self._ended
            if len(self._waiting) >= MAX_WAITING:
                raise channel.unanswered(self._target, MAX_WAITING)
            self._waiting.append(answer)
            self._write = asyncio.create_task(self._send(request))
            await asyncio.wait({self._write})
        return await answer

    async def _send(self, request: Any) -> None:
        # The reader reports the end of the call: it knows the reason.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            await self._call.write(request)

    async def _read(self) -> None:
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                if not self._waiting:
                    break  # an answer to no question
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(reply)
            self._end(channel.ended(self._target))
        except grpc.RpcError as error:
            # gRPC puts a status of its own in the index's place when something was being sent as the call ended.
            if error.code() is not grpc.StatusCode.INTERNAL:
                first = channel.error_of(self._target, self._timeout_s, error)
                if self._waiting and not (refused := self._waiting.popleft()).done():
                    refused.set_exception(first)
            self._end(channel.ended(self._target))
        finally:
            self._call.cancel()

    def _end(self, error: KVPoolError) -> None:
        self._ended = self._ended or error
        while self._waiting:
            if not (answer := self._waiting.popleft()).done():
                answer.set_exception(self._ended)
