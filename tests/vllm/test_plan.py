"""Plans against plain references: what a hit needs, what a hit is, what a step stores."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvpool.vllm.plan import (
    Group,
    PoolWorkerMetadata,
    blocks_to_load,
    blocks_to_store,
    longest_hit,
)

BLOCKS = st.sampled_from([16, 32, 64])


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Group], list[list[bool]], int, int, int]:
    groups = [
        Group(draw(BLOCKS), draw(st.none() | st.integers(1, 300))) for _ in range(draw(st.integers(1, 3)))
    ]
    align_tokens = math.lcm(*(group.block_tokens for group in groups))
    max_tokens = draw(st.integers(0, 12)) * align_tokens
    local_tokens = draw(st.integers(0, max_tokens // align_tokens)) * align_tokens
    present = [
        draw(st.lists(st.booleans() | st.just(True), min_size=n, max_size=n))
        for n in (max_tokens // group.block_tokens for group in groups)
    ]
    return groups, present, local_tokens, max_tokens, align_tokens


def _sees(group: Group, token: int, hit_tokens: int) -> bool:
    """Whether the query at position ``hit_tokens`` attends to ``token`` (itself at distance 0)."""
    return token < hit_tokens and (group.window is None or hit_tokens - token < group.window)


@given(situations())
def test_longest_hit_is_what_attention_needs(
    situation: tuple[list[Group], list[list[bool]], int, int, int],
) -> None:
    groups, present, local_tokens, max_tokens, align_tokens = situation

    def usable(hit_tokens: int) -> bool:
        return all(
            present[g][token // group.block_tokens]
            for g, group in enumerate(groups)
            for token in range(local_tokens, hit_tokens)
            if _sees(group, token, hit_tokens)
        )

    candidates = range(local_tokens + align_tokens, max_tokens + 1, align_tokens)
    expected = max((n for n in candidates if usable(n)), default=local_tokens)
    assert (
        longest_hit(
            groups, present, local_tokens=local_tokens, max_tokens=max_tokens, align_tokens=align_tokens
        )
        == expected
    )


@given(situations())
def test_every_token_that_is_seen_is_local_or_loaded(
    situation: tuple[list[Group], list[list[bool]], int, int, int],
) -> None:
    groups, _, local_tokens, max_tokens, _ = situation
    for group in groups:
        loaded = blocks_to_load(group, local_tokens, max_tokens)
        for token in range(max_tokens):
            if _sees(group, token, max_tokens):
                assert token < local_tokens or token // group.block_tokens in loaded
        for index in loaded:
            tokens = range(index * group.block_tokens, (index + 1) * group.block_tokens)
            assert index * group.block_tokens >= local_tokens
            assert any(_sees(group, token, max_tokens) for token in tokens), "a block nobody needs"


def test_a_hole_ends_full_attention_and_not_a_window_beyond_it() -> None:
    present = [True] * 4 + [False] + [True] * 11
    full, window = Group(16), Group(16, 40)
    sizes = {"local_tokens": 0, "max_tokens": 256, "align_tokens": 16}
    assert longest_hit([full], [present], **sizes) == 64
    assert longest_hit([window], [present], **sizes) == 256
    assert longest_hit([full, window], [present, present], **sizes) == 64


@given(BLOCKS, st.lists(st.integers(1, 100), max_size=20), st.integers(0, 3))
def test_each_full_block_is_stored_once(block_tokens: int, steps: list[int], lag: int) -> None:
    """However a request's tokens fall into steps, also when hashes come ``lag`` blocks late."""
    stored: list[int] = []
    computed = already = 0
    for tokens in [*steps, 0]:
        computed += tokens
        hashed = max(0, computed // block_tokens - (lag if tokens else 0))
        new = blocks_to_store(block_tokens, already, computed, hashed)
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
