"""What an engine remembers of records that the pool lacks, and which of them bound a hit."""

from __future__ import annotations

import os

import pytest

from kvpool.store import LookupBatch, LookupGroup
from kvpool.vllm.load.lookups import MAX_LACKING, RequestLookup
from kvpool.vllm.load.seen import Record, SeenRecords
from tests.support.scheduler import (
    BLOCK_TOKENS,
)

pytestmark = [pytest.mark.vllm]
TTL_S = 100.0


def records(count: int, group: int = 0, nbytes: int = 32) -> LookupGroup:
    return LookupGroup(os.urandom(count * nbytes), nbytes, group, 1, BLOCK_TOKENS)


def each(asked: LookupGroup) -> list[Record]:
    n = asked.hash_nbytes
    return [(asked.hashes[at * n :][:n], asked.group) for at in range(asked.records)]


@pytest.mark.parametrize("nbytes", [8, 32])
def test_a_record_is_new_until_a_request_had_it_and_known_once_the_pool_did(nbytes: int) -> None:
    seen, asked = SeenRecords(TTL_S, 0.0), records(4, nbytes=nbytes)
    assert [seen.why_absent([one], 10.0) for one in each(asked)] == ["new"] * 4
    seen.looked_up(asked, b"\1\1\0\0", 10.0)
    assert [seen.why_absent([one], 11.0) for one in each(asked)] == ["evicted"] * 2 + ["not_stored"] * 2
    seen.stored([(asked.hashes[-nbytes:], 0)], 12.0)
    assert [seen.why_absent([one], 13.0) for one in each(asked)][2:] == ["not_stored", "evicted"]
    seen.looked_up(asked, b"\0\0\0\0", 14.0)
    assert seen.why_absent(each(asked)[:1], 14.0) == "evicted", (
        "who misses it does not forget that it was there"
    )


def test_a_record_that_may_have_outlived_its_time_has_expired() -> None:
    asked = records(1)
    for ttl_s, after_s, why in ((TTL_S, 74.0, "evicted"), (TTL_S, 75.0, "expired"), (0.0, 1e6, "evicted")):
        seen = SeenRecords(ttl_s, 0.0)
        seen.looked_up(asked, b"\1", 10.0)
        assert seen.why_absent(each(asked), 10.0 + after_s) == why


def test_what_was_in_another_namespace_is_in_another_namespace_until_it_is_in_this_one() -> None:
    seen, asked, unknown = SeenRecords(TTL_S, 0.0), records(2), records(1)
    seen.looked_up(asked, b"\1\0", 10.0)
    for _ in range(2):
        seen.leave(10.5)
        assert [seen.why_absent([one], 11.0) for one in each(asked)] == ["other_namespace", "not_stored"]
    assert seen.why_absent(each(unknown), 11.0) == "new"
    assert seen.why_absent([*each(asked), *each(unknown)], 11.0) == "other_namespace", "of the best known one"
    seen.looked_up(asked, b"\1\1", 12.0)
    assert seen.why_absent([*each(unknown), *each(asked)], 12.0) == "evicted"


def test_groups_are_told_apart_and_nothing_lacking_is_new() -> None:
    seen, asked = SeenRecords(TTL_S, 0.0), records(1, group=1)
    seen.looked_up(asked, b"\1", 10.0)
    assert seen.why_absent(each(asked), 10.0) == "evicted"
    assert seen.why_absent(each(asked._replace(group=0)), 10.0) == "new"
    seen.stored([(asked.hashes, 2)], 10.0)
    assert seen.why_absent(each(asked._replace(group=2)), 10.0) == "evicted"
    assert seen.why_absent([], 10.0) == "new"


def test_the_newest_record_takes_a_slot_and_the_older_one_is_new_again() -> None:
    """So the memory is bounded, and what was forgotten is not guessed."""
    seen = SeenRecords(TTL_S, 0.0, slots=64)
    asked = records(1000)
    seen.looked_up(asked, b"\1" * 1000, 10.0)
    known = [seen.why_absent([one], 10.0) for one in each(asked)].count("evicted")
    assert 0 < known <= 64
    assert seen.why_absent(each(asked)[-1:], 10.0) == "evicted"


def test_a_record_does_not_take_over_what_was_known_of_another_one_in_its_slot() -> None:
    seen, first, second = SeenRecords(TTL_S, 0.0, slots=1), records(1), records(1)
    seen.looked_up(first, b"\1", 10.0)
    seen.looked_up(second, b"\0", 10.0)
    assert [seen.why_absent(each(one), 10.0) for one in (first, second)] == ["new", "not_stored"]


class Ended(LookupBatch):
    def __init__(self, found: list[bytes]) -> None:
        self._found = found

    def done(self) -> bool:
        return True

    def records(self, timeout_s: float | None = None) -> list[bytes]:
        return self._found


FULL, WINDOW = records(4), records(4, group=1)._replace(sliding_window=True)


@pytest.mark.parametrize(
    ("found", "hit", "lacks"),
    [
        ([b"\1\1\0\0", b"\1\1\1\1"], 32, [(0, 2)]),
        ([b"\1\1\0\0", b"\0\0\0\0"], 0, [(0, 2), (1, 1), (1, 0)]),
        ([b"\1\1\1\1", b"\1\0\1\0"], 16, [(1, 3), (1, 1)]),
        ([b"\0\0\0\0", b"\1\1\1\1"], 16, [(0, 1)]),
        ([b"\1\1\1\1", b"\1\1\1\1"], 64, []),
    ],
    ids=["the first of all", "windows before it", "windows alone", "behind the engine's own", "nothing"],
)
def test_a_hit_is_bounded_by_the_first_record_of_all_or_the_last_of_a_window(
    found: list[bytes], hit: int, lacks: list[tuple[int, int]]
) -> None:
    lookup = RequestLookup(Ended(found), [b"\1" * 4] * 2, 0.0, 1.0, [FULL, WINDOW])
    assert lookup.ended(0.1)
    groups = {0: each(FULL), 1: each(WINDOW)}
    assert lookup.lacking(hit) == [groups[group][at] for group, at in lacks]


def test_few_records_say_why_however_many_are_lacking() -> None:
    asked = records(1000)._replace(sliding_window=True)
    lookup = RequestLookup(Ended([bytes(1000)]), [b"\1" * 1000], 0.0, 1.0, [asked])
    assert lookup.ended(0.1)
    assert lookup.lacking(0) == each(asked)[: -MAX_LACKING - 1 : -1]
