"""``python -m benchmarks audits``: on real engines, what audits of hits find, their false alarms, and their cost.

Without options: wrong hits of every kind. ``--honest N``: so many honest ones. ``--cost``: engines in turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.audits_cost import measure_cost
from benchmarks.audits_honest import pairs, soak
from benchmarks.audits_wrong import run_set, sets
from demo.workspace import workspace
from tests.support.engine_forks import watching

SHARE = 1 / 256
BOUND = 3.0  # over hits without an alarm: the most that the rate of alarms may be, at 95 %


def run_audits(*, honest: int, cost: int, only: Sequence[str], as_json: bool) -> bool:
    """Measure and print; whether every fault was found and no honest hit was. Blocks for minutes to hours."""
    console = Console(stderr=True)
    report: dict[str, list[dict[str, Any]]] = {}

    def begins(what: str) -> None:
        console.print(what, highlight=False, markup=False, soft_wrap=True)

    def wanted(name: str) -> bool:
        return not only or any(one in name for one in only)

    with workspace("kvpool-bench-", console, keep=False) as folder, watching(folder, "audits"):
        if honest:
            chosen = [pair for pair in pairs() if wanted(f"{pair.name} {pair.dtype}")]
            rows = report.setdefault("honest", [])
            for number, pair in enumerate(chosen):
                begins(f"{pair.name} in {pair.dtype}")
                rows.append(asdict(soak(pair, -(-honest // len(chosen)), folder / f"honest{number}", number)))
        if cost:
            begins("engines that audit no hit, one of 256 and every one")
            report["cost"] = [asdict(row) for row in measure_cost(folder, cost)]
        if not (honest or cost):
            of_wrong = report.setdefault("wrong", [])
            for number, one in enumerate(sets()):
                if wanted(f"{one.family} {one.dtype}"):
                    of_wrong += map(asdict, run_set(one, folder / f"wrong{number}", begins))
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
    found = all(row["found"] for row in report.get("wrong", ()))
    return found and not any(row["alarms"] or row["failed"] for row in report.get("honest", ()))


def _show(report: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    console = Console()
    if rows := report.get("wrong"):
        table = _table(
            "Wrong hits. after: audited hits, the first finding counted. of floor: of the farthest layer, median.",
            "fault", "family", "dtype", "audited", "found", "after", "hits at 1 in 256", "what", "distance", "of floor",
        )  # fmt: skip
        for row in rows:
            table.add_row(
                row["wrong"], row["family"], row["dtype"], f"{row['audited']}", f"{row['found']}",
                f"{row['found_after'] or '-'}", f"{row['found_after'] / SHARE:,.0f}" if row["found_after"] else "-",
                row["what"] or "-", f"{row['distance']:.2g}", f"{row['ratio']:.2g}",
            )  # fmt: skip
        console.print(table)
    if rows := report.get("honest"):
        table = _table(
            "Honest hits. of others: stored by the other engine. of floor: the most of a layer; an alarm is above 2.",
            "engines", "dtype", "hits", "of others", "alarms", "farthest", "of floor",
        )  # fmt: skip
        for row in rows:
            table.add_row(
                row["pair"] + (f": {row['failed']}" if row["failed"] else ""), row["dtype"], f"{row['hits']}",
                f"{row['of_others']}", f"{row['alarms']}", f"{row['farthest']:.2g}", f"{row['ratio']:.2g}",
            )  # fmt: skip
        console.print(table)
        hits, alarms = (sum(row[name] for row in rows) for name in ("hits", "alarms"))
        bound = (
            "" if alarms or not hits else f": at most {BOUND / hits:.1e} of honest hits are alarms, at 95 %"
        )
        console.print(f"{hits:,} honest hits, {alarms} alarms{bound}", highlight=False)
    if rows := report.get("cost"):
        table = _table(
            "Cost of audits: ms, of the fastest tenth of hits.",
            "share", "hits", "audits", "computed", "first token of a hit", "next token", "MB read for a hit",
        )  # fmt: skip
        for row in rows:
            table.add_row(
                f"{row['share']:.4f}", f"{row['hits']}", f"{row['audits']}", f"{row['computed_ms']:.0f}",
                f"{row['first_ms']:.1f}", f"{row['step_ms']:.2f}", f"{row['read_mb']:.1f}",
            )  # fmt: skip
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for name in columns:
        is_text = name in ("fault", "family", "dtype", "what", "engines")
        table.add_column(name, justify="left" if is_text else "right")
    return table
