"""``kvpool index`` killed, stopped, damaged and replaced while it is asked: warm again, and never believed too far."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.engine_process import free_ports
from kvpool import IndexClient, IndexUnavailable, Worker, open_store
from kvpool.index.protocol.messages import SERVICE
from kvpool.key.hashing import seed_id
from kvpool.key.key import namespace_prefix
from tests.support.announced_workers import announced
from tests.support.command_line import kvpool, refused
from tests.support.deadlines import eventually
from tests.support.feeds import Misbehaving, misbehaving
from tests.support.index_process import Index, held_blocks, running
from tests.support.servers import running as running_server
from tests.support.wire import batch, packed64, removed, stored

pytestmark = pytest.mark.usefixtures("grpc_started")

PROMPT = list(range(1, 201))


def publish(publisher: Misbehaving, numbers: range) -> None:
    for number in numbers:
        publisher.publish(batch(stored([PROMPT[number]]), at_s=number))


def row(client: IndexClient) -> tuple[int, int, bool]:
    (one,) = client.lookup("m", hashes64=packed64(PROMPT))
    return one.device_blocks, one.sequence, one.stale


def health(target: str) -> str:
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def of_replicas(*targets: str) -> list[dict[str, str]]:
    """What the doctor finds of them."""
    findings = json.loads(kvpool("doctor", *(f"--index={one}" for one in targets), "--json").stdout)[
        "findings"
    ]
    return [one for one in findings if one["about"] == "replicas"]


def test_killed_and_warm_again_then_damaged_and_cold(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with misbehaving() as publisher:
        keeping = ["--worker", publisher.flag(), "--snapshot", str(path), "--snapshot-every"]
        publish(publisher, range(10))
        with running(*keeping, "0.1") as index, IndexClient(index.target, 60) as client:
            assert eventually(lambda: row(client) == (10, 9, False))
            written = path.stat().st_ino if path.exists() else 0
            assert eventually(lambda: path.exists() and path.stat().st_ino != written)
            written = path.stat().st_ino  # of this one it is sure that all was known
            assert eventually(lambda: path.stat().st_ino != written)
            index.stop(signal.SIGKILL)
        publisher.forget(9)  # from now on only the snapshot knows of the first nine
        with running(*keeping, "86400") as index, IndexClient(index.target, 60) as client:
            assert eventually(lambda: row(client) == (10, 9, False))
            publish(publisher, range(10, 12))
            assert eventually(lambda: row(client) == (12, 11, False))
            assert eventually(lambda: health(index.target) == "SERVING")
            publisher.forget(1)
            code, lines = index.stop()
        assert code == 0
        assert lines[0].startswith(f"INFO 1 workers with 10 blocks are back from {path}, ")

        packed = bytearray(path.read_bytes())  # written on SIGTERM
        packed[-1] ^= 1
        path.write_bytes(packed)
        with running(*keeping, "86400") as index, IndexClient(index.target, 60) as client:
            assert eventually(lambda: row(client) == (0, 11, False))
            _, lines = index.stop()
        assert lines[0] == (
            "WARNING no snapshot is taken over: no image of a prefix index: its checksum is wrong"
        )
        assert path.read_bytes() != packed, "the next one takes its place"


def test_health_waits_for_the_publishers_and_a_peer_gives_what_it_knows() -> None:
    with misbehaving() as publisher:
        publish(publisher, range(10))
        publisher.mute = True
        slow = ["--worker", publisher.flag(), "--warm-up", "600"]
        with running(*slow) as index, IndexClient(index.target, 60) as client:
            assert eventually(lambda: len(publisher.asked) > 0)
            assert health(index.target) == "NOT_SERVING"
            assert row(client) == (0, 0, True)
            with pytest.raises(IndexUnavailable, match="it is not warm itself"):
                client.snapshot()
            with running(*slow, "--bootstrap", index.target) as cold:
                assert health(cold.target) == "NOT_SERVING"
                _, lines = cold.stop()
            assert lines[0].startswith("WARNING no snapshot is taken over: ")
            assert "it is not warm itself" in lines[0]

            publisher.mute = False
            assert eventually(lambda: health(index.target) == "SERVING")
            assert row(client) == (10, 9, False)
            publisher.forget(9)
            with (
                running("--worker", publisher.flag(), "--bootstrap", index.target) as other,
                IndexClient(other.target, 60) as its_client,
            ):
                assert eventually(lambda: row(its_client) == (10, 9, False))
                assert [one["level"] for one in of_replicas(index.target, other.target)] == ["ok"]

                client.remove("w")  # and nobody tells the first nine again
                client.register(its_client.workers()[0].worker)
                assert eventually(lambda: row(client) == (0, 9, False))
                (only,) = of_replicas(index.target, other.target)
                assert f"{index.target} knows of 1 blocks and {other.target} of 10" in only["says"]


def test_a_replica_that_is_full_is_not_compared() -> None:
    with misbehaving() as publisher:
        publish(publisher, range(10))
        with (
            running("--worker", publisher.flag()) as whole,
            running("--worker", publisher.flag(), "--max-blocks", "5") as full,
        ):
            targets = [whole.target, full.target]
            for target in targets:
                with IndexClient(target, 60) as client:
                    assert eventually(lambda client=client: row(client)[1:] == (9, False))
            about = {one["level"]: one["says"] for one in of_replicas(*targets)}
            assert about.keys() == {"warn", "ok"}
            assert about["warn"].startswith("not compared are 1 rank:")
            assert about["ok"].endswith("know the same of 0 ranks")


def test_what_the_pool_held_comes_back_while_it_is_the_same_one(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with (
        running_server("valkey-server", tmp_path) as server,
        misbehaving() as publisher,
        open_store(server.url) as store,
    ):
        publisher.publish(batch(stored([1, 2]), stored([1, 2, 3], medium="STORAGE"), at_s=0))
        publisher.publish(batch(stored([9]), at_s=1))
        prefix = namespace_prefix("default", "a" * 32)
        store.announce(f"{prefix}facts", b"facts", lease_s=600)  # as the connector does
        assert all(store.put_many([f"{prefix}{block:064x}:0:0" for block in (1, 2, 3)], [b"block"] * 3))
        ends = (publisher.publisher,)
        worker = Worker("w", "m", 16, seed_id(None), ends, incarnation="1", namespace="a" * 32)

        def answers(device: int, pool: int) -> list[str]:
            """Start an index, wait for this answer, stop it; what it said."""
            with (
                running("--pool", server.url, "--snapshot", str(path)) as index,
                IndexClient(index.target, 60) as client,
            ):
                assert eventually(lambda: held_blocks(client, [1, 2, 3]) == [(device, pool, False)])
                assert eventually(lambda: health(index.target) == "SERVING")
                return index.stop()[1]

        with announced(store, worker, 3.0):
            assert not any("are back" in line for line in answers(2, 3))
            publisher.forget(1)  # only the snapshot knows of both now
            lines = answers(2, 3)
            assert "1 workers with 4 blocks are back" in lines[0]
            assert not any("joins" in line or "gone" in line for line in lines), lines
            server.kill()
            server.start()
            assert eventually(lambda: any("worker" in key for key in store.announcements("kvpool:default:")))
            answers(2, 0)


def test_one_replica_after_the_other_is_replaced_while_a_client_asks(tmp_path: Path) -> None:
    """A rolling upgrade: there is always an answer, none is beyond its sequence, and nothing is lost."""
    ports = free_ports(2)
    targets = [f"127.0.0.1:{port}" for port in ports]
    payloads, truth, held = [], [], 0
    for number in range(120):  # two blocks more, one less
        held += -1 if number % 3 == 2 else 1
        event = removed([PROMPT[held]]) if number % 3 == 2 else stored([PROMPT[held - 1]])
        payloads.append(batch(event, at_s=number))
        truth.append(held)
    wrong: list[str] = []
    answers = 0
    ended = threading.Event()

    def ask_on() -> None:
        """As a router does: the one that answers, else the other."""
        nonlocal answers
        with IndexClient(targets[0], 60) as one, IndexClient(targets[1], 60) as two:
            turn = [one, two]
            while not ended.is_set():
                for client in list(turn):
                    try:
                        blocks, sequence, stale = row(client)
                    except IndexUnavailable:
                        turn.reverse()
                        continue
                    if not (stale or blocks == truth[sequence]):
                        wrong.append(f"{blocks} blocks at {sequence}, not {truth[sequence]}")
                    answers += 1
                    break
                ended.wait(0.002)

    with misbehaving() as publisher:
        published = 0

        def go_on(count: int) -> None:
            nonlocal published
            for payload in payloads[published : published + count]:
                publisher.publish(payload)
            published += count

        def start(place: int, *more: str) -> Index:
            path = tmp_path / f"snapshot-{place}"
            index = Index(
                "--worker", publisher.flag(), "--listen", targets[place], "--snapshot", str(path), *more
            )
            replicas[place] = index
            assert eventually(lambda: health(index.target) == "SERVING")
            return index

        def has_all(target: str) -> bool:
            at = published - 1
            with IndexClient(target, 60) as client:

                def is_right() -> bool:
                    try:
                        return row(client) == (truth[at], at, False)
                    except IndexUnavailable:  # gRPC waits up to a second before it dials again
                        return False

                return eventually(is_right)

        def is_answered() -> bool:
            before = answers
            return eventually(lambda: answers > before)

        replicas: dict[int, Index] = {}
        asking = threading.Thread(target=ask_on)
        try:
            go_on(20)
            start(0)
            start(1)
            asking.start()
            for place in (0, 1):
                go_on(10)
                replicas[place].stop()
                assert is_answered()
                go_on(10)
                assert has_all(targets[1 - place])
                publisher.forget(published - publisher.first - 15)  # not enough to begin without a snapshot
                start(place, "--bootstrap", targets[1 - place])
                assert is_answered()
            go_on(10)
            for target in targets:
                assert has_all(target)
                with IndexClient(target, 60) as client:
                    assert client.workers()[0].publishers[0].resets == 0
        finally:
            ended.set()
            asking.join(60)
            for index in replicas.values():
                if index.process.poll() is None:
                    index.process.kill()
                    index.process.communicate(timeout=60)
    assert wrong == []
    assert answers > 0


def test_two_indexes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    with running("--snapshot", str(path)) as index:
        line = refused("index", "--listen", "127.0.0.1:0", "--snapshot", str(path))
        assert f"--snapshot {path}: another index writes this file: give each index a file of its own" in line
        code, _ = index.stop()
    assert code == 0
    assert path.stat().st_mode & 0o777 == 0o600
