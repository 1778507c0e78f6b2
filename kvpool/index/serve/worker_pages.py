"""Workers by tenant and name, in pages: of ``ListWorkers``, and of the status page. Pure, but for reads.

A page's token is the id of its last worker. Any replica answers the next page; a worker is listed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from kvpool.discovery.quota import Standing
from kvpool.errors import ConfigError
from kvpool.index.answer import IndexStatus, PublisherStatus, WorkerStatus
from kvpool.index.cost.load import KEEP_S, KnownLoad, LoadBoard
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.protocol import messages
from kvpool.index.serve.auth import Permissions
from kvpool.v1 import index_pb2 as pb

MAX_PAGE_SIZE = 1024  # workers
MAX_PAGE_NBYTES = 4 << 20  # but one worker at least, which has 1,024 ranks


def list_workers(
    fleet: Fleet, request: Any, caller: Permissions, index: IndexStatus, quotas: Mapping[str, Standing]
) -> Any:
    """``ListWorkersResponse``, with the workers and quotas that ``caller`` may see. Errors: ``ConfigError``."""
    last = _position(request.page_token)
    positions = sorted(
        position
        for worker in fleet.followed()
        if request.tenant in ("", worker.tenant)
        and request.model in ("", worker.model)
        and caller.sees(worker.tenant)
        and (position := (worker.tenant, worker.name)) > last
    )
    page = positions[: min(request.page_size, MAX_PAGE_SIZE) or None]
    reply = pb.ListWorkersResponse(index=messages.encode_index_status(index))
    if not request.page_token:
        reply.quotas.extend(
            messages.encode_quota(tenant, standing)
            for tenant, standing in sorted(quotas.items())
            if request.tenant in ("", tenant) and caller.sees(tenant)
        )
    nbytes = 0
    for status in fleet.workers({_id(*position) for position in page}):
        one = messages.encode_worker_status(status)
        nbytes += one.ByteSize()
        if request.page_size and nbytes > MAX_PAGE_NBYTES and reply.workers:
            reply.next_page_token = _id(reply.workers[-1].worker.tenant, reply.workers[-1].worker.name)
            return reply
        reply.workers.append(one)
    if len(page) < len(positions):
        reply.next_page_token = _id(*page[-1])
    return reply


def _id(tenant: str, name: str) -> str:
    return f"{tenant}/{name}"


def _position(page_token: str) -> tuple[str, str]:
    """Of the former page's last worker; before all others without one."""
    tenant, slash, name = page_token.partition("/")
    if page_token and not slash:
        raise ConfigError("page_token is the next_page_token of the page before, as it came")
    return tenant, name


# ---- of the status page


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
