"""What ``kvpool lookup --route`` shows: workers by the cost of a prompt, with the terms of each cost."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvpool.index import Pick, Route

_COLUMNS = (("cost", 6), ("prefill", 7), ("fetch", 5), ("queue", 6), ("held", 9), ("run", 3), ("wait", 4))


def ranking_json(route: Route) -> list[dict[str, Any]]:
    """The picks in their order, each as one object: the fields of a row and of a pick."""
    return [{**pick.row._asdict(), **_without_row(pick)} for pick in route.picks]


def ranking_table(model: str, route: Route) -> Table | Text:
    """The same for people."""
    if not route.picks:
        return Text(f'no worker of model "{model}" that was asked about is there now')
    table = Table(
        title="cost = prefill + fetch + queue, in tokens; held: device/local/loadable blocks",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("worker", min_width=12, overflow="fold")
    for name, nchars in _COLUMNS:
        table.add_column(name, min_width=nchars, justify="right", overflow="fold")
    table.add_column("trust", min_width=8, no_wrap=True)
    several = len({pick.worker for pick in route.picks}) != len(route.picks)
    for pick in route.picks:
        row, known = pick.row, pick.load_source != "none"
        table.add_row(
            Text(f"{pick.worker} rank {pick.dp_rank}" if several else pick.worker),
            *map(str, (pick.cost, pick.prefill_cost, pick.fetch_cost, pick.queue_cost)),
            f"{row.device_blocks}/{row.local_blocks}/{row.loadable_blocks}",
            str(pick.running) if known else "?",
            str(pick.waiting) if known else "?",
            "unreachable" if pick.unreachable else "asleep" if pick.asleep else pick.trust,
        )
    return table


def _without_row(pick: Pick) -> dict[str, Any]:
    fields = pick._asdict()
    del fields["row"]
    return fields
