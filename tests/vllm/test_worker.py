"""The worker half on a real file store: what it reports, and that nothing of ours raises into the engine.

Over 400 lines because all calls of the worker half share one scripted pool.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool import metrics
from kvpool.config import PoolConfig
from kvpool.discovery import announcer
from kvpool.discovery.worker import Publisher, Worker
from kvpool.discovery.worker_record import unpack_worker
from kvpool.key.key import EPOCH_FACT, FACTS_SUFFIX, MEMORY_FACT, Namespace, request_key
from kvpool.store import open_store
from kvpool.store.server import documents as server_announcements
from kvpool.transfer.mover import Finished
from kvpool.vllm.engine.measure import WeightsMeasure
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import BlockRef, LoadPlan, Measured, PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.tell.announcement import Announcement
from kvpool.vllm.worker import LOOK_EVERY_S, WorkerHalf
from tests.support.announced_workers import records
from tests.support.clock import Clock
from tests.support.deadlines import ends_within, eventually
from tests.support.devices import SlowDevice
from tests.support.misbehaving import Peer, misbehaving, to
from tests.support.scheduler import planted

pytestmark = [pytest.mark.vllm]

FACTS = {"model": "test", "tensor_parallel": 2}
RANK = 1
GEOMETRY = Geometry((Group(16),), step_tokens=2048)


def hashed(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def cache() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(-100, 100, (16, 4, 32, 8)).to(torch.float32)


def started(
    pool: str,
    cache: torch.Tensor,
    *arguments: Any,
    rank: int = 0,
    geometry: Geometry = GEOMETRY,
    **more: Any,
) -> WorkerHalf:
    """``arguments``: of ``register``, behind the facts; ``more``: of the worker."""
    worker = WorkerHalf(PoolConfig(pool=pool), geometry, rank=rank, **more)
    worker.register([[cache]], FACTS, *arguments)
    return worker


@pytest.fixture
def worker(tmp_path: Path, cache: torch.Tensor) -> Iterator[WorkerHalf]:
    worker = started(f"file://{tmp_path}/pool", cache, rank=RANK)
    yield worker
    worker.close()


def described(namespace: str) -> Announcement:
    publisher = Publisher(0, "tcp://127.0.0.1:1")
    return Announcement(
        Worker("w", "m", 16, "0" * 16, (publisher,), incarnation="one", namespace=namespace), ("a problem",)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_announces_the_worker_until_it_is_closed(
    tmp_path: Path, cache: torch.Tensor, rank: int
) -> None:
    url = f"file://{tmp_path}/pool"
    worker = started(url, cache, described, rank=rank)
    with open_store(url) as store:
        if rank == 0:
            key = "kvpool:default:worker:0:w"
            assert eventually(lambda: key in store.announcements("kvpool:default:worker:"))
            announced = unpack_worker(key, store.announcements(key)[key])
            assert announced is not None
            assert (announced.worker.namespace, announced.lease_s) == (Namespace("default", FACTS).hex, 10.0)
        else:
            assert not eventually(lambda: bool(store.announcements("kvpool:default:")), within_s=0.5)
        worker.close()
        assert records(store) == {}


def test_a_request_of_an_index_is_reported_while_it_stands(
    tmp_path: Path, cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "READ_S", 0.05)
    url = f"file://{tmp_path}/pool"
    worker = started(url, cache, described)
    reports: list[PoolWorkerMetadata | None] = [worker.take_report()]
    request = request_key("kvpool:default:worker:0:w")

    def asked() -> bool:
        reports.append(worker.take_report())
        last = reports[-1]
        return last is not None and last.asked

    with open_store(url) as store:
        assert not asked()
        store.announce(request, b"?", lease_s=600)
        assert eventually(asked)
        assert asked(), "in each step, for the scheduler decides how often it is told"
        store.withdraw(request)
        assert eventually(lambda: not asked())
        assert reports[-1] is None
    worker.close()
    assert not asked()


def test_a_worker_that_cannot_be_announced_works_all_the_same(tmp_path: Path, cache: torch.Tensor) -> None:
    worker = started(f"file://{tmp_path}/pool", cache, planted)
    worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
    stored(worker, 10)
    worker.close()


def report_of(worker: WorkerHalf) -> PoolWorkerMetadata:
    report = worker.take_report()
    assert report is not None
    return report


def refs(*blocks: tuple[int, int]) -> list[BlockRef]:
    """(hash number, block id) pairs of group 0."""
    return [BlockRef(hashed(number), 0, (block_id,)) for number, block_id in blocks]


def finish(worker: WorkerHalf, count: int) -> tuple[set[str], set[str]]:
    """Poll until ``count`` loads have ended."""
    ended: set[str] = set()
    failed: set[str] = set()

    def over() -> bool:
        now_ended, now_failed = worker.poll(idle=True)
        assert not ended & now_ended, "a load is reported once"
        ended.update(now_ended)
        failed.update(now_failed)
        return len(ended) >= count

    assert eventually(over)
    return ended, failed


def stored(worker: WorkerHalf, *tags: int) -> None:
    done: dict[int, int] = {}

    def over() -> bool:
        worker.poll(idle=True)
        report = worker.take_report()
        done.update(report.stored if report else {})
        return set(done) >= set(tags)

    assert eventually(over)


def test_what_is_stored_names_the_engine(tmp_path: Path, cache: torch.Tensor) -> None:
    url = f"file://{tmp_path}/pool"
    worker = started(url, cache)
    for step in (PoolMetadata(writer=b"this engine's id"), PoolMetadata(stores=refs((1, 3)), tags=[10])):
        worker.start_loads(step)
        worker.start_stores(step)
    stored(worker, 10)
    with open_store(url) as store:
        got = store.submit_get(
            [Namespace("default", FACTS).key(hashed(1), 0, 0)], [bytearray(cache[3].nbytes)]
        )
        assert got.wait() == [True]
        assert got.writers() == [b"this engine's id"]
    worker.close()


@pytest.mark.parametrize("where", ["before it begins", "while it begins"])
def test_a_fault_of_an_audit_is_reported_once_as_its_end(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "before it begins":
        monkeypatch.setattr(worker, "_foreign", planted)
    else:
        monkeypatch.setattr(worker._mover, "audit", planted)
    worker.start_audits(PoolMetadata(audits={1: refs((1, 3)), 2: refs((2, 4))}))
    report = worker.take_report()
    assert report is not None
    assert (report.audit_staged, report.audit_ended) == ({1: 1, 2: 1}, {1: 1, 2: 1})


def test_keys_that_are_refused_while_the_pool_is_away_are_counted(cache: torch.Tensor) -> None:
    with misbehaving() as server:
        worker = started(server.url, cache, rank=RANK)
        worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
        stored(worker, 10)
        assert metrics.REFUSED_KEYS.name not in worker.stats()
    tags = itertools.count(11)

    def refused() -> bool:
        worker.start_stores(PoolMetadata(stores=refs((2, 4)), tags=[next(tags)]))
        worker.poll(idle=True)
        return worker.stats().get(metrics.REFUSED_KEYS.name, 0) > 0

    assert eventually(refused)
    assert eventually(refused), "it goes on growing"
    worker.close()


def test_a_record_that_the_pool_refuses_for_itself_is_told_from_those_beside_it(cache: torch.Tensor) -> None:
    refused = Namespace("default", FACTS).keys([hashed(1)], 0, RANK)[0].encode()

    def answer(words: Sequence[bytes], good: bytes) -> bytes:
        return b"-NOPERM No permissions to access a key\r\n" if words[1] == refused else good

    with misbehaving() as server:
        worker = started(server.url, cache, rank=RANK)
        server.misbehave(to(b"HSET", answer))
        worker.start_stores(PoolMetadata(stores=refs((1, 3), (2, 4)), tags=[10, 11]))
        told = PoolWorkerMetadata()

        def over() -> bool:
            nonlocal told
            worker.poll(idle=True)
            told = told.aggregate(worker.take_report() or PoolWorkerMetadata())
            return bool(told.dropped)

        assert eventually(over)
        assert (told.stored, told.dropped, told.refused) == ({11: 1}, {10: 1}, {10})
        assert worker.stats()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/refused"] == 1
        worker.close()


def test_blocks_go_and_come_back_under_this_ranks_keys(
    worker: WorkerHalf, cache: torch.Tensor, tmp_path: Path
) -> None:
    worker.start_stores(PoolMetadata(stores=refs((1, 3), (2, 4)), tags=[10, 11]))
    stored(worker, 10, 11)
    with open_store(f"file://{tmp_path}/pool") as store:
        namespace = Namespace("default", FACTS)
        assert store.contains_many(namespace.keys([hashed(1), hashed(2)], 0, RANK)) == [True, True]
        assert store.contains_many(namespace.keys([hashed(1)], 0, 0)) == [False]
    step = PoolMetadata(loads=[LoadPlan("a", refs((1, 8), (2, 9)), 60.0)])
    worker.start_loads(step)
    worker.start_loads(step)  # polled again: not loaded again
    assert finish(worker, 1) == ({"a"}, set())
    assert torch.equal(cache[8], cache[3])
    assert torch.equal(cache[9], cache[4])
    assert worker.slots_in_use == 0


def test_a_load_is_reported_with_the_share_of_it_that_was_near(cache: torch.Tensor, tmp_path: Path) -> None:
    near, far = (f"file://{tmp_path}/{name}?capacity=64MiB" for name in ("near", "far"))
    worker = started(f"{near} {far}", cache)
    blocks = [(number, number) for number in range(1, 5)]
    worker.start_stores(PoolMetadata(stores=refs(*blocks), tags=list(range(4))))
    stored(worker, *range(4))
    store = worker._store
    assert store is not None
    assert eventually(lambda: store.counters()["behind_waiting"] == 0)
    with open_store(near) as near_alone:
        near_alone.delete_many(Namespace("default", FACTS).keys([hashed(4)], 0, 0))
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs(*blocks), 60.0)]))
    assert finish(worker, 1) == ({"a"}, set())
    assert report_of(worker).load_near == {"a": 0.75}
    worker.close()


def test_what_is_the_same_on_every_rank_is_stored_by_the_first_and_loaded_by_all(
    cache: torch.Tensor, tmp_path: Path
) -> None:
    url, other = f"file://{tmp_path}/pool", cache.clone()
    groups = [Group(16, latent=True, copies=2), Group(16)]
    step = [BlockRef(hashed(1), 0, (3,)), BlockRef(hashed(2), 1, (3,)), BlockRef(hashed(3), 0, (4,))]
    ranks = [
        WorkerHalf(PoolConfig(pool=url), Geometry(tuple(groups), step_tokens=2048), rank=rank)
        for rank in (0, 1)
    ]
    for rank, layers in zip(ranks, (cache, other), strict=True):
        rank.register([[layers[:, :2]], [layers[:, 2:]]], FACTS)
        rank.take_report()
    first, second = ranks
    second.start_stores(PoolMetadata(stores=list(step), tags=[10, 11, 12]))
    report = report_of(second)
    assert report.stored == {10: 1, 12: 1}, "nothing of these is for this rank to store"
    assert report.staged.keys() >= {10, 12}
    stored(second, 11)
    assert second.take_report() is None, "each tag once"
    namespace = Namespace("default", FACTS)
    keys = [namespace.key(block.block_hash, block.group, rank) for rank in (0, 1) for block in step]
    with open_store(url) as store:
        assert store.contains_many(keys) == [False, False, False, False, True, False]
        first.start_stores(PoolMetadata(stores=list(step), tags=[10, 11, 12]))
        stored(first, 10, 11, 12)
        assert store.contains_many(keys) == [True, True, True, False, True, False]
    second.start_loads(PoolMetadata(loads=[LoadPlan("a", [BlockRef(hashed(3), 0, (9,))], 60.0)]))
    assert finish(second, 1) == ({"a"}, set())
    assert torch.equal(other[9, :2], cache[4, :2])
    second.start_loads(PoolMetadata(loads=[LoadPlan("b", [BlockRef(hashed(7), 0, (9,))], 60.0)]))
    assert finish(second, 1) == ({"b"}, {"b"})
    report = report_of(second)
    assert report.missing == {(hashed(7), 0)}
    for rank in ranks:
        rank.close()


def test_a_stage_moves_nothing_before_it_has_the_facts_of_all(cache: torch.Tensor, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    worker = started(url, cache, described, geometry=replace(GEOMETRY, pipeline_parallel=2))
    report = report_of(worker)
    assert report.facts == {0: FACTS}
    early = PoolMetadata(loads=[LoadPlan("a", refs((7, 5)), 60.0)], stores=refs((1, 3)), tags=[10])
    worker.start_loads(early)
    worker.start_stores(early)
    assert finish(worker, 1) == ({"a"}, {"a"})
    report = report_of(worker)
    assert (report.staged, report.stored, report.dropped) == ({10: 1}, {}, {10: 1})
    of_all = {**FACTS, "stage1.group0.layers": 3}
    namespace = Namespace("default", of_all)
    with open_store(url) as store:
        assert not eventually(lambda: bool(store.announcements("kvpool:default:")), within_s=0.3)
        step = PoolMetadata(facts=of_all, stores=refs((1, 3)), tags=[11])
        worker.start_loads(step)
        worker.start_stores(step)
        stored(worker, 11)
        assert store.contains_many([namespace.key(hashed(1), 0, 0)]) == [True]
        key = "kvpool:default:worker:0:w"
        assert eventually(lambda: key in store.announcements("kvpool:default:worker:"))
        assert namespace.facts_key in store.announcements("kvpool:default:")
        announced = unpack_worker(key, store.announcements(key)[key])
        assert announced is not None
        assert announced.worker.namespace == namespace.hex
        worker.close()
        assert records(store) == {}


def test_a_load_is_reported_with_the_time_that_it_is_known_to_have_taken(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes between the last poll that saw it under way and the one that saw its end may be a long step."""
    clock = Clock()
    monkeypatch.setattr(worker, "_clock", clock)
    worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
    stored(worker, 10)
    ended = worker._mover.poll  # type: ignore[union-attr]
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs((1, 8)), 60.0)], timed=7))
    monkeypatch.setattr(worker._mover, "poll", lambda wait_s: Finished([], [], []))
    for _ in range(3):
        clock.sleep(1)
        assert worker.poll(idle=False) == (set(), set())
    over: list[Finished] = []
    assert eventually(lambda: over.append(ended(0.01)) or bool(over[-1].loads))
    found = iter(over[-1:])  # those before it saw no end
    monkeypatch.setattr(worker._mover, "poll", lambda wait_s: next(found))
    clock.sleep(50)
    assert finish(worker, 1) == ({"a"}, set())
    report = report_of(worker)
    assert report.load_s == {"a": pytest.approx(3.0)}
    assert report.timed == 7
    monkeypatch.setattr(worker._mover, "poll", ended)
    worker.start_loads(PoolMetadata(loads=[LoadPlan("b", refs((7, 8)), 60.0)]))
    assert finish(worker, 1) == ({"b"}, {"b"})
    report = report_of(worker)
    assert set(report.load_s) == {"b"}, "failed ones cost time as well"
    assert not worker._loads


def test_a_plan_without_blocks_is_reported_as_failed(worker: WorkerHalf) -> None:
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", [], 60.0)]))
    assert finish(worker, 1) == ({"a"}, {"a"})


def test_a_cancelled_load_is_still_reported(worker: WorkerHalf) -> None:
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs(*((n, 1 + n) for n in range(12))), 1.0)]))
    worker.start_loads(PoolMetadata(cancelled=["a", "unknown"]))
    assert finish(worker, 1) == ({"a"}, {"a"})
    assert eventually(lambda: worker.poll(idle=False) == (set(), set()) and worker.slots_in_use == 0)


def test_a_pool_that_cannot_be_opened_is_reported_and_its_loads_fail(
    tmp_path: Path, cache: torch.Tensor
) -> None:
    (tmp_path / "file").write_text("not a folder")
    worker = started(f"file://{tmp_path}/file", cache, rank=RANK)
    report = report_of(worker)
    assert report.facts == {}
    assert "not a file" in report.broken[RANK]
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs((1, 8)), 60.0)]))
    worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
    assert finish(worker, 1) == ({"a"}, {"a"})
    report = report_of(worker)
    assert report.dropped == {10: 1}
    worker.close()


def test_a_record_that_has_no_key_costs_its_load_and_its_step_of_stores_and_not_the_pool(
    worker: WorkerHalf, cache: torch.Tensor
) -> None:
    worker.take_report()
    nameless = [BlockRef(b"short", 0, (5,))]
    worker.start_stores(PoolMetadata(stores=nameless, tags=[9]))
    report = report_of(worker)
    assert (report.staged, report.dropped, report.broken) == ({9: 1}, {9: 1}, {})
    worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
    stored(worker, 10)
    worker.start_loads(
        PoolMetadata(loads=[LoadPlan("bad", nameless, 60.0), LoadPlan("good", refs((1, 8)), 60.0)])
    )
    assert finish(worker, 2) == ({"bad", "good"}, {"bad"})
    assert torch.equal(cache[8], cache[3])
    counted = worker.counters.take()
    assert [counted[f"{metrics.REQUEST_FAULTS.name}/{where}"] for where in ("store", "load")] == [1, 1]


def test_a_fault_of_ours_fails_the_loads_under_way_and_switches_the_pool_off(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
    stored(worker, 10)

    monkeypatch.setattr("kvpool.transfer.copier.BlockCopier.scatter", planted)
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs((1, 8)), 60.0)]))
    assert finish(worker, 1) == ({"a"}, {"a"})
    report = report_of(worker)
    assert "planted" in report.broken[RANK]
    worker.start_loads(PoolMetadata(loads=[LoadPlan("b", refs((1, 8)), 60.0)]))
    assert finish(worker, 1) == ({"b"}, {"b"})


def test_while_the_engines_memory_is_away_nothing_is_copied_or_measured(
    tmp_path: Path, cache: torch.Tensor
) -> None:
    worker = started(f"file://{tmp_path}/pool", cache, None, WeightsMeasure(lambda: [("cache", cache)]))
    worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
    stored(worker, 10)
    before = cache.clone()
    worker.start_loads(PoolMetadata(loads=[LoadPlan("under way", refs((1, 8)), 60.0)]))
    for _ in range(2):
        worker.let_go()
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs((1, 9)), 60.0)]))
    worker.start_stores(PoolMetadata(stores=refs((2, 4)), tags=[11]))
    assert finish(worker, 2) == ({"under way", "a"}, {"under way", "a"})
    worker.start_loads(PoolMetadata(measure=1))
    report = report_of(worker)
    assert (report.staged, report.dropped, report.measured) == ({11: 1}, {11: 1}, {})
    assert torch.equal(cache, before)
    worker.take_back()
    worker.start_loads(PoolMetadata())
    assert list(report_of(worker).measured) == [(0, 1)]
    worker.start_loads(PoolMetadata(loads=[LoadPlan("b", refs((1, 8)), 60.0)], weights={}))
    assert finish(worker, 1) == ({"b"}, set())
    assert torch.equal(cache[8], before[3])
    worker.close()


def test_a_rank_that_cannot_look_at_an_audited_block_says_so_and_holds_nothing(worker: WorkerHalf) -> None:
    """Else the other ranks' parts would be taken for the whole record."""
    report_of(worker)
    worker.let_go()
    worker.start_audits(PoolMetadata(audits={5: refs((1, 3))}))
    report = report_of(worker)
    assert (report.audit_staged, report.audit_ended) == ({5: 1}, {5: 1})
    assert [part.why for part in report.audited[5]] == ["gone"]
    worker.take_back()
    worker.start_audits(PoolMetadata(audits={6: refs((1, 3))}))
    found = PoolWorkerMetadata()

    def ended() -> bool:
        nonlocal found
        worker.poll(idle=True)
        found = found.aggregate(worker.take_report() or PoolWorkerMetadata())
        return bool(found.audit_ended)

    assert eventually(ended)
    assert (found.audit_staged, found.audit_ended) == ({6: 1}, {6: 1})
    assert [part.why for part in found.audited[6]] == ["missing"]


def test_a_copy_that_does_not_end_before_a_sleep_costs_the_pool(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the call to sleep."""
    assert worker._mover is not None
    device, worker._mover._clock = SlowDevice(1 << 20), Clock()  # type: ignore[assignment]
    memory = worker._mover._memory
    memory._device, memory._gathers = device, device.copy_stream(1 << 20)  # type: ignore[assignment]
    worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
    worker.let_go()
    report = report_of(worker)
    assert "did not end within 5 s" in report.broken[RANK]
    assert report.dropped == {10: 1}


def test_a_rank_that_ends_its_pool_gives_back_every_block_that_it_was_to_store(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.take_report()
    device = SlowDevice(1 << 20)
    mover = worker._mover
    assert mover is not None
    memory = mover._memory
    memory._device, memory._gathers = device, device.copy_stream(1 << 20)  # type: ignore[assignment]
    worker.start_stores(PoolMetadata(stores=refs((1, 3), (2, 4)), tags=[10, 11]))
    worker.poll(idle=False)
    assert worker.take_report() is None, "not copied yet"
    device.streams[0].stream.go_on()
    device.go_on()
    worker.poll(idle=False)
    report = report_of(worker)
    assert report.staged == {10: 1, 11: 1}
    worker.start_stores(PoolMetadata(stores=refs((5, 5)), tags=[12]))

    monkeypatch.setattr(mover, "poll", planted)
    worker.poll(idle=False)
    report = report_of(worker)
    assert report.staged == {12: 1}, "each tag once"
    assert report.dropped.keys() >= {12}
    assert len(device.engine) == 3, (
        "what is computed next comes behind all copies: a mark, and a wait for each stream"
    )
    worker.start_stores(PoolMetadata(stores=refs((6, 6)), tags=[13]))
    report = report_of(worker)
    assert report.staged == report.dropped == {13: 1}


def test_a_pool_that_says_nothing_of_announcements_does_not_hold_up_the_start(
    cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for which in ("WRITE_S", "READ_S"):
        monkeypatch.setattr(server_announcements, which, 2.0)
    with misbehaving() as server:
        blocks = {b"MULTI", b"HSET", b"PEXPIRE", b"EXEC", b"HMGET", b"EXISTS", b"TOUCH", b"PTTL", b"UNLINK"}

        def trickles(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
            if words[0] in blocks:
                peer.send(good)
            else:
                peer.drip(b"$60000\r\n" + b"x" * 60000, 0.3)

        server.misbehave(trickles)
        with ends_within(1.0):
            worker = started(server.url, cache, described)
        worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[10]))
        stored(worker, 10)
        worker.close()


class Weights(dict[str, torch.Tensor]):
    """A model in memory, changed where it lies or as a whole."""

    broken = False

    def __init__(self, *values: float) -> None:
        super().__init__({f"w{index}": torch.tensor([value]) for index, value in enumerate(values)})

    def shown(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in list(self.items()):
            if self.broken:
                raise RuntimeError("it is being built anew")
            yield name, tensor

    def measured(self) -> Measured:
        return Measured(WeightsMeasure(self.shown).take())


def in_step(worker: WorkerHalf, number: int, **more: Any) -> PoolWorkerMetadata:
    """What is reported of a step that stores one block."""
    step = PoolMetadata(number=number, stores=refs((number, 3)), tags=[number], **more)
    worker.start_loads(step)
    worker.start_stores(step)
    worker.poll(idle=True)
    while len(worker._storing):
        worker.poll(idle=True)
    return report_of(worker)


def test_a_worker_moves_what_is_of_its_weights_alone_and_says_how_they_are_named(
    tmp_path: Path, cache: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    url, weights = f"file://{tmp_path}/pool", Weights(1.0)
    worker = started(url, cache, described, WeightsMeasure(weights.shown))
    start = weights.measured()
    assert report_of(worker).measured == {(0, 0): start}
    before = Namespace("default", FACTS)

    def announced_namespace() -> str:
        key = "kvpool:default:worker:0:w"
        found = unpack_worker(key, store.announcements(key).get(key, b""))
        return found.worker.namespace if found is not None else ""

    with open_store(url) as store:
        assert eventually(lambda: announced_namespace() == before.hex)
        assert in_step(worker, 1).stored == {1: 1}
        namings = [
            ({MEMORY_FACT: "one"}, Namespace("default", {**FACTS, MEMORY_FACT: "one"})),
            ({EPOCH_FACT: "two"}, Namespace("default", {**FACTS, EPOCH_FACT: "two"})),
            ({}, before),
        ]
        caplog.set_level(logging.INFO, "vllm.kvpool")
        caplog.clear()
        for number, (named, namespace) in enumerate(namings, 2):
            weights["w0"].fill_(number)
            assert in_step(worker, number, measure=number).measured == {(0, number): weights.measured()}
            assert in_step(worker, 9, weights=named).stored == {9: 1}
            worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs((1, 5)), 60.0)]))
            failed = set() if namespace == before else {"a"}
            assert finish(worker, 1) == ({"a"}, failed), "what was stored before is of the first alone"
            worker.take_report()
            assert eventually(lambda name=namespace.hex: announced_namespace() == name)
            assert store.contains_many(namespace.keys([hashed(number), hashed(9)], 0, 0)) == [False, True]
            in_step(worker, 10, weights=named)  # the same again, after a call that has changed nothing
            in_step(worker, 11, off=True)
            assert eventually(lambda: announced_namespace() == ""), "indexes count nothing of the pool"
        said = [line for line in caplog.messages if line.startswith("kvpool: namespace ")]
        assert [line.split()[2].strip(",") for line in said] == [name.hex for _, name in namings]
        assert before.facts_key in store.announcements("kvpool:default:")
        worker.close()
        assert records(store) == {}
        of_others = {before.facts_key, namings[0][1].facts_key}
        assert set(store.announcements("kvpool:default:", FACTS_SUFFIX)) == of_others


def test_of_weights_in_memory_files_say_nothing(tmp_path: Path, cache: torch.Tensor) -> None:
    files = {"weights": "a", "stage1.revision": "b", "fp8_scales": "c", "stage0.drafts_weights": "d"}
    worker = WorkerHalf(PoolConfig(pool=f"file://{tmp_path}/pool"), GEOMETRY, rank=0)
    worker.register([[cache]], {**FACTS, **files})
    in_step(worker, 1, measure=1)
    in_step(worker, 2, weights={MEMORY_FACT: "one"})
    assert worker._namespace == Namespace("default", {**FACTS, MEMORY_FACT: "one"})
    in_step(worker, 3, weights={})
    assert worker._namespace == Namespace("default", {**FACTS, **files})
    in_step(worker, 4, weights={EPOCH_FACT: "two"})
    assert worker._namespace == Namespace("default", {**FACTS, **files, EPOCH_FACT: "two"})
    worker.close()


def test_a_worker_that_is_asked_moves_nothing_until_its_weights_are_named(
    worker: WorkerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_step(worker, 1).measured == {(RANK, 0): Measured(why="no model is shown")}
    monkeypatch.setattr(worker._mover, "poll", lambda wait_s: Finished([], [], []))
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs((1, 5)), 60.0)]))
    assert worker.poll(idle=False) == (set(), set())
    monkeypatch.undo()
    report = in_step(worker, 2, measure=7, loads=[LoadPlan("b", refs((1, 6)), 60.0)])
    assert (report.measured, report.dropped) == ({(RANK, 7): Measured(why="no model is shown")}, {2: 1})
    assert "a" in report.load_causes, "what arrives is of weights that it may not have any more"
    assert report.missing == set()
    # Also when it hears of other stages meanwhile.
    assert in_step(worker, 3, facts=FACTS).dropped == {3: 1}
    assert in_step(worker, 4).dropped == {4: 1}
    report = in_step(worker, 5, weights={})
    assert (report.measured, report.stored) == ({}, {5: 1})


def test_a_silent_change_is_found_and_what_was_stored_of_it_deleted(
    tmp_path: Path, cache: torch.Tensor
) -> None:
    clock, weights = Clock(), Weights(*range(10))  # two looks are a rotation
    url = f"file://{tmp_path}/pool"
    worker = started(url, cache, None, WeightsMeasure(weights.shown), clock=clock)
    for number in range(1, 5):
        clock.sleep(LOOK_EVERY_S)
        assert in_step(worker, number, watch=True).stored == {number: 1}
    weights["w0"].fill_(99)
    assert in_step(worker, 5, watch=True).stored == {5: 1}, "it does not look in every step"
    clock.sleep(LOOK_EVERY_S)
    assert in_step(worker, 6).stored == {6: 1}, "nobody watches"
    report = in_step(worker, 7, watch=True)
    assert (report.differs, report.stored, report.dropped) == (True, {}, {7: 1})
    clock.sleep(LOOK_EVERY_S)
    report = in_step(worker, 8, watch=True, facts=FACTS, silent=True)
    assert (report.differs, report.dropped) == (False, {8: 1}), "once"
    of_start = Namespace("default", FACTS)
    keys = of_start.keys([hashed(number) for number in range(1, 7)], 0, 0)
    with open_store(url) as store:
        assert eventually(lambda: store.contains_many(keys) == [True] + 5 * [False]), (
            "all was as measured in two rotations after the first"
        )
    report = in_step(worker, 9, measure=1)
    assert report.measured == {(0, 1): weights.measured()}
    in_step(worker, 10, weights={MEMORY_FACT: "other"})
    for number in range(11, 14):
        clock.sleep(LOOK_EVERY_S)
        report = in_step(worker, number, watch=True)
        assert (report.differs, report.stored) == (False, {number: 1})
    worker.close()


@pytest.mark.parametrize("how", [{"watch": True}, {"measure": 1}, {"weights": {EPOCH_FACT: "one"}}], ids=str)
def test_a_load_under_way_when_the_weights_are_others_is_stopped_and_fails_even_if_all_came(
    tmp_path: Path, cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    clock, weights, stopped = Clock(), Weights(1.0), list[str]()
    worker = started(f"file://{tmp_path}/pool", cache, None, WeightsMeasure(weights.shown), clock=clock)
    in_step(worker, 1)
    worker.start_loads(
        PoolMetadata(loads=[LoadPlan("a", refs((1, 5)), 60.0), LoadPlan("b", refs((7, 6)), 60.0)])
    )
    weights["w0"].fill_(2)
    clock.sleep(LOOK_EVERY_S)
    monkeypatch.setattr(worker._mover, "cancel", stopped.append)
    worker.start_loads(PoolMetadata(**how))
    assert stopped == ["a", "b"]
    assert finish(worker, 2) == ({"a", "b"}, {"a", "b"})
    assert report_of(worker).missing == set(), "of the namespace that it is in no more"
    worker.close()


def test_what_was_on_its_way_to_the_pool_when_the_watch_found_a_change_is_deleted(
    tmp_path: Path, cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, weights = Clock(), Weights(1.0)
    url = f"file://{tmp_path}/pool"
    worker = started(url, cache, None, WeightsMeasure(weights.shown), clock=clock)
    monkeypatch.setattr(worker._mover, "poll", lambda wait_s: Finished([], [], []))
    worker.start_stores(PoolMetadata(stores=refs((1, 3)), tags=[1]))
    weights["w0"].fill_(2)
    clock.sleep(LOOK_EVERY_S)
    worker.start_loads(PoolMetadata(watch=True))
    worker.start_loads(PoolMetadata(silent=True))
    worker.poll(idle=True)
    assert worker._unsure.condemned, "it may be stored after it was deleted"
    monkeypatch.undo()
    stored(worker, 1)
    worker.poll(idle=True)
    with open_store(url) as store:
        keys = Namespace("default", FACTS).keys([hashed(1)], 0, 0)
        assert eventually(lambda: store.contains_many(keys) == [False])
    assert not worker._unsure.condemned
    worker.close()


def test_a_stage_whose_weights_are_named_waits_for_the_facts_of_all(
    tmp_path: Path, cache: torch.Tensor
) -> None:
    geometry = replace(GEOMETRY, pipeline_parallel=2)
    worker = started(f"file://{tmp_path}/pool", cache, geometry=geometry)
    assert in_step(worker, 1, measure=1).dropped == {1: 1}
    assert in_step(worker, 2, weights={MEMORY_FACT: "one"}).dropped == {2: 1}
    assert in_step(worker, 3, facts=FACTS).stored == {3: 1}
    assert worker._namespace == Namespace("default", {**FACTS, MEMORY_FACT: "one"})
    worker.close()


def test_what_a_measure_has_found_anew_is_not_deleted(tmp_path: Path, cache: torch.Tensor) -> None:
    clock, weights = Clock(), Weights(1.0)
    url = f"file://{tmp_path}/pool"
    worker = started(url, cache, None, WeightsMeasure(weights.shown), clock=clock)
    in_step(worker, 1)
    in_step(worker, 2, measure=1)
    in_step(worker, 3, weights={})
    weights["w0"].fill_(2)
    clock.sleep(LOOK_EVERY_S)
    assert in_step(worker, 4, watch=True).differs
    in_step(worker, 5, silent=True)
    keys = Namespace("default", FACTS).keys([hashed(1), hashed(3)], 0, 0)
    with open_store(url) as store:
        assert eventually(lambda: store.contains_many(keys) == [True, False])
    worker.close()


def test_a_worker_that_ends_deletes_what_it_has_condemned(
    tmp_path: Path, cache: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    clock, weights = Clock(), Weights(1.0)
    url = f"file://{tmp_path}/pool"
    worker = started(url, cache, None, WeightsMeasure(weights.shown), clock=clock)
    in_step(worker, 1)
    weights["w0"].fill_(2)
    clock.sleep(LOOK_EVERY_S)
    assert in_step(worker, 2, watch=True).differs
    assert "w0 torch.float32" in caplog.text, "which of them, for who writes it"
    worker.start_loads(PoolMetadata(silent=True))
    worker.close()
    with open_store(url) as store:
        assert store.contains_many(Namespace("default", FACTS).keys([hashed(1)], 0, 0)) == [False]


def test_a_model_that_cannot_be_read_is_other_weights_and_says_why(
    tmp_path: Path, cache: torch.Tensor
) -> None:
    clock, weights = Clock(), Weights(1.0)
    worker = started(f"file://{tmp_path}/pool", cache, None, WeightsMeasure(weights.shown), clock=clock)
    in_step(worker, 1)
    weights.broken = True
    clock.sleep(LOOK_EVERY_S)
    assert in_step(worker, 2, watch=True).differs
    report = in_step(worker, 3, measure=1)
    assert (report.measured, report.broken) == ({(0, 1): Measured(why="it is being built anew")}, {})
    weights.broken, weights["w0"] = False, torch.tensor([float("nan")])
    assert in_step(worker, 4, measure=2).measured == {(0, 2): weights.measured()._replace(nan=True)}
    worker.close()
