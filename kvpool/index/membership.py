"""``Membership``: which workers an index follows, in which partitions, within which limits; and that at rest.

A partition is a ``PrefixIndex`` for workers that share tenant, model, hash algorithm, seed and block size. In it a
holder is one rank of one start of a worker (``rank/N``, with a number that is never given again), or the pool of one
namespace (``pool/NAMESPACE``). So nothing that is said late about an earlier start can be taken for a later one's,
and no name of a worker can be taken for a pool.

Threads: the caller holds the fleet's lock, for every method. ``ranks`` and ``models`` may be read without it: each
value in them is replaced whole.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

from kvpool.discovery.admission import MAX_PUBLISHERS
from kvpool.discovery.worker import MAX_WORKERS, Position, Worker
from kvpool.errors import KVPoolError, SnapshotRefused
from kvpool.index.dp_rank import DpRank, pool_holder, unhashed
from kvpool.index.limits import Limits
from kvpool.index.partition import Key, Members, Partition
from kvpool.index.snapshot import PartitionState, RankState, Snapshot, WorkerState
from kvpool.index.table import PrefixIndex
from kvpool.index.tenant_shares import MORE, TenantShares
from kvpool.text import nearest, unknown

Source = Literal["pool", "flag", "call"]
SOURCES: tuple[Source, ...] = ("pool", "flag", "call")

MAX_MODELS = 1024  # (tenant, model) pairs; those without workers make room
MAX_PARTITIONS = 1024  # of a fleet
MAX_RANKS = 32768  # of all workers; a table has room for 65,536 holders
RANK_NBYTES = 8 << 10  # of memory beside the tables
MAX_NAMESPACES = 1024  # of a partition
MAX_LEASE_S = 86400.0
MAX_NAMED = 10  # of the known models, in an error
# How long a worker that comes back from a snapshot waits for the pool to announce it: as long as a watch keeps those
# that it cannot read (kvpool.discovery.worker_watch).
RESTORED_LEASE_S = 60.0

assert MAX_RANKS + MAX_NAMESPACES <= 65536
assert MAX_PUBLISHERS <= MAX_RANKS


logger = logging.getLogger("kvpool.index")

_HOLDER = re.compile(r"rank/([0-9]{1,18})")


class Entry:
    """One worker: ``ranks`` are of its present start."""

    __slots__ = ("expires_at_s", "partition", "ranks", "source", "worker")

    def __init__(
        self,
        worker: Worker,
        source: Source,
        expires_at_s: float | None,
        partition: Partition,
        ranks: tuple[DpRank, ...],
    ) -> None:
        self.worker = worker
        self.source = source
        self.expires_at_s = expires_at_s
        self.partition = partition
        self.ranks = ranks

    def is_among(self, ids: Collection[str] | None, tenant: str | None, model: str | None) -> bool:
        """None: all."""
        worker = self.worker
        return (
            tenant in (None, worker.tenant)
            and model in (None, worker.model)
            and (ids is None or worker.id in ids)
        )

    def lease_left_ms(self, now_s: float) -> int:
        """1 at least: 0 says that there is no lease."""
        expires_at_s = self.expires_at_s
        return 0 if expires_at_s is None else max(1, int((expires_at_s - now_s) * 1000))


class Membership:
    """``options``: of each partition's ``PrefixIndex``. ``seed``, ``clock``, ``tenant_share``: as of the fleet.

    ``limits``: has room for each rank.

    ``models``: the partitions of each (tenant, model); (): known, without ranks now. ``departed``: totals of those
    who have left.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        seed: str | None,
        clock: Callable[[], float],
        tenant_share: float,
        limits: Limits,
    ) -> None:
        self._options, self._seed, self._clock, self._limits = options, seed, clock, limits
        self._shares = TenantShares(tenant_share)
        self.entries: dict[str, Entry] = {}  # by worker's id
        self.ranks: dict[tuple[str, int], DpRank] = {}
        self.models: dict[tuple[str, str], tuple[Partition, ...]] = {}
        self.departed: Counter[str] = Counter()
        self._next_holder = 0

    def snapshot(self) -> tuple[PartitionState, ...]:
        """``Fleet.snapshot``."""
        now_s = self._clock()
        entries: dict[Partition, list[Entry]] = {}
        for entry in self.entries.values():
            entries.setdefault(entry.partition, []).append(entry)
        return tuple(_partition_state(partition, members, now_s) for partition, members in entries.items())

    def restore(
        self,
        snapshot: Snapshot,
        indexes: Sequence[PrefixIndex],
        *,
        age_s: float,
        flags: Collection[str],
        life: str | None,
    ) -> list[tuple[Worker, dict[int, Position]]]:
        """``Fleet.restore``; ``indexes``: the tables of the snapshot's partitions."""
        pooled = bool(life) and life == snapshot.life
        assert not self.entries
        # Behind all that the snapshot names, so that no start of now is taken for one of them.
        numbers = [_HOLDER.fullmatch(name) for index in indexes for name in index.workers()]
        self._next_holder = max((int(found[1]) + 1 for found in numbers if found), default=0)
        try:
            entries: list[Entry] = []
            for state, index in zip(snapshot.partitions, indexes, strict=True):
                workers = [
                    (one, lease_s)
                    for one in state.workers
                    if (lease_s := _restored_lease_s(one, age_s, flags, life is not None)) != 0
                ]
                entries += self._restore_partition(index, workers, state.namespaces if pooled else ())
        except KVPoolError as error:
            for entry in self.entries.values():
                self._limits.give(len(entry.ranks) * RANK_NBYTES, entry.worker.tenant)
            for known in (self.entries, self.ranks, self.models, self._shares):
                known.clear()
            raise SnapshotRefused(f"this snapshot cannot be followed: {error}") from error
        return [
            (entry.worker, {rank.publisher.dp_rank: rank.position for rank in entry.ranks if rank.position})
            for entry in entries
        ]

    def _restore_partition(
        self,
        index: PrefixIndex,
        workers: Iterable[tuple[WorkerState, float | None]],
        namespaces: Sequence[str],
    ) -> list[Entry]:
        now_s = self._clock()
        entries: list[Entry] = []
        kept: set[str] = set()
        for state, lease_s in workers:
            if state.worker.id in self.entries:
                raise SnapshotRefused(f"worker {state.worker.id} is there twice")
            known = {rank.publisher.dp_rank: rank for rank in state.ranks if rank.position is not None}
            for rank in known.values():
                if rank.holder in kept or _HOLDER.fullmatch(rank.holder) is None:
                    raise SnapshotRefused(f"worker {state.worker.id} has blocks that are not its own")
                kept.add(rank.holder)
            self.make_room(state.worker, None)
            source = next((source for source in SOURCES if source == state.source), None)
            if source is None:
                raise SnapshotRefused(
                    f"worker {state.worker.id} was named by a source that this version does not know"
                )
            expires_at_s = None if lease_s is None else now_s + lease_s
            entries.append(self.enter(state.worker, source, expires_at_s, now_s, index, known))
            if entries[-1].partition.index is not index:
                raise SnapshotRefused("workers of one table do not belong together")
        for namespace in namespaces[:MAX_NAMESPACES] if entries else ():
            entries[0].partition.namespaces.setdefault(namespace, 0)
            kept.add(pool_holder(namespace))
        for holder in set(index.workers()) - kept:
            index.remove_worker(holder)
        return entries

    def renew(self, entry: Entry, worker: Worker) -> None:
        if entry.worker.namespace != worker.namespace:
            self._enter_namespace(entry.partition, worker.namespace)
            self._leave_namespace(entry.partition, entry.worker.namespace)
        if entry.worker == worker:
            return
        entry.worker = worker
        for rank in entry.ranks:
            rank.rename(worker)
        entry.partition.members = Members(entry.partition.members.ranks)

    def make_room(self, worker: Worker, known: Entry | None) -> None:
        """Check every limit before anything is changed; what no worker uses any more makes room.

        Errors: ``KVPoolError``, and those of ``TenantShares.check``.
        """
        tenant, replaced_ranks = worker.tenant, len(known.ranks) if known else None
        if known is None and len(self.entries) >= MAX_WORKERS:
            raise KVPoolError(
                f"this index follows {MAX_WORKERS} workers already: remove one, or start another"
            )
        if len(self.ranks) + len(worker.publishers) - (replaced_ranks or 0) > MAX_RANKS:
            raise KVPoolError(f"this index would follow more than {MAX_RANKS} ranks: start another")
        self._shares.check(
            worker, replaced_ranks=replaced_ranks, max_workers=MAX_WORKERS, max_ranks=MAX_RANKS
        )
        if self._has_room(worker):
            return
        self._drop_unused()
        if self._has_room(worker):
            return
        if len(self.models) < MAX_MODELS and sum(map(len, self.models.values())) < MAX_PARTITIONS:
            share = int(min(MAX_MODELS, MAX_PARTITIONS) * self._shares.share)
            raise KVPoolError(
                f"tenant {tenant} may have {share} models, hash schemes and block sizes of them counted apart: "
                f"{MORE}"
            )
        raise KVPoolError(
            f"this index follows {MAX_MODELS} models, or {MAX_PARTITIONS} hash schemes and block sizes of them, "
            "already: start another"
        )

    def _has_room(self, worker: Worker) -> bool:
        """For its model and its partition, in all and of its tenant."""
        partitions = self.models.get((worker.tenant, worker.model))
        if _find(partitions, worker) is not None:
            return True
        of_tenant = [several for (tenant, _), several in self.models.items() if tenant == worker.tenant]
        is_new = partitions is None
        return (
            len(self.models) + is_new <= MAX_MODELS
            and len(of_tenant) + is_new <= MAX_MODELS * self._shares.share
            and sum(map(len, self.models.values())) < MAX_PARTITIONS
            and sum(map(len, of_tenant)) + 1 <= MAX_PARTITIONS * self._shares.share
        )

    def _drop_unused(self) -> None:
        for name, partitions in list(self.models.items()):
            used = tuple(partition for partition in partitions if partition.members)
            for partition in partitions:
                if not partition.members:
                    self._depart(partition)
            if used:
                self.models[name] = used
            else:
                del self.models[name]

    def enter(
        self,
        worker: Worker,
        source: Source,
        expires_at_s: float | None,
        now_s: float,
        restored: PrefixIndex | None = None,
        known: Mapping[int, RankState] | None = None,
    ) -> Entry:
        """Errors: ``KVPoolError`` when there is no room for its ranks or its namespace; it is not in then."""
        nbytes = len(worker.publishers) * RANK_NBYTES
        if not self._limits.take(nbytes, worker.tenant):
            raise KVPoolError(
                f"worker {worker.name}: no memory is left for {len(worker.publishers)} more ranks of tenant "
                f"{worker.tenant}: raise --max-memory"
            )
        name = (worker.tenant, worker.model)
        partitions = self.models.get(name, ())
        partition = _find(partitions, worker)
        if partition is None:
            index = restored or PrefixIndex(block_tokens=worker.block_tokens, **self._options)
            partition = Partition(Key.of(worker), index, self._seed, self._clock)
            self.models[name] = (*partitions, partition)
        try:
            self._enter_namespace(partition, worker.namespace)
        except KVPoolError:
            self._limits.give(nbytes, worker.tenant)
            raise
        ranks = []
        for publisher in worker.publishers:
            state = (known or {}).get(publisher.dp_rank)
            holder = f"rank/{self._next_holder}" if state is None else state.holder
            self._next_holder += 1
            rank = DpRank(worker, publisher, partition.index, holder, now_s, partition.no_hasher)
            if state is not None and state.position is not None:
                rank.restore(state.position, state.incomplete_reason, now_s)
            ranks.append(rank)
            self.ranks[worker.id, publisher.dp_rank] = rank
        if partition.no_hasher:
            logger.warning("worker %s: %s", worker.id, unhashed(partition.no_hasher))
        partition.members = Members((*partition.members.ranks, *ranks))
        self._shares.enter(worker)
        self.entries[worker.id] = entry = Entry(worker, source, expires_at_s, partition, tuple(ranks))
        return entry

    def forget(self, entry: Entry) -> None:
        partition = entry.partition
        self._limits.give(len(entry.ranks) * RANK_NBYTES, entry.worker.tenant)
        del self.entries[entry.worker.id]
        self._shares.leave(entry.worker)
        partition.members = Members(rank for rank in partition.members.ranks if rank not in entry.ranks)
        for rank in entry.ranks:
            del self.ranks[entry.worker.id, rank.publisher.dp_rank]
            rank.leave()
            for name in ("batches", "gaps", "replays", "resets", "malformed"):
                self.departed[name] += getattr(rank, name)
        self._leave_namespace(partition, entry.worker.namespace)
        if not partition.members and not len(partition.index):
            # The model stays known; a table's memory does not shrink, so it goes.
            name_of = (partition.key.tenant, partition.key.model)
            self.models[name_of] = tuple(other for other in self.models[name_of] if other is not partition)
            self._depart(partition)

    def _depart(self, partition: Partition) -> None:
        counters = partition.index.counters()
        for name in ("refused", "evicted"):
            self.departed[name] += counters[name]

    def _enter_namespace(self, partition: Partition, namespace: str) -> None:
        if not namespace:
            return
        if namespace not in partition.namespaces and len(partition.namespaces) >= MAX_NAMESPACES:
            for unused in [other for other, workers in partition.namespaces.items() if not workers]:
                partition.index.remove_worker(pool_holder(unused))
                del partition.namespaces[unused]
            if len(partition.namespaces) >= MAX_NAMESPACES:
                raise KVPoolError(f"workers of one model name more than {MAX_NAMESPACES} namespaces")
        partition.namespaces[namespace] += 1

    def _leave_namespace(self, partition: Partition, namespace: str) -> None:
        if namespace:
            partition.namespaces[namespace] -= 1


def _partition_state(partition: Partition, entries: Iterable[Entry], now_s: float) -> PartitionState:
    """Under ``_lock``: no other code takes the locks of several ranks."""
    with ExitStack() as held:
        for rank in partition.members.ranks:
            held.enter_context(rank.lock)
        return PartitionState(
            tuple(
                WorkerState(
                    entry.worker,
                    entry.source,
                    None if entry.expires_at_s is None else entry.expires_at_s - now_s,
                    tuple(
                        RankState(rank.publisher, rank.holder, rank.position, rank.incomplete_reason)
                        for rank in entry.ranks
                    ),
                )
                for entry in entries
            ),
            tuple(partition.namespaces),
            partition.index.image(),
        )


def _restored_lease_s(
    state: WorkerState, age_s: float, flags: Collection[str], announced: bool
) -> float | None:
    """For how long a worker of a snapshot comes back; 0: not at all."""
    if state.source == "pool":
        return RESTORED_LEASE_S if announced else 0
    if state.source == "flag" and state.worker.id not in flags:
        return 0
    return None if state.lease_left_s is None else min(max(0, state.lease_left_s - age_s), MAX_LEASE_S)


def is_same_start(known: Worker, worker: Worker) -> bool:
    return (Key.of(known), known.publishers, known.incarnation) == (
        Key.of(worker),
        worker.publishers,
        worker.incarnation,
    )


def _find(partitions: Iterable[Partition] | None, worker: Worker) -> Partition | None:
    key = Key.of(worker)
    return next((partition for partition in partitions or () if partition.key == key), None)


def unknown_model(name: str, known: Iterable[str]) -> str:
    """The error text for a model that is not among the ``known``."""
    names = sorted(known)
    if len(names) <= MAX_NAMED or nearest(name, names) is not None:
        return unknown("model", name, names)
    return f'unknown model "{name}"; {len(names)} are known, among them {", ".join(names[:MAX_NAMED])}'
