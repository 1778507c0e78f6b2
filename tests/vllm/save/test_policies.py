"""What the settings and the requests make of loads and stores, on the scheduler half with a real file store."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.discovery.quota import write_held, write_quota
from kvpool.store import Store
from kvpool.vllm.geometry import Group
from kvpool.vllm.load.gate import MIN_SAMPLES, MIN_STEP_TOKENS
from kvpool.vllm.plan import PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.scheduler import SchedulerHalf
from tests.support.scheduler import BLOCK_TOKENS, STEP_TOKENS, TABLE, answer, half, output, put, request

pytestmark = [pytest.mark.vllm]


def whole(scheduler: SchedulerHalf, asked: Request, tokens: int = 100, held_tokens: int = 0) -> PoolMetadata:
    """The step that computes all of a request beyond the ``held_tokens`` that the engine had."""
    scheduler.seen(asked)
    scheduler.allocated(asked, TABLE, 0)
    asked.num_computed_tokens = held_tokens
    return scheduler.plan(output(asked, tokens - held_tokens, TABLE))


def ids(step: PoolMetadata) -> list[int]:
    return [block_id for block in step.stores for block_id in block.block_ids]


# Requests, and roles.


@pytest.mark.parametrize(
    ("params", "role"),
    [({"kvpool": {"load": False}}, {}), (None, {"loads": False})],
    ids=["a request", "a worker that only writes"],
)
def test_who_opts_out_of_loads_is_not_even_looked_up(
    store: Store, params: object, role: dict[str, bool]
) -> None:
    scheduler, asked = half(store, **role), request("a", transfer_params=params)  # type: ignore[arg-type]
    put(store, asked.block_hashes)
    scheduler.seen(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert metrics.LOOKUP_REQUESTS.name not in scheduler.counters.take()
    assert ids(whole(scheduler, asked)) == TABLE[0][:6], "it is stored all the same"


@pytest.mark.parametrize("asks_for", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_who_must_not_read_a_cache_is_not_even_looked_up(store: Store, asks_for: dict[str, Any]) -> None:
    """vLLM computes all of such a prompt: what a hit spared would be memory that was never written."""
    scheduler, asked = half(store), request("a", **asks_for)
    put(store, asked.block_hashes)
    scheduler.seen(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert metrics.LOOKUP_REQUESTS.name not in scheduler.counters.take()
    assert ids(whole(scheduler, asked)) == TABLE[0][:6], "it is stored all the same"


@pytest.mark.parametrize(
    ("params", "role"),
    [({"kvpool": {"store": False}}, {}), (None, {"stores": False})],
    ids=["a request", "a worker that only reads"],
)
def test_who_opts_out_of_stores_is_loaded_only(store: Store, params: object, role: dict[str, bool]) -> None:
    scheduler, asked = half(store, **role), request("a", transfer_params=params)  # type: ignore[arg-type]
    put(store, asked.block_hashes)
    assert answer(scheduler, asked) == 96
    assert whole(scheduler, asked).stores == []


def test_requests_of_a_lower_number_come_first(store: Store) -> None:
    scheduler = half(store)
    late, soon = (
        request(name, first=first, transfer_params={"kvpool": {"priority": priority}})
        for name, priority, first in (("late", 5, 0), ("soon", -5, 1000))
    )
    for asked in (late, soon):
        put(store, asked.block_hashes)
        assert answer(scheduler, asked) == 96
        scheduler.allocated(asked, TABLE, 96)
    step = output(late, 100, ([1, 2, 3, 4, 5, 6],))
    other = output(soon, 100, ([11, 12, 13, 14, 15, 16],))
    assert step.kv_connector_block_state is not None
    cached, more = step.scheduled_cached_reqs, other.scheduled_cached_reqs
    cached.req_ids += more.req_ids
    cached.num_computed_tokens += more.num_computed_tokens
    step.num_scheduled_tokens |= other.num_scheduled_tokens
    tables = {"late": ([1, 2, 3, 4, 5, 6],), "soon": ([11, 12, 13, 14, 15, 16],)}
    step.kv_connector_block_state.req_ids.add("soon")
    step.kv_connector_block_state.resolve_block_ids = tables.__getitem__
    plan = scheduler.plan(step)
    assert [(load.request_id, load.priority) for load in plan.loads] == [("late", 5), ("soon", -5)]
    assert ids(plan) == [11, 12, 13, 14, 15, 16, 1, 2, 3, 4, 5, 6], "what is at the end is dropped first"


# Prompts.


@pytest.mark.parametrize(("decode", "stored"), [(True, [7, 8, 9, 10]), (False, [7, 8])])
@pytest.mark.parametrize(("per_record", "prompt_tokens"), [(1, 40), (2, 60)])
def test_generated_tokens_are_stored_unless_they_are_not_wanted(
    store: Store, decode: bool, stored: list[int], per_record: int, prompt_tokens: int
) -> None:
    """A record may hold the end of the prompt and what was generated."""
    scheduler = half(store, store_decode=decode, blocks_per_record=per_record)
    asked = request("a", tokens=prompt_tokens)
    step = whole(scheduler, asked, tokens=prompt_tokens)
    asked.append_output_token_ids(list(range(500, 530)))
    asked.num_computed_tokens = prompt_tokens
    later = scheduler.plan(output(asked, 68 - prompt_tokens, TABLE))
    assert ids(step) + ids(later) == stored


# Requests that have had a block.


def test_a_block_is_stored_when_enough_requests_have_computed_it(store: Store) -> None:
    scheduler = half(store, min_requests_to_store=3)
    assert [ids(whole(scheduler, request(name))) for name in "ab"] == [[], []]
    assert ids(whole(scheduler, request("c"))) == TABLE[0][:6]
    assert ids(whole(scheduler, request("d"))) == TABLE[0][:6], "it was computed, so nobody had it"


def test_a_block_that_the_engine_has_already_is_stored_by_the_request_that_makes_it_enough(
    store: Store,
) -> None:
    scheduler = half(store, min_requests_to_store=2)
    assert ids(whole(scheduler, request("a"))) == []
    assert ids(whole(scheduler, request("b"), held_tokens=64)) == TABLE[0][:6]
    assert ids(whole(scheduler, request("c"), held_tokens=96)) == [], "once"


def test_a_record_that_begins_with_what_the_engine_had_counts_as_computed(store: Store) -> None:
    scheduler = half(store, min_requests_to_store=2, blocks_per_record=4)
    assert ids(whole(scheduler, request("a"))) == []
    assert ids(whole(scheduler, request("b"), held_tokens=48)) == TABLE[0][:4]
    assert ids(whole(scheduler, request("c"), held_tokens=48)) == TABLE[0][:4], (
        "it was computed, so nobody had it"
    )
    assert ids(whole(scheduler, request("d"), held_tokens=64)) == [], "once"


def test_a_request_counts_once_however_often_it_is_preempted(store: Store) -> None:
    scheduler, asked = half(store, min_requests_to_store=2), request("a")
    assert [ids(whole(scheduler, asked)) for _ in range(3)] == [[], [], []]
    assert ids(whole(scheduler, request("b"))) == TABLE[0][:6]
    assert ids(whole(scheduler, asked, held_tokens=64)) == TABLE[0][4:6], (
        "what it computes again is enough now"
    )


def test_a_request_that_may_not_be_stored_is_not_counted(store: Store) -> None:
    scheduler = half(store, min_requests_to_store=2)
    shy = request("shy", transfer_params={"kvpool": {"store": False}})
    assert [ids(whole(scheduler, asked)) for asked in (shy, request("a"))] == [[], []]
    assert ids(whole(scheduler, request("b"))) == TABLE[0][:6]


# Write-back.


class Engine:
    """vLLM's own block pool, and what a request takes from it and gives back."""

    def __init__(self, scheduler: SchedulerHalf, blocks: int = 17) -> None:
        self.scheduler = scheduler
        self.pool = BlockPool(blocks, True, BLOCK_TOKENS)
        scheduler.bind_block_pool(self.pool)

    def run(self, asked: Request) -> tuple[PoolMetadata, list[KVCacheBlock]]:
        """Allocate, compute and cache a whole request; it still holds its blocks."""
        full = len(asked.block_hashes)
        blocks = self.pool.get_new_blocks(full)
        self.pool.cache_full_blocks(asked, blocks, 0, full, BLOCK_TOKENS, 0)
        self.scheduler.seen(asked)
        self.scheduler.allocated(asked, ([],), 0)
        table = ([block.block_id for block in blocks],)
        return self.scheduler.plan(output(asked, asked.num_tokens, table)), blocks

    def end(self, asked: Request, blocks: list[KVCacheBlock]) -> None:
        self.scheduler.finished(asked)
        self.pool.free_blocks(reversed(blocks))

    def step(self) -> PoolMetadata:
        """A step of some other request, which fills no block."""
        other = request("other", tokens=4)
        self.scheduler.seen(other)
        return self.scheduler.plan(output(other, 4, ([],)))


def prompts(count: int, tokens: int = 64) -> list[Request]:
    """Requests that have no block in common."""
    return [request(f"r{i}", tokens, first=1000 * (i + 1)) for i in range(count)]


def test_of_layers_that_draft_a_prompts_last_block_is_stored_when_the_token_behind_it_is_known(
    store: Store,
) -> None:
    """Also where answers are not wanted: it is the prompt's."""
    scheduler = half(store, groups=(Group(BLOCK_TOKENS, reads_ahead=True),), store_decode=False)
    asked = request("a", tokens=64)
    assert ids(whole(scheduler, asked, tokens=64)) == TABLE[0][:3]
    asked.append_output_token_ids(list(range(500, 530)))
    asked.num_computed_tokens = 64
    assert ids(scheduler.plan(output(asked, 1, TABLE))) == TABLE[0][3:4]
    asked.num_computed_tokens = 65
    assert ids(scheduler.plan(output(asked, 20, TABLE))) == []


AHEAD = 2 * STEP_TOKENS // BLOCK_TOKENS


def test_write_back_stores_what_the_engine_evicts_next_and_only_once(store: Store) -> None:
    engine = Engine(half(store, store_policy="write_back"))
    *others, last = prompts(4)
    for asked in others:
        step, blocks = engine.run(asked)
        assert step.stores == [], "there are free blocks for the next steps"
        engine.end(asked, blocks)
    step, _ = engine.run(last)
    evicted_next = others[0].block_hashes[::-1]  # a prompt is evicted from its end
    assert [block.block_hash for block in step.stores] == evicted_next
    assert len(step.stores) == AHEAD
    for block in step.stores:
        (block_id,) = block.block_ids
        held = engine.pool.blocks[block_id].block_hash
        assert held is not None
        assert held[:-4] == block.block_hash
        assert not engine.pool.blocks[block_id].ref_cnt, "it is held while it is sent"
    assert engine.step().stores == []


def test_write_back_leaves_what_is_in_use_and_what_changed_meanwhile(store: Store) -> None:
    scheduler = half(store, store_policy="write_back")
    engine = Engine(scheduler, blocks=9)
    first, second = prompts(2)
    _, blocks = engine.run(first)
    assert engine.step().stores == [], "the request still has them"
    engine.end(first, blocks)
    engine.pool.evict_blocks({blocks[0].block_id})
    step, _ = engine.run(second)  # in the four that were free from the start
    assert [block.block_hash for block in step.stores] == first.block_hashes[:0:-1]
    assert scheduler.counters.take()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/evicted"] == 1


def test_write_back_gives_up_what_was_evicted_before_it_could_be_stored(store: Store) -> None:
    scheduler = half(store, store_policy="write_back")
    engine = Engine(scheduler, blocks=5)
    first, second = prompts(2)
    step, blocks = engine.run(first)
    engine.end(first, blocks)
    step, _ = engine.run(second)  # at once, into the same blocks
    assert step.stores == []
    assert scheduler.counters.take()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/evicted"] == 4
    assert len(scheduler._store_planner._write_back._kept) == 4


def test_write_back_keeps_no_more_than_the_engine_has_blocks(store: Store) -> None:
    scheduler = half(store, store_policy="write_back")
    engine = Engine(scheduler, blocks=9)
    for asked in prompts(20):
        _, blocks = engine.run(asked)
        engine.end(asked, blocks)
        assert len(scheduler._store_planner._write_back._kept) <= 8


def test_write_back_of_a_tenant_over_its_quota_stores_nothing(store: Store) -> None:
    """And what it gives up is stored with the next request that lacks it."""
    write_quota(store, "default", 10)
    write_held(store, "default", 10, 60)
    scheduler = half(store, store_policy="write_back")
    scheduler._quota.turn()
    engine = Engine(scheduler)
    *others, last = prompts(4)
    for asked in others:
        _, blocks = engine.run(asked)
        engine.end(asked, blocks)
    step, blocks = engine.run(last)
    assert step.stores == []
    assert scheduler.counters.take()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/quota"] == AHEAD
    assert engine.step().stores == []
    assert scheduler._store_planner._queue.is_empty
    engine.end(last, blocks)
    write_held(store, "default", 1, 60)
    scheduler._quota.turn()
    asked = prompts(5)[-1]
    step, _ = engine.run(asked)
    assert [block.block_hash for block in step.stores] == others[1].block_hashes[::-1], "the next in turn"


# The cost gate.


def computing(scheduler: SchedulerHalf, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Large steps, each of ``seconds``, by a clock that the test moves."""
    clock = [time.monotonic()]
    if scheduler._gate is not None:
        monkeypatch.setattr(scheduler._gate, "_clock", lambda: clock[0])
    big = request("big", tokens=MIN_STEP_TOKENS * (MIN_SAMPLES + 1))
    scheduler.seen(big)
    for step in range(MIN_SAMPLES):
        big.num_computed_tokens = step * MIN_STEP_TOKENS
        plan = scheduler.plan(output(big, MIN_STEP_TOKENS, ([],)))
        clock[0] += seconds
        scheduler.update(PoolWorkerMetadata(timed=plan.timed), (), ())
    scheduler.finished(big)
    monkeypatch.undo()


def loading(scheduler: SchedulerHalf, seconds: float) -> None:
    for load in range(MIN_SAMPLES):
        asked = request(f"load-{load}")
        assert answer(scheduler, asked) == 96
        scheduler.allocated(asked, TABLE, 96)
        scheduler.plan(SchedulerOutput.make_empty())
        name = asked.request_id
        scheduler.update(PoolWorkerMetadata(load_s={name: seconds}), finished_loads=[name], failed_loads=[])
        scheduler.finished(asked)


@pytest.mark.parametrize(
    ("gate", "load_s", "offered"), [(True, 0.01, 96), (True, 10.0, 0), (False, 10.0, 96)]
)
def test_a_load_that_is_slower_than_computing_is_not_offered(
    store: Store, monkeypatch: pytest.MonkeyPatch, gate: bool, load_s: float, offered: int
) -> None:
    scheduler, asked = half(store, cost_gate=gate), request("a")
    put(store, asked.block_hashes)
    computing(scheduler, monkeypatch, seconds=1.0)
    loading(scheduler, load_s)
    scheduler.counters.take()
    assert [answer(scheduler, asked) for _ in range(2)] == [offered] * 2
    decided = {key: n for key, n in scheduler.counters.take().items() if "gate" in key}
    result = f"{metrics.GATE_DECISIONS.name}/{'pays' if offered else 'too_slow'}"
    assert decided == ({result: 1} if gate else {}), "decided once for a request"


def test_steps_without_prompts_and_lost_reports_do_not_spoil_the_rate(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, big = half(store), request("big", tokens=MIN_STEP_TOKENS)
    clock = [time.monotonic()]
    monkeypatch.setattr(scheduler._gate, "_clock", lambda: clock[0])
    scheduler.seen(big)
    for _ in range(9):  # none of these is ever reported
        assert scheduler.plan(output(big, MIN_STEP_TOKENS, ([],))).timed
        clock[0] += 100
    big.num_computed_tokens = MIN_STEP_TOKENS
    assert not scheduler.plan(output(big, MIN_STEP_TOKENS, ([],))).timed, "nothing of a prompt"
    clock[0] += 100
    scheduler.update(None, (), ())
    big.num_computed_tokens = 0
    assert not scheduler.plan(output(big, MIN_STEP_TOKENS - 1, ([],))).timed, "too small"
    clock[0] += 100
    scheduler.update(None, (), ())
    assert metrics.GATE_PREFILL_TOKENS.name not in scheduler.counters.take()
    one = scheduler.plan(output(big, MIN_STEP_TOKENS, ([],)))
    clock[0] += 1
    two = scheduler.plan(output(big, MIN_STEP_TOKENS, ([],)))  # ahead, as with asynchronous scheduling
    clock[0] += 1
    scheduler.update(PoolWorkerMetadata(timed=one.timed), (), ())
    clock[0] += 1
    scheduler.update(PoolWorkerMetadata(timed=two.timed), (), ())
    counted = scheduler.counters.take()
    assert counted[metrics.GATE_PREFILL_TOKENS.name] == 2 * MIN_STEP_TOKENS
    assert counted[metrics.GATE_PREFILL_SECONDS.name] == pytest.approx(3.0), "one after the other: 2 and 1"
    assert not scheduler._gate._steps
