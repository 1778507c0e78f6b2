"""``python -m benchmarks index``: what it measures and prints. No figure is promised here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.contest import contest
from benchmarks.index import Dictionary
from tests.support.command_line import benchmark, benchmark_refused, environment


def test_bench_index_agrees_with_a_dictionary() -> None:
    arguments = ["index", "--blocks", "16384", "--rounds", "1", "--workers", "3", "--workers", "70"]
    report = json.loads(benchmark(*arguments, "--json").stdout)
    shapes = [(row["shape"], row["workers"], row["blocks"]) for row in report["rows"]]
    assert shapes == [("sessions", 3, 16384), ("sessions", 70, 16384), ("everybody", 8, 16384)]
    for row in report["rows"]:
        assert set(row["results"]) == {"kvpool", "dict"}
        assert row["tokens_mpairs_per_s"] > 0
        assert row["block_nbytes_most"] >= row["results"]["kvpool"]["block_nbytes"] > 0
        for result in row["results"].values():
            assert result["ingest_mpairs_per_s"] > 0
            assert result["remove_worker_us"] > 0
            assert [(one["blocks"], one["kind"]) for one in result["asked"]] == [
                (blocks, kind)
                for kind in ("full", "half", "none", "holes")
                for blocks in (64, 512, 1024, 8192)
            ]
            assert all(one["p99_us"] >= one["p50_us"] > 0 for one in result["asked"])
            assert not any(one["wrong"] for one in result["asked"])
    assert [(row["kind"], row["callers"]) for row in report["rpc"]] == [
        ("unary", 1),
        ("unary", 16),
        ("stream", 1),
        ("stream", 16),
    ]
    for row in report["rpc"]:
        assert row["p50_over_echo"] == pytest.approx(row["p50_us"] / row["echo_p50_us"])
    restart = report["restart"]
    assert (restart["blocks"], restart["workers"]) == (16384, 70)
    assert 8 < restart["block_nbytes"] < 30
    assert 0 < restart["killed_listens_s"] <= restart["killed_answers_s"]
    assert 0 < restart["copy_ms"] < restart["write_s"] * 1e3
    assert restart["restore_s"] > 0
    feed = report["feed"]
    assert [(row["index"], row["batch_events"]) for row in feed["ingest"]] == [("kvpool", 64), ("kvpool", 1)]
    assert all(row["mblocks_per_s"] > 0 for row in feed["ingest"])
    assert [row["blocks"] for row in feed["beside"]] == [64, 8192]
    for row in feed["beside"]:
        assert row["mblocks_per_s"] > 0, "something came while it was asked"
        assert row["p99_ratio"] == pytest.approx(row["busy_p99_us"] / row["idle_p99_us"])
    shown = benchmark(*arguments).stdout
    assert all(name in shown for name in ("dict", "stream", "8,192 holes", "events a batch"))


def test_contest_tells_who_is_wrong() -> None:
    class Forgetful(Dictionary):
        """Does not take holes for holes."""

        def take_away(self, worker: int, hashes: Sequence[int]) -> None:
            pass

    right, wrong = (contest(one, "sessions", 8, 4, 1) for one in (Dictionary(), Forgetful()))
    assert right.pairs == wrong.pairs
    assert not any(one.wrong for one in right.asked)
    assert {one.kind for one in wrong.asked if one.wrong} == {"holes"}


def test_dynamo_that_is_not_there_or_cannot_start_is_one_clear_line(tmp_path: Path) -> None:
    arguments = ["index", "--peers", "--peers-folder", str(tmp_path)]
    assert "make bench-peers" in benchmark_refused(*arguments)
    environment(tmp_path, "dynamo")
    assert "No module named 'dynamo'" in benchmark_refused(*arguments)
