"""The curve of hit rates beside caches that are really run."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import pairwise

import pytest

from kvpool.discovery.reuse import ReuseCurve


def of_lru(requests: list[list[int]], blocks: int) -> float:
    """The share of leading hits in a cache of so many blocks."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for hashes in requests:
        for one in hashes:
            if one not in cache:
                break
            hits += 1
        for one in hashes:
            cache[one] = None
            cache.move_to_end(one)
            if len(cache) > blocks:
                cache.popitem(last=False)
    return hits / sum(map(len, requests))


def conversations(seed: int, turns: int, most: int = 60) -> list[list[int]]:
    """Turns of sessions that grow, begin anew, and have a beginning in common."""
    draw = random.Random(seed)
    common = [draw.getrandbits(64) for _ in range(6)]
    sessions: dict[int, list[int]] = {}
    requests = []
    for _ in range(turns):
        number = draw.randrange(most)
        prompt = sessions.get(number, common) + [draw.getrandbits(64) for _ in range(draw.randrange(1, 9))]
        if len(prompt) > 150:
            prompt = prompt[: draw.randrange(1, 60)]
        sessions[number] = prompt
        requests.append(prompt)
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_it_is_exact_where_all_blocks_are_followed(seed: int) -> None:
    requests = conversations(seed, 400)
    curve = ReuseCurve()
    for hashes in requests:
        curve.ask(hashes)
    assert curve.share == 1
    points = curve.points()
    assert len(points) >= 100
    assert points[-1].blocks == curve.distinct_blocks == len({one for hashes in requests for one in hashes})
    for point in points[::9] + points[-1:]:
        assert point.hit_rate == pytest.approx(of_lru(requests, point.blocks)), point


def test_neighbours_are_at_most_a_tenth_apart() -> None:
    curve = ReuseCurve()
    for hashes in conversations(1, 400):
        curve.ask(hashes)
    sizes = [point.blocks for point in curve.points()]
    assert sizes[0] == 1
    assert all(one < other <= max(one + 1, 1.1 * one) for one, other in pairwise(sizes))


def test_a_sample_is_bounded_and_near() -> None:
    requests = conversations(7, 4000, most=200)
    exact, curve = ReuseCurve(), ReuseCurve(most_blocks=2048)
    for hashes in requests:
        exact.ask(hashes)
        curve.ask(hashes)
        assert len(curve._uses) <= 2048
    assert curve.share < 0.2
    assert curve.distinct_blocks == pytest.approx(exact.distinct_blocks, rel=0.1)
    of_exact = dict(exact.points())
    errors = [abs(rate - of_exact[blocks]) for blocks, rate in curve.points() if blocks in of_exact]
    assert len(errors) > 100
    assert max(errors) < 0.08


def test_a_block_twice_in_a_prompt_is_used_once() -> None:
    curve = ReuseCurve()
    curve.ask([5, 6, 5])
    curve.ask([5, 6, 7])
    assert curve.points() == [(1, 1 / 6), (2, 2 / 6), (3, 2 / 6)]


def test_blocks_with_the_smallest_hashes_are_counted_in_the_largest_size() -> None:
    """Nobody's hashes are so; a document may say it."""
    curve = ReuseCurve(most_blocks=256)
    for _ in range(2):
        curve.ask(range(300))
    assert curve.share < 1e-16
    assert all(0 <= point.hit_rate <= 1 and point.blocks < 1 << 50 for point in curve.points())


def test_a_curve_that_is_lowered_forgets_the_blocks_above() -> None:
    curve = ReuseCurve()
    curve.ask([1 << 63, 5, 6])
    curve.lower(1 << 63)
    assert (curve.share, curve.distinct_blocks) == (0.5, 4)
    curve.lower(1 << 64)
    assert curve.share == 0.5


def test_without_requests_there_is_no_curve() -> None:
    curve = ReuseCurve()
    assert curve.points() == []
    curve.ask([])
    assert curve.points() == []
