"""What ``kvpool lookup --route`` shows: workers by the cost of a prompt, with the terms of each cost."""

from __future__ import annotations

from typing import Any

from kvpool.cli.tables import Column, add_row, console, fitted, left_out, show
from kvpool.index import Pick, Ranking


def ranking_json(ranking: Ranking) -> list[dict[str, Any]]:
    """The picks in their order, each as one object: the fields of a row and of a pick."""
    return [{**pick.row._asdict(), **_without_row(pick)} for pick in ranking.picks]


def print_ranking(model: str, ranking: Ranking) -> None:
    """The same for people. Cost, blocks and trust stay on a narrow screen."""
    out = console()
    if not ranking.picks:
        show(out, f'no worker of model "{model}" that was asked about is there now')
        return
    several = len({pick.worker for pick in ranking.picks}) != len(ranking.picks)
    columns = [
        Column("worker", left=True), Column("cost"), Column("prefill", drop=1), Column("fetch", drop=2),
        Column("queue", drop=3), Column("held"), Column("run", drop=5), Column("wait", drop=4),
        Column("trust", left=True),
    ]  # fmt: skip
    for pick in ranking.picks:
        row, known = pick.row, pick.load_source != "none"
        cells = (
            f"{pick.worker} rank {pick.dp_rank}" if several else pick.worker,
            *map(str, (pick.cost, pick.prefill_cost, pick.fetch_cost, pick.queue_cost)),
            f"{row.device_blocks}/{row.local_blocks}/{row.loadable_blocks}",
            str(pick.running) if known else "?",
            str(pick.waiting) if known else "?",
            "unreachable" if pick.unreachable else "asleep" if pick.asleep else pick.trust,
        )
        add_row(columns, *cells)
    table, missing = fitted(columns, out.width)
    show(out, "cost = prefill + fetch + queue, in tokens; held: device/local/loadable blocks", table)
    if missing:
        show(out, left_out(missing))


def _without_row(pick: Pick) -> dict[str, Any]:
    fields = pick._asdict()
    del fields["row"]
    return fields
