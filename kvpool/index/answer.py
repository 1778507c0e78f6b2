"""What the index answers: ``Lookup`` of a prompt, ``WorkerStatus`` of those that it follows.

Everything here is immutable; nothing blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from kvpool.discovery.worker import Worker


class Row(NamedTuple):
    """What one data-parallel rank of one worker holds of a prompt; see ``Lookup``."""

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


@dataclass(frozen=True)
class Lookup:
    """How many leading blocks of a prompt each worker holds, in columns: row i of each belongs to ``workers[i]``.

    Every candidate rank has a row, by name and rank, with zeros where it holds nothing. Iterating gives a ``Row``
    a row. ``len`` is the number of rows.

    ``addresses``: where each serves requests; empty: not known. ``block_tokens``: tokens of a block that is hashed.
    ``prompt_blocks``: full blocks of the prompt. ``device_blocks``: in accelerator memory. ``local_blocks``: in any
    tier of that worker. ``pool_blocks``: what it could load from the pool. ``sequences``: device and local blocks
    are exactly those of this event batch of that rank; 0 also before the first. ``staleness_ms``: since the index
    last knew that there was no later batch. ``stale``: not to be trusted now, so device and local blocks are 0.
    ``loadable_blocks``: what it need not compute: its local blocks, and from there on what the pool holds. At least
    the local and the pool's blocks each; more where the pool continues what the worker has begun.
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

    @classmethod
    def of(cls, rows: list[Row]) -> Lookup:
        """The columns of ``rows``."""
        return cls(*zip(*rows, strict=True)) if rows else cls()

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Row]:
        return map(Row._make, zip(*(getattr(self, field.name) for field in fields(self)), strict=True))


@dataclass(frozen=True)
class PublisherStatus:
    """How well one rank is followed.

    ``sequence``: of the last batch applied, 0 also before the first. ``batches``: applied. ``gaps``: times that
    batches were missing. ``replays``: gaps that a replay closed. ``resets``: times that all it held was forgotten.
    ``staleness_ms``, ``stale``: as in ``Lookup``. ``problem``: one line; empty: none. What it holds after that batch:
    ``device_blocks``, ``host_blocks``, ``disk_blocks``; ``digest``, ``blocks`` of all these, as ``Content``: the same
    in every index that followed it to this sequence, and evicted nothing. ``evicted_blocks``: forgotten to make room,
    since all it held was last cleared: above 0 it may be credited with less than it holds.
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

    ``source``: who named it: ``pool`` (it announces itself there), ``flag`` (of ``kvpool index``) or ``call``
    (``RegisterWorker``). ``lease_left_ms``: until it is forgotten unless named again; 0: it has no lease.
    """

    worker: Worker
    source: str
    lease_left_ms: int
    publishers: tuple[PublisherStatus, ...]


@dataclass(frozen=True)
class IndexStatus:
    """The index itself: what it has answered since it was started, to all tenants, and what it knows now.

    ``lookups``: answered with at least one row. ``prompt_blocks``: of these, summed. ``device_blocks``,
    ``local_blocks``, ``pool_blocks``: of each, the most that one rank had of it, summed; so their shares of
    ``prompt_blocks`` are hit ratios. ``held_blocks``: distinct blocks with a holder. ``held_pool_blocks``: of the
    pool, once for each namespace. ``instance_id``: of this start of this index; empty: an index of an earlier version.
    ``placements``: requests of Envoy and ``kvpool router`` that got a worker, and ``Route`` calls with a pick.
    ``placed_prompt_blocks``: of the former whose prompt was known, summed; ``placed_matched_blocks``: those of them
    that the worker need not compute. ``pool_servers``: of the pool that it follows, as far as it knows them;
    ``pool_servers_away``: those of them that did not answer last.
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
class FleetStatus:
    """An index and whom it follows, by tenant and name."""

    index: IndexStatus
    workers: tuple[WorkerStatus, ...]


class Totals(NamedTuple):
    """What a metrics page shows of a fleet: since it was made, of all its workers, and what is there now."""

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
    device_blocks: int  # held; these four: once for each holder
    host_blocks: int
    disk_blocks: int
    pool_blocks: int
