"""Blocks of waiting requests come near, within bounds, and are counted by whether a load used them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics, open_store
from kvpool.store import Store
from kvpool.vllm.geometry import Group
from kvpool.vllm.load.gate import MIN_SAMPLES, MIN_STEP_TOKENS
from kvpool.vllm.load.prefetch import UNUSED_S
from kvpool.vllm.plan import PoolWorkerMetadata
from kvpool.vllm.scheduler import SchedulerHalf
from tests.support.clock import Clock
from tests.support.deadlines import eventually
from tests.support.scheduler import BLOCK_TOKENS, NAMESPACE, TABLE, answer, half, put, request

pytestmark = pytest.mark.vllm

TOKENS = 100
BLOCKS = TOKENS // BLOCK_TOKENS
HIT_TOKENS = BLOCKS * BLOCK_TOKENS
CAPACITY_NBYTES = 1 << 20
PART_NBYTES = 1  # as ``put`` stores


class Engine:
    """An engine's scheduler half before a near and a far pool. A step asks for no request unless a test does."""

    def __init__(self, near: Path, far: Path, **settings: Any) -> None:
        urls = [f"file://{near}?capacity={CAPACITY_NBYTES}", f"file://{far}?capacity=64MiB"]
        self.store = open_store(urls)
        self.far = open_store(urls[1])
        self.near = open_store(urls[0])
        self.clock = Clock()
        self._settings: dict[str, Any] = {"pool": " ".join(urls), **settings}

    def start(self, sizes: dict[tuple[int, int], int] | None = None, **of_half: Any) -> SchedulerHalf:
        scheduler = half(self.store, clock=self.clock, **self._settings, **of_half)
        scheduler.update(PoolWorkerMetadata(part_nbytes=sizes or {(0, 0): PART_NBYTES}), (), ())
        return scheduler

    def close(self) -> None:
        for store in (self.store, self.far, self.near):
            store.close()

    def near_has(self, asked: Request) -> int:
        return sum(self.near.contains_many(NAMESPACE.keys(asked.block_hashes[:BLOCKS], 0, 0)))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(Engine(tmp_path / "near", tmp_path / "far", **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def step(scheduler: SchedulerHalf) -> None:
    scheduler.plan(SchedulerOutput.make_empty())


def arrive(scheduler: SchedulerHalf, asked: Request) -> None:
    """It arrives, and its lookup ends before vLLM has room for it."""
    scheduler.seen(asked)
    lookup = scheduler._requests[asked.request_id].found.lookup
    assert lookup is not None
    assert eventually(lambda: lookup.ended(0.0))


def far_request(store: Store, name: str, first: int = 0, transfer_params: object = None) -> Request:
    """A request whose prompt another host has stored."""
    asked = request(name, TOKENS, transfer_params, first)
    put(store, list(asked.block_hashes[:BLOCKS]))
    return asked


def counted(scheduler: SchedulerHalf) -> dict[str, float]:
    """Since the last call."""
    step(scheduler)
    name = f"{metrics.PREFETCHED_NBYTES.name}/"
    taken = scheduler.counters.take()
    return {key.removeprefix(name): value for key, value in taken.items() if key.startswith(name)}  # type: ignore[misc]


def test_what_a_waiting_request_will_load_comes_near(engine: Callable[..., Engine]) -> None:
    one = engine()
    scheduler, asked = one.start(), far_request(one.far, "a")
    arrive(scheduler, asked)
    step(scheduler)
    assert one.near_has(asked) == 0, "vLLM may ask for it in its next step"
    step(scheduler)
    assert eventually(lambda: one.near_has(asked) == BLOCKS)
    assert answer(scheduler, asked) == HIT_TOKENS
    scheduler.allocated(asked, TABLE, HIT_TOKENS)
    assert eventually(lambda: counted(scheduler) == {"used": BLOCKS})


def test_what_came_near_is_no_load_from_the_pool(engine: Callable[..., Engine]) -> None:
    """The cost gate holds back the pool, and what it has brought near meanwhile is offered."""
    one = engine()
    scheduler, asked, other = one.start(), far_request(one.far, "a"), far_request(one.far, "b", 1000)
    gate = scheduler._gate
    assert gate is not None
    for _ in range(MIN_SAMPLES):
        gate.computed(MIN_STEP_TOKENS, 1.0)
        gate.loaded(MIN_STEP_TOKENS, 9.0)
    assert answer(scheduler, other) == 0
    arrive(scheduler, asked)
    step(scheduler)
    step(scheduler)
    assert eventually(lambda: scheduler._prefetches.brought("a"))
    assert answer(scheduler, asked) == HIT_TOKENS
    span = scheduler._requests["a"].found.span
    assert span is not None
    assert span.near


def test_the_gate_holds_back_what_is_not_near(engine: Callable[..., Engine]) -> None:
    one = engine()
    scheduler, asked = one.start(), far_request(one.far, "a")
    gate, near_tokens = scheduler._gate, 4 * BLOCK_TOKENS
    assert gate is not None
    for _ in range(MIN_SAMPLES):
        gate.computed(MIN_STEP_TOKENS, 1.0)
        gate.loaded(MIN_STEP_TOKENS, 9.0)
    put(one.store, list(asked.block_hashes[:4]))
    scheduler.counters.take()

    def load(asked: Request, ok: bool, *reports: PoolWorkerMetadata) -> None:
        assert answer(scheduler, asked) == near_tokens
        scheduler.allocated(asked, TABLE, near_tokens)
        step(scheduler)
        report = reduce(lambda report, other: report.aggregate(other), reports)
        scheduler.update(report, [asked.request_id], [] if ok else [asked.request_id])
        scheduler.finished(asked)

    load(asked, True, *(PoolWorkerMetadata(load_s={"a": one}, load_near={"a": 1.0}) for one in (0.1, 0.2)))
    taken = scheduler.counters.take()
    assert taken[metrics.GATE_NEAR_TOKENS.name] == near_tokens
    assert taken[metrics.GATE_NEAR_SECONDS.name] == 0.2
    assert taken[f"{metrics.MISSED_TOKENS.name}/gate"] == HIT_TOKENS - near_tokens
    for name in ("lost", "lost too"):
        load(request(name), False, PoolWorkerMetadata(load_s={name: 10.0}, load_near={name: 0.0}))
    assert answer(scheduler, request("b")) == 0, "and now from near"
    assert metrics.GATE_LOAD_SECONDS.name not in scheduler.counters.take()
    put(one.store, list(asked.block_hashes[4:BLOCKS]))
    gate._loads["near"].closed = False
    load_of_both = request("c")
    assert answer(scheduler, load_of_both) == HIT_TOKENS
    scheduler.allocated(load_of_both, TABLE, HIT_TOKENS)
    reports = [PoolWorkerMetadata(load_s={"c": 4.0}, load_near={"c": near}) for near in (1.0, 0.5)]
    scheduler.update(reports[0].aggregate(reports[1]), ["c"], [])
    assert scheduler.counters.take()[metrics.GATE_LOAD_TOKENS.name] == HIT_TOKENS / 2, "evicted meanwhile"


def test_a_request_that_vllm_has_room_for_brings_nothing_near(engine: Callable[..., Engine]) -> None:
    one = engine()
    scheduler, asked = one.start(), far_request(one.far, "a")
    arrive(scheduler, asked)
    step(scheduler)
    assert answer(scheduler, asked) == HIT_TOKENS
    scheduler.allocated(asked, TABLE, HIT_TOKENS)
    for _ in range(5):
        step(scheduler)
    assert not scheduler._prefetches._copies
    assert one.near_has(asked) == 0


def test_a_hint_is_waited_for_by_nobody(engine: Callable[..., Engine]) -> None:
    one = engine()
    scheduler, first = one.start(), far_request(one.far, "a")
    hinted = far_request(one.far, "b", 1000, {"kvpool": {"prefetch": True}})
    arrive(scheduler, first)
    arrive(scheduler, hinted)
    step(scheduler)
    assert eventually(lambda: one.near_has(hinted) == BLOCKS)
    assert one.near_has(first) == 0


def test_what_no_load_used_keeps_its_room_for_a_time(engine: Callable[..., Engine]) -> None:
    """So a caller that queues requests and gives them up pushes no more out of the near pool."""
    one = engine(prefetch_share=1.5 * BLOCKS * PART_NBYTES / CAPACITY_NBYTES)
    scheduler, given_up = one.start(), far_request(one.far, "a")
    second = far_request(one.far, "b", 1000)
    arrive(scheduler, given_up)
    arrive(scheduler, second)
    step(scheduler)
    step(scheduler)
    assert eventually(lambda: one.near_has(given_up) == BLOCKS)
    scheduler.finished(given_up)
    assert eventually(lambda: counted(scheduler) == {"unused": BLOCKS})
    for _ in range(5):
        step(scheduler)
    assert one.near_has(second) == 0
    one.clock.sleep(UNUSED_S)
    step(scheduler)
    assert eventually(lambda: one.near_has(second) == BLOCKS)


def test_a_prefix_larger_than_the_room_stays_far_and_keeps_nobody(engine: Callable[..., Engine]) -> None:
    one = engine(prefetch_share=1.5 * BLOCKS * PART_NBYTES / CAPACITY_NBYTES)
    scheduler, asked = one.start(), request("a", 2 * TOKENS)
    put(one.far, list(asked.block_hashes))
    second = far_request(one.far, "b", 1000)
    arrive(scheduler, asked)
    arrive(scheduler, second)
    for _ in range(3):
        step(scheduler)
    assert eventually(lambda: one.near_has(second) == BLOCKS)
    assert one.near_has(asked) == 0


def test_what_another_request_loads_is_not_read_far_twice(engine: Callable[..., Engine]) -> None:
    one = engine()
    scheduler, first, second = one.start(), far_request(one.far, "a"), request("b", TOKENS)
    arrive(scheduler, first)
    assert answer(scheduler, first) == HIT_TOKENS
    scheduler.allocated(first, TABLE, HIT_TOKENS)
    arrive(scheduler, second)
    for _ in range(3):
        step(scheduler)
    assert not scheduler._prefetches._copies
    assert one.near_has(second) == 0


@pytest.mark.parametrize("why", ["sizes", "off", "opted out"])
def test_nothing_is_prefetched(engine: Callable[..., Engine], why: str) -> None:
    """Ranks whose parts differ in size, a share of nothing, a request that goes without the pool."""
    one = engine(prefetch_share=0.0 if why == "off" else 0.25)
    sizes = {(0, 0): PART_NBYTES, (0, 1): PART_NBYTES + (why == "sizes")}
    scheduler, asked = (
        one.start(sizes, ranks=2),
        request("a", TOKENS, {"kvpool": {"load": why != "opted out"}}),
    )
    put(one.far, list(asked.block_hashes[:BLOCKS]), ranks=2)
    scheduler.seen(asked)
    if why != "opted out":
        arrive(scheduler, asked)
    for _ in range(3):
        step(scheduler)
    assert not scheduler._prefetches._copies
    assert one.near_has(asked) == 0


def test_a_window_brings_only_what_it_sees(engine: Callable[..., Engine]) -> None:
    one = engine()
    groups = (Group(BLOCK_TOKENS, window=2 * BLOCK_TOKENS + 1),)
    scheduler, asked = one.start(groups=groups), far_request(one.far, "a")
    arrive(scheduler, asked)
    for _ in range(2):
        step(scheduler)
    assert eventually(lambda: one.near_has(asked) == 2)


def test_a_reset_gives_up_what_is_under_way(engine: Callable[..., Engine]) -> None:
    one = engine()
    scheduler, asked, waits = one.start(), far_request(one.far, "a"), far_request(one.far, "b", 1000)
    arrive(scheduler, asked)
    for _ in range(2):
        step(scheduler)
    arrive(scheduler, waits)
    assert scheduler._prefetches._copies.keys() == {"a"}
    scheduler.reset()
    assert not scheduler._prefetches._queue
    assert not scheduler._prefetches._copies
    for _ in range(3):
        step(scheduler)
    assert one.near_has(waits) == 0
