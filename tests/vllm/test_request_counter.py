"""Counting requests by block: exact for what was seen last, bounded for all else."""

from __future__ import annotations

import pytest

from kvpool.vllm.stores import RequestCounter

pytestmark = [pytest.mark.vllm]


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
