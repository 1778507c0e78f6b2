"""``LookupCalls``: ``Lookup`` and ``LookupStream``: a prompt, one after another, or many in one message.

On a stream a request with an id is refused in a reply of its own, and the stream goes on; one without ends it, as an
earlier client expects. Requests of one message are refused each by itself. The handlers run in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.client.messages import MAX_REQUESTS
from kvpool.index.limits import CallMemory
from kvpool.index.prompt import Prompt
from kvpool.index.request_stats import RequestStats
from kvpool.index.serve import lookup_codec
from kvpool.index.serve.auth import Permissions
from kvpool.index.serve.calls import SMALL_NBYTES, Calls, Method, take_reply
from kvpool.index.serve.lookup_codec import Asked
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_RESPONSES_NBYTES = 16 << 20  # of one message: 256 prompts among 1,000 workers
TURN_S = 0.001  # of requests in one message, after which other calls get their turn


class LookupCalls:
    """``ask``: the packed reply to one prompt, which is a ``Prompt`` or a ``LookupRequest``."""

    def __init__(self, calls: Calls, stats: RequestStats, ask: Callable[[Any], Awaitable[bytes]]) -> None:
        self._calls, self._stats, self._ask = calls, stats, ask
        self.method = Method(pb.LookupRequest, "read", _tenant, self._answer, lookup_codec.read_lookup)

    async def serve(self, context: grpc.aio.ServicerContext) -> None:
        """One stream."""
        self._stats.record_stream(1)
        memory = self._calls.memory(self._calls.caller(self.method.right, context), context)
        try:
            while (packed := await context.read()) is not grpc.aio.EOF:
                reply = await self._reply(packed, context, memory)
                nbytes = len(reply)
                await context.write(reply)
                if nbytes > SMALL_NBYTES:
                    memory.give(nbytes)
                del packed, reply  # the next request may be long in coming
        finally:
            self._stats.record_stream(-1)

    async def _reply(self, packed: bytes, context: grpc.aio.ServicerContext, memory: CallMemory) -> bytes:
        """What is to be sent, for which there is room. Errors: what ends the stream."""
        caller = self._calls.caller(self.method.right, context)
        try:
            reply: bytes = await self._calls.answer(self.method, packed, caller, memory)
            take_reply(memory, len(reply))
            return reply
        except Exception as error:
            if not (number := lookup_codec.id_of(packed)):
                raise
            return self._refused(number, error)

    async def _answer(self, asked: Asked, caller: Permissions) -> bytes:
        reply = await (
            self._ask(asked.prompt) if asked.prompt is not None else self._many(asked.requests, caller)
        )
        return lookup_codec.with_id(reply, asked.id)

    async def _many(self, requests: Sequence[Buffer], caller: Permissions) -> bytes:
        if len(requests) > MAX_REQUESTS:
            raise ConfigError(f"a request holds at most {MAX_REQUESTS} requests, not {len(requests)}")
        replies: list[bytes] = []
        left_nbytes, ends_s = MAX_RESPONSES_NBYTES, time.monotonic() + TURN_S
        for packed in requests:
            if time.monotonic() > ends_s:
                await asyncio.sleep(0)
                ends_s = time.monotonic() + TURN_S
            reply = await self._one(packed, caller, left_nbytes)
            left_nbytes -= len(reply)
            replies.append(reply)
        return lookup_codec.packed_responses(replies)

    async def _one(self, packed: Any, caller: Permissions, left_nbytes: int) -> bytes:
        """The reply to one of many requests, or why it is refused."""
        try:
            if left_nbytes <= 0:
                raise KVPoolError("the reply is full: ask about fewer prompts or workers in one message")
            asked = self._calls.read(self.method, packed)
            if asked.prompt is None:
                raise ConfigError("one of many requests holds a prompt, and no requests of its own")
            caller.check(self.method.right, _tenant(asked))
            return await self._answer(asked, caller)
        except Exception as error:
            return self._refused(lookup_codec.id_of(packed), error)

    def _refused(self, number: int, error: Exception) -> bytes:
        code, text = self._calls.explain("Lookup", error)
        return lookup_codec.refused(number, code.value[0], text)


def _tenant(asked: Asked) -> str | None:
    """None: each of its requests names one."""
    if asked.prompt is None:
        return None
    if isinstance(asked.prompt, Prompt):
        return asked.prompt.tenant
    return asked.prompt.scope.tenant or DEFAULT_TENANT
