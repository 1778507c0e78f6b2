"""Memory that callers with a token take: requests, replies that they do not read, snapshots, all in one budget."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool import IndexClient, IndexUnavailable
from kvpool.discovery.worker import Publisher
from kvpool.errors import SnapshotRefused
from kvpool.index import limits
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import MAX_NBYTES, Snapshot
from kvpool.index.follow import snapshot_file
from kvpool.index.follow.snapshot_file import SnapshotFile
from kvpool.index.limits import PACK_BLOCK_NBYTES
from kvpool.index.protocol.messages import MAX_REQUEST_NBYTES, SERVICE
from kvpool.index.serve import calls
from kvpool.index.serve.auth import TokenAuth
from kvpool.v1 import index_pb2 as pb
from tests.support.credentials import write_tokens
from tests.support.deadlines import eventually
from tests.support.fleets import Clock, Served, a_worker, hold_questions, say, serving
from tests.support.index_process import peak_nbytes, running
from tests.support.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

WAIT_S = 120
MiB = 1 << 20
CALLERS = 32
LARGE = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
RESERVED = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 16),
]  # a caller that reads little ahead
SCOPE = pb.Scope(model="m", tenant="a")


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def lookup_of(blocks: int) -> bytes:
    request: bytes = pb.LookupRequest(
        scope=SCOPE, block_hashes=packed64(range(1, blocks + 1))
    ).SerializeToString()
    return request


def outcome(call: Any, *arguments: Any, **options: Any) -> str:
    """ "OK", or the status and its text."""
    try:
        call(*arguments, timeout=WAIT_S, **options)
        return "OK"
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"


# ---- a process


@pytest.mark.parametrize("streamed", [False, True])
def test_callers_that_all_send_the_largest_request(tmp_path: Path, streamed: bool) -> None:
    """Of 33 MiB, where 64 MiB are all there is: none of them is received."""
    tokens = write_tokens(tmp_path / "t.toml", a=(["read", "publish"], ["a"]), b=(["read", "publish"], ["b"]))
    with running("--tokens", str(tmp_path / "t.toml"), "--max-memory", "64MiB") as index:
        with IndexClient(index.target, WAIT_S, token=tokens["b"]) as other:
            other.register(a_worker(tenant="b", ranks=1), 600)
            before = peak_nbytes(index)
            with (
                grpc.insecure_channel(index.target, options=LARGE) as channel,
                ThreadPoolExecutor(CALLERS) as threads,
            ):
                method = channel.unary_unary(f"/{SERVICE}/{'LookupStream' if streamed else 'Lookup'}")
                request = lookup_of(MAX_REQUEST_NBYTES // 8 - 100)
                asked = [
                    threads.submit(outcome, method, request, metadata=bearer(tokens["a"]))
                    for _ in range(CALLERS)
                ]
                for _ in range(10):
                    assert len(other.lookup("m", tenant="b", hashes64=packed64([1]))) == 1
                outcomes = {one.result() for one in asked}
        assert all(one.startswith("RESOURCE_EXHAUSTED: ") for one in outcomes), outcomes
        assert peak_nbytes(index) - before < 64 * MiB


def test_a_request_of_millions_of_elements_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """33 MiB of empty ones became 1.3 GiB."""
    tokens = write_tokens(tmp_path / "t.toml", a=(["read"], ["a"]))
    empty = bytes([pb.Scope.DESCRIPTOR.fields_by_name["multimodal"].number << 3 | 2, 0]) * (16 * MiB)
    request = b"\x0a\x80\x80\x80\x10" + empty
    with running("--tokens", str(tmp_path / "t.toml")) as index:
        with IndexClient(index.target, WAIT_S, token=tokens["a"]) as client:
            assert client.workers() == []
        before = peak_nbytes(index)
        with grpc.insecure_channel(index.target, options=LARGE) as channel:
            said = outcome(channel.unary_unary(f"/{SERVICE}/Lookup"), request, metadata=bearer(tokens["a"]))
        assert said == "INVALID_ARGUMENT: a request has at most 131072 fields"
        assert peak_nbytes(index) - before < 6 * MAX_REQUEST_NBYTES


# ---- in this process, with little memory


@contextmanager
def little_memory(folder: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    """An index with a token for tenant a, one for b, and one for all."""
    tokens = write_tokens(
        folder / "tokens.toml", a=(["read"], ["a"]), b=(["read"], ["b"]), root=(["read", "admin"], ["*"])
    )
    fleet = Fleet(max_memory_nbytes=64 * MiB, clock=Clock())  # a reply has as many bytes whenever it is made
    for tenant in "ab":
        ranks = tuple(Publisher(rank, "") for rank in range(20))
        fleet.add(a_worker(tenant=tenant, publishers=ranks), "flag")
        say(fleet, f"{tenant}/w", 0, 0, batch(stored(range(1, 1000))))

    def take() -> Snapshot:
        return Snapshot(1.0, "", fleet.snapshot())

    with serving(fleet, auth=TokenAuth(str(folder / "tokens.toml")), take=take) as running:
        yield running, tokens


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Served, dict[str, str]]]:
    with little_memory(tmp_path) as made:
        yield made


def test_a_large_request_waits_for_room_and_no_longer_than_that(
    served: tuple[Served, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, tokens = served
    budget, request = index.fleet.limits, lookup_of(1 << 15)  # 256 KiB
    used = budget.used_nbytes
    entered, go_on = hold_questions(index.fleet, monkeypatch)
    monkeypatch.setattr(budget, "limit_nbytes", 2 * (used + 700_000))  # half for one tenant: one of two
    monkeypatch.setattr("kvpool.index.limits.ROOM_TIMEOUT_S", 0.2)
    with grpc.insecure_channel(index.target) as channel, ThreadPoolExecutor(2) as threads:
        method = channel.unary_unary(f"/{SERVICE}/Lookup")
        first = threads.submit(outcome, method, request, metadata=bearer(tokens["a"]))
        assert entered.acquire(timeout=WAIT_S)
        says = "RESOURCE_EXHAUSTED: there is no room for a request of 262156 bytes now: send it again later"
        assert outcome(method, request, metadata=bearer(tokens["a"])).startswith(says)
        monkeypatch.setattr("kvpool.index.limits.ROOM_TIMEOUT_S", WAIT_S)
        second = threads.submit(outcome, method, request, metadata=bearer(tokens["a"]))
        go_on.set()
        assert (first.result(), second.result()) == ("OK", "OK")
        assert eventually(lambda: budget.used_nbytes == used)


@pytest.mark.parametrize("name", ["Lookup", "LookupStream"])
def test_replies_that_are_not_read_are_counted_until_their_call_ends(
    served: tuple[Served, dict[str, str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    index, tokens = served
    budget = index.fleet.limits
    used = budget.used_nbytes
    small = lookup_of(1)
    one = pb.LookupRequest.FromString(small)
    request = pb.LookupRequest(requests=[one] * 256).SerializeToString()
    with grpc.insecure_channel(index.target) as channel:
        method = channel.unary_unary(f"/{SERVICE}/Lookup")
        nbytes = len(method(request, metadata=bearer(tokens["a"]), timeout=WAIT_S))
    assert nbytes > calls.SMALL_NBYTES
    assert eventually(lambda: budget.used_nbytes == used)
    most_nbytes = nbytes + 256 * 20 * 4  # a row grows with its staleness
    # Half for a, which has half of what is used: three replies fit, and no fourth.
    monkeypatch.setattr(budget, "limit_nbytes", used + 2 * (3 * most_nbytes + nbytes // 4))
    with grpc.insecure_channel(index.target, options=RESERVED) as channel:
        mute = [
            channel.stream_stream(f"/{SERVICE}/{name}")(iter([request]), metadata=bearer(tokens["a"]))
            for _ in range(3)
        ]
        assert eventually(lambda: used + 3 * nbytes <= budget.used_nbytes <= used + 3 * most_nbytes)
        method = channel.unary_unary(f"/{SERVICE}/Lookup")
        says = r"RESOURCE_EXHAUSTED: there is no room for a reply of \d+ bytes now: send it again later"
        with grpc.insecure_channel(index.target) as other:
            method = other.unary_unary(f"/{SERVICE}/Lookup")
            assert re.match(says, outcome(method, request, metadata=bearer(tokens["a"])))
            assert outcome(method, small, metadata=bearer(tokens["a"])) == "OK", "small ones find room"
            theirs = pb.LookupRequest(scope=pb.Scope(model="m", tenant="b"), block_hashes=bytes(8))
            many = pb.LookupRequest(requests=[theirs] * 256).SerializeToString()
            assert outcome(method, many, metadata=bearer(tokens["b"])) == "OK", "and other tenants"
        for call in mute:
            call.cancel()
        assert eventually(lambda: budget.used_nbytes == used)


def test_an_unread_reply_keeps_its_call_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CALLS", limits.CALLS._replace(of_tenant=2))
    one = pb.LookupRequest.FromString(lookup_of(1))
    request = pb.LookupRequest(requests=[one] * 256).SerializeToString()
    with (
        little_memory(tmp_path) as (index, tokens),
        grpc.insecure_channel(index.target, options=RESERVED) as channel,
        grpc.insecure_channel(index.target) as other,
    ):
        metadata = bearer(tokens["a"])
        method = channel.stream_stream(f"/{SERVICE}/Lookup")
        mute = [method(iter([request]), metadata=metadata) for _ in range(2)]

        def said() -> str:
            return outcome(other.unary_unary(f"/{SERVICE}/Lookup"), lookup_of(1), metadata=metadata)

        assert eventually(lambda: said().startswith("RESOURCE_EXHAUSTED: 2 calls are open for this tenant"))
        time.sleep(0.5)
        assert said() != "OK", "as long as nothing is read"
        for call in mute:
            call.cancel()
        assert eventually(lambda: said() == "OK")


def test_requests_that_arrive_slowly_take_room(
    served: tuple[Served, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be as large as the largest: gRPC does not tell."""
    monkeypatch.setattr(calls, "LATE_S", 0.2)
    monkeypatch.setattr(calls, "REQUEST_S", 3.0)
    index, tokens = served
    budget = index.fleet.limits
    used, largest = budget.used_nbytes, budget.limit_of_request_nbytes(MAX_REQUEST_NBYTES)
    assert largest * 2 > budget.limit_of_owner_nbytes - used // 2, "one fits"
    metadata = bearer(tokens["a"])
    sending = threading.Event()

    def late() -> Iterator[bytes]:
        assert sending.wait(WAIT_S)
        yield lookup_of(3 * MiB // 8)  # twice that, and the largest, are more than there is

    with grpc.insecure_channel(index.target) as channel:
        method = channel.stream_stream(f"/{SERVICE}/Lookup")
        slow = [method(late(), metadata=metadata) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            ended = [threads.submit(call.code) for call in slow]
            assert eventually(lambda: sum(one.done() for one in ended) == 3)
            assert budget.used_nbytes == used + largest
            assert outcome(channel.unary_unary(f"/{SERVICE}/Lookup"), lookup_of(1), metadata=metadata) == "OK"
            codes = [one.result() for one in ended]
        refused = [call for call in slow if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert len(refused) == 3
        assert {call.details() for call in refused} == {
            "too many requests are arriving slowly: send it again later"
        }
        assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == 1
        assert eventually(lambda: budget.used_nbytes == used)
        monkeypatch.setattr(calls, "REQUEST_S", WAIT_S)
        (found,) = (method(late(), metadata=metadata) for _ in range(1))
        assert eventually(lambda: budget.used_nbytes == used + largest)
        sending.set()
        assert len(list(found)) == 1
        assert eventually(lambda: budget.used_nbytes == used)


# ---- snapshots


def test_a_snapshot_is_counted_and_refused_where_there_is_no_room(
    served: tuple[Served, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, tokens = served
    budget = index.fleet.limits
    used = budget.used_nbytes
    wanted = PACK_BLOCK_NBYTES * index.fleet.totals().blocks
    assert budget.tables_nbytes == 48 * MiB
    monkeypatch.setattr(budget, "tables_nbytes", 0)
    with IndexClient(index.target, WAIT_S, token=tokens["root"]) as client:
        assert len(client.snapshot()) > 2 * 999 * 8
        assert eventually(lambda: budget.used_nbytes == used)
        monkeypatch.setattr(budget, "limit_nbytes", used + wanted - 1)
        with pytest.raises(
            IndexUnavailable, match=rf"RESOURCE_EXHAUSTED.* no room for a snapshot.* {wanted} by"
        ):
            client.snapshot()
        monkeypatch.setattr(budget, "limit_nbytes", used + wanted)
        assert client.snapshot()
        monkeypatch.setattr(budget, "limit_nbytes", used)
        monkeypatch.setattr(budget, "tables_nbytes", index.fleet.totals().memory_nbytes + wanted)
        assert client.snapshot(), "tables leave enough of theirs"
        assert eventually(lambda: budget.used_nbytes == used)


def test_a_file_for_which_there_is_no_room_stays_as_it_was(
    served: tuple[Served, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING, "kvpool.index")
    fleet, path = served[0].fleet, tmp_path / "snapshot"
    used = fleet.limits.used_nbytes

    def write() -> None:
        SnapshotFile(path, lambda: fleet.packed(lambda: Snapshot(1.0, "", fleet.snapshot()))).close()

    write()
    before = path.read_bytes()
    assert fleet.limits.used_nbytes == used
    monkeypatch.setattr(fleet.limits, "limit_nbytes", used)
    monkeypatch.setattr(fleet.limits, "tables_nbytes", 0)
    write()
    assert path.read_bytes() == before
    assert "there is no room for a snapshot" in caplog.text
    assert fleet.limits.used_nbytes == used


def test_a_snapshot_that_is_too_large_is_not_read(
    served: tuple[Served, dict[str, str]], tmp_path: Path
) -> None:
    index, tokens = served
    with IndexClient(index.target, WAIT_S, token=tokens["root"]) as client:
        packed = client.snapshot()
        with pytest.raises(IndexUnavailable, match="larger --max-memory"):
            client.snapshot(max_nbytes=len(packed) - 1)
    (tmp_path / "snapshot").write_bytes(packed)
    with pytest.raises(SnapshotRefused, match="raise --max-memory to read it"):
        snapshot_file.read(tmp_path / "snapshot", max_nbytes=len(packed) - 1)
    limited = Fleet(max_memory_nbytes=7 * MiB)
    assert limited.limits.limit_of_snapshot_nbytes(MAX_NBYTES) == MiB
    assert Fleet().limits.limit_of_snapshot_nbytes(MAX_NBYTES) > 1 << 35
