"""What to load and what to store: pure functions over block indices, and the messages between the two halves.

Nothing here knows a store, a tensor or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpool.key.key import Fact


@dataclass(frozen=True)
class Group:
    """One group of layers that share a block table. ``window``: tokens that a query sees, itself included.

    The pool keeps ``blocks_per_record`` neighbouring blocks of the engine as one record, under the hash of the last.
    ``latent``: MLA, which keeps one latent vector for each token. ``copies``: so many neighbouring ranks of the engine
    hold the same bytes; with MLA, those of one pipeline stage.
    """

    block_tokens: int
    window: int | None = None  # None: full attention
    blocks_per_record: int = 1
    latent: bool = False
    copies: int = 1

    @property
    def record_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_record

    def key_rank(self, rank: int) -> int:
        """The number in the key under which the pool keeps what ``rank`` holds of a record."""
        return rank // self.copies

    def stored_by(self, rank: int) -> bool:
        """Whether ``rank`` stores what it holds: of those that hold the same, the first one does."""
        return rank % self.copies == 0

    def key_ranks(self, ranks: int) -> range:
        """The numbers in the keys under which a record of an engine of ``ranks`` ranks lies."""
        return range(ranks // self.copies)


class BlockRef(NamedTuple):
    """One record as the scheduler names it; a worker adds its rank and gets a key.

    ``block_ids``: its blocks in the engine's memory, in order; of a load, 0 for those that are not to be written.
    """

    block_hash: bytes
    group: int
    block_ids: tuple[int, ...]


class LoadPlan(NamedTuple):
    """Records of one request to load; it fails when no record arrives for ``stall_timeout_s``.

    ``priority``: of loads that wait for staging slots, the one with the lowest number comes first.
    """

    request_id: str
    blocks: Sequence[BlockRef]
    stall_timeout_s: float
    priority: int = 0


@dataclass
class PoolMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step. ``tags`` name the records of ``stores``, one to one.

    Where a rank cannot store all, it drops the last.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[BlockRef] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # requests whose load is not wanted any more
    idle: bool = False  # no forward runs in this step
    timed: int = 0  # number of a step whose end the scheduler wants to hear of; 0: it does not
    facts: dict[str, Fact] = field(default_factory=dict)  # of several pipeline stages together, once
    number: int = 0  # of the step, counted from 1
    epoch: str = ""  # from this step on, its own stores and loads included; empty: as before


@dataclass
class PoolWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, summed over the ranks of a step."""

    facts: dict[int, dict[str, Fact]] = field(default_factory=dict)  # by rank, once, in its first step
    broken: dict[int, str] = field(default_factory=dict)  # by rank: why it has no pool
    staged: dict[int, int] = field(default_factory=dict)  # tag: ranks that do not read its blocks any more
    store_slots: int = 0  # records that the staging of each rank takes at a time, once, in its first step
    stored: dict[int, int] = field(default_factory=dict)  # tag: ranks that have stored what is theirs
    dropped: dict[int, int] = field(default_factory=dict)  # tag: ranks that gave up on it
    missing: set[tuple[bytes, int]] = field(default_factory=set)  # (hash, group) that a load did not find
    reloaded: int = 0  # the first step with other weights than the one before; 0: they are as they were
    asked: bool = False  # an index asks for all that the engine's own cache holds
    timed: int = 0  # the number of the step, if it had one
    load_s: dict[str, float] = field(default_factory=dict)  # by request: how long its load took at least

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PoolWorkerMetadata:
        assert isinstance(other, PoolWorkerMetadata)
        return PoolWorkerMetadata(
            self.facts | other.facts,
            self.broken | other.broken,
            _summed(self.staged, other.staged),
            min(self.store_slots or other.store_slots, other.store_slots or self.store_slots),
            _summed(self.stored, other.stored),
            _summed(self.dropped, other.dropped),
            self.missing | other.missing,
            max(self.reloaded, other.reloaded),
            self.asked or other.asked,
            max(self.timed, other.timed),
            {
                name: max(self.load_s.get(name, 0.0), other.load_s.get(name, 0.0))
                for name in self.load_s.keys() | other.load_s.keys()
            },
        )

    def is_empty(self) -> bool:
        return self == PoolWorkerMetadata()


def _summed(ours: Mapping[int, int], theirs: Mapping[int, int]) -> dict[int, int]:
    return {tag: ours.get(tag, 0) + theirs.get(tag, 0) for tag in ours.keys() | theirs.keys()}


def records_to_load(group: Group, local_tokens: int, hit_tokens: int) -> range:
    """Indices of the records that ``group`` lacks to go on at token ``hit_tokens``, given ``local_tokens`` computed.

    Full attention needs every block up to there. A sliding window needs those that the next token sees, from
    token ``hit_tokens - window + 1`` on. ``local_tokens`` is a multiple of the group's block size and may lie inside a
    record, ``hit_tokens`` is a multiple of the record's.
    """
    first = local_tokens // group.record_tokens
    if group.window is not None:
        first = max(first, max(0, hit_tokens - group.window + 1) // group.record_tokens)
    return range(first, hit_tokens // group.record_tokens)


def blocks_lacking(group: Group, table: Sequence[int], record: int, local_tokens: int) -> tuple[int, ...]:
    """Where the blocks of a record go, by the block table of a request that has ``local_tokens`` computed.

    0: nowhere, for the engine has the block already, or keeps none at this place.
    """
    start = record * group.blocks_per_record
    ids = tuple(table[start : start + group.blocks_per_record])
    held = local_tokens // group.block_tokens - start
    return ids if held <= 0 else (0,) * held + ids[held:]


def blocks_held(group: Group, table: Sequence[int], record: int) -> tuple[int, ...] | None:
    """Where the blocks of a record lie, by a block table; None when the engine does not keep all of them."""
    start = record * group.blocks_per_record
    ids = tuple(table[start : start + group.blocks_per_record])
    return ids if len(ids) == group.blocks_per_record and all(ids) else None


def first_missing(present: Sequence[int], count: int) -> int:
    """The first of ``count`` leading records that is not there; ``count`` if all are of which something is said."""
    try:
        return present.index(False, 0, count)
    except ValueError:
        return count


def longest_hit(
    groups: Sequence[Group],
    present: Sequence[bytes],
    *,
    local_tokens: int,
    max_tokens: int,
    align_tokens: int,
) -> int:
    """The largest number of leading tokens from which the engine can go on, by its own cache and the pool.

    ``present[g][i]``: 1 when every part of record ``i`` of group ``g`` is in the pool, else 0. ``align_tokens``: a
    multiple of every group's record. The answer is a multiple of it that is at most ``max_tokens``, or else
    ``local_tokens``. It is found by searches for zeros: a million tokens take microseconds.
    """
    hit = max_tokens
    while True:
        hit = hit // align_tokens * align_tokens
        if hit <= local_tokens:
            return local_tokens
        usable = min(
            _usable_tokens(group, there, local_tokens, hit)
            for group, there in zip(groups, present, strict=True)
        )
        if usable == hit:
            return hit
        hit = usable


def _usable_tokens(group: Group, there: bytes, local_tokens: int, hit_tokens: int) -> int:
    """The longest hit up to ``hit_tokens`` for which ``group`` has all that it needs, wherever hits may end."""
    hit_tokens = min(hit_tokens, len(there) * group.record_tokens)
    needed = records_to_load(group, local_tokens, hit_tokens)
    first = local_tokens // group.record_tokens
    if not needed or there.find(0, needed.start, needed.stop) < 0:
        return hit_tokens
    # Either all from the local tokens on is there, or a window full somewhere behind.
    end = there.find(0, first, needed.stop)
    if group.window is not None:
        window_records = -(-(group.window - 1) // group.record_tokens)
        start = there.rfind(b"\1" * window_records, first, needed.stop)
        end = max(end, start + window_records if start >= 0 else 0)
    return end * group.record_tokens


def records_to_store(record_tokens: int, already: int, computed_tokens: int, hashed_records: int) -> range:
    """Indices of the records that are full after a step and were not planned before.

    ``already``: how many leading records of the request were planned, or came from a cache. ``computed_tokens``
    may count drafts that will be rejected. A record is stored when its hash is known: hashes are of tokens that the
    request has, so no draft is in the record that was not accepted. That may be a step after the record was computed,
    as it is under asynchronous scheduling.
    """
    return range(already, max(already, min(computed_tokens // record_tokens, hashed_records)))
