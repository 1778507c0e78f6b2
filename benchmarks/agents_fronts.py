"""Others' routers before made-up sessions of agents, in real time: a table of ``python -m benchmarks agents``.

The workers are those of ``python -m benchmarks route``: they have no pool. Lengths, pauses and times of computing are
divided by ``DIVISOR``, so that a small fleet fits on a machine. Each front gets fresh workers and the same sessions.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.agents_model import CACHE_NBYTES, TOKEN_NBYTES, EngineModel
from benchmarks.agents_traffic import COMMON_TOKENS, FIRST_TOKENS, TURN_TOKENS, made_up
from benchmarks.contest import percentile
from benchmarks.route_caller import Answer, Caller
from benchmarks.route_fronts import DIRECT, KVPOOL_ROUTER, Front, routers
from benchmarks.route_runs import in_loop, stage
from benchmarks.route_traffic import BLOCK_TOKENS, Traffic, Turn

DIVISOR = 32
WORKERS = 4
SESSIONS, TURNS = 24, 16
APART_S = 60 / DIVISOR
LONGEST_PAUSE_S = 4.0
SEED = 5


@dataclass(frozen=True)
class FrontRow:
    """``hits_of_ideal``, ``sessions_moved``, ``moves``: as in ``Row``. ``failed``: without an answer of 200."""

    policy: str
    workers: int
    turns: int
    hits_of_ideal: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    sessions_moved: int
    moves: int
    failed: int


@dataclass(frozen=True)
class _Session:
    turns: Sequence[Turn]
    pauses_s: Sequence[float]  # before each turn


def run_fronts(peers: Path, begins: Callable[[str], None]) -> list[FrontRow]:
    """A row each. ``begins``: told of each. Blocks for a minute each. Errors: ``KVPoolError``."""
    fronts = {"none": DIRECT, "kvpool router": KVPOOL_ROUTER, **routers(peers)}
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        traffic = Traffic(Path(folder), SEED)
        words = [FIRST_TOKENS // DIVISOR, *[TURN_TOKENS // DIVISOR] * (TURNS - 1)]
        texts = traffic.sessions(SESSIONS, system_words=COMMON_TOKENS // DIVISOR, words=words)
        sessions = [
            _Session(turns, _pauses([prompt.at_s for prompt in made.prompts[:TURNS]], number * APART_S))
            for number, (turns, made) in enumerate(zip(texts, made_up(SESSIONS, SEED).sessions, strict=True))
        ]
        rows = []
        for name, front in fronts.items():
            begins(f"{name} in real time")
            rows.append(_run(name, front, traffic, sessions))
    return rows


def _pauses(at_s: Sequence[float], start_s: float) -> list[float]:
    return [start_s, *(min((b - a) / DIVISOR, LONGEST_PAUSE_S) for a, b in itertools.pairwise(at_s))]


def _run(name: str, front: Front, traffic: Traffic, sessions: Sequence[_Session]) -> FrontRow:
    answers: list[tuple[int, Turn, Answer]] = []
    blocks = CACHE_NBYTES // TOKEN_NBYTES // DIVISOR // BLOCK_TOKENS
    length = COMMON_TOKENS + FIRST_TOKENS + TURNS * TURN_TOKENS
    token_s = EngineModel().compute_s(0, length) / length  # both are divided
    with stage(traffic, front, 1, workers=WORKERS, blocks=blocks, token_s=token_s) as (_, running):
        urls = itertools.cycle(running.urls)

        async def talk(number: int, session: _Session) -> None:
            caller = Caller()
            try:
                for turn, pause_s in zip(session.turns, session.pauses_s, strict=True):
                    await asyncio.sleep(pause_s)
                    body = turn.body(stream=True, session_id=f"session-{number}")
                    answers.append((number, turn, await caller.ask(next(urls), body)))
            finally:
                caller.close()

        async def all_talk() -> None:
            await asyncio.gather(*(talk(number, session) for number, session in enumerate(sessions)))

        in_loop(all_talk)
    return _row(name, traffic, answers)


def _row(name: str, traffic: Traffic, answers: Sequence[tuple[int, Turn, Answer]]) -> FrontRow:
    good = [one for one in answers if one[2].status == 200]
    first_s = sorted(answer.first_s for _, _, answer in good)
    workers: dict[int, list[str]] = {}
    for number, _, answer in good:
        workers.setdefault(number, []).append(answer.worker)
    moves = {number: sum(a != b for a, b in itertools.pairwise(those)) for number, those in workers.items()}
    # Of the very first prompt nothing could have been held.
    earlier = [traffic.plan.prompts[turn.number].earlier * BLOCK_TOKENS for _, turn, _ in good]
    hits = sum(min(answer.cached_tokens, most) for (_, _, answer), most in zip(good, earlier, strict=True))
    return FrontRow(
        policy=name,
        workers=WORKERS,
        turns=len(good),
        hits_of_ideal=hits / max(1, sum(earlier) - earlier[0]) if good else 0.0,
        ttft_p50_s=statistics.median(first_s) if good else 0.0,
        ttft_p90_s=percentile(first_s, 0.9) if good else 0.0,
        ttft_p99_s=percentile(first_s, 0.99) if good else 0.0,
        sessions_moved=sum(map(bool, moves.values())),
        moves=sum(moves.values()),
        failed=len(answers) - len(good),
    )


def fronts_table(rows: Sequence[FrontRow]) -> Table:
    table = Table(
        title=f"In real time: {SESSIONS} made-up sessions of {TURNS} turns before "
        f"{WORKERS} workers without a pool, lengths and times divided by {DIVISOR}. TTFT: ms to the first token.",
        box=SIMPLE, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in ("front", "ideal", "TTFT p50", "p90", "p99", "moved sessions", "moves", "failed"):
        table.add_column(name, justify="left" if name == "front" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy, f"{row.hits_of_ideal:.1%}", f"{row.ttft_p50_s * 1e3:.0f}", f"{row.ttft_p90_s * 1e3:.0f}",
            f"{row.ttft_p99_s * 1e3:.0f}", f"{row.sessions_moved}", f"{row.moves}", f"{row.failed}",
        )  # fmt: skip
    return table
