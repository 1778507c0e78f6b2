"""``LookupCalls``: ``Lookup``, ``LookupStream`` and ``Route``: the calls with a prompt, or many.

A refused request of a stream with an id gets a status as its reply; without an id it ends the stream.
Requests of one message are refused one by one. One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.partition import merged
from kvpool.index.limits import CallMemory, NotAtOnce, Work
from kvpool.index.prompt import Prompt
from kvpool.index.protocol.messages import MAX_REQUESTS, decode_prompt, decode_route_options, encode_lookup
from kvpool.index.protocol.packed import (
    PackedLookup,
    id_of,
    pack_pool_media,
    pack_responses,
    read_lookup,
    refused_response,
    with_id,
)
from kvpool.index.request_stats import Matched, result_of
from kvpool.index.serve.auth import Permissions
from kvpool.index.serve.calls import SMALL_NBYTES, Calls, Method, take_reply
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

INLINE_NBYTES = 128 << 10  # of a prompt: 16,384 hashes take about 0.2 ms
LOAD_NBYTES = 1 << 10  # of a prompt, which take as long as one load of a RouteRequest
THREADS, THREADS_OF_TENANT = 8, 4
MAX_RESPONSES_NBYTES = 16 << 20  # of one message: 256 prompts among 1,000 workers
TURN_S = 0.001  # of requests in one message, before other calls' turn


class LookupCalls:
    """Answers ``methods``, and streams by ``serve``. ``close`` ends its threads, which tenants share.

    A thread answers prompts above ``INLINE_NBYTES``, and prompts without an answer at once (``NotAtOnce``).
    The native table works without the interpreter's lock.
    """

    def __init__(self, calls: Calls, fleet: Fleet, router: Router, tokenizers: Tokenizers) -> None:
        self._calls, self._stats = calls, calls.stats
        self._fleet, self._router, self._tokenizers = fleet, router, tokenizers
        self._work = Work(THREADS, THREADS_OF_TENANT, "kvpool-lookup")
        self._lookup = Method(pb.LookupRequest, "read", _tenant, self._answer, read_lookup)
        self.methods = {
            "Lookup": self._lookup,
            "Route": Method(
                pb.RouteRequest, "read", lambda request: request.scope.tenant or DEFAULT_TENANT, self._route
            ),
        }

    def close(self) -> None:
        """Blocks until answers in threads end."""
        self._work.close()

    async def serve(self, context: grpc.aio.ServicerContext) -> None:
        self._stats.record_stream(1)
        memory = self._calls.memory(self._calls.caller("read", context), context)
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
        """The reply, with room for it. Errors end the stream."""
        caller = self._calls.caller("read", context)
        try:
            reply: bytes = await self._calls.answer(self._lookup, packed, caller, memory)
            take_reply(memory, len(reply))
            return reply
        except Exception as error:
            if not (number := id_of(packed)):
                raise
            return self._refused(number, error)

    async def _answer(self, lookup: PackedLookup, caller: Permissions) -> bytes:
        if lookup.prompt is None:
            return with_id(await self._many(lookup.requests, caller), lookup.id)
        return with_id(await self._ask(lookup.prompt, self._pack), lookup.id)

    async def _route(self, request: Any, _: Permissions) -> bytes:
        def pack(prompt: Prompt, at_once: bool) -> tuple[bytes, Matched]:
            ranking = self._router.rank(prompt, at_once=at_once, **decode_route_options(request))
            if len(ranking.native) and not request.preview:
                self._stats.record_placed()
            if ranking.placed is not None:
                self._stats.record_session(ranking.placed)
            return ranking.pack(), Matched(*ranking.matched())

        return await self._ask(request, pack, len(request.loads) * LOAD_NBYTES)

    async def _ask(
        self, request: Any, pack: Callable[[Prompt, bool], tuple[bytes, Matched]], beside_nbytes: int = 0
    ) -> bytes:
        """The packed reply to a ``Prompt``, or to a message that holds it, counted in the stats.

        ``beside_nbytes``: the request's other work, as bytes of a prompt. ``pack``: at once, or in a thread.
        """
        begun_s = time.perf_counter()
        try:
            prompt = request if isinstance(request, Prompt) else await self._read(request)
            answer = None
            if prompt.nbytes + beside_nbytes <= INLINE_NBYTES:
                with contextlib.suppress(NotAtOnce):
                    answer = pack(prompt, True)
            if answer is None:
                answer = await self._work.run(prompt.tenant, lambda: pack(prompt, False))
        except BaseException as error:
            self._stats.record_lookup(time.perf_counter() - begun_s, result_of(error))
            raise
        self._stats.record_lookup(time.perf_counter() - begun_s, "answered", answer[1])
        return answer[0]

    async def _read(self, request: Any) -> Prompt:
        return await in_tokens(decode_prompt(request), self._fleet, self._tokenizers)

    def _pack(self, prompt: Prompt, at_once: bool) -> tuple[bytes, Matched]:
        """The packed reply: native, unless workers of the model hash differently."""
        answers = self._fleet.ask(prompt, at_once=at_once)
        if len(answers) == 1:
            rows = answers[0].rows
            packed = rows.pack()
            if held := answers[0].pool_media():
                packed += pack_pool_media(held)
            return packed, Matched(*rows.most())
        lookup = merged(answers)
        return encode_lookup(lookup).SerializeToString(), Matched.of(lookup)

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
        return pack_responses(replies)

    async def _one(self, packed: Any, caller: Permissions, left_nbytes: int) -> bytes:
        try:
            if left_nbytes <= 0:
                raise KVPoolError("the reply is full: ask about fewer prompts or workers in one message")
            lookup = self._calls.read(self._lookup, packed)
            if lookup.prompt is None:
                raise ConfigError("one of many requests holds a prompt, and no requests of its own")
            caller.check("read", _tenant(lookup))
            return await self._answer(lookup, caller)
        except Exception as error:
            return self._refused(id_of(packed), error)

    def _refused(self, number: int, error: Exception) -> bytes:
        code, text = self._calls.explain("Lookup", error)
        return refused_response(number, code.value[0], text)


async def in_tokens(prompt: Prompt, fleet: Fleet, tokenizers: Tokenizers) -> Prompt:
    """The prompt with tokens instead of text. Errors: ``UnknownModel``; ``ConfigError`` without a tokenizer."""
    if prompt.text is None and prompt.chat is None:
        return prompt
    fleet.names.check(prompt.tenant, prompt.model)
    if (model := tokenizers.model_of(prompt, fleet.names.model)) not in tokenizers:
        raise ConfigError(
            f'this index has no tokenizer for "{model}": start it with '
            f"--tokenizer {model}=FOLDER, or send token_ids"
        )
    return await tokenizers.in_tokens(prompt, model)


def _tenant(lookup: PackedLookup) -> str | None:
    """None: each of its requests names one."""
    if lookup.prompt is None:
        return None
    if isinstance(lookup.prompt, Prompt):
        return lookup.prompt.tenant
    return lookup.prompt.scope.tenant or DEFAULT_TENANT
