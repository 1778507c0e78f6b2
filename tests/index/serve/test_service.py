"""The service as any gRPC client meets it: answers, status codes with one line, health, reflection, an orderly end.

Over 400 lines because all calls of the service share its fixtures.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvpool import ConfigError, IndexClient, IndexUnavailable, KVPoolError
from kvpool.index.client import client as client_module
from kvpool.index.fleet import workers
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import Snapshot, pack, unpack
from kvpool.index.prompt import MAX_PROMPT_BLOCKS
from kvpool.index.protocol.messages import SERVICE, encode_worker
from kvpool.index.request_stats import RequestStats
from kvpool.index.serve import calls
from kvpool.index.serve import service as service_module
from kvpool.index.serve.service import IndexServer
from kvpool.v1 import index_pb2 as pb
from kvpool.v1 import index_pb2_grpc
from tests.support.calls import WAIT_S, raw, refused
from tests.support.deadlines import eventually, raises
from tests.support.fleets import Clock, Served, a_worker, hold_questions, joined, say, serving
from tests.support.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")


@pytest.fixture
def served() -> Iterator[Served]:
    fleet = Fleet()
    joined(fleet, a_worker("a", ranks=2), stored([1, 2]), sequence=4)
    with serving(fleet) as running:
        yield running


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(served.target, options=options) as opened:
        yield opened


# ---- the four calls, by the generated stub


def test_register_list_remove(channel: grpc.Channel) -> None:
    stub = index_pb2_grpc.IndexServiceStub(channel)
    worker = pb.Worker(
        name="b", model="n", block_tokens=32, publishers=[pb.Publisher(events="tcp://127.0.0.1:5557")]
    )
    request = pb.RegisterWorkerRequest(worker=worker, lease_ms=60_000)
    assert stub.RegisterWorker(request, timeout=WAIT_S).replaced is False
    assert stub.RegisterWorker(request, timeout=WAIT_S).replaced is False
    (status,) = stub.ListWorkers(pb.ListWorkersRequest(model="n"), timeout=WAIT_S).workers
    assert status.worker.tenant == "default"
    assert status.worker.hash_algorithm == "sha256_cbor"
    assert status.worker.hash_seed_id == Fleet().seed_id
    assert status.source == "call"
    assert 50_000 < status.lease_left_ms <= 60_000
    worker.incarnation = "2"
    assert stub.RegisterWorker(request.__class__(worker=worker), timeout=WAIT_S).replaced is True
    assert stub.ListWorkers(pb.ListWorkersRequest(model="n"), timeout=WAIT_S).workers[0].lease_left_ms == 0
    assert stub.RemoveWorker(pb.RemoveWorkerRequest(name="b"), timeout=WAIT_S).removed is True
    assert stub.RemoveWorker(pb.RemoveWorkerRequest(name="b"), timeout=WAIT_S).removed is False
    assert len(stub.ListWorkers(pb.ListWorkersRequest(), timeout=WAIT_S).workers) == 1


def test_a_long_prompt_is_answered(channel: grpc.Channel) -> None:
    stub = index_pb2_grpc.IndexServiceStub(channel)
    blocks = MAX_PROMPT_BLOCKS
    request = pb.LookupRequest(scope=pb.Scope(model="m"), block_hashes=packed64(range(blocks)))
    assert list(stub.Lookup(request, timeout=WAIT_S).prompt_blocks) == [blocks, blocks]
    tokens = pb.LookupRequest(scope=pb.Scope(model="m"), token_ids=bytes(4 * 100_000))
    assert list(stub.Lookup(tokens, timeout=WAIT_S).prompt_blocks) == [6250, 6250]


def test_a_lease_ends(served: Served) -> None:
    clock = Clock()
    with serving(Fleet(clock=clock)) as other:
        other.fleet.add(a_worker(), "call", 5)
        clock.now_s += 6
        assert eventually(lambda: other.fleet.workers() == [])


# ---- what is refused


LOOKUP = pb.Scope(model="m")


@pytest.mark.parametrize(
    ("method", "request_", "code", "says"),
    [
        ("Lookup", b"\xff\xff\xff", "INVALID_ARGUMENT", "not a kvpool.v1.LookupRequest"),
        ("Lookup", b"\x0a\x03\x0a\x01\xff", "INVALID_ARGUMENT", "not a kvpool.v1.LookupRequest"),  # no UTF-8
        ("ListWorkers", b"\x08", "INVALID_ARGUMENT", "not a kvpool.v1.ListWorkersRequest"),
        ("Lookup", pb.LookupRequest(scope=LOOKUP), "INVALID_ARGUMENT", "holds a prompt: block_hashes, token_ids,"),
        ("Lookup", pb.LookupRequest(scope=LOOKUP, token_ids=bytes(4 << 22) + bytes(4)), "INVALID_ARGUMENT",
         "1 to 4194304 tokens"),
        ("Lookup", pb.LookupRequest(scope=LOOKUP, block_hashes=bytes((32 << 20) + 8)), "INVALID_ARGUMENT",
         "1 to 4194304 blocks"),
        ("Lookup", pb.LookupRequest(scope=LOOKUP, block_hashes=bytes(34 << 20)), "RESOURCE_EXHAUSTED", "max"),
        ("Lookup", pb.LookupRequest(scope=pb.Scope(model="x"), block_hashes=bytes(8)), "NOT_FOUND", "known are m"),
        ("Lookup", pb.LookupRequest(scope=pb.Scope(model="m", tenant="x"), block_hashes=bytes(8)), "NOT_FOUND",
         'this index follows no worker of tenant "x"; kvpool top shows whom it follows, kvpool doctor why not others'),
        ("RegisterWorker", b"", "INVALID_ARGUMENT", "holds a worker"),
        ("RegisterWorker", pb.RegisterWorkerRequest(worker=pb.Worker(name="b\n", model="m")), "INVALID_ARGUMENT",
         "cannot be printed"),
        ("RemoveWorker", pb.RemoveWorkerRequest(name="a", tenant="/"), "INVALID_ARGUMENT", "tenant"),
        ("Nothing", b"", "UNIMPLEMENTED", "Method not found"),
    ],
)  # fmt: skip
def test_wrong_calls(channel: grpc.Channel, method: str, request_: Any, code: str, says: str) -> None:
    found, text = refused(channel, method, request_)
    assert found == code, text
    assert says in text
    assert raw(channel, "ListWorkers", b""), "it goes on"


def test_a_full_fleet_says_so(channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MAX_WORKERS", 1)
    request = pb.RegisterWorkerRequest(worker=encode_worker(a_worker("b")))
    assert refused(channel, "RegisterWorker", request) == (
        "RESOURCE_EXHAUSTED", "this index follows 1 workers already: remove one, or start another",
    )  # fmt: skip


def test_what_is_answered_is_counted() -> None:
    stats, fleet = RequestStats(), Fleet()
    joined(
        fleet,
        a_worker(namespace="a" * 32),
        stored([1]),
        stored([1, 2], medium="CPU"),
        stored([9], medium="STORAGE"),
        sequence=1,
    )
    with serving(fleet, stats=stats) as served, grpc.insecure_channel(served.target) as channel:
        asked = [
            ("m", packed64([1, 2, 3, 4])),
            ("m", packed64(range(10, 10 + (1 << 17)))),
            ("m", b""),
            ("x", bytes(8)),
        ]
        for model, hashes in asked:
            request = pb.LookupRequest(scope=pb.Scope(model=model), block_hashes=hashes)
            try:
                raw(channel, "Lookup", request.SerializeToString())
            except grpc.RpcError:
                continue
        stub = index_pb2_grpc.IndexServiceStub(channel)
        status = stub.ListWorkers(pb.ListWorkersRequest(), timeout=WAIT_S).index
    totals = stats.totals()
    assert totals.results == {"answered": 2, "wrong": 1, "unknown": 1, "failed": 0}
    assert totals.refused == {"INVALID_ARGUMENT": 1, "NOT_FOUND": 1}
    assert totals.matched == (4 + (1 << 17), 1, 2, 0)
    assert [totals.ratios[where].sum for where in ("device", "local", "pool")] == [0.25, 0.5, 0]
    assert sum(totals.seconds.counts) == 2
    assert totals.streams == 0
    assert (status.lookups, status.prompt_blocks, status.device_blocks, status.local_blocks) == (
        2, 4 + (1 << 17), 1, 2,
    )  # fmt: skip
    assert (status.held_blocks, status.held_pool_blocks) == (3, 1)
    assert status.memory_nbytes > 0
    assert status.uptime_ms < WAIT_S * 1000


def test_open_streams_are_counted() -> None:
    stats, fleet = RequestStats(), Fleet()
    fleet.add(a_worker(), "flag")
    with serving(fleet, stats=stats) as served, grpc.insecure_channel(served.target) as channel:
        stub = index_pb2_grpc.IndexServiceStub(channel)
        going_on = threading.Event()

        def questions() -> Iterator[Any]:
            yield pb.LookupRequest(scope=pb.Scope(model="m"), block_hashes=bytes(8))
            going_on.wait(WAIT_S)

        answers = stub.LookupStream(questions(), timeout=WAIT_S)
        next(answers)
        assert stats.totals().streams == 1
        going_on.set()
        assert list(answers) == []
        assert eventually(lambda: stats.totals().streams == 0)


# ---- health, reflection, start and end


def test_health_waits_until_it_is_warm_and_not_for_ever() -> None:
    ask = health_pb2.HealthCheckRequest(service=SERVICE)
    status = health_pb2.HealthCheckResponse
    is_warm = threading.Event()
    options = {"is_warm": is_warm.is_set, "warm_up_s": 3600.0}
    with serving(**options) as served, grpc.insecure_channel(served.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(ask, timeout=WAIT_S).status == status.NOT_SERVING
        assert not pb.ListWorkersResponse.FromString(raw(channel, "ListWorkers", b"")).workers, (
            "it answers all the same"
        )
        is_warm.set()
        assert eventually(lambda: stub.Check(ask, timeout=WAIT_S).status == status.SERVING)
        is_warm.clear()  # a worker that joins later does not take it away again
        rounds = []
        served.fleet.expire = lambda: rounds.append(1)  # type: ignore[method-assign]
        assert eventually(lambda: len(rounds) > 1)
        assert stub.Check(ask, timeout=WAIT_S).status == status.SERVING
    options = {"is_warm": lambda: False, "warm_up_s": 0.5}
    with serving(**options) as served, grpc.insecure_channel(served.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert eventually(lambda: stub.Check(ask, timeout=WAIT_S).status == status.SERVING)


# ---- snapshots


def test_a_snapshot_comes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "CHUNK_NBYTES", 100)
    fleet = Fleet()
    joined(fleet, a_worker("a", ranks=2), stored(range(200)), sequence=4)

    def take() -> Snapshot:
        return Snapshot(1.0, "life", fleet.snapshot())

    with serving(fleet, take=take) as served, IndexClient(served.target, WAIT_S) as client:
        packed = client.snapshot()
        assert packed == b"".join(pack(take()))
        assert unpack(packed).life == "life"
        monkeypatch.setattr(client_module, "MAX_SNAPSHOT_NBYTES", len(packed) - 1)
        with pytest.raises(IndexUnavailable, match="has more than"):
            client.snapshot()
    with pytest.raises(IndexUnavailable, match="was closed"):
        client.snapshot()


def test_snapshots_are_refused_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    going, may_go = threading.Event(), threading.Event()

    def take() -> Snapshot:
        going.set()
        assert may_go.wait(WAIT_S)
        return Snapshot(1.0, "", ())

    with (
        serving() as served,
        IndexClient(served.target, WAIT_S) as client,
        pytest.raises(IndexUnavailable, match=r"FAILED_PRECONDITION.*: this index has nothing to give"),
    ):
        client.snapshot()
    with serving(take=take) as served, grpc.insecure_channel(served.target) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(f"/{SERVICE}/Snapshot")(b"\xff", timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        first = channel.unary_stream(f"/{SERVICE}/Snapshot")(b"", timeout=WAIT_S)
        assert going.wait(WAIT_S)
        with IndexClient(served.target, WAIT_S) as client:
            with pytest.raises(IndexUnavailable, match="another snapshot is under way"):
                client.snapshot()
            may_go.set()
            assert len(list(first)) == 1
            assert len(client.snapshot()) > 0


def test_a_caller_that_takes_no_chunks_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "CHUNK_TIMEOUT_S", 0.2)
    fleet = Fleet()
    fleet.add(a_worker("a"), "flag")
    say(fleet, "default/a", 0, 4, batch(stored(range(1 << 19))))  # 4 MiB, far beyond what fits on the way
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    begun = threading.Event()

    def take() -> Snapshot:
        begun.set()
        return Snapshot(1.0, "", fleet.snapshot())

    with (
        serving(fleet, take=take) as served,
        grpc.insecure_channel(served.target, options=options) as channel,
    ):
        mute = channel.unary_stream(f"/{SERVICE}/Snapshot")(b"", timeout=3600)
        assert begun.wait(WAIT_S)
        with IndexClient(served.target, WAIT_S) as client:
            assert eventually(lambda: not raises(IndexUnavailable, client.snapshot))
        mute.cancel()


def test_reflection(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest
    requests = [ask(list_services=""), ask(file_containing_symbol="kvpool.v1.IndexService")]
    listed, described = stub.ServerReflectionInfo(iter(requests), timeout=WAIT_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {"kvpool.v1.IndexService", "grpc.health.v1.Health"} <= names
    assert pb.DESCRIPTOR.serialized_pb in described.file_descriptor_response.file_descriptor_proto


def test_a_call_for_reflection_without_a_request_ends(
    channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC holds a part of a request for as long as the call lasts."""
    monkeypatch.setattr(calls, "REQUEST_S", 0.5)
    sent = threading.Event()
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter(lambda: sent.wait(WAIT_S), True), timeout=WAIT_S)
    try:
        assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert call.details() == "the request did not arrive within 0.5 s"
    finally:
        sent.set()


def test_a_call_under_way_is_answered_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    fleet.add(a_worker(), "flag")
    entered, go_on = hold_questions(fleet, monkeypatch)
    request = pb.LookupRequest(scope=LOOKUP, block_hashes=packed64(range(1 << 17))).SerializeToString()
    with serving(fleet) as served, grpc.insecure_channel(served.target) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Lookup").future(request, timeout=WAIT_S)
        assert entered.acquire(timeout=WAIT_S)
        ending = threading.Thread(target=served.stop)
        ending.start()
        with grpc.insecure_channel(served.target) as late:
            ask = partial(raw, late, "ListWorkers", b"", timeout_s=0.2)
            assert eventually(lambda: raises(grpc.RpcError, ask)), "new calls are refused while it ends"
        assert not call.done()
        go_on.set()
        assert pb.LookupResponse.FromString(call.result(WAIT_S)).worker == ["w"]
        ending.join(WAIT_S)


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("nowhere", "'nowhere' is not an address: write HOST:PORT"),
        ("127.0.0.1:70000", "write HOST:PORT"),
        ("http://127.0.0.1:1", "write HOST:PORT"),
        ("192.0.2.1:0", "cannot listen on 192.0.2.1:0: Cannot assign requested address; choose another"),
        ("does-not-exist.invalid:0", "cannot listen on does-not-exist.invalid:0"),
    ],
)
def test_where_it_cannot_listen(listen: str, says: str) -> None:
    async def start() -> None:
        server = IndexServer(Fleet())
        try:
            await server.start(listen)
        finally:
            await server.stop()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(start())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_refused(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    other = Served(Fleet())
    other.target = served.target
    with pytest.raises(ConfigError, match=f"cannot listen on {served.target}: Address already in use"):
        other.start()
    assert capfd.readouterr() == ("", "")


# ---- who is followed


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
def test_an_old_connection_is_made_anew_and_its_streams_end_after_the_grace(grace_s: float) -> None:
    async def run(target: str) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            stream = channel.stream_stream(f"/{SERVICE}/LookupStream")()
            while channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
                await asyncio.sleep(0.01)
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)  # the index has said so
            request = pb.ListWorkersRequest().SerializeToString()
            for _ in range(20):
                assert await channel.unary_unary(f"/{SERVICE}/ListWorkers")(request, timeout=WAIT_S)
            if grace_s:
                assert await stream.code() is grpc.StatusCode.UNAVAILABLE
            else:
                await asyncio.sleep(1.0)
                await stream.write(b"no message")
                assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT, "it is answered"

    # Longer than a busy machine takes to see that it is READY.
    with serving(max_connection_age_s=2.0, max_connection_grace_s=grace_s) as served:
        asyncio.run(asyncio.wait_for(run(served.target), WAIT_S))


class Recorded:
    """A feed that only writes down its orders."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def follow(self, worker: Any, ranks: Any) -> None:
        self.orders.append(f"follow {worker.id} {worker.incarnation}")

    def unfollow(self, worker_id: str) -> None:
        self.orders.append(f"unfollow {worker_id}")

    def close(self) -> None:
        self.orders.append("close")

    is_alive = True


def test_exactly_those_that_are_there_are_followed() -> None:
    clock = Clock()
    feed = Recorded()
    fleet = Fleet(clock=clock, feed=feed)
    fleet.add(a_worker("a", incarnation="1"), "call", 5)
    fleet.add(a_worker("a", incarnation="1"), "call", 5)
    fleet.add(a_worker("a", incarnation="2"), "call", 5)
    fleet.add(a_worker("b", incarnation="1"), "flag")
    assert fleet.add(a_worker("b", incarnation="2"), "pool") == "kept"
    clock.now_s += 6
    assert fleet.expire() == ["default/a"]
    assert not fleet.remove("default/a")
    assert fleet.remove("default/b")
    fleet.close()
    assert feed.orders == [
        "follow default/a 1",
        "unfollow default/a",
        "follow default/a 2",
        "follow default/b 1",
        "unfollow default/a",
        "unfollow default/b",
        "close",
    ]


def test_an_index_whose_feed_has_ended_ends() -> None:
    feed = Recorded()

    async def serve() -> None:
        server = IndexServer(Fleet(feed=feed))
        try:
            await server.start("127.0.0.1:0")
            feed.is_alive = False
            await asyncio.wait_for(server.wait(asyncio.Event()), WAIT_S)
        finally:
            await server.stop()

    with pytest.raises(KVPoolError, match="reads no more events"):
        asyncio.run(serve())


def test_a_start_that_cannot_be_taken_leaves_nobody_half_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Recorded()
    fleet = Fleet(feed=feed)
    fleet.add(a_worker(), "call")
    with pytest.raises(ConfigError):
        fleet.add(a_worker(block_tokens=0), "call")
    assert len(feed.orders) == 1, "a worker that makes no sense changes nothing"
    monkeypatch.setattr(workers, "MAX_RANKS", 1)
    with pytest.raises(KVPoolError):
        fleet.add(a_worker(ranks=2), "call")
    assert feed.orders[1:] == ["unfollow default/w"]
    assert fleet.workers() == []
