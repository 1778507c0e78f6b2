"""``python -m benchmarks placing``: kvpool's router beside simpler policies, cell by cell, in simulated time.

A cell is a fleet's size, whether it has a pool, and what befalls it. All policies of a cell get the same sessions. In a
cell kvpool should have at least the hits of the best rival and at most 1.05 times the p90 of the quickest; those that
it misses are marked.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.placing_fleet import (
    BEFALLS,
    POLICIES,
    ROOM,
    SMALL_ROOM,
    Befalls,
    PolicyName,
    Result,
    simulate,
)
from benchmarks.placing_traffic import live_tokens, sessions_of
from kvpool.errors import ConfigError

NEAR_HITS, NEAR_TTFT = 0.001, 1.05  # of the best rival: the same


class Cell(NamedTuple):
    workers: int
    has_pool: bool
    befalls: Befalls


class Row(NamedTuple):
    """Means over the seeds. ``is_missed``: by kvpool."""

    workers: int
    has_pool: bool
    befalls: Befalls
    policy: PolicyName
    hits_of_ideal: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    moves: float
    turns: float
    is_missed: bool = False


def run_placing(
    *, workers: Sequence[int], seeds: int, only: Sequence[str], befalls: Sequence[str], as_json: bool
) -> None:
    """Print a table or JSON. ``seeds``: their number. Takes minutes. Errors: ``ConfigError``."""
    for option, given, known in (("--only", only, POLICIES), ("--befalls", befalls, BEFALLS)):
        if unknown := set(given) - set(known):
            raise ConfigError(f"{option} {min(unknown)}: it is one of {', '.join(known)}")
    policies = [policy for policy in POLICIES if policy in (only or POLICIES)]
    cells = [
        Cell(count, has_pool, what)
        for count in sorted(set(workers))
        for has_pool in (False, True)
        for what in BEFALLS
        if what in (befalls or BEFALLS)
    ]
    rows: list[Row] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cells) * len(policies) * seeds)
        for number, cell in enumerate(cells):
            doing = f"{number + 1}/{len(cells)} {cell.workers} workers, {_said(cell)}"
            progress.update(task, description=doing)
            if not console.is_terminal:
                console.print(doing, soft_wrap=True)
            of_cell = []
            for policy in policies:
                results = []
                for seed in range(1, seeds + 1):
                    results.append(_run(cell, policy, seed))
                    progress.advance(task)
                of_cell.append(_mean(cell, policy, results))
            rows += judged(of_cell)
    if as_json:
        print(json.dumps({"seeds": seeds, "rows": [row._asdict() for row in rows]}))
        return
    out = Console()
    if not out.is_terminal:  # a file has no width, and columns would be cut
        out = Console(width=140)
    out.print(_table(rows, seeds))


def _run(cell: Cell, policy: PolicyName, seed: int) -> Result:
    traffic = sessions_of(cell.workers, seed)
    room = SMALL_ROOM if cell.befalls == "small" else ROOM
    tokens = round(room * live_tokens(traffic) / cell.workers)
    longest = traffic.longest_tokens + traffic.block_tokens  # a cache holds any prompt
    return simulate(policy, cell.workers, traffic, max(tokens, longest), cell.befalls, has_pool=cell.has_pool)


def _mean(cell: Cell, policy: PolicyName, results: Sequence[Result]) -> Row:
    turns, hits, p50_s, p90_s, p99_s, moves = (
        statistics.mean(values) for values in zip(*results, strict=True)
    )
    return Row(cell.workers, cell.has_pool, cell.befalls, policy, hits, p50_s, p90_s, p99_s, moves, turns)


def judged(rows: Sequence[Row]) -> list[Row]:
    """The rows of a cell, with kvpool's marked where it misses the best rivals."""
    rivals = [row for row in rows if row.policy != "kvpool"]
    if not rivals:
        return list(rows)
    hits = max(row.hits_of_ideal for row in rivals)
    ttft_s = min(row.ttft_p90_s for row in rivals)
    return [
        row._replace(
            is_missed=row.policy == "kvpool"
            and (row.hits_of_ideal < hits - NEAR_HITS or row.ttft_p90_s > NEAR_TTFT * ttft_s)
        )
        for row in rows
    ]


def _said(cell: Cell | Row) -> str:
    said = {
        "nothing": "", "death": ", a worker dies", "slow": ", one ten times slower", "small": ", caches of half",
    }  # fmt: skip
    return f"{'a pool' if cell.has_pool else 'no pool'}{said[cell.befalls]}"


def _table(rows: Sequence[Row], seeds: int) -> Table:
    table = Table(
        title=f"Sessions on simulated workers, means of {seeds} samples. Ideal: hits over those of one endless cache. "
        "TTFT: seconds to the first token. Moves: of a session to another worker. !: kvpool has fewer hits than the "
        "best rival, or a p90 over 1.05 times the quickest rival's.",
        box=SIMPLE, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in ("workers", "cell", "policy", "ideal", "TTFT p50", "p90", "p99", "moves", ""):
        table.add_column(name, justify="left" if name in ("cell", "policy") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.workers}", _said(row), row.policy, f"{row.hits_of_ideal:.1%}", f"{row.ttft_p50_s:.2f}",
            f"{row.ttft_p90_s:.2f}", f"{row.ttft_p99_s:.2f}", f"{row.moves:.2f}", "!" if row.is_missed else "",
        )  # fmt: skip
    return table
