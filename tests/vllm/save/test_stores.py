"""What is stored of that which a request did not compute, in which order, and when: on the scheduler half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.store import Store
from kvpool.transfer.memory import MAX_STAGING_NBYTES, MIN_STAGING_NBYTES, default_nbytes
from kvpool.vllm.geometry import Group
from kvpool.vllm.plan import PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.save.request_counter import RequestCounter
from kvpool.vllm.scheduler import SchedulerHalf
from tests.support.clock import Clock
from tests.support.deadlines import eventually
from tests.support.scheduler import (
    BLOCK_TOKENS,
    BUDGET_S,
    answer,
    half,
    output,
    put,
    request,
)

pytestmark = [pytest.mark.vllm]

FULL_BLOCKS = 6  # of 100 tokens


class Engine:
    """vLLM's own block pool with the full blocks of one prompt in its cache."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self.scheduler: SchedulerHalf = half(store, **settings)
        self.pool = BlockPool(32, True, BLOCK_TOKENS)
        self.scheduler.bind_block_pool(self.pool)
        asked = request("computed")
        self.blocks = self.pool.get_new_blocks(FULL_BLOCKS)
        self.pool.cache_full_blocks(asked, self.blocks, 0, FULL_BLOCKS, BLOCK_TOKENS, 0)
        self.table = ([block.block_id for block in self.blocks] + [30],)

    def begins(self, asked: Request, held_blocks: int, tokens: int = 4) -> PoolMetadata:
        """The first step of a request that finds its first blocks in the engine."""
        self.scheduler.allocated(asked, self.table, 0)
        asked.num_computed_tokens = held_blocks * BLOCK_TOKENS
        return self.scheduler.plan(output(asked, tokens, self.table))

    def idle(self) -> PoolMetadata:
        return self.scheduler.plan(SchedulerOutput.make_empty())

    def report(self, step: PoolMetadata, *, ok: bool = True) -> None:
        tags = dict.fromkeys(step.tags, 1)
        ended = {"stored": tags} if ok else {"dropped": tags}
        self.scheduler.update(PoolWorkerMetadata(staged=tags, **ended), (), ())


def hashes(step: PoolMetadata) -> list[bytes]:
    return [block.block_hash for block in step.stores]


def test_what_the_engine_has_and_the_lookup_missed_is_stored(store: Store) -> None:
    engine, asked = Engine(store), request("a")
    put(store, asked.block_hashes[:2])
    assert answer(engine.scheduler, asked, local_tokens=80) == 0
    step = engine.begins(asked, 5)
    # For what is behind the first miss the pool need not have been asked: the workers find out what is there.
    assert hashes(step) == asked.block_hashes[2:5]
    assert [block.block_ids for block in step.stores] == [(block_id,) for block_id in engine.table[0][2:5]]
    assert engine.begins(asked, 5).stores == [], "preempted, and on its way"


def test_what_was_loaded_from_another_pool_is_stored_and_what_came_from_this_one_is_not(store: Store) -> None:
    """Under vLLM's MultiConnector: no tokens of the load are this connector's."""
    engine, asked = Engine(store), request("a")
    put(store, asked.block_hashes[:2])
    assert answer(engine.scheduler, asked) == 32
    engine.scheduler.allocated(asked, engine.table, 0)  # the other connector loads
    assert engine.idle().stores == []
    assert hashes(engine.begins(asked, 6)) == asked.block_hashes[2:6]


def late_answer(engine: Engine, asked: Request) -> Callable[[], None]:
    """Hold back what the pool says to the request's lookup, until the result is called."""
    engine.scheduler.seen(asked)
    lookup = engine.scheduler._requests[asked.request_id].found.lookup
    assert lookup is not None
    lookup._gives_up_s += BUDGET_S
    done = lookup._lookup.done
    lookup._lookup.done = lambda: False  # type: ignore[method-assign]

    def comes() -> None:
        lookup._lookup.done = done  # type: ignore[method-assign]
        assert eventually(done)

    return comes


def test_an_answer_that_comes_late_is_used_for_storing_also_when_the_request_is_over(store: Store) -> None:
    engine, asked = Engine(store), request("a")
    answer_comes = late_answer(engine, asked)
    assert engine.scheduler.matched_tokens(asked, 96) == (0, False), "nothing to wait for"
    assert engine.begins(asked, 6).stores == []
    engine.scheduler.finished(asked)
    assert engine.scheduler.wants_steps()
    assert engine.idle().stores == []
    answer_comes()
    assert hashes(engine.idle()) == asked.block_hashes[:6]


def test_what_the_engine_evicted_before_the_late_answer_is_not_stored(store: Store) -> None:
    engine, asked = Engine(store), request("a")
    answer_comes = late_answer(engine, asked)
    assert engine.begins(asked, 6).stores == []
    engine.pool.evict_blocks({engine.table[0][5]})
    answer_comes()
    assert hashes(engine.idle()) == asked.block_hashes[:5]


def test_a_lookup_without_an_answer_says_nothing_of_what_is_held(store: Store) -> None:
    engine, asked = Engine(store), request("a")
    engine.scheduler.seen(asked)
    lookup = engine.scheduler._requests["a"].found.lookup
    assert lookup is not None
    lookup._lookup.done = lambda: False  # type: ignore[method-assign]
    engine.begins(asked, 6)
    lookup._gives_up_s -= 2 * BUDGET_S
    assert engine.idle().stores == []
    assert not engine.scheduler.wants_steps()
    assert engine.scheduler.counters.take()[f"{metrics.LOOKUP_FAILURES.name}/timeout"] == 1


def test_a_worker_that_only_writes_asks_for_what_the_engine_has_and_stores_what_is_missing(
    store: Store,
) -> None:
    engine, asked = Engine(store, loads=False), request("a")
    put(store, asked.block_hashes[:4])
    engine.scheduler.seen(asked)
    assert engine.scheduler.matched_tokens(asked, 96) == (0, False)
    stored = hashes(engine.begins(asked, 6))
    assert eventually(lambda: stored.extend(hashes(engine.idle())) or len(stored) == 2)
    assert stored == asked.block_hashes[4:6]


def test_what_is_held_and_missing_is_stored_if_enough_requests_have_had_it(store: Store) -> None:
    engine = Engine(store, min_requests_to_store=3)
    for name, stored in (("a", 0), ("b", 0), ("c", 6)):
        asked = request(name)
        assert answer(engine.scheduler, asked, local_tokens=80) == 0
        step = engine.begins(asked, 6)
        assert len(step.stores) == stored
        engine.scheduler.finished(asked)
    engine.report(step)
    put(store, request("d").block_hashes[:3])
    asked = request("d")
    assert answer(engine.scheduler, asked, local_tokens=80) == 0
    assert hashes(engine.begins(asked, 6)) == asked.block_hashes[3:6], "the pool has lost them"


def test_a_prompt_is_all_that_is_stored_of_what_is_held_where_answers_are_not_wanted(store: Store) -> None:
    engine, asked = Engine(store, store_decode=False), request("a", tokens=70)
    asked.append_output_token_ids(list(range(70, 100)))
    assert answer(engine.scheduler, asked, local_tokens=80) == 0
    assert hashes(engine.begins(asked, 6)) == asked.block_hashes[:4]


def test_write_back_keeps_what_is_held_and_missing_until_it_is_evicted(store: Store) -> None:
    engine, asked = Engine(store, store_policy="write_back"), request("a")
    assert answer(engine.scheduler, asked, local_tokens=80) == 0
    assert engine.begins(asked, 6).stores == []
    engine.pool.get_new_blocks(31 - FULL_BLOCKS)
    engine.pool.free_blocks(reversed(engine.blocks))
    other = request("other", tokens=4)
    stored = hashes(engine.scheduler.plan(output(other, 4, ([],))))
    assert stored == asked.block_hashes[:1:-1], (
        "a prompt is evicted from its end, and two steps take four blocks"
    )


# Order, and room.


def test_no_more_is_sent_than_staging_takes_and_the_rest_follows_in_order(store: Store) -> None:
    engine, asked = Engine(store), request("a")
    engine.scheduler.update(PoolWorkerMetadata(store_slots=2), (), ())
    first = engine.begins(asked, 0, tokens=100)
    assert hashes(first) == asked.block_hashes[:2]
    assert engine.idle().stores == []
    engine.report(first)
    second = engine.idle()
    assert hashes(second) == asked.block_hashes[2:4]
    engine.report(second)
    assert hashes(engine.idle()) == asked.block_hashes[4:6]


def test_what_was_dropped_goes_before_what_comes_behind_it(store: Store) -> None:
    clock = Clock()
    engine, asked = Engine(store, clock=clock), request("a")
    first = engine.begins(asked, 0, tokens=48)
    assert hashes(first) == asked.block_hashes[:3]
    engine.scheduler.update(
        PoolWorkerMetadata(staged=dict.fromkeys(first.tags, 1), stored={first.tags[0]: 1}), (), ()
    )
    engine.scheduler.update(PoolWorkerMetadata(dropped=dict.fromkeys(first.tags[1:], 1)), (), ())
    asked.num_computed_tokens = 48
    assert engine.scheduler.plan(output(asked, 52, engine.table)).stores == [], "a pause, and behind a gap"
    clock.sleep(1)
    again = engine.idle()
    assert hashes(again) == asked.block_hashes[1:6]
    engine.report(again, ok=False)
    engine.pool.evict_blocks({engine.table[0][2]})
    clock.sleep(1)
    assert hashes(engine.idle()) == asked.block_hashes[1:2]
    counted = engine.scheduler.counters.take()
    assert counted[f"{metrics.STORE_SKIPPED_BLOCKS.name}/evicted"] == 1
    assert counted[f"{metrics.STORE_SKIPPED_BLOCKS.name}/behind_gap"] == 3


def test_a_record_that_the_store_refuses_for_itself_pauses_no_other_and_is_not_sent_again(
    store: Store,
) -> None:
    engine = Engine(store, groups=[Group(BLOCK_TOKENS, window=40)], clock=Clock())
    asked = request("a")
    engine.scheduler.update(PoolWorkerMetadata(store_slots=2), (), ())
    step, sent = engine.begins(asked, 0, tokens=100), 0
    while step.stores:
        sent += len(step.stores)
        tags = dict.fromkeys(step.tags, 1)
        engine.scheduler.update(PoolWorkerMetadata(staged=tags, dropped=tags, refused=set(tags)), (), ())
        step = engine.idle()
    assert sent == FULL_BLOCKS


def test_what_was_given_up_comes_back_with_the_next_request_that_misses_it(store: Store) -> None:
    clock = Clock()
    engine, asked = Engine(store, clock=clock), request("a")
    engine.report(engine.begins(asked, 0, tokens=100), ok=False)
    lost = engine.blocks[0]
    engine.pool.evict_blocks({lost.block_id})
    clock.sleep(1)
    assert engine.idle().stores == [], "all stand behind the first"
    other = request("b")
    assert answer(engine.scheduler, other) == 0
    engine.pool.cache_full_blocks(other, [lost], 0, 1, BLOCK_TOKENS, 0)
    assert hashes(engine.begins(other, 6)) == other.block_hashes[:6]


def test_what_a_request_goes_on_to_compute_is_not_stored_behind_what_was_given_up(store: Store) -> None:
    clock = Clock()
    engine, asked = Engine(store, clock=clock), request("a")
    engine.report(engine.begins(asked, 0, tokens=48), ok=False)
    engine.pool.evict_blocks({engine.table[0][0]})
    clock.sleep(1)
    assert engine.idle().stores == []
    asked.num_computed_tokens = 48
    assert engine.scheduler.plan(output(asked, 52, engine.table)).stores == []


def test_windows_are_stored_whatever_is_missing_before(store: Store) -> None:
    engine, asked = Engine(store, groups=[Group(BLOCK_TOKENS, window=40)]), request("a")
    engine.scheduler.update(PoolWorkerMetadata(store_slots=1), (), ())
    first = engine.begins(asked, 0, tokens=100)
    engine.pool.evict_blocks({engine.table[0][1]})
    engine.report(first)
    stored = []
    for _ in range(4):
        step = engine.idle()
        stored += hashes(step)
        engine.report(step)
    assert stored == asked.block_hashes[2:6]


def test_a_reset_forgets_what_waits(store: Store) -> None:
    engine, asked = Engine(store), request("a")
    engine.scheduler.update(PoolWorkerMetadata(store_slots=1), (), ())
    first = engine.begins(asked, 0, tokens=100)
    engine.scheduler.forget()
    engine.report(first)
    assert engine.idle().stores == []


# What the engine takes, and what it waits for.


@pytest.mark.parametrize("taken", [16, 80, 112])
def test_of_an_offer_that_was_changed_nothing_is_loaded(store: Store, taken: int) -> None:
    scheduler, asked = half(store), request("a")
    put(store, asked.block_hashes)
    assert answer(scheduler, asked) == 96
    scheduler.allocated(asked, ([7, 8, 9, 10, 11, 12, 13],), taken)
    (load,) = scheduler.plan(SchedulerOutput.make_empty()).loads
    assert not load.blocks, "the workers report it as failed, and the engine computes"
    assert scheduler.counters.take()[metrics.OFFER_MISMATCHES.name] == 1


def test_blocks_come_back_that_nobody_else_has(store: Store) -> None:
    clock = Clock()
    engine, asked = Engine(store, clock=clock), request("a")
    assert not engine.scheduler.frees_blocks()
    step = engine.begins(asked, 0, tokens=100)
    assert not engine.scheduler.frees_blocks(), "the request has them, too"
    engine.pool.free_blocks(engine.blocks)
    assert engine.scheduler.frees_blocks()
    clock.sleep(2)
    assert not engine.scheduler.frees_blocks(), "not for ever"
    engine.scheduler.update(PoolWorkerMetadata(staged={step.tags[0]: 1}), (), ())
    assert engine.scheduler.frees_blocks(), "one has come: the others may"
    engine.report(step)
    assert not engine.scheduler.frees_blocks()


def test_staging_follows_the_size_of_a_step() -> None:
    llama_8b = 16 * 131_072  # bytes of a block of 16 tokens
    assert default_nbytes(512, llama_8b) == MAX_STAGING_NBYTES, "2.7 GiB would be two steps and a third more"
    assert default_nbytes(128, llama_8b) == int(2 * 128 * llama_8b / 0.75)
    assert default_nbytes(1, 4096) == MIN_STAGING_NBYTES


def hashed(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_blocks_are_counted_by_hash_and_group() -> None:
    counter = RequestCounter()
    assert [counter.add(hashed(1), 0) for _ in range(3)] == [1, 2, 3]
    assert counter.add(hashed(1), 1) == 1
    assert counter.add(hashed(2), 0) == 1
    assert (counter.count(hashed(1), 0), counter.count(hashed(3), 0)) == (3, 0)


def test_what_was_seen_longest_ago_is_forgotten() -> None:
    counter = RequestCounter(max_blocks=3)
    for number in (1, 2, 3, 1, 4):
        counter.add(hashed(number), 0)
    assert [counter.count(hashed(number), 0) for number in (1, 2, 3, 4)] == [2, 0, 1, 1]
    for number in range(1000):
        counter.add(hashed(number), 0)
    assert len(counter._counts) == 3
