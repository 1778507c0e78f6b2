"""Lookups over one call: in order, each with its deadline, and what ends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import Any

import grpc
import grpc.aio
import pytest

from kvpool import AsyncIndexClient, ConfigError, IndexUnavailable, UnknownModel
from kvpool.index.client import stream as lookup_stream
from kvpool.index.client.messages import SERVICE
from kvpool.index.client.stream import LookupStream
from kvpool.index.fleet import Fleet
from kvpool.v1 import index_pb2 as pb
from tests.index.fleets import a_worker, say, serving
from tests.index.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 30


def a_fleet() -> Fleet:
    fleet = Fleet()
    fleet.add(a_worker("a"), "flag")
    say(fleet, "default/a", 0, 4, batch(stored(list(range(1, 65)))))
    return fleet


def streaming(target: str, use: Callable[[LookupStream], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncIndexClient(target, timeout_s=WAIT_S) as client, client.stream() as stream:
            await use(stream)

    asyncio.run(run())


async def matched(stream: LookupStream, blocks: int, **options: Any) -> int:
    answer = await stream.lookup("m", hashes64=packed64(list(range(1, blocks + 1))), **options)
    return answer.device_blocks[0]


def test_every_task_gets_its_own_answer() -> None:
    async def use(stream: LookupStream) -> None:
        assert await matched(stream, 3) == 3
        many = [*range(1, 65)] * 5
        assert await asyncio.gather(*(matched(stream, blocks) for blocks in many)) == many

    with serving(a_fleet()) as served:
        streaming(served.target, use)


def test_long_and_short_prompts_stay_in_order() -> None:
    async def use(stream: LookupStream) -> None:
        # The long ones are answered by another thread of the index.
        lengths = [20_000, 1, 20_000, 64, 2]
        answers = await asyncio.gather(
            *(stream.lookup("m", hashes64=packed64(list(range(1, blocks + 1)))) for blocks in lengths)
        )
        assert [answer.prompt_blocks[0] for answer in answers] == lengths
        assert [answer.device_blocks[0] for answer in answers] == [64, 1, 64, 64, 2]

    with serving(a_fleet()) as served:
        streaming(served.target, use)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"model": "other"}, UnknownModel, "other"),
        ({"token_ids": [1] * 16, "cache_salt": "x", "tenant": "nobody"}, UnknownModel, "nobody"),
    ],
)
def test_what_is_refused_ends_the_stream(options: dict[str, Any], error: type[Exception], says: str) -> None:
    model = options.pop("model", "m")
    if "token_ids" not in options:
        options["hashes64"] = packed64([1])

    async def use(stream: LookupStream) -> None:
        assert await matched(stream, 5) == 5
        with pytest.raises(error, match=says):
            await stream.lookup(model, **options)
        with pytest.raises(IndexUnavailable, match="make another"):
            await matched(stream, 1)

    with serving(a_fleet()) as served:
        streaming(served.target, use)
        streaming(served.target, lambda stream: matched(stream, 1))  # type: ignore[arg-type, return-value]


def test_what_is_refused_ends_those_behind_it() -> None:
    async def use(stream: LookupStream) -> None:
        assert await matched(stream, 5) == 5
        wrong, *behind = await asyncio.gather(
            stream.lookup("other", hashes64=packed64([1])),
            *(matched(stream, 1) for _ in range(20)),
            return_exceptions=True,
        )
        assert isinstance(wrong, (UnknownModel, IndexUnavailable))
        assert all(isinstance(answer, IndexUnavailable) for answer in behind)

    with serving(a_fleet()) as served:
        streaming(served.target, use)


def test_what_cannot_be_sent_leaves_the_stream_as_it_was() -> None:
    async def use(stream: LookupStream) -> None:
        with pytest.raises(ConfigError, match="token_ids, hashes64, text or chat"):
            await stream.lookup("m")
        with pytest.raises(ConfigError, match="timeout_s"):
            await matched(stream, 1, timeout_s=0)
        assert await matched(stream, 2) == 2

    with serving(a_fleet()) as served:
        streaming(served.target, use)


def test_nobody_listens() -> None:
    async def use(stream: LookupStream) -> None:
        with pytest.raises(IndexUnavailable, match="start one with"):
            await matched(stream, 1)

    streaming("127.0.0.1:1", use)


class Slow:
    """An index that answers when it is let; then with as many workers as the prompt has bytes."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked = threading.Semaphore(0)
        handler = grpc.stream_stream_rpc_method_handler(self._answer, pb.LookupRequest.FromString)
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"LookupStream": handler}),)
        )
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def _answer(self, requests: Any, _: Any) -> Any:
        for request in requests:
            self.asked.release()
            self.go.wait(WAIT_S)
            names = ("dp_rank", "block_tokens", "prompt_blocks", "device_blocks", "local_blocks", "pool_blocks",
                     "sequence", "staleness_ms")  # fmt: skip
            columns: Any = {name: [0] for name in names}
            yield pb.LookupResponse(
                worker=[f"{len(request.block_hashes)}"], address=[""], stale=[False], **columns
            ).SerializeToString()

    def __enter__(self) -> Slow:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.stop(WAIT_S).wait()


def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    async def use(stream: LookupStream) -> None:
        with pytest.raises(IndexUnavailable, match=r"did not answer within 0\.2 s"):
            await stream.lookup("m", hashes64=packed64([1, 2]), timeout_s=0.2)
        slow.go.set()
        answer = await stream.lookup("m", hashes64=packed64([1, 2, 3]))
        assert answer.workers == ("24",)

    with Slow() as slow:
        streaming(slow.target, use)


def test_closing_ends_what_waits_and_is_final() -> None:
    async def use(stream: LookupStream) -> None:
        waiting = asyncio.create_task(stream.lookup("m", hashes64=packed64([1])))
        await asyncio.to_thread(slow.asked.acquire)
        await stream.close()
        await stream.close()
        with pytest.raises(IndexUnavailable, match="closed"):
            await waiting
        with pytest.raises(IndexUnavailable, match="closed"):
            await stream.lookup("m", hashes64=packed64([1]))

    with Slow() as slow:
        streaming(slow.target, use)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_stream, "MAX_WAITING", 3)

    async def use(stream: LookupStream) -> None:
        waiting = [asyncio.create_task(stream.lookup("m", hashes64=packed64([1]))) for _ in range(3)]
        await asyncio.to_thread(slow.asked.acquire)
        with pytest.raises(IndexUnavailable, match="no more are sent"):
            await stream.lookup("m", hashes64=packed64([1]))
        slow.go.set()
        assert [answer.workers for answer in await asyncio.gather(*waiting)] == [("8",)] * 3

    with Slow() as slow:
        streaming(slow.target, use)


def test_a_closed_client_opens_none() -> None:
    async def run() -> None:
        client = AsyncIndexClient("127.0.0.1:1")
        await client.close()
        with pytest.raises(IndexUnavailable, match="closed"):
            client.stream()

    asyncio.run(run())


def test_the_end_of_an_index_does_not_wait_for_its_streams() -> None:
    async def run(target: str) -> None:
        async with AsyncIndexClient(target, timeout_s=WAIT_S) as client, client.stream() as stream:
            assert await matched(stream, 1) == 1
            await asyncio.wait_for(
                asyncio.to_thread(served.stop), 4
            )  # well within the 5 s that calls are given
            with pytest.raises(IndexUnavailable):
                await matched(stream, 1)

    with serving(a_fleet()) as served:
        asyncio.run(run(served.target))


def test_a_message_that_is_no_question_is_refused() -> None:
    with serving(a_fleet()) as served, grpc.insecure_channel(served.target) as channel:
        call = channel.stream_stream(f"/{SERVICE}/LookupStream")(iter([b"\xff\xff"]), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "LookupRequest" in caught.value.details()
