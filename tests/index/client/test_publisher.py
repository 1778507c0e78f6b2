"""Publish through the real service: ``EventPublisher``, strangers' streams, floods, and callers that never read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from kvpool import AsyncIndexClient, ConfigError, IndexClient, IndexUnavailable, KVPoolError
from kvpool.index import Publisher, Worker
from kvpool.index.client import codec
from kvpool.index.client import publisher as module
from kvpool.index.client.messages import SERVICE
from kvpool.index.client.publisher import EventPublisher
from kvpool.index.fleet import Fleet
from kvpool.index.follow.push import Pushed
from kvpool.index.serve import codec as serve_codec
from kvpool.index.serve import publish_streams
from kvpool.v1 import index_pb2 as pb
from tests.index.fleets import Served, a_worker, serving
from tests.index.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 30
QUIET = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))  # windows that do not grow


def pusher(name: str = "p", incarnation: str = "1", ranks: int = 1) -> Worker:
    publishers = tuple(Publisher(rank, "push") for rank in range(ranks))
    return a_worker(name, publishers=publishers, incarnation=incarnation)


def payload(number: int) -> bytes:
    return batch(stored([number + 1], parent=number or None))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async def holds() -> None:
        while not await condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(holds(), WAIT_S)


async def held(client: AsyncIndexClient, blocks: int, rank: int = 0) -> int:
    """Leading blocks that the rank is credited with, or -1 while it is stale, unknown, or the index is away."""
    try:
        answer = await client.lookup("m", hashes64=packed64(range(1, blocks + 1)), timeout_s=WAIT_S)
    except KVPoolError:
        return -1
    return -1 if len(answer) <= rank or answer.stale[rank] else answer.device_blocks[rank]


def run(target: str, use: Callable[[AsyncIndexClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncIndexClient(target, timeout_s=WAIT_S) as client:
            await use(client)

    asyncio.run(main())


def test_what_is_published_is_credited() -> None:
    async def use(client: AsyncIndexClient) -> None:
        async with client.publisher(pusher(ranks=2)) as publisher:
            assert [publisher.publish(payload(number)) for number in range(20)] == list(range(20))
            publisher.publish(payload(0), dp_rank=1)
            await until(lambda: _is(held(client, 30), 20))
            await until(lambda: _is(held(client, 30, rank=1), 1))
            assert publisher.problem == ""
            for number in range(20, 25):
                publisher.publish(payload(number))
            await until(lambda: _is(held(client, 30), 25))
            (status,) = await client.workers()
            assert (status.source, status.lease_left_ms > 0) == ("call", True)
            assert [(one.sequence, one.gaps, one.resets) for one in status.publishers] == [
                (24, 0, 0),
                (0, 0, 0),
            ]
            with pytest.raises(ConfigError, match="has no rank 2"):
                publisher.publish(b"", dp_rank=2)
        await until(lambda: _is(held(client, 30), -1))

    with serving() as served:
        run(served.target, use)


async def _is(found: Awaitable[Any], wanted: Any) -> bool:
    return await found == wanted


def test_an_index_that_starts_again_is_told_everything_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.1)

    async def use(target: str, first: Served) -> None:
        async with (
            AsyncIndexClient(target, timeout_s=WAIT_S) as client,
            client.publisher(pusher()) as publisher,
        ):
            for number in range(10):
                publisher.publish(payload(number))
            await until(lambda: _is(held(client, 20), 10))
            await asyncio.to_thread(first.stop)
            publisher.publish(payload(10))
            await until(lambda: _true(lambda: publisher.problem != ""))
            assert "\n" not in publisher.problem

            def serve_again() -> None:
                with serving(target=target):
                    ready.set()
                    assert done.wait(WAIT_S)

            ready, done = threading.Event(), threading.Event()
            second = threading.Thread(target=serve_again)
            second.start()
            try:
                assert await asyncio.to_thread(ready.wait, WAIT_S)
                await until(lambda: _is(held(client, 20), 11))
                assert publisher.problem == ""
            finally:
                done.set()
                await asyncio.to_thread(second.join)

    with serving() as served:
        asyncio.run(use(served.target, served))


async def _true(condition: Callable[[], bool]) -> bool:
    return condition()


def test_a_new_start_takes_the_place_of_the_old_one() -> None:
    async def use(client: AsyncIndexClient) -> None:
        async with client.publisher(pusher()) as old:
            for number in range(9):
                old.publish(payload(number))
            await until(lambda: _is(held(client, 20), 9))
            async with client.publisher(pusher(incarnation="2")) as new:
                new.publish(payload(0))
                await until(lambda: _is(held(client, 20), 1))
                old.publish(payload(9))
                # The old one registers itself again, as it must: who is the real one is for their operator to say.
                assert new.problem == "" or "incarnation" in new.problem

    with serving() as served:
        run(served.target, use)


def test_a_lease_that_is_not_kept_ends() -> None:
    async def use(client: AsyncIndexClient) -> None:
        publisher = client.publisher(pusher(), lease_s=0.5)
        publisher.publish(payload(0))
        await until(lambda: _is(held(client, 1), 1))
        await publisher.close()
        await until(lambda: _nobody(client))

    with serving() as served:
        run(served.target, use)


async def _nobody(client: AsyncIndexClient) -> bool:
    return await client.workers() == []


def test_what_cannot_be_published() -> None:
    async def use(client: AsyncIndexClient) -> None:
        for worker in (a_worker("w", incarnation="1"), pusher(incarnation="")):
            with pytest.raises(ConfigError, match="to push, it has an incarnation"):
                client.publisher(worker)
        await client.close()
        with pytest.raises(IndexUnavailable, match="closed"):
            client.publisher(pusher())

    with serving() as served:
        run(served.target, use)


def test_the_newest_batches_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 5)
    rank = module._DpRank()
    for number in range(12):
        rank.keep(bytes([number]))
    assert [number for number, _ in rank.kept] == [7, 8, 9, 10, 11]
    assert rank.take_unsent() == (7, b"\7"), "what was lost is a gap"
    assert rank.take_unsent() == (8, b"\10")
    monkeypatch.setattr(module, "MAX_KEPT_NBYTES", 3)
    rank.keep(b"123")
    assert list(rank.kept) == [(12, b"123")]
    rank.keep(b"12345")
    assert list(rank.kept) == [(13, b"12345")], "one at least"
    assert rank.kept_nbytes == 5


# ---- strangers


def message(number: int = 0, body: bytes = b"", **fields: Any) -> bytes:
    pushed = Pushed("default/p", 0, "1", number, body)._replace(**fields)
    packed: bytes = codec.encode_batch(pushed).SerializeToString()
    return packed


@pytest.mark.parametrize(
    ("sent", "code", "says"),
    [
        (message(), "FAILED_PRECONDITION", "call RegisterWorker first"),
        (
            message(worker_id="default/a", incarnation="x"),
            "FAILED_PRECONDITION",
            "not registered with events",
        ),
        (message(worker_id="a%b/p"), "INVALID_ARGUMENT", "tenant"),
        (b"\xff\xff", "INVALID_ARGUMENT", "not a kvpool.v1.EventBatch"),
        (message(0, bytes(34 << 20)), "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
def test_what_is_refused_ends_the_stream(sent: bytes, code: str, says: str) -> None:
    fleet = Fleet()
    fleet.add(a_worker("a"), "flag")
    options = [("grpc.max_send_message_length", -1)]
    with serving(fleet) as served, grpc.insecure_channel(served.target, options=options) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Publish")(iter([sent]), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code().name == code
        assert says in caught.value.details()
        assert "\n" not in caught.value.details()


def test_a_malformed_batch_clears_its_rank_and_nothing_else() -> None:
    async def use(client: AsyncIndexClient) -> None:
        async with client.publisher(pusher("q")) as other, client.publisher(pusher()) as publisher:
            other.publish(payload(0))
            publisher.publish(payload(0))
            await until(lambda: _is(held(client, 5, rank=0), 1))
            publisher.publish(b"\xc1")
            publisher.publish(payload(0))
            await until(lambda: _resets(client, "p", 1))
            await until(lambda: _is(held(client, 5, rank=0), 1))
            await until(lambda: _is(held(client, 5, rank=1), 1))

    with serving() as served:
        run(served.target, use)


async def _resets(client: AsyncIndexClient, name: str, count: int) -> bool:
    return any(
        one.resets == count
        for status in await client.workers()
        if status.worker.name == name
        for one in status.publishers
    )


def test_a_flood_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads that apply what a tenant pushes are taken, and its calls of every kind are answered."""
    fleet = Fleet()
    entered, go_on = threading.Semaphore(0), threading.Event()
    apply = fleet.apply

    def slow(*arguments: Any) -> None:
        entered.release()
        assert go_on.wait(WAIT_S)
        apply(*arguments)

    async def use(client: AsyncIndexClient) -> None:
        names = [f"p{number}" for number in range(2 * publish_streams.THREADS)]
        publishers = [client.publisher(pusher(name)) for name in names]
        try:
            for publisher in publishers:
                for number in range(100):
                    publisher.publish(payload(number))
            for _ in range(publish_streams.THREADS_OF_TENANT):
                assert await asyncio.to_thread(entered.acquire, timeout=WAIT_S)
            assert await held(client, 1) == -1
            long = await client.lookup("m", hashes64=packed64(range(1 << 17)), timeout_s=WAIT_S)
            assert long.stale == (True,) * len(names)
            assert len(await client.workers()) == len(names)
            go_on.set()
            await until(lambda: _is(held(client, 200), 100))
        finally:
            go_on.set()
            for publisher in publishers:
                await publisher.close()

    with serving(fleet) as served:
        monkeypatch.setattr(fleet, "apply", slow)
        run(served.target, use)


def test_who_does_not_read_what_it_is_told_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_streams, "ACK_TIMEOUT_S", 0.2)

    async def main(target: str) -> None:
        async with grpc.aio.insecure_channel(target, options=QUIET) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Publish")()
            pushing = asyncio.create_task(_write_for_ever(call))
            async with AsyncIndexClient(target, timeout_s=WAIT_S) as client:
                await until(lambda: _problem(client, "no stream pushes its events"))
                (status,) = await client.workers()
                assert status.publishers[0].stale
                pushing.cancel()
                call.cancel()

    with serving() as served:
        served.roster.add(pusher(), "call")
        asyncio.run(main(served.target))


def test_who_leaves_while_it_is_told_is_no_fault_of_the_index(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsent(_: object) -> bytes:  # so fails a write that is told of its call's end before the task
        raise grpc.aio.InternalError

    async def main(target: str) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Publish")()
            await call.write(message(last=True))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asyncio.wait_for(call.read(), WAIT_S)
            assert ended.value.code() is grpc.StatusCode.CANCELLED

    monkeypatch.setattr(serve_codec, "encode_ack", unsent)
    with serving() as served:
        served.roster.add(pusher(), "call")
        asyncio.run(main(served.target))
    assert not [record.message for record in caplog.records if record.name.startswith("kvpool")]


async def _write_for_ever(call: Any) -> None:
    body = bytes(1000)  # each is malformed, and told so
    number = 0
    try:
        await call.write(message(last=True))
        question = pb.PublishAck.FromString(await call.read()).question
        await call.write(message(answers=question, last=True))
        while True:
            await call.write(message(number, body))
            number += 1
    except (grpc.RpcError, asyncio.InvalidStateError):
        return


async def _problem(client: AsyncIndexClient, says: str) -> bool:
    (status,) = await client.workers()
    return status.publishers[0].problem == says and status.publishers[0].resets > 100


def test_publishers_end_with_their_index() -> None:
    async def use(target: str) -> None:
        async with (
            AsyncIndexClient(target, timeout_s=WAIT_S) as client,
            client.publisher(pusher()) as publisher,
        ):
            publisher.publish(payload(0))
            await until(lambda: _is(held(client, 1), 1))
            await asyncio.wait_for(
                asyncio.to_thread(served.stop), 4
            )  # well within the 5 s that calls are given

    with serving() as served:
        asyncio.run(use(served.target))


def test_an_event_publisher_is_what_a_client_makes() -> None:
    async def use(client: AsyncIndexClient) -> None:
        publisher = client.publisher(pusher())
        assert isinstance(publisher, EventPublisher)
        await publisher.close()
        await publisher.close()

    run("127.0.0.1:1", use)
    with IndexClient("127.0.0.1:1") as client:
        assert not hasattr(client, "publisher")
