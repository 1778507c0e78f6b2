"""Blocks of adapters, on both halves: moved while the worker holds what they are called by."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.config import PoolConfig
from kvpool.store import Store
from kvpool.vllm.engine.adapters import UNDIGESTED, UNREADABLE
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import AdapterWeights, BlockRef, LoadPlan, PoolMetadata
from kvpool.vllm.scheduler import SchedulerHalf
from kvpool.vllm.worker import WorkerHalf
from tests.support.adapters import LORA, Vllm
from tests.support.deadlines import eventually
from tests.support.scheduler import (
    BLOCK_TOKENS,
    FACTS,
    TABLE,
    TOKENS,
    answer,
    computed,
    half,
    hold,
    output,
    request_with,
)

pytestmark = [pytest.mark.vllm]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch)


@pytest.fixture
def worker(tmp_path: Path, vllm: Vllm) -> Iterator[WorkerHalf]:
    config = PoolConfig(pool=f"file://{tmp_path}/pool")
    worker = WorkerHalf(config, Geometry((Group(16),), step_tokens=2048), rank=0, adapters=vllm.loads)
    worker.register([[torch.zeros(16, 4, 32, 8)]], dict(FACTS))
    yield worker
    worker.close()


def step_of(worker: WorkerHalf, scheduler: SchedulerHalf, step: PoolMetadata) -> None:
    """The worker takes a step, until all that it moves has ended; the scheduler hears of it."""
    worker.start_loads(step)
    worker.start_stores(step)
    wanted = {plan.request_id for plan in step.loads}
    ended: set[str] = set()
    failed: set[str] = set()

    def at_rest() -> bool:
        for of_all, of_poll in zip((ended, failed), worker.poll(idle=True), strict=True):
            of_all |= of_poll
        return wanted <= ended and not worker.slots_in_use

    assert eventually(at_rest)
    scheduler.update(worker.take_report(), ended, failed)


def idle(scheduler: SchedulerHalf) -> PoolMetadata:
    return scheduler.plan(output(request_with("x"), 0, TABLE))


def test_a_request_for_an_adapter_that_nobody_has_loaded_finds_what_another_engine_stored(
    worker: WorkerHalf, vllm: Vllm, store: Store
) -> None:
    vllm.loads.look(LoRARequest(LORA[0], 1, LORA[1]))
    computed(request_with("of another engine", LORA), store, vllm.loads.take_news()[1])
    scheduler, asked = half(store), request_with("asked", LORA)
    scheduler.seen(asked)
    assert scheduler.matched_tokens(asked, 0)[0] is None
    step_of(worker, scheduler, idle(scheduler))
    assert answer(scheduler, asked) == 96
    scheduler.allocated(asked, TABLE, 96)
    step = idle(scheduler)
    [plan] = step.loads
    assert plan.blocks
    worker.start_loads(step)
    assert asked.request_id in worker._loads, "it is read ahead, and vLLM gets the same"
    kept = PoolMetadata(stores=list(plan.blocks), tags=list(range(len(plan.blocks))))
    worker.start_stores(kept)
    report = worker.take_report()
    assert report is not None
    assert set(report.dropped) == set(range(len(plan.blocks))), "nothing is computed with it yet"
    scheduler.close()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_load_of_weights_that_are_replaced_fails(
    worker: WorkerHalf, vllm: Vllm, store: Store, when: str
) -> None:
    vllm.add()
    scheduler, earlier, asked = half(store), request_with("earlier", LORA), request_with("asked", LORA)
    step_of(worker, scheduler, idle(scheduler))
    scheduler.seen(earlier)
    scheduler.allocated(earlier, TABLE, 0)
    step_of(worker, scheduler, scheduler.plan(output(earlier, len(TOKENS), TABLE)))
    assert answer(scheduler, asked) == 96
    scheduler.allocated(asked, TABLE, 96)
    vllm.put(seed=2)
    if when == "before":
        vllm.add(in_place=True)
    worker.start_loads(idle(scheduler))
    assert bool(worker._loads) == (when == "during")
    if when == "during":
        vllm.add(in_place=True)
    ended: list[set[str]] = []

    def at_rest() -> bool:
        ended.append(worker.poll(idle=True)[1])
        return bool(ended[-1])

    assert eventually(at_rest)
    report = worker.take_report()
    assert report is not None
    assert (ended[-1], report.load_causes["asked"]) == ({"asked"}, "adapter")
    scheduler.close()


def test_an_adapter_stays_without_the_pool_through_a_reset_that_keeps_blocks(store: Store) -> None:
    scheduler = half(store)
    hold(scheduler, "one")
    asked = [request_with(name, LORA) for name in ("first", "second")]
    scheduler.seen(asked[0])
    hold(scheduler, "two")
    pool = BlockPool(32, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(pool)
    blocks = pool.get_new_blocks(1)
    scheduler.reset()
    hold(scheduler, "two")
    scheduler.seen(asked[1])
    assert [scheduler._requests[one.request_id].asked.identified for one in asked] == [False, False]
    pool.free_blocks(blocks)
    scheduler.reset()
    hold(scheduler, "two")
    assert [scheduler._requests[one.request_id].asked.identified for one in asked] == [True, True]
    for one in asked:
        scheduler.finished(one)
    assert not scheduler._adapters._live
    scheduler.close()


def test_blocks_of_replaced_weights_are_neither_stored_nor_loaded(
    worker: WorkerHalf, vllm: Vllm, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM loads an adapter again that it had dropped, of files that were replaced, behind the answer to a request."""
    vllm.add()
    digest = vllm.weights().digests[0]
    computed(request_with("of another engine", LORA), store, digest)
    scheduler = half(store)
    step_of(worker, scheduler, idle(scheduler))
    asked = request_with("asked", LORA)
    assert answer(scheduler, asked) == 96
    scheduler.allocated(asked, TABLE, 96)
    vllm.put(seed=2)
    vllm.add(in_place=True)
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        step_of(worker, scheduler, idle(scheduler))
        assert answer(scheduler, asked) == 0
        scheduler.allocated(asked, TABLE, 0)
        assert scheduler.plan(output(asked, len(TOKENS), TABLE)).stores == []
        later = request_with("later", LORA)
        scheduler.seen(later)
        assert answer(scheduler, later) == 0
    said = [record.getMessage() for record in caplog.records if "adapter" in record.getMessage()]
    assert len(said) == 1
    assert LORA[1] in said[0]
    for one in (asked, later):
        scheduler.finished(one)
    assert scheduler.counters.take()[f"{metrics.ADAPTER_REQUESTS.name}/changed"] == 2
    scheduler.reset()
    again = request_with("again", LORA)
    scheduler.seen(again)
    assert scheduler.matched_tokens(again, 0)[0] is None
    step_of(worker, scheduler, idle(scheduler))
    assert scheduler._requests["again"].asked.identified, "the engine's cache holds nothing of before"
    scheduler.close()


def test_blocks_of_weights_that_are_loaded_again_in_their_step_are_not_stored_and_none_later(
    worker: WorkerHalf, vllm: Vllm, store: Store
) -> None:
    vllm.add()
    scheduler, asked = half(store), request_with("asked", LORA)
    step_of(worker, scheduler, idle(scheduler))
    pool = BlockPool(32, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(pool)
    blocks = pool.get_new_blocks(6)
    pool.cache_full_blocks(asked, blocks, 0, 6, BLOCK_TOKENS, 0)
    table = ([block.block_id for block in blocks] + [30],)
    scheduler.seen(asked)
    scheduler.allocated(asked, table, 0)
    step = scheduler.plan(output(asked, len(TOKENS), table))
    assert len(step.stores) == 6
    vllm.put(seed=2)
    vllm.add(in_place=True)
    step_of(worker, scheduler, step)
    assert metrics.STORED_BLOCKS.name not in worker.counters.take()
    waiting = scheduler._store_planner._queue._waiting
    assert len(waiting) == 6, "as what a full staging dropped"
    again: list[BlockRef] = []

    def gives_up() -> bool:
        again.extend(idle(scheduler).stores)
        return not waiting

    assert eventually(gives_up)
    assert again == []
    assert scheduler.counters.take()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/adapter"] == 6
    scheduler.close()


def test_blocks_of_an_adapter_go_to_the_pool_and_come_from_it(
    worker: WorkerHalf, vllm: Vllm, store: Store
) -> None:
    vllm.add()
    scheduler, asked = half(store), request_with("asked", LORA)
    step_of(worker, scheduler, idle(scheduler))
    scheduler.seen(asked)
    scheduler.allocated(asked, TABLE, 0)
    step_of(worker, scheduler, scheduler.plan(output(asked, len(TOKENS), TABLE)))
    again = request_with("again", LORA)
    scheduler.seen(again)
    assert answer(scheduler, again) == 96
    scheduler.allocated(again, TABLE, 96)
    step_of(worker, scheduler, idle(scheduler))
    assert not scheduler._requests["again"].refused
    scheduler.close()


def test_blocks_that_were_computed_after_a_reset_by_requests_without_the_pool_count(
    worker: WorkerHalf, vllm: Vllm, store: Store
) -> None:
    """The worker has told what it holds before the reset, and nobody asks for it."""
    vllm.add()
    scheduler = half(store)
    step_of(worker, scheduler, idle(scheduler))
    scheduler.reset()
    earlier, asked = request_with("earlier", LORA), request_with("asked", LORA)
    earlier.kv_transfer_params = {"kvpool": {"load": False, "store": False}}
    scheduler.seen(earlier)
    scheduler.allocated(earlier, TABLE, 0)
    step_of(worker, scheduler, scheduler.plan(output(earlier, len(TOKENS), TABLE)))
    scheduler.finished(earlier)
    vllm.put(seed=2)
    vllm.add(in_place=True)
    step_of(worker, scheduler, idle(scheduler))
    scheduler.seen(asked)
    state = scheduler._requests["asked"].asked
    assert (state.checked, state.identified) == (True, False)
    scheduler.close()


def test_a_worker_that_knows_of_no_adapters_moves_none(tmp_path: Path) -> None:
    config = PoolConfig(pool=f"file://{tmp_path}/pool")
    worker = WorkerHalf(config, Geometry((Group(16),), step_tokens=2048), rank=0)
    worker.register([[torch.zeros(16, 4, 32, 8)]], dict(FACTS))
    block = BlockRef(bytes(32), 0, (1,), AdapterWeights(1, *LORA, ("one",)))
    step = PoolMetadata(
        stores=[block],
        tags=[7],
        loads=[LoadPlan("a", [block], 60.0)],
        adapters=[LoRARequest(LORA[0], 1, LORA[1])],
        tell_adapters=True,
    )
    worker.start_loads(step)
    worker.start_stores(step)
    assert worker.poll(idle=True) == ({"a"}, {"a"})
    report = worker.take_report()
    assert report is not None
    assert (report.dropped, report.adapters) == ({7: 1}, {(0, 1): UNREADABLE})
    worker.close()


def held_by_engine(scheduler: SchedulerHalf, asked: Request) -> list[BlockRef]:
    """What is stored for a request of which the engine's cache has six blocks, and the pool none."""
    asked.num_computed_tokens = 96
    assert answer(scheduler, asked, 96) == 0
    lookup = scheduler._requests[asked.request_id].found.lookup
    assert eventually(lambda: lookup is None or lookup.ended(time.monotonic()))
    scheduler.allocated(asked, TABLE, 0)
    return scheduler.plan(output(asked, 1, TABLE)).stores


@pytest.mark.parametrize(
    "before",
    [
        "nothing",
        "of the same",
        "by another number",
        "before it was known",
        "in place",
        "without the pool",
        "undigested",
    ],
)
def test_blocks_of_other_weights_in_the_engines_cache_are_not_stored_as_an_adapters(
    store: Store, before: str
) -> None:
    """vLLM finds them under its name and path, whoever computed them."""
    scheduler = half(store)
    of_adapter: dict[str, Any] = {"load_inplace": True} if before == "in place" else {}
    earlier, asked = request_with("earlier", LORA, **of_adapter), request_with("asked", LORA)
    if before == "by another number":
        hold(scheduler, "two")
        scheduler.seen(asked)
        hold(scheduler, "one", 2)
        earlier.lora_request = LoRARequest(LORA[0], 2, LORA[1])
    if before == "without the pool":
        earlier.kv_transfer_params = {"kvpool": {"load": False, "store": False}}
    if before != "nothing":
        scheduler.seen(earlier)
        scheduler.matched_tokens(earlier, 0)
        scheduler.allocated(earlier, TABLE, 0)
        assert scheduler.plan(output(earlier, len(TOKENS), TABLE)).stores == []
        scheduler.finished(earlier)
        hold(
            scheduler,
            {"undigested": UNDIGESTED, "of the same": "two"}.get(before, "one"),
            1 + (before == "by another number"),
        )
    hold(scheduler, "two")
    scheduler.seen(asked)
    stored = held_by_engine(scheduler, asked)
    assert len(stored) == (6 if before in ("nothing", "of the same") else 0)
    scheduler.close()
