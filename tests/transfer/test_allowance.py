"""The allowance of a cap on bandwidth, with a clock that the test sets."""

from __future__ import annotations

import random

import pytest

from kvpool.transfer.allowance import Allowance


@pytest.mark.parametrize("seed", range(20))
def test_the_rate_holds_on_average_for_sizes_up_to_a_hundred_seconds(seed: int) -> None:
    chance, now = random.Random(seed), [0.0]
    allowance = Allowance(1000, lambda: now[0])
    sent = largest = 0
    nbytes = chance.randint(1, 100_000)
    while now[0] < 2000:
        allowance.refill()
        if allowance.take(nbytes):
            sent, largest = sent + nbytes, max(largest, nbytes)
            nbytes = chance.choice([1, 999, 1000, 1001, chance.randint(1, 100_000)])
        now[0] += chance.random() / 2
        assert sent <= 1000 * (now[0] + 1) + largest
    assert sent >= 1000 * 2000 * 0.9, "it is used"


def test_what_is_not_used_is_saved_for_a_second() -> None:
    now = [0.0]
    allowance = Allowance(1000, lambda: now[0])
    now[0] = 3600.0
    allowance.refill()
    assert [allowance.take(500) for _ in range(3)] == [True, True, False]


def test_without_a_rate_everything_passes() -> None:
    allowance = Allowance(0)
    allowance.refill()
    assert all(allowance.take(1 << 40) for _ in range(10))
