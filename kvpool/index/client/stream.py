"""``LookupStream``: many lookups over one call of the index, from one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvpool.errors import KVPoolError
from kvpool.index.answer import Lookup
from kvpool.index.client import calls, channel
from kvpool.index.prompt import Prompt, PromptFields, as_prompt
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_WAITING = 1024  # lookups without an answer


class LookupStream:
    """Made by ``AsyncIndexClient.stream``; a context manager. Any number of tasks may use it at once.

    Each request has an id, for its reply or refusal. When the stream ends (the index stops, or revokes the
    token), the oldest request gets the reason, all others ``IndexUnavailable``: make another stream.

    An index of an earlier version replies without ids, in order, and ends the stream with its first refusal.
    """

    def __init__(self, target: str, call: Any, timeout_s: float) -> None:
        self._target, self._call, self._timeout_s = target, call, timeout_s
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by id; in the order of requests
        self._last_id = 0
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
        """As ``IndexClient.lookup``. A late answer is dropped."""
        call = calls.lookup_call(as_prompt(model, fields))
        limit_s = self._limit_s(timeout_s)
        answer = channel.answer(self._target, limit_s, await self._ask_within(limit_s, call.request))
        if isinstance(answer, KVPoolError):
            raise answer
        return answer

    async def lookup_many(
        self, prompts: Sequence[Prompt], *, timeout_s: float | None = None
    ) -> list[Lookup | KVPoolError]:
        """As ``IndexClient.lookup_many``."""
        call = calls.lookups_call(prompts)
        limit_s = self._limit_s(timeout_s)
        reply = await self._ask_within(limit_s, call.request)
        if isinstance(refused := channel.answer(self._target, limit_s, reply), KVPoolError):
            raise refused
        try:
            replies = call.value(reply)
        except ValueError as error:
            raise channel.unreadable(self._target, "LookupStream", error) from error
        return [channel.answer(self._target, limit_s, one) for one in replies]

    async def close(self) -> None:
        """Idempotent."""
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

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else channel.check_timeout_s(timeout_s)

    async def _ask_within(self, limit_s: float, request: Any) -> Any:
        try:
            return await asyncio.wait_for(self._ask(request), limit_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise channel.late(self._target, limit_s) from error

    async def _ask(self, request: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        async with self._turn:
            if self._write is not None:  # of a caller that did not wait for its end
                await asyncio.wait({self._write})
            if self._ended is not None:
                raise self._ended
            if len(self._waiting) >= MAX_WAITING:
                raise channel.unanswered(self._target, MAX_WAITING)
            self._last_id += 1
            request.id = self._last_id
            self._waiting[request.id] = answer
            self._write = asyncio.create_task(self._send(request))
            await asyncio.wait({self._write})
        return await answer

    async def _send(self, request: Any) -> None:
        # The reader reports the end of the call: it knows the reason.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            await self._call.write(request)

    async def _read(self) -> None:
        try:
            while (packed := await self._call.read()) is not grpc.aio.EOF:
                reply = pb.LookupResponse.FromString(packed)
                answer = self._waiting.pop(reply.id, None) if reply.id else self._oldest()
                if answer is None:
                    break  # for no request
                if not answer.done():
                    answer.set_result(reply)
            self._end(channel.ended(self._target))
        except DecodeError as error:
            self._end(channel.unreadable(self._target, "LookupStream", error))
        except grpc.RpcError as error:
            # gRPC replaces the index's status by its own when a write was under way at the end.
            if error.code() is not grpc.StatusCode.INTERNAL:
                first = channel.error_of(self._target, self._timeout_s, error)
                if (oldest := self._oldest()) is not None and not oldest.done():
                    oldest.set_exception(first)
            self._end(channel.ended(self._target))
        finally:
            self._call.cancel()

    def _oldest(self) -> asyncio.Future[Any] | None:
        return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def _end(self, error: KVPoolError) -> None:
        self._ended = self._ended or error
        while (answer := self._oldest()) is not None:
            if not answer.done():
                answer.set_exception(self._ended)
