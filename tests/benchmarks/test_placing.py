"""``python -m benchmarks placing``: what it counts, on a small fleet. No figure is promised here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import placing_traffic
from benchmarks.placing import Row, judged, run_placing
from benchmarks.placing_fleet import BEFALLS, POLICIES, simulate
from benchmarks.placing_traffic import live_tokens, sessions_of
from kvpool.errors import ConfigError
from tests.support.command_line import benchmark


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing_traffic, "SESSIONS", 5)
    monkeypatch.setattr(placing_traffic, "TURNS", (4, 8))


def report(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    run_placing(**{"workers": [2], "seeds": 1, "only": [], "befalls": [], "as_json": True} | options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_policies_are_compared_in_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    rows = report(capsys)["rows"]
    assert [(row["has_pool"], row["befalls"], row["policy"]) for row in rows] == [
        (has_pool, befalls, policy)
        for has_pool in (False, True)
        for befalls in BEFALLS
        for policy in POLICIES
    ]
    for row in rows:
        assert row["turns"] == sum(len(session) for session in sessions_of(2, 1).sessions)
        assert 0 < row["hits_of_ideal"] <= 1
        assert 0 < row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"]
        assert row["hits_of_ideal"] > 0.99 or not row["has_pool"]
    moves = {
        row["policy"]: row["moves"] for row in rows if row["befalls"] == "nothing" and not row["has_pool"]
    }
    assert moves["hash"] == moves["fewest"] == 0 < moves["load"]


def test_a_run_is_the_same_again() -> None:
    traffic = sessions_of(3, 7)
    assert sessions_of(3, 7).sessions[0][0].tokens == traffic.sessions[0][0].tokens
    runs = [simulate("kvpool", 3, traffic, 200_000, "death", has_pool=False) for _ in range(2)]
    assert runs[0] == runs[1]


def test_live_sessions_are_those_that_have_begun_and_not_ended() -> None:
    traffic = sessions_of(4, 3)
    assert 0 < live_tokens(traffic) < sum(session[-1].tokens + 300 for session in traffic.sessions)


def test_a_cell_is_missed_by_hits_or_by_time() -> None:
    def row(policy: Any, hits: float, p90_s: float) -> Row:
        return Row(8, False, "nothing", policy, hits, 0.1, p90_s, 1.0, 0.0, 10.0)

    rivals = [row("hash", 0.95, 1.0), row("load", 0.3, 0.9)]
    for hits, p90_s, is_missed in ((0.95, 0.94, False), (0.94, 0.5, True), (0.99, 0.95, True)):
        found = judged([row("kvpool", hits, p90_s), *rivals])
        assert [one.is_missed for one in found] == [is_missed, False, False]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="--only best: it is one of kvpool, hash"):
        run_placing(workers=[2], seeds=1, only=["best"], befalls=[], as_json=True)


def test_the_table_marks_what_is_missed() -> None:
    table = benchmark(
        "placing",
        "--workers",
        "2",
        "--seeds",
        "1",
        "--only",
        "kvpool",
        "--only",
        "load",
        "--befalls",
        "nothing",
    ).stdout
    rows = [line.split() for line in table.splitlines() if line.split()[:1] == ["2"]]
    assert [("no" in row, "kvpool" in row) for row in rows] == [
        (True, True), (True, False), (False, True), (False, False),
    ]  # fmt: skip
