"""Replies of the index: ``Lookup`` of a prompt, ``Ranking`` of its workers, ``WorkerStatus`` of each. Immutable."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from kvpool.discovery.audit_news import SAME, AuditNews
from kvpool.discovery.quota import Standing
from kvpool.discovery.worker import Worker

LoadSource = Literal["none", "reported", "scraped"]
LOAD_SOURCES: dict[int, LoadSource] = {0: "none", 1: "reported", 2: "scraped"}  # by the native core's number
Trust = Literal["exact", "degraded", "fallback"]
TRUSTS: dict[int, Trust] = {1: "exact", 2: "degraded", 3: "fallback"}  # by the native core's number


class Row(NamedTuple):
    """One data-parallel rank of one worker, as a row of ``Lookup``."""

    worker: str
    dp_rank: int
    address: str
    block_tokens: int
    prompt_blocks: int
    device_blocks: int
    local_blocks: int
    pool_blocks: int
    sequence: int
    staleness_ms: int
    stale: bool
    loadable_blocks: int
    pool_media: int = 0


@dataclass(frozen=True)
class Lookup:
    """How many leading blocks of a prompt each worker holds, in columns: row i of each belongs to ``workers[i]``.

    Every candidate rank has a row, sorted by name and rank, zeros included. Iterating gives ``Row``s.

    ``addresses``: where workers serve requests; empty: unknown. ``block_tokens``: tokens of a hashed block.
    ``prompt_blocks``: full blocks of the prompt. ``device_blocks``: in accelerator memory. ``local_blocks``: in
    any tier of the worker, then in its host's near pool. ``pool_blocks``: loadable from the pool. ``sequences``: the
    event batch after which device and local blocks are exact; 0 also before the first. ``staleness_ms``: since the
    index last knew that it had every batch. ``stale``: not trusted now; device and local blocks are 0.
    ``loadable_blocks``: need no compute: leading blocks that are local or in the pool, at least the larger of both
    counts. ``pool_media``: of the prompt's different images, clips and sounds, those whose encoder's output is
    loadable from the pool.
    """

    workers: tuple[str, ...] = ()
    dp_ranks: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    block_tokens: tuple[int, ...] = ()
    prompt_blocks: tuple[int, ...] = ()
    device_blocks: tuple[int, ...] = ()
    local_blocks: tuple[int, ...] = ()
    pool_blocks: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    staleness_ms: tuple[int, ...] = ()
    stale: tuple[bool, ...] = ()
    loadable_blocks: tuple[int, ...] = ()
    pool_media: tuple[int, ...] = ()

    @classmethod
    def of(cls, rows: list[Row]) -> Lookup:
        return cls(*zip(*rows, strict=True)) if rows else cls()

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Row]:
        return map(Row._make, zip(*(getattr(self, one.name) for one in fields(self)), strict=True))


class Pick(NamedTuple):
    """One data-parallel rank of one worker, and the cost of a prompt there, in tokens to compute.

    ``cost`` is the sum of ``prefill_cost`` (tokens in no tier), ``fetch_cost`` (tokens in the worker's other
    tiers or the pool), ``queue_cost`` (earlier work), ``move_cost`` (what a session's blocks displace) and
    ``encode_cost`` (items that its encoder has to compute). Of the queue: ``running`` and ``waiting`` requests,
    ``queued_tokens`` (0 also if unknown), ``kv_usage_permille`` and ``reserved_cost``; ``load_source`` and
    ``load_age_ms`` are their origin.

    ``trust``: ``exact``: blocks are known; ``degraded``: stale, device and local blocks count as 0; ``fallback``:
    nothing is known. ``asleep``: its engine serves no requests now. ``unreachable``: stale and silent.
    """

    row: Row
    trust: Trust
    cost: int
    prefill_cost: int
    fetch_cost: int
    queue_cost: int
    running: int
    waiting: int
    queued_tokens: int
    kv_usage_permille: int
    reserved_cost: int
    load_source: LoadSource
    load_age_ms: int
    asleep: bool
    unreachable: bool
    move_cost: int = 0
    encode_cost: int = 0

    @property
    def worker(self) -> str:
        return self.row.worker

    @property
    def dp_rank(self) -> int:
        return self.row.dp_rank

    @property
    def address(self) -> str:
        """Where it serves requests; empty: unknown."""
        return self.row.address


def named_pick(packed: Sequence[Any]) -> Pick:
    """Of values in ``Pick``'s order, with numbers for trust and source. Errors: ``LookupError`` for unnamed ones."""
    row, trust, *costs, source, age_ms, asleep, unreachable, move_cost, encode_cost = packed
    named = (TRUSTS[trust], *costs, LOAD_SOURCES[source])
    return Pick._make((Row._make(row), *named, age_ms, asleep, unreachable, move_cost, encode_cost))


@dataclass(frozen=True)
class Ranking:
    """``picks``: the best first; empty: the model has no worker. ``reservation``: for ``release``; empty: none."""

    picks: tuple[Pick, ...] = ()
    reservation: str = ""


@dataclass(frozen=True)
class PublisherStatus:
    """How well one rank is followed.

    ``sequence``: of the last batch applied, 0 also before the first. ``batches``: applied. ``gaps``: times
    that batches were missing. ``replays``: gaps that a replay closed. ``resets``: times that all its blocks
    were forgotten. ``staleness_ms``, ``stale``: as in ``Lookup``. ``problem``: one line; empty: none.
    ``device_blocks``, ``host_blocks``, ``disk_blocks``: held after that batch. ``digest``, ``blocks``: as in
    ``Content``; equal in every index that applied the same batches and evicted nothing. ``evicted_blocks``:
    forgotten to make room since the last clear; above 0 the rank may be credited with less than it holds.
    """

    dp_rank: int
    sequence: int = 0
    batches: int = 0
    gaps: int = 0
    replays: int = 0
    resets: int = 0
    staleness_ms: int = 0
    stale: bool = False
    problem: str = ""
    digest: int = 0
    blocks: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    evicted_blocks: int = 0


@dataclass(frozen=True)
class WorkerStatus:
    """One worker that the index follows.

    ``source``: ``pool`` (announced there), ``flag`` (of ``kvpool index``) or ``call`` (``RegisterWorker``).
    ``lease_left_ms``: until it is forgotten unless renewed; 0: no lease.
    """

    worker: Worker
    source: str
    lease_left_ms: int
    publishers: tuple[PublisherStatus, ...]


@dataclass(frozen=True)
class IndexStatus:
    """The index itself: totals since its start, over all tenants, and its present state.

    ``lookups``: answered with at least one row. ``prompt_blocks``: of these, summed. ``device_blocks``,
    ``local_blocks``, ``pool_blocks``: the largest count of any rank, summed; shares of ``prompt_blocks`` are hit
    ratios. ``held_blocks``: distinct blocks with a holder. ``held_pool_blocks``: of the pool, counted per
    namespace. ``instance_id``: of this start; empty: an index of an earlier version. ``placements``: requests of
    Envoy and ``kvpool router`` that got a worker, and ``Route`` calls with a pick. ``placed_prompt_blocks``: of
    the former with a known prompt, summed; ``placed_matched_blocks``: those that need no compute.
    ``pool_servers``: of the followed pool, as far as known; ``pool_servers_away``: those that did not answer last.
    """

    uptime_ms: int = 0
    lookups: int = 0
    prompt_blocks: int = 0
    device_blocks: int = 0
    local_blocks: int = 0
    pool_blocks: int = 0
    held_blocks: int = 0
    held_pool_blocks: int = 0
    memory_nbytes: int = 0
    instance_id: str = ""
    placements: int = 0
    placed_prompt_blocks: int = 0
    placed_matched_blocks: int = 0
    pool_servers: int = 0
    pool_servers_away: int = 0


@dataclass(frozen=True)
class EngineAudits:
    """Blocks of the pool that an engine computed again to compare them, since its start, as it says itself.

    ``writer``: its name in the records that it stores, 32 hex digits, as all writers here. ``same``, ``differing``:
    what it computes, or not. ``unjudged``: compared before it knew how far honest blocks are from each other.
    ``doubts``: why it doubts itself and goes on without the pool; empty: it does not. ``put_away_writers``: whose
    records it takes for missing now. ``found_writers``: of the block that differed last, and its prefix. ``found_s``:
    when that was, in seconds since the epoch; 0: none did.
    """

    tenant: str
    host: str
    writer: str
    same: int = 0
    differing: int = 0
    unjudged: int = 0
    doubts: str = ""
    put_away_writers: tuple[str, ...] = ()
    found_writers: tuple[str, ...] = ()
    found_s: float = 0.0

    @classmethod
    def of(cls, tenant: str, news: AuditNews) -> EngineAudits:
        last = max(news.findings, key=lambda one: one.at_s, default=None)
        return cls(
            tenant, news.host, news.writer, news.counts.get(SAME, 0), news.differing, news.unjudged, news.doubts,
            news.put_away, *((last.writers, last.at_s) if last is not None else ()),
        )  # fmt: skip


def worst_first(audits: Iterable[EngineAudits]) -> list[EngineAudits]:
    """Those that doubt themselves, then those with the last findings."""
    return sorted(
        audits, key=lambda one: (not one.doubts, -one.found_s, -one.differing, one.tenant, one.host)
    )


@dataclass(frozen=True)
class FleetStatus:
    """``quotas``: what tenants with a quota hold of it in the pool, by tenant. ``audits``: the worst first."""

    index: IndexStatus
    workers: tuple[WorkerStatus, ...]
    quotas: Mapping[str, Standing] = field(default_factory=dict)
    audits: tuple[EngineAudits, ...] = ()


@dataclass(frozen=True)
class HitCurve:
    """The share of blocks that a pool of each size would have had, as LRU, of the requests since ``since_s``.

    ``sizes``: in blocks, ascending; the last is all distinct ones. ``hit_rates``: of each. ``share``: of all blocks,
    those that are followed; 1: the curve is exact. ``since_s``: seconds since the epoch. ``block_tokens``: their
    mean. ``pool_blocks``: today's size, which the pool has room for, or which a tenant has there; 0: unknown.
    ``block_nbytes``: of the pool's memory for one; 0: unknown.
    """

    sizes: tuple[int, ...]
    hit_rates: tuple[float, ...]
    requests: int
    requested_blocks: int
    share: float
    since_s: float
    block_tokens: float = 0.0
    pool_blocks: int = 0
    block_nbytes: float = 0.0

    def at(self, blocks: float) -> float:
        """The hit rate of a pool of so many."""
        place = bisect_right(self.sizes, blocks)
        return self.hit_rates[place - 1] if place else 0.0


class FleetTotals(NamedTuple):
    """A metrics page's numbers: totals of all workers since the fleet was made, and present counts."""

    workers: int
    ranks: int
    stale_ranks: int
    incomplete_ranks: int
    blocks: int
    memory_nbytes: int
    batches: int
    gaps: int
    replays: int
    resets: int
    malformed_batches: int
    refused_blocks: int
    evicted_blocks: int
    device_blocks: int  # held; these five: per holder
    host_blocks: int
    disk_blocks: int
    near_blocks: int  # in near pools
    pool_blocks: int
    pool_media: int  # outputs of encoders in the pool
