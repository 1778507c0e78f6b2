"""The messages between both halves: plans of loads and stores, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpool.key.key import Fact


class AdapterWeights(NamedTuple):
    """What an adapter's blocks are of. ``number``: vLLM's; ``digests``: of its tensors, by rank."""

    number: int
    name: str
    path: str
    digests: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What the hashes of its blocks cover."""
        return self.name, self.path


class BlockRef(NamedTuple):
    """A record without a rank. ``block_ids``: its blocks in the engine's memory; 0: not to be loaded."""

    block_hash: bytes
    group: int
    block_ids: tuple[int, ...]
    adapter: AdapterWeights | None = None  # whose KV it is


class LoadPlan(NamedTuple):
    """Records to load; fails when no byte arrives for ``stall_timeout_s``. The lowest ``priority`` goes first."""

    request_id: str
    blocks: Sequence[BlockRef]
    stall_timeout_s: float
    priority: int = 0
    audited: bool = False  # what it loads is: who wrote it is reported


DRAFT = "draft."  # begins the names of drafts' layers


class LayerDistance(NamedTuple):
    """Of a layer that torch keeps as ``element``. ``difference``, ``norm``: the sums of ``_native.distances``."""

    name: str
    element: str
    difference: float
    norm: float


class AuditedPart(NamedTuple):
    """What a rank found of a part of an audited record. ``why``: it says nothing: of ``metrics.AUDITS``."""

    why: str
    writer: bytes = b""
    layers: Sequence[LayerDistance] = ()


class Measured(NamedTuple):
    """What a rank's weights are in memory. ``why``: it cannot say."""

    digest: str = ""
    why: str = ""
    nan: bool = False


@dataclass
class PoolMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step. ``tags`` match ``stores``, of which a full rank drops the last."""

    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[BlockRef] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    # By number: records that this step computes, to be compared with the pool's.
    audits: dict[int, list[BlockRef]] = field(default_factory=dict)
    put_away: frozenset[bytes] | None = None  # writers whose records count as missing; None: as before
    wrong: list[BlockRef] = field(default_factory=list)  # records to be deleted
    found: dict[int, str] = field(default_factory=dict)  # by number of an audit that found something: what
    cancelled: list[str] = field(default_factory=list)  # requests that no longer want their load
    adapters: list[Any] = field(default_factory=list)  # requests for adapters that a worker is to read
    tell_adapters: bool = False  # the workers tell of all that they hold, also what they have told
    idle: bool = False  # no forward runs in this step
    timed: int = 0  # number of a timed step; 0: untimed
    facts: dict[str, Fact] = field(default_factory=dict)  # of several pipeline stages together, once
    number: int = 0  # of the step, from 1
    writer: bytes = b""  # this engine's name in what it stores, with its first step
    measure: int = (
        0  # number of a question: what weights the worker holds, before anything of this step; 0: none
    )
    watch: bool = False  # the weights lie in memory, and are those of the last measure
    # They have changed, and no call has said so: what was stored since they were last seen the same is deleted.
    silent: bool = False
    # What names the weights from this step on, its stores and loads included: ``facts_of_weights``; None: as before.
    weights: dict[str, Fact] | None = None
    off: bool = False  # the engine goes without the pool until it is measured again


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
    audit_staged: dict[int, int] = field(default_factory=dict)  # number: ranks that no longer read its blocks
    audited: dict[int, list[AuditedPart]] = field(default_factory=dict)  # number: what ranks found
    audit_ended: dict[int, int] = field(default_factory=dict)  # number: ranks that have ended it
    load_writers: dict[str, set[bytes]] = field(default_factory=dict)  # by request with an audited load
    missing: set[tuple[bytes, int]] = field(default_factory=set)  # (hash, group) that a load did not find
    # By rank and number of the question; 0: of the start, once.
    measured: dict[tuple[int, int], Measured] = field(default_factory=dict)
    differs: bool = False  # the watch found other weights than those of the last measure
    adapters: dict[tuple[int, int], str] = field(default_factory=dict)  # by rank and number: ``take_news``
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
            _summed(self.audit_staged, other.audit_staged),
            {
                number: [*self.audited.get(number, ()), *other.audited.get(number, ())]
                for number in self.audited.keys() | other.audited.keys()
            },
            _summed(self.audit_ended, other.audit_ended),
            {
                name: self.load_writers.get(name, set()) | other.load_writers.get(name, set())
                for name in self.load_writers.keys() | other.load_writers.keys()
            },
            self.missing | other.missing,
            self.measured | other.measured,
            self.differs or other.differs,
            self.adapters | other.adapters,
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


def count(into: dict[int, int], tags: Iterable[int]) -> None:
    """One rank more for each tag."""
    for tag in tags:
        into[tag] = into.get(tag, 0) + 1


def _summed(ours: Mapping[int, int], theirs: Mapping[int, int]) -> dict[int, int]:
    return {tag: ours.get(tag, 0) + theirs.get(tag, 0) for tag in ours.keys() | theirs.keys()}
