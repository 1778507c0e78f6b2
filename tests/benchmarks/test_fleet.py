"""``python -m benchmarks fleet``: what it measures, prints and draws. No figure is promised here."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.simulated_fleet import BlockCache, Taken, arrivals
from tests.support.command_line import benchmark


def test_bench_fleet_finds_more_with_a_shared_index(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    arguments = ["fleet", "--workers", "12", "--requests", "300", "--routers", "1", "--routers", "8"]
    report = json.loads(benchmark(*arguments, "--plot", str(plot), "--json").stdout)
    rows = {(row["policy"], row["routers"]): row for row in report["rows"]}
    policies = ("random", "least load", "own history", "shared index")
    assert list(rows) == [(policy, routers) for policy in policies for routers in (1, 8)]
    for (policy, _), row in rows.items():
        assert 0 <= row["followup_hit_ratio"] <= 1
        assert 0 <= row["hit_ratio"] <= 1
        assert row["load_max_over_mean"] >= 1
        assert (row["late_ratio"] is not None) == (policy == "shared index")
    followups = {which: row["followup_hit_ratio"] for which, row in rows.items()}
    assert followups["shared index", 8] > followups["own history", 8] > followups["random", 8]
    assert followups["shared index", 8] > 0.9
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = benchmark(*arguments[:5], "--routers", "2").stdout
    assert all(policy in table for policy in policies)


def test_a_fleet_of_one_seed_is_one_fleet() -> None:
    one, again = (list(arrivals(5, 3, 200, seed=7)) for _ in range(2))
    assert one == again
    assert [request.at_s for request in one] == sorted(request.at_s for request in one)
    assert {request.router for request in one} == {0, 1, 2}
    alone = list(arrivals(5, 1, 200, seed=7))
    assert [request.prompt for request in alone] == [request.prompt for request in one]
    said: set[tuple[int, ...]] = set()
    for request in one:
        assert not request.earlier or request.prompt[: request.earlier] in said
        said.add(request.prompt + request.answer)


def test_a_cache_keeps_the_beginning_of_what_was_used_last() -> None:
    cache = BlockCache(6)
    assert cache.take((1, 2, 3), (4,)) == Taken(0, (1, 2, 3, 4), [])
    assert cache.take((5, 6), (7,)) == Taken(0, (5, 6, 7), [4])
    assert cache.take((1, 2, 3), (8,)) == Taken(3, (8,), [7])
    assert cache.take((5, 9), (10, 11)) == Taken(1, (9, 10, 11), [6, 8, 3])
