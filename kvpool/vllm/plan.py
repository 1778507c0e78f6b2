"""Plans of loads and stores: pure functions over block indices, and the messages between both halves.

Nothing here uses a store, a tensor or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpool.key.key import Fact


@dataclass(frozen=True)
class Group:
    """A group of layers with a common block table.

    ``window``: tokens that a query sees, including itself. ``chunk``: a query sees the tokens of its own chunk of
    so many. None of them: all tokens before it. The pool stores ``blocks_per_record`` neighbouring blocks as a
    record, under the last one's hash. ``latent``: MLA, with a latent vector per token. ``state``: recurrent layers,
    whose block holds all that they keep of the tokens up to its end: a window of two tokens, so that only a prefix's
    last block is needed. ``copies``: number of neighbouring ranks with equal bytes; with MLA, a whole pipeline stage.
    ``parts``: that a rank makes of its heads in each record, one key each (``kvpool.vllm.parts``).
    ``reads_ahead``: drafts' layers compute a token with the next one, which a block's hash does not cover. So a block
    is stored, and a hit ends in front of it, when the token behind it is known. ``scratch``: its blocks are one
    request's alone: a ring, or a window that the engine fills again behind each hit. Never stored.
    """

    block_tokens: int
    window: int | None = None
    blocks_per_record: int = 1
    latent: bool = False
    state: bool = False
    copies: int = 1
    parts: int = 1
    chunk: int | None = None
    reads_ahead: bool = False
    scratch: bool = False

    @property
    def record_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_record

    @property
    def needs_all(self) -> bool:
        """Whether a query sees every token before it."""
        return self.window is None and self.chunk is None and not self.scratch

    @property
    def is_ring(self) -> bool:
        """Whether a request has a single block, which it writes in circles."""
        return self.scratch and self.window is None

    def first_seen(self, tokens: int) -> int:
        """The first token that the query behind ``tokens`` tokens sees."""
        if self.window is not None:
            return max(0, tokens - self.window + 1)
        return 0 if self.chunk is None else tokens // self.chunk * self.chunk

    def most_seen(self, tokens: int) -> int:
        """The most of ``tokens`` tokens before it that any query sees."""
        return min(tokens, (self.window or self.chunk or tokens + 1) - 1)

    def own_parts(self, rank: int) -> range:
        """The numbers, in pool keys, of the parts of a record that ``rank`` holds."""
        first = rank // self.copies * self.parts
        return range(first, first + self.parts)

    def stored_by(self, rank: int) -> bool:
        """Whether ``rank`` stores its parts: the first of the ranks with equal bytes does."""
        return rank % self.copies == 0

    def all_parts(self, ranks: int) -> range:
        """The numbers of all parts of a record, for an engine of ``ranks`` ranks."""
        return range(ranks // self.copies * self.parts)


class AdapterFiles(NamedTuple):
    """The files that an adapter's blocks are of. ``number``: vLLM's; ``state``: as ``adapters.files_state`` has it."""

    number: int
    name: str
    path: str
    state: bytes

    @property
    def key(self) -> tuple[str, str]:
        """What the hashes of its blocks cover."""
        return self.name, self.path


class BlockRef(NamedTuple):
    """A record without a rank. ``block_ids``: its blocks in the engine's memory; 0: not to be loaded."""

    block_hash: bytes
    group: int
    block_ids: tuple[int, ...]
    adapter: AdapterFiles | None = None  # whose KV it is


class LoadPlan(NamedTuple):
    """Records to load; fails when no byte arrives for ``stall_timeout_s``. The lowest ``priority`` goes first."""

    request_id: str
    blocks: Sequence[BlockRef]
    stall_timeout_s: float
    priority: int = 0


@dataclass
class PoolMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step. ``tags`` match ``stores``, of which a full rank drops the last."""

    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[BlockRef] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # requests that no longer want their load
    idle: bool = False  # no forward runs in this step
    timed: int = 0  # number of a timed step; 0: untimed
    facts: dict[str, Fact] = field(default_factory=dict)  # of several pipeline stages together, once
    number: int = 0  # of the step, from 1
    epoch: str = ""  # from this step on, including its stores and loads; empty: unchanged


@dataclass
class PoolWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, summed over the ranks of a step."""

    facts: dict[int, dict[str, Fact]] = field(default_factory=dict)  # by rank, once, in its first step
    broken: dict[int, str] = field(default_factory=dict)  # by rank: why it has no pool
    staged: dict[int, int] = field(default_factory=dict)  # tag: ranks that no longer read its blocks
    store_slots: int = 0  # records in each rank's staging, once, in its first step
    part_nbytes: dict[tuple[int, int], int] = field(default_factory=dict)  # by group and part, once
    parts: dict[int, int] = field(default_factory=dict)  # ``Group.parts`` by group, with ``part_nbytes``
    stored: dict[int, int] = field(default_factory=dict)  # tag: ranks that stored their parts
    dropped: dict[int, int] = field(default_factory=dict)  # tag: ranks that gave it up
    refused: set[int] = field(default_factory=set)  # tags of which a store refused a part for itself
    missing: set[tuple[bytes, int]] = field(default_factory=set)  # (hash, group) that a load did not find
    reloaded: int = 0  # the first step with changed weights; 0: unchanged
    other_files: set[tuple[str, str]] = field(
        default_factory=set
    )  # adapters that were loaded of others, by key
    asked: bool = False  # an index requests the engine's whole cache
    timed: int = 0  # the number of a timed step
    load_s: dict[str, float] = field(default_factory=dict)  # by request: least duration of its load
    load_near: dict[str, float] = field(default_factory=dict)  # by request: least share of it from near
    load_causes: dict[str, str] = field(default_factory=dict)  # by request: why its load failed

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PoolWorkerMetadata:
        assert isinstance(other, PoolWorkerMetadata)
        return PoolWorkerMetadata(
            self.facts | other.facts,
            self.broken | other.broken,
            _summed(self.staged, other.staged),
            min(self.store_slots or other.store_slots, other.store_slots or self.store_slots),
            self.part_nbytes | other.part_nbytes,
            self.parts | other.parts,  # the same of all ranks, or their facts differ
            _summed(self.stored, other.stored),
            _summed(self.dropped, other.dropped),
            self.refused | other.refused,
            self.missing | other.missing,
            max(self.reloaded, other.reloaded),
            self.other_files | other.other_files,
            self.asked or other.asked,
            max(self.timed, other.timed),
            {
                name: max(self.load_s.get(name, 0.0), other.load_s.get(name, 0.0))
                for name in self.load_s.keys() | other.load_s.keys()
            },
            {
                name: min(self.load_near.get(name, 1.0), other.load_near.get(name, 1.0))
                for name in self.load_near.keys() | other.load_near.keys()
            },
            self.load_causes | other.load_causes,
        )

    def is_empty(self) -> bool:
        return self == PoolWorkerMetadata()


def _summed(ours: Mapping[int, int], theirs: Mapping[int, int]) -> dict[int, int]:
    return {tag: ours.get(tag, 0) + theirs.get(tag, 0) for tag in ours.keys() | theirs.keys()}


def records_to_load(group: Group, local_tokens: int, hit_tokens: int) -> range:
    """Indices of the records that ``group`` lacks to resume at ``hit_tokens``, given ``local_tokens``
    computed.

    Those of the tokens that the next query sees (``Group.first_seen``). ``local_tokens`` is a multiple of the
    group's block size, maybe inside a record; a part of a record behind ``hit_tokens`` is left out.
    """
    if group.scratch:
        return range(0)
    first = max(local_tokens, group.first_seen(hit_tokens)) // group.record_tokens
    return range(first, hit_tokens // group.record_tokens)


class Room(NamedTuple):
    """Blocks of a request with a load. ``behind``: that it takes besides, to be computed from nothing."""

    loaded: int  # with the local blocks before them, which might be free
    behind: int


def room_of_load(groups: Sequence[Group], hit_tokens: int, tokens: int, step_tokens: int) -> Room:
    """The blocks that a prompt of ``tokens`` takes with a load up to ``hit_tokens``, in steps of ``step_tokens``."""
    loaded = needed = 0
    for group in groups:
        if group.is_ring:
            loaded, needed = loaded + 1, needed + 1
            continue
        first, most = group.first_seen(hit_tokens) // group.block_tokens, -(-tokens // group.block_tokens)
        if not group.needs_all:
            most = min(most, -(-(group.most_seen(tokens) + step_tokens) // group.block_tokens) + 1)
        loaded += (held := -(-hit_tokens // group.block_tokens) - first)
        needed += max(held, most)
    return Room(loaded, needed - loaded)


def blocks_lacking(group: Group, table: Sequence[int], record: int, local_tokens: int) -> tuple[int, ...]:
    """A record's target blocks, given ``local_tokens``; 0: the engine has the block, or keeps none here."""
    start = record * group.blocks_per_record
    ids = tuple(table[start : start + group.blocks_per_record])
    held = local_tokens // group.block_tokens - start
    return ids if held <= 0 else (0,) * held + ids[held:]


def blocks_held(group: Group, table: Sequence[int], record: int) -> tuple[int, ...] | None:
    """A record's blocks in a block table; None unless the engine keeps all of them."""
    start = record * group.blocks_per_record
    ids = tuple(table[start : start + group.blocks_per_record])
    return ids if len(ids) == group.blocks_per_record and all(ids) else None


def first_missing(present: Sequence[int], count: int) -> int:
    """The first absent of ``count`` leading records, within ``present``; else ``count``."""
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
    """The most leading tokens after which the engine can resume, from its own cache and the pool.

    ``present[g][i]``: 1: every part of record ``i`` of group ``g`` is in the pool, else 0. ``align_tokens``:
    a multiple of every group's record. Returns a multiple of it up to ``max_tokens``, or else
    ``local_tokens``. Searches for zeros make a million tokens take microseconds.
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


def junction(groups: Sequence[Group], present: Sequence[bytes], max_tokens: int, align_tokens: int) -> int:
    """Where prompts part whose blocks are in the pool and whose states may not be; 0 without states.

    Arguments as of ``longest_hit``.
    """
    kept = [(group, there) for group, there in zip(groups, present, strict=True) if not group.state]
    if len(kept) == len(groups):
        return 0
    return longest_hit(
        [group for group, _ in kept],
        [there for _, there in kept],
        local_tokens=0,
        max_tokens=max_tokens,
        align_tokens=align_tokens,
    )


def reached(group: Group, align_tokens: int) -> bytes:
    """Which records hits may need, for the records of every ``align_tokens`` tokens: 1 or 0.

    Hits end at multiples of ``align_tokens``, so a window sees the last records in front of them only; which is what
    vLLM keeps itself (``SlidingWindowManager.reachable_block_mask``).
    """
    records = align_tokens // group.record_tokens
    if group.scratch:
        return bytes(records)
    if group.window is None:  # chunks may begin anywhere
        return b"\1" * records
    first = max(0, align_tokens - group.window + 1) // group.record_tokens
    behind = group.reads_ahead and not group.state
    return bytes(record >= first or (behind and record == 0) for record in range(records))


def has_tails(groups: Sequence[Group], match_tokens: int) -> bool:
    """Whether hits that end at multiples of ``match_tokens`` may end inside of a block.

    Such a tail is a record, too: the block that holds it, under the hash of its end. What a block holds behind it is
    computed again. For states beside full attention, with blocks of one size, as in vLLM's own offloading. Where the
    engine fills a window again behind a hit, it cuts hits to whole blocks.
    """
    refills = any(group.scratch and not group.is_ring for group in groups)
    groups = [group for group in groups if not group.scratch]
    sizes = {group.block_tokens for group in groups}
    return (
        not refills
        and len(sizes) == 1
        and 0 < match_tokens < min(sizes)
        and any(group.state for group in groups)
        and all(
            (group.state or group.needs_all) and group.blocks_per_record == 1 and not group.reads_ahead
            for group in groups
        )
    )


def is_resumed_at(group: Group, tokens: int, prompt_tokens: int, stop_tokens: int) -> bool:
    """Whether requests are likely to resume at ``tokens``, where a request has a state, which is large.

    They do at the end of its prompt, or one token before it, behind its answer, and where prompts part
    (``stop_tokens``); not at the other ends of steps, which depend on what else was computed. A hit leaves a token to
    compute: of whole blocks all but the last. With drafts that read ahead it ends a block earlier.
    """
    behind = group.block_tokens * (2 if group.reads_ahead else 1)
    return tokens >= prompt_tokens - behind or tokens == stop_tokens


def _usable_tokens(group: Group, there: bytes, local_tokens: int, hit_tokens: int) -> int:
    """The longest hit up to ``hit_tokens`` that ``group`` allows, ignoring alignment."""
    if group.scratch:
        return hit_tokens
    hit_tokens = min(hit_tokens, len(there) * group.record_tokens)
    if group.reads_ahead and not group.state:
        hit_tokens = max(0, there.rfind(1, 0, hit_tokens // group.record_tokens + 1)) * group.record_tokens
    needed = records_to_load(group, local_tokens, hit_tokens)
    first = local_tokens // group.record_tokens
    if not needed or there.find(0, needed.start, needed.stop) < 0:
        return hit_tokens
    # Either everything after the local tokens is present, or a full window, or the beginning of a chunk, further on.
    end = there.find(0, needed.start if group.chunk is not None else first, needed.stop)
    if group.window is not None:
        window_records = -(-(group.window - 1) // group.record_tokens)
        start = there.rfind(b"\1" * window_records, first, needed.stop)
        end = max(end, start + window_records if start >= 0 else 0)
    return end * group.record_tokens


def records_to_store(record_tokens: int, already: int, computed_tokens: int, hashed_records: int) -> range:
    """Indices of the records that a step completes and no earlier plan covers.

    ``already``: leading records planned before, or from a cache. ``computed_tokens`` may include drafts that
    will be rejected. A record is stored once its hash is known: hashes cover accepted tokens only, so no
    rejected draft is in it. Under asynchronous scheduling that may be a step later.
    """
    return range(already, max(already, min(computed_tokens // record_tokens, hashed_records)))
