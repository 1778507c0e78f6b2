"""``kvpool top``: what an index follows, and how well, again and again.

Live on a terminal; elsewhere a table, or a JSON object, a look. One thread, which waits between two looks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpool.cli.index_connection import IndexConnection
from kvpool.errors import ConfigError, IndexUnavailable
from kvpool.index.answer import FleetStatus, IndexStatus, PublisherStatus, WorkerStatus
from kvpool.index.client.client import IndexClient
from kvpool.text import unknown

TIMEOUT_S = 5.0
HEAD_LINES = 8  # of a live screen that are no rows
MIN_PROBLEM_CHARS = 6


class Row(NamedTuple):
    """One rank of one worker, as it is shown. ``batches_per_s``: None where there is nothing to compare with."""

    tenant: str
    worker: str
    dp_rank: int
    model: str
    source: str
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    batches: int
    batches_per_s: float | None
    staleness_ms: int
    stale: bool
    gaps: int
    replays: int
    resets: int
    problem: str


class Rates(NamedTuple):
    """Of lookups: shares of the prompts' blocks that the best rank of each had; None: nothing was asked."""

    lookups_per_s: float | None
    device_ratio: float | None
    local_ratio: float | None
    pool_ratio: float | None


class Look(NamedTuple):
    """What an index said at one moment; ``at_s``: seconds that only go up."""

    at_s: float
    status: FleetStatus


SORTS: dict[str, Callable[[Row], float]] = {
    "name": lambda row: 0,
    "device": lambda row: -row.device_blocks,
    "host": lambda row: -row.host_blocks,
    "disk": lambda row: -row.disk_blocks,
    "batches": lambda row: -(row.batches_per_s or 0.0),
    "lag": lambda row: -row.staleness_ms,
    "gaps": lambda row: -row.gaps,
    "resets": lambda row: -row.resets,
}


def run_top(
    *,
    index: IndexConnection,
    tenant: str | None,
    model: str | None,
    sort: str,
    most: int,
    interval_s: float,
    once: bool,
    as_json: bool,
) -> None:
    """Look until Ctrl-C, or once. An index that is away is asked again, but with ``once``.

    Errors: ``ConfigError`` for the arguments; with ``once`` those of ``IndexClient``.
    """
    if sort not in SORTS:
        raise ConfigError(f"--sort: {unknown('order', sort, SORTS)}")
    console = Console()
    try:
        with index.open(TIMEOUT_S) as client:
            watch = _Watch(client, tenant, model, sort)
            if once:
                watch.look()
                _print(console, watch, most, as_json)
            elif as_json or not console.is_terminal:
                while True:
                    watch.try_to_look()
                    _print(console, watch, most, as_json)
                    time.sleep(interval_s)
            else:
                with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
                    while True:
                        watch.try_to_look()
                        fitting = max(1, console.height - HEAD_LINES)
                        live.update(watch.table(console.width, fitting), refresh=True)
                        time.sleep(interval_s)
    except (KeyboardInterrupt, BrokenPipeError):  # the watcher has gone, or who read for him
        return


def _print(console: Console, watch: _Watch, most: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(watch.as_json()), flush=True)
    else:
        console.print(watch.table(console.width, most))


class _Watch:
    """The last two looks at an index, and why there is no later one."""

    def __init__(self, client: IndexClient, tenant: str | None, model: str | None, sort: str) -> None:
        self._client, self._tenant, self._model, self._sort = client, tenant, model, sort
        self._before: Look | None = None
        self._now: Look | None = None
        self._away = ""

    def look(self) -> None:
        status = self._client.status(tenant=self._tenant, model=self._model)
        self._before, self._now, self._away = self._now, Look(time.monotonic(), status), ""

    def try_to_look(self) -> None:
        try:
            self.look()
        except IndexUnavailable as error:
            self._away = str(error)

    def as_json(self) -> dict[str, object]:
        if self._away or self._now is None:
            return {"error": self._away}
        index = self._now.status.index
        return {
            "index": {name: getattr(index, name) for name in IndexStatus.__dataclass_fields__}
            | rates_of(self._now, self._before)._asdict(),
            "ranks": [row._asdict() for row in rows_of(self._now, self._before, self._sort)],
        }

    def table(self, width: int, most: int) -> RenderableType:
        if self._now is None:
            return Text(f"{self._away}; trying again")
        parts: list[RenderableType] = []
        if self._away:  # first: the end of a screen that is too long is cut off
            ago_s = time.monotonic() - self._now.at_s
            parts.append(Text(f"this is {ago_s:.0f} s old: {self._away}; trying again"))
        parts += [Text(line) for line in _head(self._now, self._before)]
        rows = rows_of(self._now, self._before, self._sort)
        parts.append(_table(rows, most, width))
        if most and len(rows) > most:
            stale = sum(row.stale for row in rows[most:])
            parts.append(Text(f"and {len(rows) - most} more ranks, {stale} of them stale"))
        return Group(*parts)


# ---- from looks to numbers


def rows_of(now: Look, before: Look | None, sort: str) -> list[Row]:
    """A row for each rank, in the order of ``SORTS``, then by tenant, name and rank."""
    known = {} if before is None else {
        _identity(status, rank): rank for status in before.status.workers for rank in status.publishers
    }  # fmt: skip
    rows = []
    for status in now.status.workers:
        for rank in status.publishers:
            last = known.get(_identity(status, rank))
            rate = None
            if before is not None and last is not None and last.batches <= rank.batches:
                rate = (rank.batches - last.batches) / max(now.at_s - before.at_s, 1e-9)
            worker = status.worker
            rows.append(
                Row(
                    worker.tenant, worker.name, rank.dp_rank, worker.model, status.source, rank.device_blocks,
                    rank.host_blocks, rank.disk_blocks, rank.batches, rate, rank.staleness_ms, rank.stale,
                    rank.gaps, rank.replays, rank.resets, rank.problem,
                )
            )  # fmt: skip
    return sorted(rows, key=lambda row: (SORTS[sort](row), row[:3]))


def rates_of(now: Look, before: Look | None) -> Rates:
    """Of the time between two looks; of all the time since the index was started where it was not asked since."""
    index = now.status.index
    last = before.status.index if before is not None else None
    # An index of an earlier version has no id, but the time since its start.
    if (
        before is None
        or last is None
        or last.instance_id != index.instance_id
        or last.uptime_ms > index.uptime_ms
    ):
        return Rates(None, *_ratios(index, IndexStatus()))
    rate = (index.lookups - last.lookups) / max(now.at_s - before.at_s, 1e-9)
    since = last if index.prompt_blocks > last.prompt_blocks else IndexStatus()
    return Rates(rate, *_ratios(index, since))


def _ratios(now: IndexStatus, since: IndexStatus) -> tuple[float | None, float | None, float | None]:
    asked = now.prompt_blocks - since.prompt_blocks
    if asked <= 0:
        return None, None, None
    return (
        (now.device_blocks - since.device_blocks) / asked,
        (now.local_blocks - since.local_blocks) / asked,
        (now.pool_blocks - since.pool_blocks) / asked,
    )


def _identity(status: WorkerStatus, rank: PublisherStatus) -> tuple[str, str, int]:
    return status.worker.id, status.worker.incarnation, rank.dp_rank


# ---- from numbers to a screen


def _head(now: Look, before: Look | None) -> list[str]:
    status = now.status
    index, ranks = status.index, [rank for worker in status.workers for rank in worker.publishers]
    stale = sum(rank.stale for rank in ranks)
    rates = rates_of(now, before)
    lookups = f"{index.lookups} lookups"
    if rates.lookups_per_s is not None:
        lookups += f", {rates.lookups_per_s:.1f}/s"
    shares = ", ".join(
        f"{where} {'-' if ratio is None else f'{ratio:.1%}'}"
        for where, ratio in zip(("device", "local", "pool"), rates[1:], strict=True)
    )
    return [
        f"up {_duration(index.uptime_ms / 1000)}: {len(status.workers)} workers, {len(ranks)} ranks, {stale} stale",
        f"{index.held_blocks} blocks, {index.held_pool_blocks} in the pool, {index.memory_nbytes / 1e6:.1f} MB",
        f"{lookups}; best rank's share: {shares}",
    ]


def _table(rows: Sequence[Row], most: int, width: int) -> Table:
    tenants = len({row.tenant for row in rows}) > 1
    several = len({(row.tenant, row.worker) for row in rows}) != len(rows)
    names = ["worker", "device", "lag"]
    if width >= 60:
        names = ["worker", "device", "host", "disk", "batch/s", "lag"]
    if width >= 80:
        names += ["gaps", "replays", "resets"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name == "worker" else "right", overflow="fold")
    table.add_column("problem", no_wrap=True)
    lines = []
    for row in rows[: most or None]:
        worker = f"{row.tenant}/{row.worker}" if tenants else row.worker
        cells = {
            "worker": f"{worker} rank {row.dp_rank}" if several else worker,
            "device": str(row.device_blocks), "host": str(row.host_blocks), "disk": str(row.disk_blocks),
            "batch/s": "-" if row.batches_per_s is None else f"{row.batches_per_s:.1f}",
            "lag": f"{row.staleness_ms / 1000:.1f} s", "gaps": str(row.gaps), "replays": str(row.replays),
            "resets": str(row.resets),
        }  # fmt: skip
        lines.append((row, [cells[name] for name in names]))
    columns = zip(*(line for _, line in lines), strict=True)
    taken = sum(max(map(len, (name, *column))) + 2 for name, column in zip(names, columns, strict=False))
    for row, line in lines:
        problem = ("stale: " if row.stale else "") + row.problem
        table.add_row(*map(Text, line), Text(_cut(problem, max(MIN_PROBLEM_CHARS, width - taken - 2))))
    return table


def _cut(text: str, nchars: int) -> str:
    return text if len(text) <= nchars else text[: nchars - 1] + "\u2026"


def _duration(seconds: float) -> str:
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h" if days < 2 else f"{days:.1f} days"
