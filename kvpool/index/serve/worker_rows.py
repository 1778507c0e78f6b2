"""``WorkerRow``: a worker on the status page, with its health and its load. Pure, but for reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from kvpool.index.answer import PublisherStatus, WorkerStatus
from kvpool.index.cost.load import KEEP_S, KnownLoad, LoadBoard

Health = Literal["unreachable", "stale", "asleep", "incomplete", "silent", "healthy"]
# The worst first; a worker is as its worst rank. unreachable: stale, without events and metrics. stale: its
# events do not arrive, so its blocks get no credit. asleep: its engine serves no requests now. incomplete:
# its blocks are known, or can match, only in part. silent: its events are switched off.
HEALTHS: tuple[Health, ...] = get_args(Health)


class WorkerRow(NamedTuple):
    """One worker. ``loads``: of its ranks with a known load."""

    status: WorkerStatus
    health: Health
    problem: str
    loads: tuple[KnownLoad, ...]

    @property
    def position(self) -> tuple[str, str]:
        return self.status.worker.tenant, self.status.worker.name

    @property
    def staleness_ms(self) -> int:
        """Of the rank that is furthest behind."""
        return max((rank.staleness_ms for rank in self.status.publishers), default=0)

    def blocks(self, tier: str) -> int:
        return sum(int(getattr(rank, f"{tier}_blocks")) for rank in self.status.publishers)

    def as_json(self) -> dict[str, Any]:
        worker, ranks = self.status.worker, self.status.publishers
        return {
            **{name: getattr(worker, name) for name in ("name", "tenant", "model", "address")},
            "source": self.status.source,
            "health": self.health,
            "problem": self.problem,
            "ranks": len(ranks),
            **{f"{tier}_blocks": self.blocks(tier) for tier in ("device", "host", "disk")},
            "evicted_blocks": sum(rank.evicted_blocks for rank in ranks),
            "gaps": sum(rank.gaps for rank in ranks),
            "resets": sum(rank.resets for rank in ranks),
            "staleness_ms": self.staleness_ms,
            "running": _total(known.load.running for known in self.loads),
            "waiting": _total(known.load.waiting for known in self.loads),
            "kv_usage": max((known.load.kv_usage for known in self.loads), default=None),
        }


def rows_of(workers: Iterable[WorkerStatus], loads: LoadBoard) -> list[WorkerRow]:
    return [_row(status, loads) for status in workers]


def _row(status: WorkerStatus, loads: LoadBoard) -> WorkerRow:
    ranks = [(rank, loads.get(status.worker.id, rank.dp_rank)) for rank in status.publishers]
    feeds = {one.dp_rank: bool(one.events) for one in status.worker.publishers}
    judged = [(_health(rank, known, feeds[rank.dp_rank]), rank) for rank, known in ranks]
    health, worst = min(judged, key=lambda one: HEALTHS.index(one[0]))
    problem = worst.problem
    if problem and len(ranks) > 1:
        problem = f"rank {worst.dp_rank}: {problem}"
    return WorkerRow(status, health, problem, tuple(known for _, known in ranks if known is not None))


def _health(rank: PublisherStatus, known: KnownLoad | None, has_feed: bool) -> Health:
    if known is not None and known.asleep:
        return "asleep"
    if not has_feed:
        return "silent"
    if rank.stale:
        # As a route has it (kvpool/_native/index/ranking.cpp).
        return "unreachable" if known is None and rank.staleness_ms > KEEP_S * 1000 else "stale"
    return "incomplete" if rank.problem else "healthy"


def _total(numbers: Iterable[int]) -> int | None:
    """None: no numbers."""
    known = list(numbers)
    return sum(known) if known else None


def page_of(
    rows: Sequence[WorkerRow], after: tuple[str, str], limit: int, health: str, find: str
) -> dict[str, Any]:
    """The rows behind ``after``, by tenant and name."""
    matching = [
        row
        for row in rows
        if health in ("", row.health) and (not find or find in row.status.worker.name.casefold())
    ]
    following = [row for row in matching if row.position > after]
    page = following[:limit]
    return {
        "matching": len(matching),
        "before": len(matching) - len(following),
        "rows": [row.as_json() for row in page],
        "next": "/".join(page[-1].position) if len(page) < len(following) else "",
    }
