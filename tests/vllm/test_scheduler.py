"""The scheduler half on real requests and a real file store: offers, failures that are remembered, deadlines.

Over 400 lines because all calls of the scheduler half share one scripted pool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.store import Batch, Store
from kvpool.vllm.geometry import Group
from kvpool.vllm.load.lookups import LOOKUP_GRACE_S
from kvpool.vllm.plan import BlockRef, PoolWorkerMetadata
from kvpool.vllm.scheduler import SchedulerHalf
from tests.support.deadlines import ends_within, eventually
from tests.support.memory_store import MemoryStore
from tests.support.scheduler import (
    BLOCK_TOKENS,
    BUDGET_S,
    FACTS,
    NAMESPACE,
    TABLE,
    answer,
    half,
    output,
    planted,
    put,
    request,
    request_with,
)
from tests.support.scripted_store import ScriptedStore

pytestmark = [pytest.mark.vllm]


@pytest.fixture
def stalling() -> Iterator[ScriptedStore]:
    with ScriptedStore() as store:
        yield store


def ids(blocks: list[BlockRef]) -> list[int]:
    return [block_id for block in blocks for block_id in block.block_ids]


def test_the_longest_prefix_on_all_ranks_is_offered_and_loaded_once(store: Store) -> None:
    scheduler, asked = half(store, ranks=2), request("a")
    put(store, asked.block_hashes[:4], ranks=2)
    put(store, asked.block_hashes[4:5], ranks=1)  # the fifth block lacks rank 1's part
    scheduler.seen(asked)
    assert answer(scheduler, asked, local_tokens=16) == 48
    scheduler.allocated(asked, TABLE, 48)
    step = scheduler.plan(SchedulerOutput.make_empty())
    (load,) = step.loads
    assert ids(load.blocks) == [8, 9, 10], "the first block is in the engine's own cache"
    assert [block.block_hash for block in load.blocks] == asked.block_hashes[1:4]
    assert 0 < load.stall_timeout_s <= BUDGET_S
    assert scheduler.plan(SchedulerOutput.make_empty()).loads == [], "a plan is handed over once"


def test_what_is_the_same_on_every_rank_is_asked_for_once(store: Store) -> None:
    groups = [Group(BLOCK_TOKENS, latent=True, copies=3), Group(BLOCK_TOKENS)]
    scheduler, asked = half(store, ranks=3, groups=groups), request("a")
    for group, rank, blocks in ((0, 0, 4), (1, 0, 6), (1, 1, 5), (1, 2, 3)):
        keys = NAMESPACE.keys(asked.block_hashes[:blocks], group, rank)
        assert all(store.put_many(keys, [b"x"] * len(keys)))
    scheduler.seen(asked)
    assert answer(scheduler, asked) == 48, "three blocks are there with every part"
    assert scheduler.counters.take()[metrics.LOOKUP_BLOCKS.name] == 6 + 3 * 6
    scheduler.finished(asked)
    store.delete_many(NAMESPACE.keys(asked.block_hashes[1:2], 0, 0))
    assert answer(scheduler, request("b")) == 16


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    ranks=st.integers(1, 4),
    latent=st.booleans(),
    good=st.lists(st.booleans(), min_size=4, max_size=4),
    order=st.permutations([0, 0, 1, 1, 2, 2, 3, 3]),
    together=st.integers(1, 3),
)
def test_a_store_is_settled_once_by_all_that_the_ranks_say(
    ranks: int, latent: bool, good: list[bool], order: list[int], together: int
) -> None:
    """Whatever the order: the block goes back when every rank has copied it, and is told when all have stored it."""
    with MemoryStore(1 << 20) as store:
        scheduler = half(
            store, ranks=ranks, loads=False, groups=[Group(BLOCK_TOKENS, copies=ranks if latent else 1)]
        )
        block_pool, _, (tag,) = computed(scheduler, 1)
        told = 0
        staged, ended = [False] * ranks, [False] * ranks
        turns = [rank for rank in order if rank < ranks]  # each rank says two things, one after the other
        for start in range(0, len(turns), together):
            report = PoolWorkerMetadata()
            for rank in turns[start : start + together]:
                # Of what is the same on every rank the others have nothing to copy or to store.
                ok = good[rank] or (latent and rank > 0)
                name = "staged" if not staged[rank] else "stored" if ok else "dropped"
                ended[rank], staged[rank] = staged[rank], True
                report = PoolWorkerMetadata(**{name: {tag: 1}}).aggregate(report)
            scheduler.update(report, (), ())
            assert block_pool.get_num_free_blocks() == 15 - (not all(staged))
            told += len(scheduler.take_events())
            assert told == (all(ended) and (good[0] if latent else all(good[:ranks])))
            assert scheduler.wants_steps() == (not all(ended))
        scheduler.update(PoolWorkerMetadata(staged={tag: 1}, stored={tag: 1}, dropped={tag: 1}), (), ())
        assert not scheduler.take_events(), "a tag that is settled says nothing any more"
        assert block_pool.get_num_free_blocks() == 15


def test_the_last_token_is_always_computed(store: Store) -> None:
    scheduler, asked = half(store), request("a", tokens=64)
    put(store, asked.block_hashes)
    assert answer(scheduler, asked) == 48


def test_a_preempted_request_is_looked_up_afresh(store: Store) -> None:
    """What the pool held when it was first asked says nothing about now."""
    scheduler, asked = half(store), request("a")
    put(store, asked.block_hashes)
    assert answer(scheduler, asked) == 96
    scheduler.allocated(asked, TABLE, 96)
    scheduler.update(None, finished_loads=["a"], failed_loads=[])
    store.delete_many(NAMESPACE.keys(asked.block_hashes[2:], 0, 0))
    assert answer(scheduler, asked) == 32


@pytest.mark.parametrize("ends", ["loads", "fails", "goes"])
def test_what_one_request_loads_the_others_wait_for(store: Store, ends: str) -> None:
    """A burst with one prefix loads it once: when it has come, the engine finds it in its own cache."""
    scheduler = half(store)
    first, second, other = request("a"), request("b", tokens=90), request("c")
    other.block_hashes[:] = [bytes(reversed(one)) for one in other.block_hashes]
    put(store, first.block_hashes)
    put(store, other.block_hashes)
    assert answer(scheduler, first) == 96
    scheduler.allocated(first, TABLE, 96)
    scheduler.plan(SchedulerOutput.make_empty())
    assert answer(scheduler, other) == 96, "it shares nothing"
    scheduler.seen(second)
    lookup = scheduler._requests["b"].found.lookup
    assert lookup is not None
    assert eventually(lambda: lookup.ended(time.monotonic()))
    assert scheduler.matched_tokens(second, 0) == (None, False)
    if ends == "goes":
        scheduler.finished(first)
    elif ends == "fails":
        scheduler.update(None, ["a"], ["a"])
    else:
        scheduler.update(None, ["a"], [])
        assert scheduler.matched_tokens(second, 0) == (None, False), "the engine caches them in its next step"
        assert scheduler.matched_tokens(second, 80) == (0, False)
        scheduler.plan(output(first, 4, TABLE))
    assert scheduler.matched_tokens(second, 0) == (80, True)


def test_a_wait_for_another_load_costs_the_budget_once(store: Store) -> None:
    scheduler, first, second = half(store, lookup_timeout_s=0.5), request("a"), request("b")
    put(store, first.block_hashes)
    assert answer(scheduler, first) == 96
    scheduler.allocated(first, TABLE, 96)
    assert answer(scheduler, second) == 96, "the first one is loading still"
    assert scheduler.matched_tokens(second, 0) == (96, True), "the engine had no blocks for it and asks again"
    scheduler.allocated(second, TABLE, 96)
    (_, load) = scheduler.plan(SchedulerOutput.make_empty()).loads
    assert load.stall_timeout_s < 0.5


def test_a_wait_for_room_costs_the_budget_once(store: Store) -> None:
    """vLLM passes over who waits: loads of later requests would take the memory again and again."""
    groups = [Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, window=2 * BLOCK_TOKENS + 1)]
    scheduler, first, second = half(store, groups=groups), request("a"), request_with("b", cache_salt="b")
    for asked in (first, second):
        for group in range(len(groups)):
            keys = NAMESPACE.keys(asked.block_hashes, group, 0)
            assert all(store.put_many(keys, [b"x"] * len(keys)))
    assert answer(scheduler, first) == 96
    scheduler.allocated(first, TABLE * 2, 96)
    pool = scheduler._block_pool
    assert pool is not None
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    scheduler.seen(second)
    state = scheduler._requests["b"]
    assert eventually(lambda: state.found.lookup is not None and state.found.lookup.ended(time.monotonic()))
    assert scheduler.matched_tokens(second, 0) == (None, False)
    assert state.found.waiting_since is not None
    state.found.waiting_since -= BUDGET_S
    for _ in range(2):
        assert scheduler.matched_tokens(second, 0) == (0, False)
        assert state.found.result == "no_room"
    pool.free_blocks(taken)
    assert scheduler.matched_tokens(second, 0) == (96, True)


def test_a_store_that_never_answers_costs_the_budget_and_no_more(stalling: ScriptedStore) -> None:
    scheduler, asked = half(stalling, lookup_timeout_s=0.2), request("a")
    with ends_within(0.2 + LOOKUP_GRACE_S):  # the budget, and the grace for a batch that is stopping
        scheduler.seen(asked)
        assert answer(scheduler, asked) == 0
    assert all(batch.cancelled for batch in stalling.under_way)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.counters.take()[f"{metrics.LOOKUP_FAILURES.name}/timeout"] == 1


def test_workers_that_never_report_cost_the_budget_and_no_more(store: Store) -> None:
    scheduler, asked = half(store, heard=False, lookup_timeout_s=0.2), request("a")
    assert scheduler.matched_tokens(asked, 0) == (None, False)
    assert answer(scheduler, asked) == 0


def test_ranks_that_differ_share_nothing(store: Store) -> None:
    scheduler, asked = half(store, ranks=2, heard=False), request("a")
    put(store, asked.block_hashes, ranks=2)
    other = {**FACTS, "weights": "0123"}
    scheduler.update(PoolWorkerMetadata(facts={0: FACTS, 1: other}), (), ())
    assert scheduler.matched_tokens(asked, 0) == (0, False)


def test_a_rank_without_a_pool_ends_it_for_the_engine(store: Store) -> None:
    scheduler, asked = half(store), request("a")
    put(store, asked.block_hashes)
    scheduler.update(PoolWorkerMetadata(broken={0: "disk on fire"}), (), ())
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.plan(output(asked, 100, TABLE)).stores == []


def test_a_pool_that_is_away_is_told_once_and_again_when_it_is_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for level in ("warning", "info"):
        monkeypatch.setattr(f"kvpool.vllm.scheduler.logger.{level}", lambda text, *_: said.append(text))
    scheduler = half(store)

    def refuse(*_: object, **__: object) -> Batch:
        raise StoreUnavailable("planted")

    for _ in range(3):  # the third time within a minute, so nothing is said any more
        with monkeypatch.context() as away:
            away.setattr(store, "submit_lookup", refuse)
            for name in "abc":
                assert scheduler.matched_tokens(request(name), 0) == (0, False)
                scheduler.finished(request(name))
        assert answer(scheduler, request("d")) == 0
        scheduler.finished(request("d"))
    assert [text.split(" (")[0] for text in said] == [
        "kvpool: the pool gives no answer",
        "kvpool: the pool answers again",
    ]


def test_of_two_stages_the_facts_of_both_make_the_namespace_and_are_told_once(store: Store) -> None:
    scheduler, asked = half(store, ranks=4, pipeline_parallel=2, heard=False), request("a")
    first, second = {**FACTS, "group0.layers": 1}, {**FACTS, "group0.layers": 3}
    of_both = {**FACTS, "stage0.group0.layers": 1, "stage1.group0.layers": 3}
    scheduler.update(PoolWorkerMetadata(facts={0: first, 1: first, 2: second}), (), ())
    assert scheduler.plan(SchedulerOutput.make_empty()).facts == {}
    assert scheduler.matched_tokens(asked, 0) == (None, False)
    scheduler.update(PoolWorkerMetadata(facts={3: second}), (), ())
    for rank in range(4):
        keys = Namespace("default", of_both).keys(asked.block_hashes, 0, rank)
        assert all(store.put_many(keys, [b"x"] * len(keys)))
    assert answer(scheduler, asked) == 96
    assert scheduler.plan(SchedulerOutput.make_empty()).facts == of_both
    assert scheduler.plan(SchedulerOutput.make_empty()).facts == {}


def computed(scheduler: SchedulerHalf, ranks_blocks: int = 4) -> tuple[BlockPool, list[int], list[int]]:
    """(the engine's pool, the blocks of a request that is over, the tags of their stores)."""
    asked = request("a", tokens=BLOCK_TOKENS * ranks_blocks)
    block_pool = BlockPool(16, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(block_pool)
    blocks = block_pool.get_new_blocks(ranks_blocks)
    table = [block.block_id for block in blocks]
    scheduler.seen(asked)
    scheduler.allocated(asked, (table,), 0)
    step = scheduler.plan(output(asked, asked.num_tokens, (table,)))
    assert ids(step.stores) == table
    block_pool.free_blocks(
        reversed(blocks)
    )  # the request ends, is aborted or preempted, or its window goes on
    scheduler.finished(asked)
    return block_pool, table, step.tags


def test_blocks_are_given_back_when_a_rank_has_ended_the_pool(store: Store) -> None:
    scheduler = half(store, ranks=2)
    block_pool, _, tags = computed(scheduler)
    broken = PoolWorkerMetadata(
        broken={1: "planted"}, staged=dict.fromkeys(tags, 1), dropped=dict.fromkeys(tags, 1)
    )
    scheduler.update(broken, (), ())
    assert block_pool.get_num_free_blocks() == 15 - 4, "the other rank goes on reading them"
    scheduler.update(PoolWorkerMetadata(staged=dict.fromkeys(tags, 1)), (), ())
    assert block_pool.get_num_free_blocks() == 15


# Records of several blocks.

LONG_TABLE = (list(range(11, 24)),)  # of 200 tokens: three records of four blocks, and a half block


@pytest.mark.parametrize(
    ("local_tokens", "first"),
    [(0, (11, 12, 13, 14)), (16, (0, 12, 13, 14)), (112, (0, 0, 0, 18)), (128, (19, 20, 21, 22))],
)
def test_a_load_may_begin_inside_a_record(store: Store, local_tokens: int, first: tuple[int, ...]) -> None:
    scheduler, asked = half(store, blocks_per_record=4), request("a", tokens=200)
    put(store, asked.block_hashes[3::4])
    assert answer(scheduler, asked, local_tokens) == 192 - local_tokens
    scheduler.allocated(asked, LONG_TABLE, 192 - local_tokens)
    (load,) = scheduler.plan(SchedulerOutput.make_empty()).loads
    begun = local_tokens // 64
    assert [block.block_hash for block in load.blocks] == asked.block_hashes[3 + 4 * begun :: 4]
    assert load.blocks[0].block_ids == first
    assert ids(load.blocks[1:]) == LONG_TABLE[0][4 * begun + 4 : 12]


def test_a_record_is_stored_when_its_last_block_is_full_and_announced_as_one(store: Store) -> None:
    scheduler, asked = half(store, blocks_per_record=4), request("a", tokens=200)
    scheduler.seen(asked)
    scheduler.allocated(asked, LONG_TABLE, 0)
    steps = []
    for tokens in (60, 20, 110, 10):
        steps.append(scheduler.plan(output(asked, tokens, LONG_TABLE)))
        asked.num_computed_tokens += tokens
    assert [ids(step.stores) for step in steps] == [[], [11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21, 22]]
    assert [block.block_hash for step in steps for block in step.stores] == asked.block_hashes[3::4]
    tags = [tag for step in steps for tag in step.tags]
    scheduler.update(PoolWorkerMetadata(stored=dict.fromkeys(tags, 1)), (), ())
    events = scheduler.take_events()
    ends = [int.from_bytes(block_hash[-8:], "big") for block_hash in asked.block_hashes[3::4]]
    assert [event.block_hashes for event in events] == [[end] for end in ends]
    assert [event.parent_block_hash for event in events] == [None, *ends[:2]]
    assert [(event.block_size, event.medium) for event in events] == [(64, "STORAGE")] * 3
    assert [token for event in events for token in event.token_ids] == list(range(192))


def test_a_record_that_begins_with_what_the_engine_had_is_stored_whole(store: Store) -> None:
    """Whoever computed its beginning had too few tokens to fill it."""
    scheduler, asked = half(store, blocks_per_record=4), request("a", tokens=200)
    put(store, asked.block_hashes[3:4])
    scheduler.seen(asked)
    scheduler.allocated(asked, LONG_TABLE, 0)
    asked.num_computed_tokens = 112
    assert ids(scheduler.plan(output(asked, 88, LONG_TABLE)).stores) == list(range(15, 23))


@pytest.mark.parametrize("at_once", [False, True])
def test_blocks_that_two_records_share_are_given_back_when_both_have_landed(
    store: Store, at_once: bool
) -> None:
    scheduler = half(store, blocks_per_record=2)
    block_pool = BlockPool(16, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(block_pool)
    shared, *own = block_pool.get_new_blocks(3)
    block_pool.touch([shared])  # by the second request, which finds it in the cache
    tags: list[int] = []
    for held_tokens, name, block in zip((0, 16), "ab", own, strict=True):
        asked = request(name, tokens=33)
        table = ([shared.block_id, block.block_id],)
        scheduler.seen(asked)
        scheduler.allocated(asked, table, 0)
        asked.num_computed_tokens = held_tokens
        step = scheduler.plan(output(asked, 33 - held_tokens, table))
        assert ids(step.stores) == table[0]
        tags += step.tags
        block_pool.free_blocks([block, shared])
        scheduler.finished(asked)
    assert block_pool.get_num_free_blocks() == 15 - 3
    if not at_once:
        scheduler.update(PoolWorkerMetadata(staged={tags[1]: 1}), (), ())
        assert block_pool.get_num_free_blocks() == 15 - 2, "the first record may still be read"
        del tags[1]
    scheduler.update(PoolWorkerMetadata(staged=dict.fromkeys(tags, 1)), (), ())
    assert block_pool.get_num_free_blocks() == 15
    assert len({block.block_id for block in block_pool.get_new_blocks(15)}) == 15


def test_a_block_that_a_load_did_not_find_is_announced_as_removed(store: Store) -> None:
    scheduler, asked = half(store), request("a")
    scheduler.update(PoolWorkerMetadata(missing={(asked.block_hashes[3], 0)}), (), ())
    (event,) = scheduler.take_events()
    assert int(event.block_hashes[0]).to_bytes(8, "big") == asked.block_hashes[3][-8:]


def cached(scheduler: SchedulerHalf, asked: Request) -> None:
    """The engine's own cache holds the full blocks of a request."""
    block_pool = BlockPool(16, True, BLOCK_TOKENS, enable_kv_cache_events=True)
    blocks = block_pool.get_new_blocks(len(asked.block_hashes))
    block_pool.cache_full_blocks(asked, blocks, 0, len(blocks), BLOCK_TOKENS, 0)
    scheduler.bind_block_pool(block_pool)


def test_all_that_the_engine_holds_is_told_when_an_index_asks_and_not_again_soon(store: Store) -> None:
    scheduler, asked = half(store), request("a")
    cached(scheduler, asked)
    scheduler.update(PoolWorkerMetadata(), (), ())
    assert scheduler.take_events() == []
    scheduler.update(PoolWorkerMetadata(asked=True, missing={(asked.block_hashes[3], 0)}), (), ())
    removed, cleared, held = scheduler.take_events()
    assert (removed.medium, cleared.medium, held.medium) == ("STORAGE", "GPU", "GPU")
    assert [int(one).to_bytes(8, "big") for one in held.block_hashes] == [
        block_hash[-8:] for block_hash in asked.block_hashes
    ]
    assert scheduler.take_events() == []
    scheduler.update(PoolWorkerMetadata(asked=True), (), ())
    assert scheduler.take_events() == [], "the same request, which stands until its lease ends"


def test_an_engine_that_publishes_nothing_tells_nothing(store: Store) -> None:
    scheduler, asked = half(store, events=False), request("a")
    cached(scheduler, asked)
    scheduler.update(PoolWorkerMetadata(asked=True), (), ())
    assert scheduler.take_events() == []


def test_a_fault_in_telling_ends_the_pool_and_not_the_engine(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, asked = half(store), request("a")
    cached(scheduler, asked)
    monkeypatch.setattr("kvpool.vllm.tell.events.held_event", planted)
    scheduler.update(PoolWorkerMetadata(asked=True, missing={(asked.block_hashes[3], 0)}), (), ())
    (removed,) = scheduler.take_events()
    assert removed.medium == "STORAGE", "nothing is told by halves, least of all a clear"
    assert scheduler.plan(output(asked, 100, TABLE)).stores == []


def test_an_abort_cancels_the_lookup_and_the_load(stalling: ScriptedStore) -> None:
    scheduler, looking = half(stalling), request("looking")
    scheduler.seen(looking)
    scheduler.finished(looking)
    assert [batch.cancelled for batch in stalling.under_way] == [True]
    loading = request("loading")
    scheduler.seen(loading)
    stalling.records |= dict.fromkeys(NAMESPACE.keys(loading.block_hashes, 0, 0), b"x")
    stalling.end(-1)
    assert answer(scheduler, loading) > 0
    scheduler.allocated(loading, TABLE, 96)
    scheduler.plan(SchedulerOutput.make_empty())
    scheduler.finished(loading)
    assert scheduler.plan(SchedulerOutput.make_empty()).cancelled == ["loading"]
    assert not scheduler._requests


def test_an_offer_that_the_engine_did_not_take_loads_nothing(store: Store) -> None:
    scheduler, asked = half(store), request("a")
    put(store, asked.block_hashes)
    assert answer(scheduler, asked) > 0
    scheduler.allocated(asked, TABLE, 0)
    assert scheduler.plan(SchedulerOutput.make_empty()).loads == []


# No request ends the pool for the others.


def faults(scheduler: SchedulerHalf, where: str) -> float:
    return scheduler.counters.take().get(f"{metrics.REQUEST_FAULTS.name}/{where}", 0)


def works(scheduler: SchedulerHalf, store: Store) -> None:
    """The pool is on: a request is offered what is there, and stores what is not."""
    good = request("good")
    put(store, good.block_hashes[:2])
    assert answer(scheduler, good) >= 32
    scheduler.allocated(good, TABLE, 0)
    assert ids(scheduler.plan(output(good, 100, TABLE)).stores) == TABLE[0][:6]
    scheduler.finished(good)


@pytest.mark.parametrize(
    "hashes", [[b"short"] * 6, [b"x" * 65] * 6, [b"x" * 16] + [b"x" * 31] * 5, [None] * 6, 5]
)
def test_a_request_with_hashes_that_nobody_can_spell_goes_without_the_pool(store: Store, hashes: Any) -> None:
    scheduler, bad = half(store), request("bad")
    bad.block_hashes = hashes
    scheduler.seen(bad)
    assert faults(scheduler, "lookup") == 1
    assert scheduler.matched_tokens(bad, 0) == (0, False)
    scheduler.allocated(bad, TABLE, 0)
    assert scheduler.plan(output(bad, 100, TABLE)).stores == []
    scheduler.finished(bad)
    works(scheduler, store)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("vllm.engine.internals.adapter_changed_in_place", ZeroDivisionError("planted")),
        ("vllm.geometry.Geometry.record_hashes", ZeroDivisionError("planted")),
        ("vllm.load.lookups.groups_to_ask", ZeroDivisionError("planted")),
        ("store.Store.submit_lookup", ConfigError("planted")),
        ("store.Store.submit_lookup", RuntimeError("planted")),
        ("store.Store.submit_lookup", StoreUnavailable("queue full")),
    ],
    ids=str,
)
def test_a_fault_while_a_request_is_looked_up_costs_that_request_the_pool(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise error

    scheduler, bad = half(store), request("bad")
    put(store, bad.block_hashes)
    with monkeypatch.context() as broken:
        broken.setattr(f"kvpool.{call}", fails)
        scheduler.seen(bad)
    away = isinstance(error, StoreUnavailable)  # which is none of ours
    assert faults(scheduler, "lookup") == (not away)
    assert scheduler.matched_tokens(bad, 0) == (0, False)
    assert (scheduler.plan(output(bad, 100, TABLE)).stores == []) or away
    scheduler.finished(bad)
    works(scheduler, store)


def test_a_fault_in_an_offer_costs_that_request_the_pool(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, bad = half(store), request("bad")
    put(store, bad.block_hashes)
    with monkeypatch.context() as broken:
        broken.setattr("kvpool.vllm.geometry.Geometry.longest_hit", planted)
        assert answer(scheduler, bad) == 0
    assert faults(scheduler, "offer") == 1
    assert scheduler.matched_tokens(bad, 0) == (0, False)
    scheduler.finished(bad)
    works(scheduler, store)


def test_a_fault_in_planning_a_load_fails_that_load_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, bad = half(store), request("bad")
    put(store, bad.block_hashes)
    assert answer(scheduler, bad) == 96
    with monkeypatch.context() as broken:
        broken.setattr("kvpool.vllm.geometry.Geometry.record_hashes", planted)
        scheduler.allocated(bad, TABLE, 96)
    assert faults(scheduler, "load") == 1
    (load,) = scheduler.plan(SchedulerOutput.make_empty()).loads
    assert not load.blocks, "the engine waits for this load: it has to be told that it failed"
    scheduler.update(None, finished_loads=["bad"], failed_loads=["bad"])
    assert scheduler.matched_tokens(bad, 0) == (0, False)
    scheduler.finished(bad)
    works(scheduler, store)


@pytest.mark.parametrize("tokens", [0, 96])
def test_a_fault_over_a_request_that_is_first_met_with_its_blocks_costs_it_the_pool(
    tokens: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, bad = half(store), request("bad")
    with monkeypatch.context() as broken:
        broken.setattr("kvpool.vllm.scheduler.read_hints", planted)
        scheduler.allocated(bad, TABLE, tokens)
    assert faults(scheduler, "load") == 1
    assert [load.blocks for load in scheduler.plan(SchedulerOutput.make_empty()).loads] == [()] * bool(tokens)
    scheduler.finished(bad)
    works(scheduler, store)


def test_a_fault_in_planning_stores_costs_that_request_its_stores(store: Store) -> None:
    scheduler, bad, other = half(store), request("bad"), request("other")
    for one in (bad, other):
        scheduler.seen(one)
        scheduler.allocated(one, TABLE, 0)
    no_such_block = ([7, 8, 9999, 10, 11, 12, 13],)
    assert ids(scheduler.plan(output(bad, 100, no_such_block)).stores) == [7, 8]
    assert faults(scheduler, "store") == 1
    assert ids(scheduler.plan(output(other, 100, TABLE)).stores) == TABLE[0][:6]
    for one in (bad, other):
        scheduler.finished(one)
    works(scheduler, store)


def test_a_fault_in_what_the_workers_report_ends_the_pool_and_not_the_engine(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, asked = half(store), request("a")
    put(store, asked.block_hashes)
    monkeypatch.setattr(scheduler._namespace, "learn", planted)
    scheduler.update(PoolWorkerMetadata(stored={1: 1}), (), ())
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    assert scheduler.plan(output(asked, 100, TABLE)).stores == []


def test_a_request_is_counted_by_the_first_group_that_is_in_the_pool(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In vLLM's order windows that are filled again come first."""
    groups = (Group(BLOCK_TOKENS, 2 * BLOCK_TOKENS, scratch=True), Group(BLOCK_TOKENS))
    scheduler, asked = half(store, groups=groups), request("a")
    counted: list[Sequence[bytes]] = []
    monkeypatch.setattr(
        scheduler._outcomes, "admitted", lambda state, hashes, *rest, **more: counted.append(hashes)
    )
    scheduler.allocated(asked, ([], []), 0)
    assert counted == [asked.block_hashes]
    assert asked.block_hashes
