"""Plans against plain references: what a hit needs, what a hit is, what a step stores."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvpool.vllm.geometry import Geometry, Group

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
    groups += [Group(draw(BLOCKS), 2, state=True) for _ in range(draw(st.integers(0, 2)))]
    chunks = st.integers(1, 300)
    groups += [
        Group(draw(BLOCKS), None, per_record, chunk=draw(chunks)) for _ in range(draw(st.integers(0, 1)))
    ]
    if draw(st.booleans()):
        groups = [replace(group, reads_ahead=True) for group in groups]
    for _ in range(draw(st.integers(0, 2))):
        scratch = Group(draw(BLOCKS), draw(st.none() | st.integers(1, 300)), scratch=True)
        groups.insert(draw(st.integers(0, len(groups))), scratch)
    engine_tokens = math.lcm(*(group.block_tokens for group in groups))
    align_tokens = math.lcm(*(group.record_tokens for group in groups))
    max_tokens = draw(st.integers(0, 12 // per_record)) * align_tokens
    local_tokens = draw(st.integers(0, max_tokens // engine_tokens)) * engine_tokens
    present = [
        draw(st.lists(st.booleans() | st.just(True), min_size=n, max_size=n))
        for n in (0 if group.scratch else max_tokens // group.record_tokens for group in groups)
    ]
    return groups, present, local_tokens, max_tokens, align_tokens


def _sees(group: Group, token: int, hit_tokens: int) -> bool:
    """Whether the query at position ``hit_tokens`` attends to ``token`` (itself at distance 0)."""
    if group.scratch:
        return False
    if group.chunk is not None and token // group.chunk != hit_tokens // group.chunk:
        return False
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
        ) and all(
            hit_tokens < max_tokens and present[g][hit_tokens // group.record_tokens]
            for g, group in enumerate(groups)
            if group.reads_ahead and not group.state
        )

    candidates = range(0, max_tokens + 1, align_tokens)
    expected = max((n for n in candidates if n > local_tokens and usable(n)), default=local_tokens)
    geometry = Geometry(tuple(groups), align_tokens=align_tokens)
    there = [bytes(blocks) for blocks in present]
    assert geometry.longest_hit(there, local_tokens=local_tokens, max_tokens=max_tokens) == expected


@given(situations())
def test_every_token_that_is_seen_is_local_or_loaded(situation: Situation) -> None:
    groups, _, local_tokens, max_tokens, _ = situation
    for group in groups:
        loaded = group.records_to_load(local_tokens, max_tokens)
        for token in range(max_tokens):
            if _sees(group, token, max_tokens):
                assert token < local_tokens or token // group.record_tokens in loaded
        for index in loaded:
            tokens = range(index * group.record_tokens, (index + 1) * group.record_tokens)
            assert any(token >= local_tokens for token in tokens), "a record that the engine has"
            assert any(_sees(group, token, max_tokens) for token in tokens), "a record nobody needs"


@given(situations())
def test_a_record_is_kept_where_any_hit_needs_it_and_else_a_window_keeps_none(situation: Situation) -> None:
    groups, _, _, max_tokens, align_tokens = situation
    for group, pattern in zip(
        groups, Geometry(tuple(groups), align_tokens=align_tokens).reached, strict=True
    ):
        kept = [bool(pattern[i % len(pattern)]) for i in range(max_tokens // group.record_tokens)]
        needed = [False] * len(kept)
        for hit_tokens in range(align_tokens, max_tokens + 1, align_tokens):
            for i in group.records_to_load(0, hit_tokens):
                needed[i] = True
            if group.reads_ahead and not group.state and hit_tokens < max_tokens:
                needed[hit_tokens // group.record_tokens] = True
        assert all(k for k, n in zip(kept, needed, strict=True) if n)
        if group.scratch or (group.window is not None and not group.reads_ahead):
            assert kept == needed


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
        for record in group.records_to_load(local_tokens, max_tokens):
            ids = group.blocks_lacking(table, record, local_tokens)
            assert len(ids) == group.blocks_per_record
            first = 100 + record * group.blocks_per_record
            assert all(block in (0, first + at) for at, block in enumerate(ids)), "each in its place"
            written += [block for block in ids if block]
        assert written == [block for block in table[local_tokens // group.block_tokens :] if block]


def test_a_record_is_held_when_all_of_its_blocks_are() -> None:
    group = Group(16, None, 3)
    table = [7, 8, 9, 0, 11, 12, 13, 14, 15, 16]
    assert [group.blocks_held(table, record) for record in range(4)] == [
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
        new = Group(block_tokens).records_to_store(already, computed, hashed)
        stored += new
        already = new.stop
    assert stored == list(range(computed // block_tokens))


FULL, STATE = Group(16), Group(32, 2, state=True)


def test_prompts_part_where_their_blocks_end_whatever_states_there_are() -> None:
    present = [b"\1\1\1\1\1\0", b"\0\0\0"]
    geometry = Geometry((FULL, STATE), align_tokens=32)
    assert geometry.junction(present, 96) == 64
    assert geometry.longest_hit(present, local_tokens=0, max_tokens=96) == 0
    assert Geometry((FULL,), align_tokens=32).junction(present[:1], 96) == 0, "no states"


def test_hits_end_inside_of_blocks_of_states_beside_full_attention_only() -> None:
    state = Group(16, 2, state=True)
    assert Geometry((FULL, state), match_tokens=4).has_tails
    assert not Geometry((FULL, state), match_tokens=16).has_tails
    assert not Geometry((FULL, state), match_tokens=0).has_tails
    assert not Geometry((FULL, STATE), match_tokens=4).has_tails, "blocks of two sizes"
    assert not Geometry((FULL,), match_tokens=4).has_tails
    assert not Geometry((FULL, state, Group(16, 100)), match_tokens=4).has_tails
    assert Geometry((FULL, Group(8, scratch=True), state), match_tokens=4).has_tails, (
        "a ring's blocks do not matter"
    )
    assert not Geometry((FULL, Group(16, 32, scratch=True), state), match_tokens=4).has_tails, (
        "then vLLM cuts hits to whole blocks"
    )
    for other in ({"blocks_per_record": 2}, {"reads_ahead": True}):
        assert not Geometry((replace(FULL, **other), state), match_tokens=4).has_tails


def test_states_are_kept_where_requests_resume() -> None:
    ends = [tokens for tokens in range(32, 257, 32) if STATE.is_resumed_at(tokens, 180, 64)]
    assert ends == [64, 160, 192, 224, 256], "where prompts part, at the prompt's end and behind it"
    assert STATE.is_resumed_at(160, 160, 0), "a longer prompt may follow"
    assert [tokens for tokens in (64, 96, 128) if STATE.is_resumed_at(tokens, 160, 0)] == [128], (
        "the same one"
    )
    ahead = replace(STATE, reads_ahead=True)
    assert [tokens for tokens in (64, 96, 128) if ahead.is_resumed_at(tokens, 160, 0)] == [96, 128]
