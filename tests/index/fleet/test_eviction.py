"""A full index makes room: what is cold leaves, what is asked for stays, and nobody is credited with too much."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import ConfigError, PrefixIndex
from kvpool._native import MemoryBudget
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.table import Content
from kvpool.index.limits import Limits
from tests.support.fleets import a_worker, say
from tests.support.oracle import Model, device_blocks
from tests.support.wire import HASHES, batch, cleared, packed64, steps, stored


def prompts(seed: int, blocks: int) -> Iterator[list[int]]:
    """Blocks that nobody else has, prompt by prompt."""
    chance = random.Random(seed)
    while True:
        yield [chance.getrandbits(64) for _ in range(blocks)]


# ---- never more than the truth


@settings(max_examples=200, deadline=None)
@given(
    plan=st.lists(steps(), max_size=25),
    questions=st.lists(st.lists(HASHES, max_size=8, unique=True), min_size=3, max_size=6),
    known=st.fixed_dictionaries(
        {"reuse_reports": st.booleans(), "block_tokens": st.sampled_from([None, 8, 16])}
    ),
    max_blocks=st.integers(1, 9),
)
def test_it_never_says_more_than_a_plain_model(
    plan: list[tuple[Any, ...]], questions: list[list[int]], known: dict[str, Any], max_blocks: int
) -> None:
    index, model = PrefixIndex(max_blocks=max_blocks, **known), Model(**known)
    for what, worker, *rest in plan:
        if what == "remove":
            index.remove_worker(worker)
            model.remove_worker(worker)
        elif what == "clear":
            rank, tier = rest
            index.clear(worker, dp_rank=rank, tier=tier)
            model.clear(worker, rank, ("device", "host", "disk", "pool") if tier is None else (tier,))
        else:
            told, rank, _ = rest
            index.apply(worker, batch(*told, dp_rank=rank))
            model.apply(worker, rank, told)
        counters = index.counters()
        assert len(index) <= min(max_blocks, model.blocks())
        assert counters["refused"] == 0
        # The sums that are kept at each step are those of what is there.
        again = PrefixIndex.of_image(index.image().pack(), **known)
        for name in index.workers():
            assert index.content(name) == (again.content(name) or Content(0, 0))
            assert index.held_by(name) == again.held_by(name)
            assert again.evicted(name) == index.evicted(name)
            assert all(held <= model.held_by(name)[tier] for tier, held in index.held_by(name).items())
        for question in questions:
            truth = {row[:2]: row for row in model.match(question)}
            rows = {row[:2]: row for row in index.match(packed64(question))}
            if not counters["evicted"]:
                assert rows == truth
            for who, row in rows.items():
                assert all(told <= true for told, true in zip(row[2:], truth[who][2:], strict=True))


# ---- who leaves


FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 33}


@pytest.mark.parametrize("groups", [[{}], [FULL, WINDOW]], ids=["plain", "window"])
def test_what_is_asked_for_stays(groups: list[dict[str, Any]]) -> None:
    index = PrefixIndex(max_blocks=20_000)
    hot, *_ = prompts_of(1, 1000, 1)
    index.apply("hot", batch(*(stored(hot, **group) for group in groups)))
    for cold in prompts_of(2, 500, 200):
        index.apply("cold", batch(stored(cold)))
        assert device_blocks(index, hot, "hot") == 1000
        assert len(index) <= 20_000
    counters = index.counters()
    assert counters["evicted"] == 101_000 - len(index)
    assert len(index) > 19_900, "no more leave than must"
    assert index.evicted("cold") == counters["evicted"]
    assert index.evicted("hot") == index.evicted("nobody") == 0


def test_the_oldest_of_what_is_cold_leaves_first() -> None:
    index = PrefixIndex(max_blocks=20_000)
    told = list(prompts_of(3, 500, 120))
    for prompt in told:
        index.apply("w", batch(stored(prompt)))
    left = [sum(device_blocks(index, [block], "w") for block in prompt) for prompt in told]
    assert sum(left[-8:]) > 0.99 * 8 * 500, "what came last is there"
    assert sum(left[:60]) < 0.05 * 60 * 500, "of the older half hardly anything is"


def prompts_of(seed: int, blocks: int, count: int) -> Iterator[list[int]]:
    found = prompts(seed, blocks)
    return (next(found) for _ in range(count))


def test_what_a_cleared_worker_tells_is_whole_again() -> None:
    index = PrefixIndex(max_blocks=2)
    index.apply("w", batch(stored([1, 2, 3])))
    assert index.evicted("w") == 1
    index.apply("w", batch(cleared(), stored([4])))
    assert (index.evicted("w"), device_blocks(index, [4])) == (0, 1)
    index.apply("w", batch(stored([1, 2, 3])))
    index.clear("w")
    assert index.evicted("w") == 0


# ---- memory


def test_sets_and_copies_are_memory_too() -> None:
    """Where each block has other holders, and many copies, these take most of it."""
    limit = 4 << 20
    chance = random.Random(6)
    index = PrefixIndex(memory=MemoryBudget(limit))
    blocks = [chance.getrandbits(64) for _ in range(60_000)]
    for turn in range(60):
        for worker in range(40):
            index.apply(f"w{worker}", batch(stored(chance.sample(blocks, 200), parent=1 + turn)))
    assert index.counters()["evicted"] > 0
    assert index.memory_nbytes < limit * 1.25
    assert len(index) > 10_000


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, 1 << 63])
def test_what_is_no_budget(limit: Any) -> None:
    with pytest.raises(ConfigError, match="a memory budget is 1 to"):
        Limits(limit)


# ---- said so


def test_a_fleet_says_whose_blocks_were_forgotten() -> None:
    fleet = Fleet(max_blocks=2)
    fleet.add(a_worker("a"), "flag")
    fleet.add(a_worker("b"), "flag")
    say(fleet, "default/a", 0, 0, batch(stored([1, 2])))
    assert [one.publishers[0].problem for one in fleet.workers()] == ["", "not heard from yet"]
    say(fleet, "default/b", 0, 0, batch(stored([3])))
    first, second = (status.publishers[0] for status in fleet.workers())
    assert (first.evicted_blocks, second.evicted_blocks) == (1, 0)
    assert first.problem == "1 of its blocks were forgotten to make room: it may be credited less"
    assert (first.stale, second.problem) == (False, "")
    assert fleet.totals().evicted_blocks == 1
    assert fleet.lookup("m", hashes64=packed64([1, 2])).device_blocks[0] < 2
    for name in ("a", "b"):
        fleet.remove(f"default/{name}")
    assert fleet.totals().evicted_blocks == 1


def test_a_fleet_shares_its_memory() -> None:
    fleet = Fleet(max_memory_nbytes=4 << 20)
    for model in ("m", "n"):
        fleet.add(a_worker(model, model=model), "flag")
        for number, prompt in enumerate(prompts_of(7, 5000, 60)):
            say(fleet, f"default/{model}", 0, number, batch(stored(prompt)))
    totals = fleet.totals()
    assert totals.evicted_blocks > 0
    assert totals.memory_nbytes < 6 << 20
    with pytest.raises(ConfigError, match="memory budget"):
        Fleet(max_memory_nbytes=0)


# ---- at rest, and settled


def test_an_image_of_more_than_there_is_room_for_is_taken_in_part() -> None:
    index = PrefixIndex()
    index.apply("w", batch(stored(list(range(100)))))
    packed = index.image().pack()
    part = PrefixIndex.of_image(packed, max_blocks=40)
    assert (len(part), part.counters()["refused"], part.evicted("w")) == (40, 60, 60)
    part.apply("w", batch(stored([1000])))
    assert (len(part), device_blocks(part, [1000]), part.evicted("w")) == (40, 1, 61)
    memory = MemoryBudget(1)
    (few, _) = PrefixIndex.of_image(packed, memory=memory), PrefixIndex.of_image(packed)
    assert (len(few), memory.used_nbytes) == (100, few.memory_nbytes), "each has its first MiB"


def test_what_is_forgotten_is_not_swept() -> None:
    memory = MemoryBudget(1 << 30)
    index = PrefixIndex(max_blocks=4, memory=memory)
    index.apply("p", batch(stored([1, 2, 3, 4], medium="STORAGE")))
    assert index.mark("p") == 0
    assert memory.used_nbytes == index.memory_nbytes, "marks are memory, too"
    index.apply("w", batch(stored([5, 6])))
    assert (index.evicted("p"), index.held_by("p")["pool"]) == (2, 2)
    index.apply("p", batch(stored([1, 2, 3, 4], medium="STORAGE")))  # all is there
    assert index.sweep("p") == (0, 0)
    assert index.held_by("p")["pool"] + index.held_by("w")["device"] == 4
    before = index.memory_nbytes
    assert index.mark("p") == 0
    assert index.memory_nbytes > before
    index.remove_worker("p")
    index.remove_worker("w")
    assert memory.used_nbytes == index.memory_nbytes <= before
