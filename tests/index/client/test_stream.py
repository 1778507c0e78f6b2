"""Lookups over one call: each with its answer or its error, and its deadline, and what ends them all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from kvpool import AsyncIndexClient, ConfigError, IndexClient, IndexUnavailable, UnknownModel
from kvpool.index import Prompt
from kvpool.index.client import stream as lookup_stream
from kvpool.index.client.stream import LookupStream
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol.messages import MAX_REQUESTS, SERVICE
from kvpool.index.serve import service
from kvpool.v1 import index_pb2 as pb
from tests.support.fleets import a_worker, joined, serving
from tests.support.wire import packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60


def a_fleet() -> Fleet:
    fleet = Fleet()
    joined(fleet, a_worker("a"), stored(list(range(1, 65))), sequence=4)
    return fleet


@asynccontextmanager
async def streaming(index: Fleet | Scripted) -> AsyncIterator[LookupStream]:
    """A stream to an index of that fleet, or to one that is scripted."""
    with serving(index) if isinstance(index, Fleet) else index as served:
        async with AsyncIndexClient(served.target, timeout_s=WAIT_S) as client, client.stream() as stream:
            yield stream


async def matched(stream: LookupStream, blocks: int, **options: Any) -> int:
    answer = await stream.lookup("m", hashes64=packed64(list(range(1, blocks + 1))), **options)
    return answer.device_blocks[0]


@pytest.mark.anyio
async def test_every_task_gets_its_own_answer() -> None:
    async with streaming(a_fleet()) as stream:
        assert await matched(stream, 3) == 3
        # The long ones are answered by another thread of the index.
        many = [20_000, 1, 20_000, *[*range(1, 65)] * 5]
        assert await asyncio.gather(*(matched(stream, blocks) for blocks in many)) == [
            min(64, n) for n in many
        ]
        wrong = stream.lookup("other", hashes64=packed64([1]))
        first, error, second = await asyncio.gather(
            matched(stream, 1), wrong, matched(stream, 2), return_exceptions=True
        )
        assert (first, type(error), second) == (1, UnknownModel, 2), "a bad question fails alone"


def prompts(*blocks: int, model: str = "m") -> list[Prompt]:
    return [Prompt(model, hashes64=packed64(list(range(1, count + 1)))) for count in blocks]


@pytest.mark.anyio
async def test_many_prompts_in_one_message() -> None:
    wrong = prompts(1, model="other")

    async with streaming(a_fleet()) as stream:
        for _ in range(2):
            first, error, second = await stream.lookup_many([*prompts(3), *wrong, *prompts(64)])
            assert isinstance(error, UnknownModel)
            assert [first.device_blocks, second.device_blocks] == [(3,), (64,)]  # type: ignore[union-attr]
        several = await asyncio.gather(
            *(stream.lookup_many(prompts(*[blocks] * 50)) for blocks in range(1, 20))
        )
        for blocks, answers in enumerate(several, 1):
            assert [one.device_blocks for one in answers] == [(blocks,)] * 50  # type: ignore[union-attr]
        for count in (0, MAX_REQUESTS + 1):
            with pytest.raises(ConfigError, match=f"1 to {MAX_REQUESTS} prompts, not {count}"):
                await stream.lookup_many(prompts(1) * count)
        with pytest.raises(ConfigError, match="in one message have at most"):
            await stream.lookup_many([Prompt("m", hashes64=bytes(17 << 20))] * 2)
        assert await matched(stream, 2) == 2
    with serving(a_fleet()) as served, IndexClient(served.target, WAIT_S) as client:
        first, error, second = client.lookup_many([*prompts(3), *wrong, *prompts(64)])
        assert isinstance(error, UnknownModel)
        assert [first.device_blocks, second.device_blocks] == [(3,), (64,)]  # type: ignore[union-attr]


class Scripted:
    """An index that answers a stream as it is told."""

    def __init__(self, answer: Callable[[Any, Any], Iterator[bytes]]) -> None:
        handler = grpc.stream_stream_rpc_method_handler(answer, pb.LookupRequest.FromString)
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"LookupStream": handler}),)
        )
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Scripted:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(WAIT_S).wait()


def earlier(requests: Any, context: Any) -> Iterator[bytes]:
    """As an index of an earlier version: no ids, in order, and the first question that is refused ends the stream."""
    for request in requests:
        if not request.WhichOneof("prompt"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a request holds a prompt")
        if request.scope.model != "m":
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        yield table(f"{len(request.block_hashes)}")


def table(worker: str, number: int = 0) -> bytes:
    """A packed reply of one row."""
    names = ("dp_rank", "block_tokens", "prompt_blocks", "device_blocks", "local_blocks", "pool_blocks",
             "sequence", "staleness_ms")  # fmt: skip
    columns: Any = {name: [0] for name in names}
    reply = pb.LookupResponse(worker=[worker], address=[""], stale=[False], id=number, **columns)
    return reply.SerializeToString()


@pytest.mark.anyio
async def test_an_index_of_an_earlier_version_is_understood() -> None:
    async with streaming(Scripted(earlier)) as stream:
        answers = await asyncio.gather(
            *(stream.lookup("m", hashes64=bytes(8 * blocks)) for blocks in range(1, 30))
        )
        assert [answer.workers for answer in answers] == [(f"{8 * blocks}",) for blocks in range(1, 30)]
        with pytest.raises(UnknownModel):
            await stream.lookup("other", hashes64=bytes(8))
        with pytest.raises(IndexUnavailable, match="make another"):
            await stream.lookup("m", hashes64=bytes(8))
    async with streaming(Scripted(earlier)) as stream:
        with pytest.raises(ConfigError, match="holds a prompt"):
            await stream.lookup_many(prompts(1, 2))


@pytest.mark.anyio
async def test_what_cannot_be_sent_leaves_the_stream_as_it_was() -> None:
    async with streaming(a_fleet()) as stream:
        with pytest.raises(ConfigError, match="token_ids, hashes64, text or chat"):
            await stream.lookup("m")
        with pytest.raises(ConfigError, match="timeout_s"):
            await matched(stream, 1, timeout_s=0)
        assert await matched(stream, 2) == 2


class Slow(Scripted):
    """An index that answers when it is let: with one worker, whose name is the number of the prompt's bytes."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = threading.Semaphore(0)
        super().__init__(self._answer)

    def _answer(self, requests: Any, _: Any) -> Iterator[bytes]:
        for request in requests:
            self.asked.release()
            self.go.wait(WAIT_S)
            yield table(f"{len(request.block_hashes)}", request.id)

    def __exit__(self, *_: object) -> None:
        self.go.set()
        super().__exit__()


@pytest.mark.anyio
async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    slow = Slow()
    async with streaming(slow) as stream:
        with pytest.raises(IndexUnavailable, match=r"did not answer within 0\.2 s"):
            await stream.lookup("m", hashes64=packed64([1, 2]), timeout_s=0.2)
        slow.go.set()
        answer = await stream.lookup("m", hashes64=packed64([1, 2, 3]))
        assert answer.workers == ("24",)


@pytest.mark.anyio
async def test_closing_ends_what_waits_and_is_final() -> None:
    slow = Slow()
    async with streaming(slow) as stream:
        waiting = asyncio.create_task(stream.lookup("m", hashes64=packed64([1])))
        await asyncio.to_thread(slow.asked.acquire)
        await stream.close()
        await stream.close()
        with pytest.raises(IndexUnavailable, match="closed"):
            await waiting
        with pytest.raises(IndexUnavailable, match="closed"):
            await stream.lookup("m", hashes64=packed64([1]))


@pytest.mark.anyio
async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_stream, "MAX_WAITING", 3)

    slow = Slow()
    async with streaming(slow) as stream:
        waiting = [asyncio.create_task(stream.lookup("m", hashes64=packed64([1]))) for _ in range(3)]
        await asyncio.to_thread(slow.asked.acquire)
        with pytest.raises(IndexUnavailable, match="no more are sent"):
            await stream.lookup("m", hashes64=packed64([1]))
        slow.go.set()
        assert [answer.workers for answer in await asyncio.gather(*waiting)] == [("8",)] * 3


@pytest.mark.anyio
async def test_a_closed_client_opens_none() -> None:
    client = AsyncIndexClient("127.0.0.1:1")
    await client.close()
    with pytest.raises(IndexUnavailable, match="closed"):
        client.stream()


def test_the_end_of_an_index_does_not_wait_for_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STOP_TIMEOUT_S", 10.0 * WAIT_S)  # that calls are given

    async def run(target: str) -> None:
        async with AsyncIndexClient(target, timeout_s=WAIT_S) as client, client.stream() as stream:
            assert await matched(stream, 1) == 1
            await asyncio.wait_for(asyncio.to_thread(served.stop), WAIT_S)
            with pytest.raises(IndexUnavailable):
                await matched(stream, 1)

    with serving(a_fleet()) as served:
        asyncio.run(run(served.target))


@pytest.mark.anyio
async def test_answers_are_taken_in_any_order_and_each_by_its_id() -> None:
    """Three questions are answered the last one first; then an answer to no question ends the stream."""

    def answer(requests: Any, _: Any) -> Iterator[bytes]:
        asked = [next(requests) for _ in range(3)]
        for request in reversed(asked):
            yield table(f"{len(request.block_hashes)}", request.id)
        next(requests)
        yield table("nobody asked", 12345)

    async with streaming(Scripted(answer)) as stream:
        questions = (stream.lookup("m", hashes64=bytes(8 * blocks)) for blocks in (1, 2, 3))
        answers = await asyncio.gather(*questions)
        assert [one.workers for one in answers] == [("8",), ("16",), ("24",)]
        with pytest.raises(IndexUnavailable, match="make another"):
            await stream.lookup("m", hashes64=bytes(8))
