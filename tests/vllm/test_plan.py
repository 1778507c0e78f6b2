"""Plans against plain references: what a hit needs, what a hit is, what a step stores."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvpool.vllm.plan import (
    Group,
    PoolWorkerMetadata,
    blocks_held,
    blocks_lacking,
    longest_hit,
    records_to_load,
    records_to_store,
)

BLOCKS = st.sampled_from([16, 32, 64])
# (groups, what the pool has, local tokens, most tokens, where hits may end)
Situation = tuple[list[Group], list[list[bool]], int, int, int]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    per_record = draw(st.sampled_from([1, 1, 2, 3, 4]))
    groups = [
        Group(draw(BLOCKS), draw(st.none() | st.integers(1, 300)), per_record)
        for _ in range(draw(st.integers(1, 3)))
    ]
    engine_tokens = math.lcm(*(group.block_tokens for group in groups))
    align_tokens = math.lcm(*(group.record_tokens for group in groups))
    max_tokens = draw(st.integers(0, 12 // per_record)) * align_tokens
    local_tokens = draw(st.integers(0, max_tokens // engine_tokens)) * engine_tokens
    present = [
        draw(st.lists(st.booleans() | st.just(True), min_size=n, max_size=n))
        for n in (max_tokens // group.record_tokens for group in groups)
    ]
    return groups, present, local_tokens, max_tokens, align_tokens


def _sees(group: Group, token: int, hit_tokens: int) -> bool:
    """Whether the query at position ``hit_tokens`` attends to ``token`` (itself at distance 0)."""
    return token < hit_tokens and (group.window is None or hit_tokens - token < group.window)


@given(situations())
def test_longest_hit_is_what_attention_needs(situation: Situation) -> None:
    groups, present, local_tokens, max_tokens, align_tokens = situation

    def usable(hit_tokens: int) -> bool:
        return all(
            present[g][token // group.record_tokens]
            for g, group in enumerate(groups)
            for token in range(local_tokens, hit_tokens)
            if _sees(group, token, hit_tokens)
        )

    candidates = range(0, max_tokens + 1, align_tokens)
    expected = max((n for n in candidates if n > local_tokens and usable(n)), default=local_tokens)
    assert (
        longest_hit(
            groups,
            [bytes(blocks) for blocks in present],
            local_tokens=local_tokens,
            max_tokens=max_tokens,
            align_tokens=align_tokens,
        )
        == expected
    )


@given(situations())
def test_every_token_that_is_seen_is_local_or_loaded(situation: Situation) -> None:
    groups, _, local_tokens, max_tokens, _ = situation
    for group in groups:
        loaded = records_to_load(group, local_tokens, max_tokens)
        for token in range(max_tokens):
            if _sees(group, token, max_tokens):
                assert token < local_tokens or token // group.record_tokens in loaded
        for index in loaded:
            tokens = range(index * group.record_tokens, (index + 1) * group.record_tokens)
            assert any(token >= local_tokens for token in tokens), "a record that the engine has"
            assert any(_sees(group, token, max_tokens) for token in tokens), "a record nobody needs"


@given(situations())
def test_of_a_record_only_what_the_engine_lacks_is_written(situation: Situation) -> None:
    groups, _, local_tokens, max_tokens, _ = situation
    for group in groups:
        # As vLLM's block table: null blocks where no later token sees anything.
        table = [
            100 + i
            if any(_sees(group, i * group.block_tokens + at, max_tokens) for at in range(group.block_tokens))
            else 0
            for i in range(max_tokens // group.block_tokens)
        ]
        written = []
        for record in records_to_load(group, local_tokens, max_tokens):
            ids = blocks_lacking(group, table, record, local_tokens)
            assert len(ids) == group.blocks_per_record
            first = 100 + record * group.blocks_per_record
            assert all(block in (0, first + at) for at, block in enumerate(ids)), "each in its place"
            written += [block for block in ids if block]
        assert written == [block for block in table[local_tokens // group.block_tokens :] if block]


def test_a_record_is_held_when_all_of_its_blocks_are() -> None:
    group = Group(16, None, 3)
    table = [7, 8, 9, 0, 11, 12, 13, 14, 15, 16]
    assert [blocks_held(group, table, record) for record in range(4)] == [
        (7, 8, 9),
        None,
        (13, 14, 15),
        None,
    ]


@given(BLOCKS, st.lists(st.integers(1, 100), max_size=20), st.integers(0, 3))
def test_each_full_block_is_stored_once(block_tokens: int, steps: list[int], lag: int) -> None:
    """However a request's tokens fall into steps, also when hashes come ``lag`` blocks late."""
    stored: list[int] = []
    computed = already = 0
    for tokens in [*steps, 0]:
        computed += tokens
        hashed = max(0, computed // block_tokens - (lag if tokens else 0))
        new = records_to_store(block_tokens, already, computed, hashed)
        stored += new
        already = new.stop
    assert stored == list(range(computed // block_tokens))


def test_reports_of_ranks_add_up() -> None:
    ours = PoolWorkerMetadata(facts={0: {"a": 1}}, stored={1: 1, 2: 1}, missing={(b"h", 0)})
    theirs = PoolWorkerMetadata(facts={1: {"a": 1}}, stored={2: 1}, dropped={1: 1}, broken={1: "disk"})
    both = ours.aggregate(theirs)
    assert both.facts == {0: {"a": 1}, 1: {"a": 1}}
    assert both.stored == {1: 1, 2: 2}
    assert both.dropped == {1: 1}
    assert both.broken == {1: "disk"}
    assert both.missing == {(b"h", 0)}
    assert not both.asked
    timed = PoolWorkerMetadata(timed=3, load_s={"a": 1.0, "b": 2.0})
    slower = timed.aggregate(PoolWorkerMetadata(load_s={"b": 3.0, "c": 4.0}))
    assert (slower.timed, slower.load_s) == (3, {"a": 1.0, "b": 3.0, "c": 4.0})
    assert not timed.is_empty()
    assert both.aggregate(PoolWorkerMetadata(asked=True)).asked
    assert PoolWorkerMetadata().is_empty()
    assert not PoolWorkerMetadata(asked=True).is_empty()
    assert not both.is_empty()
