"""The lookup of one request: what it asks, when it has ended, when its answer is too old."""

from __future__ import annotations

import random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store import LookupBatch
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.load.lookups import FRESH_S, LOOKUP_GRACE_S, RequestLookup, groups_to_ask

pytestmark = [pytest.mark.vllm]


class Scripted(LookupBatch):
    """Ends when the test says so, with an answer or a fault."""

    def __init__(self) -> None:
        self.answer: list[bytes] | StoreUnavailable | None = None
        self.near_answer: list[bytes] = []
        self.cancelled = 0

    def done(self) -> bool:
        return self.answer is not None

    def cancel(self) -> None:
        self.cancelled += 1

    def records(self, timeout_s: float | None = None) -> list[bytes]:
        if isinstance(self.answer, StoreUnavailable):
            raise self.answer
        assert self.answer is not None
        return self.answer

    def near(self) -> list[bytes]:
        return self.near_answer


ONE = Geometry((Group(16),))


def test_each_group_is_asked_for_with_its_hashes_and_as_many_ranks_as_hold_parts_of_it() -> None:
    hashes = [bytes([number]) * 32 for number in range(6)]
    groups = (Group(16), Group(16, window=40, blocks_per_record=2), Group(16, latent=True, copies=4))
    full, window, latent = groups_to_ask(Geometry(groups, ranks=8), [hashes, hashes[1::2], hashes])
    assert (full.group, full.ranks, full.record_tokens, full.sliding_window) == (0, 8, 16, False)
    assert (window.group, window.ranks, window.record_tokens, window.sliding_window) == (1, 8, 32, True)
    assert (latent.group, latent.ranks, latent.record_tokens, latent.sliding_window) == (2, 2, 16, False)
    assert (full.hashes, window.hashes) == (b"".join(hashes), b"".join(hashes[1::2]))
    assert [group.records for group in (full, window, latent)] == [6, 3, 6]
    (in_parts,) = groups_to_ask(Geometry((Group(16, parts=2),), ranks=4), [hashes])
    assert in_parts.ranks == 8
    (nothing,) = groups_to_ask(ONE, [[]])
    assert nothing.records == 0
    nothing.check()


@given(st.integers(1, 8), st.integers(1, 200), st.integers(1, 8), st.integers(0, 50), st.booleans())
def test_records_that_no_hit_needs_are_not_asked_for(
    block_tokens: int, window: int, periods: int, records: int, reads_ahead: bool
) -> None:
    """Nor is a record taken to begin behind its tokens, where a hit of the other groups may have ended."""
    group = Group(block_tokens, window, reads_ahead=reads_ahead)
    geometry = Geometry((group,), align_tokens=periods * block_tokens)
    (pattern,) = geometry.reached
    wanted = (pattern * (records + 1))[:records]
    hashes = [number.to_bytes(32) for number in range(records)]
    (asked,) = groups_to_ask(geometry, [hashes])
    places = [place for place in range(records) if wanted[place]]
    assert asked.hashes == b"".join(hashes[place] for place in places)
    assert all(at * asked.record_tokens <= place * block_tokens for at, place in enumerate(places))
    asked.check()


def test_what_was_not_asked_for_counts_as_there() -> None:
    scripted = Scripted()
    lookup = RequestLookup(scripted, [b"\1\1", b"\0\1\0\1\0"], 100.0, 0.5)
    scripted.answer, scripted.near_answer = [b"\1\0", b"\0\1"], [b"\0\0", b"\0\1"]
    assert lookup.ended(100.1)
    assert lookup.present == [b"\1\0", b"\1\0\1\1\1"]
    assert lookup.near == [b"\0\0", b"\1\0\1\1\1"]


def test_hashes_of_different_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="different lengths"):
        groups_to_ask(ONE, [[bytes(32), bytes(16)]])


@pytest.mark.parametrize("place", [0, 40])
def test_hashes_that_are_not_bytes_are_refused(place: int) -> None:
    hashes: list[object] = [bytes([number]) * 32 for number in range(60)]
    hashes[place] = "text" * 8
    with pytest.raises(ConfigError, match="hashes are bytes"):
        groups_to_ask(ONE, [cast("list[bytes]", hashes)])


@pytest.mark.parametrize("nbytes", [8, 16, 32, 64])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000])
def test_hashes_are_packed_one_behind_the_other(count: int, nbytes: int) -> None:
    hashes = [random.Random(number).randbytes(nbytes) for number in range(count)]
    assert _native.pack_hashes(hashes) == _native.pack_hashes(tuple(hashes)) == b"".join(hashes)


def test_an_answer_is_taken_in_once_and_is_fresh_for_a_while() -> None:
    scripted = Scripted()
    lookup = RequestLookup(scripted, [b"\1\1"], started_s=100.0, timeout_s=0.5)
    assert not lookup.ended(100.1)
    assert not lookup.is_stale(100.1 + 2 * FRESH_S), "what is under way is not asked again"
    scripted.answer = [b"\1\0"]
    assert lookup.ended(100.2)
    scripted.answer = StoreUnavailable("asked twice")
    assert lookup.ended(200.0)
    assert (lookup.present, lookup.failure) == ([b"\1\0"], "")
    assert not lookup.is_stale(100.0 + FRESH_S)
    assert lookup.is_stale(100.1 + FRESH_S)


def test_a_fault_is_a_failure() -> None:
    scripted = Scripted()
    lookup = RequestLookup(scripted, [b"\1"], 100.0, 0.5)
    scripted.answer = StoreUnavailable("planted")
    assert lookup.ended(100.1)
    assert (lookup.present, lookup.failure) == (None, "store_unavailable")


def test_a_lookup_that_does_not_even_stop_is_given_up() -> None:
    scripted = Scripted()
    lookup = RequestLookup(scripted, [b"\1"], 100.0, 0.5)
    assert not lookup.ended(100.5 + LOOKUP_GRACE_S)
    assert lookup.ended(100.51 + LOOKUP_GRACE_S)
    assert (lookup.present, lookup.failure, scripted.cancelled) == (None, "timeout", 1)
    scripted.answer = [b"\1"]
    assert lookup.ended(101.0)
    assert lookup.present is None, "it has been given up"
