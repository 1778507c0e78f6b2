"""``kvpool top``: an index's workers and their freshness, again and again.

Live on a terminal; elsewhere a table or JSON object per interval. One thread, which waits between two requests.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvpool.cli.exits import code_of, error_object, in_options
from kvpool.cli.options import IndexConnection
from kvpool.cli.quota import said
from kvpool.cli.settings import TopOptions
from kvpool.cli.tables import Column, add_row, console, fitted, kept, show, termination_interrupts
from kvpool.discovery.quota import Standing, fullest_first
from kvpool.errors import ConfigError, IndexUnavailable
from kvpool.index.answer import EngineAudits, FleetStatus, IndexStatus, PublisherStatus, WorkerStatus
from kvpool.index.client.client import IndexClient
from kvpool.index.fleet.rank import ASLEEP
from kvpool.text import counted, format_duration, format_size, unknown

TIMEOUT_S = 5.0
MAX_QUOTAS = 5  # lines
MAX_AUDITS = 5  # lines


class RankRow(NamedTuple):
    """One rank of one worker, as shown. ``batches_per_s``: None: no former value."""

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
    publishes: bool
    gaps: int
    replays: int
    resets: int
    problem: str
    address: str


class Rates(NamedTuple):
    """Of lookups: shares of the prompts' blocks at the best rank of each. Of placements: share of the
    prompts' blocks that needs no compute. None: no requests.
    """

    lookups_per_s: float | None
    device_ratio: float | None
    local_ratio: float | None
    pool_ratio: float | None
    placements_per_s: float | None
    placed_ratio: float | None


class Look(NamedTuple):
    """An index's status at one moment; ``at_s``: monotonic seconds."""

    at_s: float
    status: FleetStatus


SORTS: dict[str, Callable[[RankRow], float]] = {
    "name": lambda row: 0,
    "device": lambda row: -row.device_blocks,
    "host": lambda row: -row.host_blocks,
    "disk": lambda row: -row.disk_blocks,
    "batches": lambda row: -(row.batches_per_s or 0.0),
    "lag": lambda row: -row.staleness_ms,
    "gaps": lambda row: -row.gaps,
    "resets": lambda row: -row.resets,
}


def run_top(options: TopOptions, index: IndexConnection) -> None:
    """Show until Ctrl-C, or once. An unreachable index is retried, but not with ``once``.

    Errors: ``ConfigError`` for the arguments; with ``once`` those of ``IndexClient``.
    """
    if options.sort not in SORTS:
        raise ConfigError(f"--sort: {unknown('order', options.sort, SORTS)}")
    out = console()
    # A watch ends with its watcher, or the reader of its pipe; one look has not been had then.
    ends = () if options.once else (KeyboardInterrupt, BrokenPipeError)
    with contextlib.suppress(*ends), index.open(TIMEOUT_S) as client:
        watch = _Watch(client, options)
        if options.once:
            watch.look()
            _print(out, watch)
        elif options.as_json or not out.is_screen:
            while True:
                watch.try_to_look()
                _print(out, watch)
                time.sleep(options.interval)
        else:
            live = Live(console=out, auto_refresh=False, vertical_overflow="crop")
            with termination_interrupts(), live:
                while True:
                    watch.try_to_look()
                    live.update(_fitted_to(out, watch), refresh=True)
                    time.sleep(options.interval)


def _print(out: Console, watch: _Watch) -> None:
    if watch.options.as_json:
        print(json.dumps(watch.as_json()), flush=True)
    else:
        show(out, *watch.parts(out.width, watch.options.most))


def _fitted_to(out: Console, watch: _Watch) -> Group:
    """As many rows as fit between the other lines, which may wrap."""
    group = Group(*watch.parts(out.width, out.height))
    too_many = len(out.render_lines(group, pad=False)) - out.height
    return group if too_many <= 0 else Group(*watch.parts(out.width, max(1, out.height - too_many - 1)))


class _Watch:
    """The last two states of an index, and why no later came."""

    def __init__(self, client: IndexClient, options: TopOptions) -> None:
        self._client, self.options = client, options
        self._before: Look | None = None
        self._now: Look | None = None
        self._away: IndexUnavailable | None = None

    def look(self) -> None:
        status = self._client.status(tenant=self.options.tenant, model=self.options.model)
        self._before, self._now, self._away = self._now, Look(time.monotonic(), status), None

    def try_to_look(self) -> None:
        try:
            self.look()
        except IndexUnavailable as error:
            self._away = error

    def as_json(self) -> dict[str, object]:
        if self._away is not None or self._now is None:
            error = self._away or IndexUnavailable("it was not asked yet")
            return {"error": error_object(str(error), code_of(error), type(error).__name__)}
        index = self._now.status.index
        return {
            "index": {name: getattr(index, name) for name in IndexStatus.__dataclass_fields__}
            | rates_of(self._now, self._before)._asdict(),
            "ranks": [row._asdict() for row in rows_of(self._now, self._before, self.options.sort)],
            "quotas": [one.as_json(tenant) for tenant, one in self._now.status.quotas.items()],
            "audits": [asdict(one) for one in self._now.status.audits],
        }

    def parts(self, width: int, most: int) -> list[RenderableType]:
        if self._now is None:
            return [Text(f"{in_options(str(self._away))}; trying again")]
        parts: list[RenderableType] = []
        if self._away is not None:  # first: the end of a long screen is cut off
            ago_s = time.monotonic() - self._now.at_s
            parts.append(Text(f"this is {ago_s:.0f} s old: {in_options(str(self._away))}; trying again"))
        rows = rows_of(self._now, self._before, self.options.sort)
        parts += [Text(line) for line in _head(self._now, self._before, rows)]
        if not rows:
            parts.append(Text(self._no_rows()))
            return parts
        columns = _columns(rows, most)
        problems = _problems_below(columns, width)
        table, *missing = fitted(columns, width)
        parts += [table, *problems]
        if most and len(rows) > most:
            stale = sum(_state(row) == "stale" for row in rows[most:])
            parts.append(Text(f"and {len(rows) - most} more ranks, {stale} of them stale"))
        return parts + missing

    def _no_rows(self) -> str:
        if self.options.tenant is not None or self.options.model is not None:
            return "no worker of this tenant and model: see without --tenant and --model who is there"
        return "no worker is in this index: it finds those that have started by its --pool, or names each with --worker"


# ---- from states to numbers


def rows_of(now: Look, before: Look | None, sort: str) -> list[RankRow]:
    """A row for each rank, in the order of ``SORTS``, then by tenant, name and rank."""
    known = {} if before is None else {
        _identity(status, rank): rank for status in before.status.workers for rank in status.publishers
    }  # fmt: skip
    rows = []
    for status in now.status.workers:
        publishing = {one.dp_rank for one in status.worker.publishers if one.events}
        for rank in status.publishers:
            last = known.get(_identity(status, rank))
            rate = None
            if before is not None and last is not None and last.batches <= rank.batches:
                rate = (rank.batches - last.batches) / max(now.at_s - before.at_s, 1e-9)
            worker = status.worker
            rows.append(
                RankRow(
                    worker.tenant, worker.name, rank.dp_rank, worker.model, status.source, rank.device_blocks,
                    rank.host_blocks, rank.disk_blocks, rank.batches, rate, rank.staleness_ms, rank.stale,
                    rank.dp_rank in publishing, rank.gaps, rank.replays, rank.resets, rank.problem,
                    worker.address,
                )
            )  # fmt: skip
    return sorted(rows, key=lambda row: (SORTS[sort](row), row[:3]))


def rates_of(now: Look, before: Look | None) -> Rates:
    """Of the time between two states; without requests since, of all time since the index's start."""
    index, start = now.status.index, IndexStatus()
    last = start if before is None else before.status.index
    passed_s = None
    # An index of an earlier version has no id, but the time since its start.
    if before is not None and last.instance_id == index.instance_id and last.uptime_ms <= index.uptime_ms:
        passed_s = max(now.at_s - before.at_s, 1e-9)

    def per_s(name: str) -> float | None:
        return None if passed_s is None else (getattr(index, name) - getattr(last, name)) / passed_s

    def share(part: str, whole: str) -> float | None:
        goes_on = passed_s is not None and getattr(index, whole) > getattr(last, whole)
        since = last if goes_on else start
        asked = getattr(index, whole) - getattr(since, whole)
        return (getattr(index, part) - getattr(since, part)) / asked if asked > 0 else None

    return Rates(
        lookups_per_s=per_s("lookups"),
        device_ratio=share("device_blocks", "prompt_blocks"),
        local_ratio=share("local_blocks", "prompt_blocks"),
        pool_ratio=share("pool_blocks", "prompt_blocks"),
        placements_per_s=per_s("placements"),
        placed_ratio=share("placed_matched_blocks", "placed_prompt_blocks"),
    )


def _identity(status: WorkerStatus, rank: PublisherStatus) -> tuple[str, str, int]:
    return status.worker.id, status.worker.incarnation, rank.dp_rank


# ---- from numbers to a screen


def _head(now: Look, before: Look | None, rows: Sequence[RankRow]) -> list[str]:
    status, index = now.status, now.status.index
    stale = sum(_state(row) == "stale" for row in rows)
    rates = rates_of(now, before)
    shares = ", ".join(
        f"{where} {_share(ratio)}"
        for where, ratio in zip(
            ("on its device", "in all its tiers", "with the pool"), rates[1:4], strict=True
        )
    )
    return [
        f"up {format_duration(index.uptime_ms / 1000)}: {counted(len(status.workers), 'worker')}, "
        f"{counted(len(rows), 'rank')}, {stale} stale",
        *_pool_away(index),
        f"the index knows {counted(index.held_blocks, 'block')}, {index.held_pool_blocks:,} in the pool, "
        f"and takes {format_size(index.memory_nbytes)} for them",
        _rated(index.lookups, "lookup", rates.lookups_per_s)
        + (f", of which the best rank had: {shares}" if rates.device_ratio is not None else ""),
        _rated(index.placements, "placement", rates.placements_per_s)
        + (
            f"; share that the worker had: {_share(rates.placed_ratio)}"
            if rates.placed_ratio is not None
            else ""
        ),
        *_quotas(status.quotas),
        *_audits(status.audits, time.time()),
    ]


def _quotas(quotas: Mapping[str, Standing]) -> list[str]:
    """The fullest first: a screen of ranks must follow."""
    fullest = fullest_first(quotas.items())
    lines = [f"tenant {tenant} {said(standing)}" for tenant, standing in fullest[:MAX_QUOTAS]]
    more = len(fullest) - len(lines)
    return [*lines, f"and {counted(more, 'more tenant')} with a quota"] if more else lines


def _audits(audits: Sequence[EngineAudits], now_s: float) -> list[str]:
    """A line for all engines that audit hits, and one for each of the worst."""
    if not audits:
        return []
    differing = sum(one.differing for one in audits)
    judged = sum(one.same for one in audits) + differing
    lines = [
        f"{counted(judged, 'audited hit')} of {counted(len(audits), 'engine')}, of which {differing:,} differ"
    ]
    wrong = [one for one in audits if one.doubts or one.differing]
    for one in wrong[:MAX_AUDITS]:
        name = f"engine {one.writer[16:24]} on {one.host}"
        if one.doubts:
            lines.append(f"{name} doubts itself, and goes without the pool: {one.doubts}")
        else:
            when = f", the last {format_duration(max(0.0, now_s - one.found_s))} ago" if one.found_s else ""
            whose = f", written by {' or '.join(one.found_writers)}" if one.found_writers else ""
            lines.append(f"{name} computes other than {counted(one.differing, 'block')}{when}{whose}")
    if len(wrong) > MAX_AUDITS:
        lines.append(f"and {counted(len(wrong) - MAX_AUDITS, 'more engine')} with findings")
    return [*lines, "kvpool doctor --pool says what to do about them"] if wrong else lines


def _pool_away(index: IndexStatus) -> list[str]:
    if not index.pool_servers_away:
        return []
    away = f"{index.pool_servers_away} of {counted(index.pool_servers, 'server')} of the pool"
    return [f"{away} cannot be reached by the index: what the workers cannot load from there, they compute"]


def _rated(count: int, what: str, per_s: float | None) -> str:
    return counted(count, what) + (f", {per_s:.1f}/s" if per_s is not None else "")


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _columns(rows: Sequence[RankRow], most: int) -> list[Column]:
    """Columns of faults stay on a narrow screen, counts of mishaps go first."""
    tenants = len({row.tenant for row in rows}) > 1
    several = len({(row.tenant, row.worker) for row in rows}) != len(rows)
    columns = [
        Column("worker", left=True), Column("address", drop=1, left=True), Column("state", left=True),
        Column("device"), Column("host", drop=3), Column("disk", drop=4), Column("batch/s", drop=2), Column("lag"),
        Column("gaps", drop=5), Column("replays", drop=7), Column("resets", drop=6), Column("problem", wraps=True),
    ]  # fmt: skip
    for row in rows[: most or None]:
        worker = f"{row.tenant}/{row.worker}" if tenants else row.worker
        add_row(
            columns, f"{worker} rank {row.dp_rank}" if several else worker, _address(row), _state(row),
            row.device_blocks, row.host_blocks, row.disk_blocks,
            "-" if row.batches_per_s is None else f"{row.batches_per_s:.1f}",
            f"{row.staleness_ms / 1000:.1f} s" if row.publishes else "-", row.gaps, row.replays, row.resets,
            row.problem,
        )  # fmt: skip
    return [column for column in columns if column.name not in ("address", "problem") or any(column.cells)]


def _problems_below(columns: list[Column], width: int) -> list[Text]:
    """Lines in place of the last column, which is taken out, where it would leave the addresses no room."""
    named, left = ({one.name for one in each} for each in (columns, kept(columns, width)))
    if not {"address", "problem"} <= named or "address" in left:
        return []
    problems = columns.pop().cells
    return [Text(f"{worker}: {one}") for worker, one in zip(columns[0].cells, problems, strict=True) if one]


def _address(row: RankRow) -> str:
    """Without what is understood; empty: its name says it already."""
    address = row.address.removeprefix("http://")
    return "" if address == row.worker else address


def _state(row: RankRow) -> str:
    if not row.publishes:
        return "no events"
    if row.stale and row.problem == ASLEEP:
        return "asleep"
    return "stale" if row.stale else "ok"
