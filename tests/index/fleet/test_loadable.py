"""``loadable_blocks``: what a rank holds, and from there on what its pool does.

Against a plain model of the same events, and against what kvpool's connector finds for the same records.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import _native
from kvpool.index import PrefixIndex
from kvpool.index.fleet.fleet import Fleet
from tests.support.fleets import Clock, a_worker, joined, say
from tests.support.oracle import Model
from tests.support.wire import batch, packed64, removed, stored

NAMESPACE = "a" * 32
PROMPT = list(range(1, 11))


def row_of(fleet: Fleet, worker: str = "w", prompt: Sequence[int] = PROMPT) -> tuple[int, int, int]:
    """(local, pool, loadable) blocks."""
    (row,) = fleet.lookup("m", hashes64=packed64(prompt), workers=[worker])
    whole = {one.worker: one for one in fleet.lookup("m", hashes64=packed64(prompt))}[worker]
    assert row == whole, "one candidate is answered as all are"
    return row.local_blocks, row.pool_blocks, row.loadable_blocks


def a_fleet(*events: dict[str, object], namespace: str = NAMESPACE) -> Fleet:
    fleet = Fleet(clock=Clock())
    joined(fleet, a_worker("w", namespace=namespace), *events)
    return fleet


def test_a_worker_reaches_into_its_own_namespace_only() -> None:
    fleet = a_fleet(stored(PROMPT[:3]), stored(PROMPT[3:], medium="STORAGE"))
    for name, namespace in (("other", "b" * 32), ("none", "")):
        joined(fleet, a_worker(name, namespace=namespace, port=6000), stored(PROMPT[:4]))
        assert row_of(fleet, name) == (4, 0, 4)
    joined(fleet, a_worker("late", namespace=NAMESPACE, port=7000), stored(PROMPT[:4]))
    assert row_of(fleet, "late") == (4, 0, 10)
    say(fleet, "default/late", 0, 1, batch(removed(PROMPT[7:8], medium="STORAGE")))
    assert row_of(fleet, "w") == (3, 0, 7), "a miss that any worker tells ends it for all"


def test_of_a_stale_rank_only_the_pool_counts() -> None:
    fleet = a_fleet(stored(PROMPT[:5]), stored(PROMPT[:2] + PROMPT[5:], medium="STORAGE"))
    assert row_of(fleet) == (5, 2, 10)
    fleet.rank("default/w", 0).mark(stale=True, problem="x")
    assert row_of(fleet) == (0, 2, 2)


def test_a_row_that_is_asked_again_reaches_as_far() -> None:
    index = PrefixIndex()
    index.apply("a", batch(stored(PROMPT[:3]), stored(PROMPT[3:], medium="STORAGE")), pool="p")
    state = _native.RankState()
    state.stale, state.version = False, 1
    rows = _native.Rows((("w", 0, "", 16, "a", "p", "", state),), True)
    answer = rows.answer(index.native, packed64(PROMPT), 0, False)
    assert answer.moved() == (0,)
    index.apply("a", batch(stored(PROMPT[3:4])))
    state.version = 2
    rows.again(0, index.native, packed64(PROMPT), 0, answer, False)
    _, device, _, pool, *_, loadable = answer.columns()
    assert (device, pool, loadable) == ((4,), (0,), (10,))


# ---- against a plain model

KINDS = st.sampled_from([None, None, "full_attention", "full_attention", "sliding_window", "mamba"])


@st.composite
def tellings(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    worker = draw(st.sampled_from(["a", "b"]))
    medium = draw(st.sampled_from(["GPU", "GPU", "CPU", "STORAGE", "STORAGE", "STORAGE"]))
    begin = draw(st.integers(0, 9))
    blocks = PROMPT[begin : begin + draw(st.integers(1, 10))]
    group = draw(st.sampled_from([0, 0, 0, 1]))
    if draw(st.integers(0, 5)) == 0:
        return worker, removed(blocks, medium=medium, group_idx=group)
    return worker, stored(
        blocks, medium=medium, group_idx=group, kv_cache_spec_kind=draw(KINDS), parent=5,
        kv_cache_spec_sliding_window=draw(st.sampled_from([None, 17, 33, 49])),
        block_size=draw(st.sampled_from([16, 16, 16, 32])),
    )  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.lists(tellings(), max_size=16),
    st.lists(st.sampled_from(PROMPT), max_size=10, unique=True),
    st.booleans(),
)
def test_it_is_the_union_that_a_plain_model_says(
    told: list[tuple[str, dict[str, object]]], other: list[int], reuse_reports: bool
) -> None:
    known = {"reuse_reports": reuse_reports, "block_tokens": 16}
    index, model = PrefixIndex(**known), Model(**known)  # type: ignore[arg-type]
    for worker, event in told:
        index.apply(worker, batch(event), pool="p")
        model.apply(worker, 0, [event], pool="p")
    state = _native.RankState()
    state.stale = False
    rows = _native.Rows(
        tuple(
            (name, 0, "", 16, name, pool, "", state) for name, pool in (("a", "p"), ("b", "p"), ("c", "p"))
        ),
        True,
    )
    for prompt in (PROMPT, other):
        expected = {row.worker: row for row in model.match(prompt)}
        prompt_blocks, _, local, pool, *_, loadable = rows.answer(
            index.native, packed64(prompt), 0, False
        ).columns()
        of_pool = expected["p"].pool_blocks if "p" in expected else 0
        assert pool == (of_pool,) * 3
        assert local == tuple(expected[name].local_blocks if name in expected else 0 for name in "abc")
        assert loadable == tuple(max(model.loadable(name, 0, "p", prompt), of_pool) for name in "abc"), (
            f"of {prompt}"
        )
        for place in range(3):
            assert max(local[place], pool[place]) <= loadable[place] <= prompt_blocks[place]


# ---- against the connector


@pytest.mark.vllm
@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_the_connector_would_load(seed: int) -> None:
    from kvpool.vllm.geometry import Geometry, Group

    chance = random.Random(seed)
    for _ in range(60):
        blocks = chance.randrange(1, 25)
        prompt = list(range(1, blocks + 1))
        groups = [
            Group(16, chance.choice([None, None, 17, 40, 64]), chance.choice([1, 1, 2]))
            for _ in range(chance.randrange(1, 4))
        ]
        local = chance.randrange(blocks + 1)
        index = PrefixIndex(reuse_reports=False, block_tokens=16)
        if local:
            index.apply("a", batch(stored(prompt[:local])))
        present = []
        for place, group in enumerate(groups):
            records = prompt[group.blocks_per_record - 1 :: group.blocks_per_record]
            there = [chance.random() < 0.8 for _ in records]
            present.append(bytes(there))
            kind = "full_attention" if group.window is None else "sliding_window"
            told = stored(
                [one for one, is_there in zip(records, there, strict=True) if is_there], medium="STORAGE", parent=9,
                group_idx=place, block_size=group.record_tokens, kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=group.window,
            )  # fmt: skip
            index.apply("a", batch(told), pool="p")
        state = _native.RankState()
        state.stale = False
        rows = _native.Rows((("w", 0, "", 16, "a", "p", "", state),), True)
        *_, loadable = rows.answer(index.native, packed64(prompt), 0, False).columns()
        hit = Geometry(tuple(groups)).longest_hit(present, local_tokens=16 * local, max_tokens=16 * blocks)
        assert loadable == (hit // 16,), (groups, local, present)
