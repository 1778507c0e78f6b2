"""``python -m benchmarks agents``: what it counts and prints, on a few short sessions. No figure is promised here."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import agents_engines, agents_fronts
from benchmarks.agents import run_agents
from benchmarks.agents_cache import Admitted, DeviceCache
from benchmarks.agents_fleet import POLICIES, Disturbance, Policy, Pools, Row, simulate
from benchmarks.agents_model import TOKEN_NBYTES, EngineModel
from benchmarks.agents_traffic import made_up, traffic
from benchmarks.route_caller import Answer
from benchmarks.route_traffic import Traffic
from benchmarks.valkey_shards import find_server
from kvpool.discovery.trace import read_trace
from kvpool.errors import ConfigError
from tests.support.command_line import benchmark

BLOCK_TOKENS = 64
SESSIONS, TURNS = 6, 6
TRACE_BLOCK_TOKENS = 512
COMMON_BLOCKS, FIRST_BLOCKS, MORE_BLOCKS = (
    25,
    80,
    12,
)  # so many tokens that they are slower to compute than to load
BLOCK_NBYTES = TRACE_BLOCK_TOKENS * TOKEN_NBYTES
CACHE = 450 * BLOCK_NBYTES  # of two workers: nearly all
POOLS = Pools(None, 10 * CACHE, host_workers=2)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sessions that begin with the same blocks and grow; answers take a second, pauses four."""
    lines = []
    for _ in range(SESSIONS):
        turns: list[Any] = []
        for turn in range(TURNS):
            kept = FIRST_BLOCKS + MORE_BLOCKS * (turn - 1) if turn else 0
            runs = [[kept + 1, MORE_BLOCKS if turn else FIRST_BLOCKS]]
            turns.append([5.0 * turn, (kept + runs[0][1]) * TRACE_BLOCK_TOKENS + 9, 20, 1.0, 4.0, kept, runs])
        lines.append(json.dumps({"tools": COMMON_BLOCKS * TRACE_BLOCK_TOKENS, "system": 0, "turns": turns}))
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(lines))
    return path


def report(capsys: pytest.CaptureFixture[str], *traces: Path, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "workers": [1], "sessions": 80, "apart_s": 3.0, "cache_nbytes": CACHE, "pools": POOLS, "only": [],
        "engines": False, "peers": None, "server": None, "as_json": True,
    }  # fmt: skip
    run_agents(traces=traces, **given | options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_policies_are_compared_on_the_same_sessions(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, trace, workers=[3, 2])
    policies = ["none", "pool", "load", "precise", "kvpool", "near"]
    rows = {(row["policy"], row["workers"]): row for row in found["rows"]}
    assert list(rows) == [(policy, workers) for workers in (2, 3) for policy in policies]
    assert [row["policy"] for row in found["kills"]] == policies
    assert [(row["policy"], row["workers"]) for row in (*found["far_killed"], *found["far_slow"])] == [
        ("kvpool", 3), ("near", 3),
    ] * 2  # fmt: skip
    assert (found["pool_nbytes"], found["near_nbytes"]) == (None, POOLS.near_nbytes)
    for row in (*found["rows"], *found["kills"], *found["far_killed"], *found["far_slow"]):
        assert row["turns"] == SESSIONS * TURNS
        assert 0 < row["hits_of_ideal"] <= 1
        assert 0 < row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"]
        assert (row["moved_gb"] > 0) == (row["far_hits"] > 0)
        assert row["pool_hits"] == pytest.approx(row["near_hits"] + row["far_hits"])
        assert row["network_gb"] == pytest.approx(row["moved_gb"] + row["stored_gb"])
        assert row["trace"] == trace.name
    for workers in (2, 3):
        assert rows["none", workers]["hits_of_ideal"] < 0.9
        assert rows["pool", workers]["hits_of_ideal"] > 0.99
        assert rows["kvpool", workers]["hits_of_ideal"] > 0.99
        assert rows["none", workers]["moved_gb"] == rows["precise", workers]["moved_gb"] == 0
        assert rows["kvpool", workers]["moves"] < rows["pool", workers]["moves"]
        assert rows["precise", workers]["moves"] < rows["none", workers]["moves"] / 2
        assert rows["kvpool", workers]["duplicate_gb"] < rows["pool", workers]["duplicate_gb"]
        assert rows["pool", workers]["sessions_moved"] == SESSIONS
        assert all(rows[policy, workers]["failed"] == 0 for policy in policies)


def test_the_table_has_the_chosen_policies(trace: Path) -> None:
    table = benchmark(
        "agents", "--trace", str(trace), "--workers", "2", "--only", "kvpool", "--only", "none",
        "--pool-bytes", "10GB", "--near-bytes", "1GB", "--host-workers", "4",
    ).stdout  # fmt: skip
    assert table.count(f"{trace.name}: 6 sessions, 36 turns") == 4
    rows = [line.split()[0] for line in table.splitlines() if " 2 " in line]
    assert rows == ["none", "kvpool", "none", "kvpool", "kvpool", "kvpool"]


def run(
    trace: Path,
    policy: str | Policy,
    folder: Path,
    disturbance: Disturbance | None,
    pools: Pools = POOLS,
    workers: int = 3,
) -> Row:
    [chosen] = [policy] if isinstance(policy, Policy) else [one for one in POLICIES if one.name == policy]
    sessions = traffic(read_trace(trace), sessions=SESSIONS, apart_s=0.2)  # several at a time
    model = EngineModel(CACHE, TRACE_BLOCK_TOKENS)
    return simulate(
        chosen,
        workers,
        sessions,
        model,
        server=find_server(None),
        folder=folder,
        pools=pools,
        disturbance=disturbance,
    )


@pytest.mark.parametrize("policy", ["pool", "kvpool"])
def test_a_killed_worker_costs_a_recompute_alone(policy: str, trace: Path, tmp_path: Path) -> None:
    whole, killed = (run(trace, policy, tmp_path / f"{one}", one) for one in (None, "kills"))
    assert whole.failed == 0
    assert killed.failed > 0
    assert killed.turns == whole.turns
    assert killed.hits_of_ideal > 0.95
    assert killed.hits_of_ideal <= whole.hits_of_ideal
    assert killed.stored_gb >= whole.stored_gb


def test_a_run_is_the_same_again(trace: Path, tmp_path: Path) -> None:
    assert len({run(trace, "kvpool", tmp_path / f"{at}", "kills") for at in range(2)}) == 1


def in_turns(trace: Path, folder: Path, disturbance: Disturbance | None, pools: Pools, *, near: bool) -> Row:
    """Each turn of a session is at the next worker of five."""
    policy = Policy("in turns", True, "turns", has_near=near)
    return run(trace, policy, folder, disturbance, pools, workers=5)


def test_a_smaller_pool_has_fewer_hits(trace: Path, tmp_path: Path) -> None:
    sizes = [Pools(blocks * BLOCK_NBYTES, 1, 1) for blocks in (90, 500, 10_000)]
    small, middle, large = (
        in_turns(trace, tmp_path / f"{one.pool_nbytes}", None, one, near=False) for one in sizes
    )
    assert small.far_hits < middle.far_hits < large.far_hits
    assert small.hits_of_ideal < middle.hits_of_ideal < large.hits_of_ideal


def test_a_near_pool_keeps_bytes_off_the_network(trace: Path, tmp_path: Path) -> None:
    hosts = Pools(None, 10 * CACHE, host_workers=3)
    far, near = (in_turns(trace, tmp_path / f"{has}", None, hosts, near=has) for has in (False, True))
    assert far.near_hits == 0
    assert near.near_hits > near.far_hits > 0
    assert near.network_gb < far.network_gb
    assert near.hits_of_ideal > 0.95


@pytest.mark.parametrize("disturbance", ["far killed", "far slow"])
def test_a_host_serves_from_near_what_the_far_pool_cannot(
    disturbance: Disturbance, trace: Path, tmp_path: Path
) -> None:
    one_host = Pools(None, 10 * CACHE, host_workers=5)
    far, near = (
        in_turns(trace, tmp_path / f"{has}", disturbance, one_host, near=has) for has in (False, True)
    )
    assert far.hits_of_ideal < 0.85 < 0.95 < near.hits_of_ideal
    assert far.ttft_p90_s > near.ttft_p90_s


def test_requests_without_sessions_come_when_they_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps([at * 1000, 1100, 5, [[0, 3]]]) for at in range(8)))
    of = traffic(read_trace(path), sessions=1, apart_s=60)
    assert [one.pause_s for [one] in of.sessions] == list(range(8))
    [row] = report(capsys, path, only=["none"])["rows"]
    assert (row["turns"], row["sessions_moved"], row["hits_of_ideal"]) == (8, None, 1.0)
    assert row["hit_rate"] == pytest.approx(14 / 16)


def test_a_turn_waits_for_the_answer_and_the_pause(trace: Path) -> None:
    of = traffic(read_trace(trace), sessions=2, apart_s=60)
    assert [[turn.pause_s for turn in turns[:3]] for turns in of.sessions] == [[0, 4, 4], [60, 4, 4]]
    first, second = (turns[0].blocks for turns in of.sessions)
    assert (first == second).sum() == COMMON_BLOCKS


def test_made_up_sessions_begin_alike_and_grow() -> None:
    one, again = (traffic(made_up(3, seed=1), sessions=3, apart_s=60) for _ in range(2))
    assert [turn.pause_s for turns in one.sessions for turn in turns] == [
        turn.pause_s for turns in again.sessions for turn in turns
    ]
    assert [len(turns) for turns in one.sessions] == [30] * 3
    assert [one.sessions[0][at].tokens for at in (0, 1, 29)] == [30_000, 32_948, 115_492]
    common = (one.sessions[0][0].blocks == one.sessions[1][0].blocks).sum()
    assert common == 20_000 // 64


def test_wrong_use_is_one_clear_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="raise --cache-bytes"):
        report(capsys, trace, cache_nbytes=100_000_000)
    with pytest.raises(ConfigError, match="the policies are none, pool"):
        report(capsys, only=["best"])


def test_memory_keeps_the_beginning_of_what_ended_last() -> None:
    cache = DeviceCache(6)
    assert cache.admit([1, 2, 3], 4) == Admitted(0, [])
    assert cache.fill([1, 2, 3]) == [1, 2, 3]
    assert cache.usage == pytest.approx(4 / 6)
    assert cache.admit([1, 2, 4], 5) is None  # two more are empty
    assert cache.admit([1, 2, 4], 4) == Admitted(2, [])
    cache.release([1, 2, 3], 4)
    assert cache.usage == pytest.approx(4 / 6)
    assert cache.fill([4]) == [4]
    cache.release([1, 2, 4], 4)
    assert cache.usage == 0
    assert cache.admit([1, 2, 3], 5) == Admitted(3, [])
    assert cache.admit([], 2) is None
    assert cache.admit([], 1) == Admitted(0, [4])
    cache.release([], 1)
    cache.release([1, 2, 3], 5)
    assert cache.admit([], 5) == Admitted(0, [3, 2])


def test_real_fronts_are_judged_by_what_earlier_turns_left(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path, 1)
    one, two = traffic.sessions(2, system_words=100, words=[40, 20])
    prompts = [traffic.plan.prompts[turn.number] for turn in (*one, *two)]
    first, second, other, last = (prompt.earlier * 16 for prompt in prompts)
    assert first == other < second == last
    answers = [
        (0, one[0], Answer(200, 0.4, 0.5, "a", 0)),
        (1, two[0], Answer(200, 0.2, 0.5, "b", other)),
        (0, one[1], Answer(200, 0.1, 0.5, "b", second - 16)),
        (1, two[1], Answer(503, 0.0, 0.5)),
    ]
    row = agents_fronts._row("smg", traffic, answers)
    assert row.hits_of_ideal == pytest.approx((other + second - 16) / (other + second))
    assert (row.turns, row.failed, row.sessions_moved, row.moves) == (3, 1, 1, 1)
    assert row.ttft_p50_s == 0.2
    assert "1" in render(agents_fronts.fronts_table([row]))


def test_real_engines_are_judged_by_whole_blocks_of_earlier_prompts() -> None:
    prompts = agents_engines._prompts()
    assert len(prompts) == agents_engines.SESSIONS * agents_engines.TURNS
    for prompt in prompts:
        held = max(
            (common(prompt.tokens, other.tokens) for other in prompts[: prompts.index(prompt)]), default=0
        )
        assert prompt.ideal == held // agents_engines.BLOCK_TOKENS * agents_engines.BLOCK_TOKENS
    said = [{"tokens": [1], "cached_tokens": 1 << 20, "pool_tokens": 0, "first_token_s": 0.5}] * len(prompts)
    placed = [0] * (len(prompts) - 1) + [1]
    row = agents_engines._row("pool", prompts, said, placed, [[1]] * (len(prompts) - 1) + [[2]])
    assert (row.hits_of_ideal, row.sessions_moved, row.moves, row.other_tokens) == (1.0, 1, 1, 1)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def render(table: Any) -> str:
    out = Console(width=120, record=True, file=io.StringIO())
    out.print(table)
    return out.export_text()
