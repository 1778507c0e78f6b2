"""What one caller can take from the others: calls, streams, and replies that it does not read."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from kvpool import AsyncIndexClient, IndexClient, IndexUnavailable
from kvpool.index import limits
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol.messages import SERVICE
from kvpool.index.request_stats import RequestStats
from kvpool.v1 import index_pb2 as pb
from tests.support.deadlines import eventually, raises
from tests.support.fleets import a_worker, hold_questions, serving
from tests.support.wire import packed64

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 60
QUIET = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))  # windows that do not grow


def a_fleet(workers: int = 1) -> Fleet:
    fleet = Fleet()
    for number in range(workers):
        fleet.add(a_worker(f"w{number}"), "flag")
    return fleet


@pytest.mark.parametrize(
    ("limit", "says"),
    [("of_host", "2 calls are open from this host"), ("total", "2 calls are open on this index")],
)
def test_calls_above_the_limit_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, limit: str, says: str
) -> None:
    monkeypatch.setattr(limits, "CALLS", limits.CALLS._replace(**{limit: 2}))
    fleet = a_fleet()
    entered, go_on = hold_questions(fleet, monkeypatch)
    asked = pb.LookupRequest(
        scope=pb.Scope(model="m"), block_hashes=packed64(range(1 << 17))
    ).SerializeToString()
    with serving(fleet) as served, grpc.insecure_channel(served.target) as channel:
        method = channel.unary_unary(f"/{SERVICE}/Lookup")
        try:
            calls = [method.future(asked, timeout=WAIT_S) for _ in range(2)]
            for _ in calls:
                assert entered.acquire(timeout=WAIT_S)
            with IndexClient(served.target, WAIT_S) as client:
                with pytest.raises(IndexUnavailable, match=f"RESOURCE_EXHAUSTED.*{says}") as caught:
                    client.workers()
                assert "\n" not in str(caught.value)
                go_on.set()
                assert [len(call.result(WAIT_S)) > 0 for call in calls] == [True, True]
                assert eventually(lambda: not raises(IndexUnavailable, client.workers))
        finally:
            go_on.set()


@pytest.mark.parametrize(
    ("limit", "says"),
    [("of_host", "2 streams are open from this host"), ("total", "2 streams are open on this index")],
)
def test_streams_above_the_limit_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, limit: str, says: str
) -> None:
    monkeypatch.setattr(limits, "STREAMS", limits.STREAMS._replace(**{limit: 2}))

    async def run(target: str) -> None:
        async with AsyncIndexClient(target, WAIT_S) as client:
            streams = [client.stream() for _ in range(2)]
            for stream in streams:
                assert len(await stream.lookup("m", hashes64=bytes(8))) == 1
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(_open_one_more, target)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert says in caught.value.details()
            assert len(await client.workers()) == 1, "calls are answered"
            assert len(await streams[0].lookup("m", hashes64=bytes(8))) == 1
            await streams[1].close()
            await asyncio.wait_for(_until_there_is_room(client), WAIT_S)
            await streams[0].close()

    with serving(a_fleet()) as served:
        asyncio.run(run(served.target))


def _open_one_more(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        list(channel.stream_stream(f"/{SERVICE}/LookupStream")(iter(()), timeout=WAIT_S))


async def _until_there_is_room(client: AsyncIndexClient) -> None:
    while True:
        async with client.stream() as stream:
            try:
                await stream.lookup("m", hashes64=bytes(8))
                return
            except IndexUnavailable:
                await asyncio.sleep(0.005)


def test_replies_that_nobody_reads_stop_their_stream_and_no_other() -> None:
    """What waits is bounded by the windows of the connection: the index answers no more until something is read."""
    workers, most = 300, 20_000
    asked = pb.LookupRequest(
        scope=pb.Scope(model="m"), block_hashes=packed64(range(1000))
    ).SerializeToString()
    stats = RequestStats()

    def lookups() -> int:
        return stats.totals().results["answered"]

    async def run(target: str) -> None:
        async with grpc.aio.insecure_channel(target, options=QUIET) as channel:
            call = channel.stream_stream(f"/{SERVICE}/LookupStream")()
            sent = 0
            writing: asyncio.Future[None]
            while sent < most:
                writing = asyncio.ensure_future(call.write(asked))
                answered, looks = lookups(), 0
                while not writing.done() and looks < 20:  # one pause of a busy machine is one look
                    await asyncio.wait({writing}, timeout=0.1)
                    answered, looks = lookups(), looks + 1 if lookups() == answered else 0
                if not writing.done():
                    break  # the index takes no more
                sent += 1
            assert sent < most
            answered = lookups()
            assert answered < sent
            async with AsyncIndexClient(target, WAIT_S) as other, other.stream() as stream:
                assert len(await other.lookup("m", hashes64=bytes(8))) == workers
                assert len(await stream.lookup("m", hashes64=bytes(8))) == workers
            assert lookups() == answered + 2
            read = 0
            while read <= answered or not writing.done():  # it goes on where it stood
                answer = await asyncio.wait_for(call.read(), WAIT_S)
                assert len(pb.LookupResponse.FromString(answer).worker) == workers
                read += 1
            call.cancel()

    with serving(a_fleet(workers), stats=stats) as served:
        asyncio.run(run(served.target))
