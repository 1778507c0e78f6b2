"""``python -m benchmarks route``: fronts of one fleet of scripted workers, side by side.

The workers (``benchmarks.route_worker``) are processes that answer OpenAI's API and publish KV events as vLLM
does. All fronts get the same requests, alternating in each round. Figures are medians of the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.route_fronts import DIRECT, fronts
from benchmarks.route_runs import TOKEN_S, Speed, Talk, run_speed, run_talk
from benchmarks.route_traffic import SAID_WORDS, Traffic, Turn
from kvpool.errors import ConfigError

SIZES = (2_000, 220_000, 740_000)  # the last: 142,000 tokens, the median prompt of a recorded agent
# Of a message: a recorded agent sends so many tokens in its 83rd turn (median), each a call and its result.
WORDS = {2_000: SAID_WORDS, 220_000: SAID_WORDS, 740_000: 720}
CALLERS = {2_000: 16, 220_000: 8, 740_000: 2}
CONVERSATIONS = {2_000: 64, 220_000: 16, 740_000: 4}
MOST_A_SECOND = {2_000: 6000, 220_000: 1000, 740_000: 200}
EVERY_S = {740_000: 0.1}  # of the one caller; others send one after the other
SYSTEMS, SYSTEM_WORDS, TURNS, TURN_WORDS = 8, 512, 6, 150
SEED = 5

_T = TypeVar("_T")


@dataclass(frozen=True)
class SpeedRow:
    """``added_*``: over no front in the same round."""

    nbytes: int
    added_p50_ms: float
    added_p99_ms: float
    requests_s: float
    front_cpu_ms: float
    workers_cpu_ms: float
    hit_ratio: float
    failed: int


@dataclass(frozen=True)
class Row:
    """``hit_ratios``, ``first_p50_ms``: of conversations, by number of replicas. ``returned_ratio``: share of
    conversations sent back to their restarted worker; by chance 1 in ``workers``.
    """

    front: str
    hit_ratios: dict[int, float]
    first_p50_ms: dict[int, float]
    returned_ratio: float
    hit_ratio_restarted: float
    failed: int
    speeds: list[SpeedRow]


def run_route(
    *,
    workers: int,
    replicas: Sequence[int],
    conversations: int,
    rounds: int,
    seconds: float,
    only: Sequence[str],
    peers: Path | None,
    as_json: bool,
) -> None:
    """Measure, and print a table or JSON. ``seconds``: longest speed measurement. ``only``: prefixes of
    fronts' names; none: all. Blocks for half an hour with the defaults. Errors: ``KVPoolError``.
    """
    found = fronts(peers)
    chosen = [one for one in found if not only or any(one.name.startswith(name) for name in only)]
    if not chosen:
        raise ConfigError(f"--only: the fronts are {', '.join(one.name for one in found)}")
    console = Console(stderr=True)
    talks: dict[tuple[str, int], list[Talk]] = {}
    restarts: dict[str, list[Talk]] = {}
    speeds: dict[tuple[str, int], list[Speed]] = {}
    load = os.getloadavg()[0]
    steps = rounds * (len(chosen) * (len(replicas) + 1) + (len(chosen) + 1) * len(SIZES))
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        folder = Path(name)
        task = progress.add_task("", total=steps)

        def step(text: str, work: Callable[[], _T]) -> _T:
            progress.update(task, description=text)
            made = work()
            progress.advance(task)
            return made

        for number in range(rounds):
            for nbytes in SIZES:
                traffic = Traffic(folder / f"rush-{nbytes}-{number}", SEED + number)
                turns = _rush(traffic, nbytes, seconds)
                for front in (DIRECT, *chosen):
                    work = partial(
                        run_speed, traffic, turns, front, workers=workers, callers=CALLERS[nbytes],
                        warm=2 * CONVERSATIONS[nbytes], alone=300, most_s=seconds, every_s=EVERY_S.get(nbytes, 0.0),
                    )  # fmt: skip
                    speeds.setdefault((front.name, nbytes), []).append(
                        step(f"{front.name}: {nbytes // 1000} KB", work)
                    )
            traffic = Traffic(folder / f"talk-{number}", SEED + number)
            talked = traffic.conversations(
                conversations, systems=SYSTEMS, system_words=SYSTEM_WORDS, turns=TURNS, words=TURN_WORDS
            )
            talks_on = partial(run_talk, traffic, talked, workers=workers, seed=number)
            for front in chosen:
                for count in replicas:
                    talk = partial(talks_on, front, count, restarts=False)
                    talks.setdefault((front.name, count), []).append(
                        step(f"{front.name}: conversations, {count} replicas", talk)
                    )
                talk = partial(talks_on, front, 1, restarts=True)
                restarts.setdefault(front.name, []).append(step(f"{front.name}: a worker restarted", talk))
    rows = [_row(front.name, replicas, talks, restarts[front.name], speeds) for front in chosen]
    direct = {nbytes: _median(speeds[DIRECT.name, nbytes], "requests_s") for nbytes in SIZES}
    if as_json:
        shown = {
            "workers": workers, "conversations": conversations, "turns": TURNS, "rounds": rounds, "token_s": TOKEN_S,
            "load_average": load, "direct_requests_s": direct,
        }  # fmt: skip
        print(json.dumps(shown | {"rows": [asdict(row) for row in rows]}))
    else:
        out = Console()
        if not out.is_terminal:  # a file has no width, and columns would be cut
            out = Console(width=120)
        for table in (_speed_table(rows, direct), _talk_table(rows, workers, replicas, conversations)):
            out.print(table)


def _rush(traffic: Traffic, nbytes: int, seconds: float) -> list[Turn]:
    """As many as a fast machine sends in two measurements."""
    conversations = CONVERSATIONS[nbytes]
    turns = int(MOST_A_SECOND[nbytes] * seconds / conversations) + 4
    return traffic.follow_ups(conversations, nbytes=nbytes, turns=turns, words=WORDS[nbytes])


def _row(
    name: str,
    replicas: Sequence[int],
    talks: dict[tuple[str, int], list[Talk]],
    restarts: list[Talk],
    speeds: dict[tuple[str, int], list[Speed]],
) -> Row:
    rows = []
    for nbytes in SIZES:
        own, direct = speeds[name, nbytes], speeds[DIRECT.name, nbytes]
        rows.append(
            SpeedRow(
                nbytes,
                statistics.median(a.p50_ms - b.p50_ms for a, b in zip(own, direct, strict=True)),
                statistics.median(a.p99_ms - b.p99_ms for a, b in zip(own, direct, strict=True)),
                _median(own, "requests_s"),
                _median(own, "front_cpu_ms"),
                _median(own, "workers_cpu_ms"),
                _median(own, "hit_ratio"),
                sum(one.failed for one in own),
            )
        )
    return Row(
        name,
        {count: _median(talks[name, count], "hit_ratio") for count in replicas},
        {count: _median(talks[name, count], "first_p50_ms") for count in replicas},
        statistics.fmean(one.returned_ratio or 0.0 for one in restarts),
        _median(restarts, "hit_ratio"),
        sum(one.failed for count in replicas for one in talks[name, count])
        + sum(one.failed for one in restarts),
        rows,
    )


def _median(measured: Sequence[Any], column: str) -> float:
    return statistics.median(float(getattr(one, column)) for one in measured)


def _speed_table(rows: Sequence[Row], direct: dict[int, float]) -> Table:
    table = Table(
        title="Requests of which no two are alike, each the next turn of a conversation. Added: over none, by one "
        "caller, ms; at 740 KB it sends ten a second. Best: requests/s of the best front over this one's. CPU: ms of a "
        "request, in the front and its picker / in the workers. Hits: of what the conversation had left behind, what "
        "the chosen worker had. "
        f"Without a front: {', '.join(f'{value:,.0f}/s at {nbytes // 1000} KB' for nbytes, value in direct.items())}.",
        box=SIMPLE, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in ("front", "KB", "added p50", "p99", "requests/s", "best", "CPU", "hits", "failed"):
        table.add_column(column, justify="left" if column == "front" else "right", no_wrap=True)
    for at, nbytes in enumerate(SIZES):
        best = max(row.speeds[at].requests_s for row in rows)
        for row in rows:
            one = row.speeds[at]
            table.add_row(
                row.front, f"{nbytes // 1000}", f"{one.added_p50_ms:.2f}", f"{one.added_p99_ms:.2f}",
                f"{one.requests_s:,.0f}", f"{best / max(one.requests_s, 1e-9):.2f}",
                f"{one.front_cpu_ms:.2f} / {one.workers_cpu_ms:.2f}", f"{one.hit_ratio:.2f}", f"{one.failed}",
            )  # fmt: skip
    return table


def _talk_table(rows: Sequence[Row], workers: int, replicas: Sequence[int], conversations: int) -> Table:
    table = Table(
        title=f"{conversations} conversations on {workers} workers. Again: of what a follow-up's last turn left "
        "behind, what the chosen worker had, by replicas of the front. First: p50 until the first token, ms, one "
        "replica. Restarted: as again, 1, while one worker loses its cache in the middle. Returned: of its "
        f"conversations, those sent there again (by chance {1 / workers:.2f}).",
        box=SIMPLE, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in (
        "front",
        *(f"again, {count}" for count in replicas),
        "first",
        "restarted",
        "returned",
        "failed",
    ):
        table.add_column(column, justify="left" if column == "front" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.front, *(f"{row.hit_ratios[count]:.2f}" for count in replicas),
            f"{row.first_p50_ms[replicas[0]]:.0f}", f"{row.hit_ratio_restarted:.2f}", f"{row.returned_ratio:.2f}",
            f"{row.failed}",
        )  # fmt: skip
    return table
