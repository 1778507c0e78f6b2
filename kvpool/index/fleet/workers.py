"""``Workers``: a fleet's present workers, their partitions and limits; and all of it at rest.

A partition is a ``PrefixIndex`` for workers that share tenant, model, hash algorithm, seed and block size.
Its holders are ranks of one start of a worker (``rank/N``, N never reused) and pools of one namespace
(``pool/NAMESPACE``). So late events of an earlier start never count for a later one.

Threads: the caller holds the fleet's lock, for every method. ``present``, ``ranks`` and ``models`` may be
read without it: each value is replaced whole.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from kvpool import _native
from kvpool.discovery.networks import one_spelling
from kvpool.discovery.worker import MAX_PUBLISHERS, MAX_WORKERS, Worker
from kvpool.errors import ConfigError, KVPoolError, SnapshotRefused
from kvpool.index.fleet.names import Names
from kvpool.index.fleet.partition import MAX_NAMESPACES, Key, Members, Partition
from kvpool.index.fleet.rank import Rank, pool_holder, unhashed
from kvpool.index.fleet.snapshot import PartitionState, RankState, Snapshot, WorkerState
from kvpool.index.fleet.start import Start
from kvpool.index.fleet.table import PrefixIndex
from kvpool.index.limits import Limits

Source = Literal["pool", "flag", "call"]
SOURCES: tuple[Source, ...] = ("pool", "flag", "call")

MAX_MODELS = 1024  # (tenant, model) pairs; those without workers make room
MAX_PARTITIONS = 1024  # of a fleet
MAX_RANKS = 32768  # of all workers; a table has room for 65,536 holders
HASHES_NBYTES = 32 << 20  # of prompts that may be extended: of 48 million tokens, in blocks of 16
RANK_NBYTES = 8 << 10  # of memory beside the tables
MAX_LEASE_S = 86400.0
MORE = "remove some of its workers, or give the index a larger --tenant-share"
# How long a restored worker waits for its announcement in the pool: as long as a watch keeps unreadable
# workers (kvpool.discovery.worker_watch).
RESTORED_LEASE_S = 60.0

assert MAX_RANKS + 2 * MAX_NAMESPACES + MAX_WORKERS <= 65536  # each worker may have a near pool of its own
assert MAX_PUBLISHERS <= MAX_RANKS

logger = logging.getLogger("kvpool.index")

_HOLDER = re.compile(r"rank/([0-9]{1,18})")


@dataclass(slots=True, eq=False)
class Present:
    """One present worker: ``ranks`` are of this start."""

    worker: Worker
    source: Source
    expires_at_s: float | None
    partition: Partition
    ranks: tuple[Rank, ...]
    lapses: int = 0

    @property
    def start(self) -> Start:
        first = self.ranks[0]
        return Start(self.worker.id, f"{first.key.start} {self.worker.address}", self.lapses)

    def is_among(self, ids: Collection[str] | None, tenant: str | None, model: str | None) -> bool:
        worker = self.worker
        is_named = ids is None or worker.id in ids
        return is_named and tenant in (None, worker.tenant) and model in (None, worker.model)

    def lease_left_ms(self, now_s: float) -> int:
        """1 at least: 0 means no lease."""
        expires_at_s = self.expires_at_s
        return 0 if expires_at_s is None else max(1, int((expires_at_s - now_s) * 1000))


class Workers:
    """``options``: of each partition's ``PrefixIndex``. ``seed``, ``clock``, ``tenant_share``: as in
    ``Fleet``. ``limits``: has room for each rank.

    ``models``: partitions by (tenant, model); (): known, without ranks now. ``departed``: totals of former ranks.
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
        self._share = tenant_share
        self._hashes = _native.HashCache(HASHES_NBYTES)
        self._used: Counter[tuple[str, str]] = Counter()  # by tenant: workers, and ranks
        self._followed: dict[str, Counter[str]] = {}  # by endpoint: publishing workers of each tenant
        self.present: dict[str, Present] = {}  # by worker's id
        self.ranks: dict[tuple[str, int], Rank] = {}
        self.models: dict[tuple[str, str], tuple[Partition, ...]] = {}
        self.names = Names(self.models, limits)
        self.departed: Counter[str] = Counter()
        self._next_holder = 0

    def snapshot(self) -> tuple[PartitionState, ...]:
        now_s = self._clock()
        entries: dict[Partition, list[Present]] = {}
        for entry in self.present.values():
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
    ) -> list[Present]:
        """``Fleet.restore``; ``indexes``: the tables of the snapshot's partitions."""
        pooled = bool(life) and life == snapshot.life
        assert not self.present
        # Above all numbers of the snapshot, so that new starts get new names.
        numbers = [_HOLDER.fullmatch(name) for index in indexes for name in index.workers()]
        self._next_holder = max((int(found[1]) + 1 for found in numbers if found), default=0)
        try:
            entries: list[Present] = []
            for state, index in zip(snapshot.partitions, indexes, strict=True):
                workers = [
                    (one, lease_s)
                    for one in state.workers
                    if (lease_s := _restored_lease_s(one, age_s, flags, life is not None)) != 0
                ]
                entries += self._restore_partition(index, workers, state.namespaces if pooled else ())
        except KVPoolError as error:
            for entry in self.present.values():
                self._limits.give(len(entry.ranks) * RANK_NBYTES, entry.worker.tenant)
                self.names.leave(entry.worker.id)
            for known in (self.present, self.ranks, self.models, self._used, self._followed):
                known.clear()
            raise SnapshotRefused(f"this snapshot cannot be followed: {error}") from error
        return entries

    def _restore_partition(
        self,
        index: PrefixIndex,
        workers: Iterable[tuple[WorkerState, float | None]],
        namespaces: Sequence[str],
    ) -> list[Present]:
        now_s = self._clock()
        entries: list[Present] = []
        kept: set[str] = set()
        for state, lease_s in workers:
            if state.worker.id in self.present:
                raise SnapshotRefused(f"worker {state.worker.id} is there twice")
            known = {rank.publisher.dp_rank: rank for rank in state.ranks if rank.position is not None}
            for rank in known.values():
                if rank.holder in kept or _HOLDER.fullmatch(rank.holder) is None:
                    raise SnapshotRefused(f"worker {state.worker.id} has blocks that are not its own")
                kept.add(rank.holder)
            self.make_room(state.worker, None)
            source = next((source for source in SOURCES if source == state.source), None)
            if source is None:
                raise SnapshotRefused(f"worker {state.worker.id} was named by an unknown source")
            expires_at_s = None if lease_s is None else now_s + lease_s
            entries.append(self.enter(state.worker, source, expires_at_s, index, known))
            if entries[-1].partition is not entries[0].partition or entries[0].partition.index is not index:
                raise SnapshotRefused("workers of one table do not belong together")
        for namespace in namespaces[:MAX_NAMESPACES] if entries else ():
            entries[0].partition.namespaces.setdefault(namespace, 0)
            kept.add(pool_holder(namespace))
        if entries:
            kept |= entries[0].partition.nears.keys()
        for holder in set(index.workers()) - kept:
            index.remove_worker(holder)
        return entries

    def renew(self, entry: Present, worker: Worker) -> None:
        if entry.worker != worker:
            entry.partition.enter_pools(worker)
            entry.partition.leave_pools(entry.worker)
            entry.worker = worker
            for rank in entry.ranks:
                rank.rename(worker)
            entry.partition.members = Members(entry.partition.members.ranks)
            self.names.enter(worker, entry.partition)

    def make_room(self, worker: Worker, known: Present | None) -> None:
        """Check every limit before any change; models and partitions without workers make room.

        Errors: ``KVPoolError``; ``ConfigError`` for an endpoint followed for another tenant, which would see
        the worker's events. ``Dialler`` compares the addresses of names.
        """
        tenant, replaced_ranks = worker.tenant, len(known.ranks) if known else None
        if known is None and len(self.present) >= MAX_WORKERS:
            raise KVPoolError(
                f"this index follows {MAX_WORKERS} workers already: remove one, or start another"
            )
        if len(self.ranks) + len(worker.publishers) - (replaced_ranks or 0) > MAX_RANKS:
            raise KVPoolError(f"this index would follow more than {MAX_RANKS} ranks: start another")
        for endpoint in _endpoints(worker):
            if self._followed.get(endpoint, Counter()).keys() - {tenant}:
                raise ConfigError(
                    f"worker {worker.name}: {endpoint} is followed for another tenant: name the worker's own endpoint"
                )
        ranks = len(worker.publishers) - (replaced_ranks or 0)
        self._check_share(tenant, "workers", int(known is None), MAX_WORKERS)
        self._check_share(tenant, "ranks", ranks, MAX_RANKS)
        if self._has_room(worker):
            return
        self._drop_unused()
        if self._has_room(worker):
            return
        if len(self.models) < MAX_MODELS and sum(map(len, self.models.values())) < MAX_PARTITIONS:
            share = int(min(MAX_MODELS, MAX_PARTITIONS) * self._share)
            raise KVPoolError(
                f"tenant {tenant} may have {share} models, hash schemes and block sizes of them counted apart: "
                f"{MORE}"
            )
        raise KVPoolError(
            f"this index follows {MAX_MODELS} models, or {MAX_PARTITIONS} hash schemes and block sizes of them, "
            "already: start another"
        )

    def _check_share(self, tenant: str, what: str, more: int, limit: int) -> None:
        most = int(limit * self._share)
        if more > 0 and self._used[tenant, what] + more > most:
            raise KVPoolError(f"tenant {tenant} may have {most} {what}: {MORE}")

    def _count(self, worker: Worker, sign: int) -> None:
        for what, count in (("workers", 1), ("ranks", len(worker.publishers))):
            self._used[worker.tenant, what] += sign * count
            if not self._used[worker.tenant, what]:
                del self._used[worker.tenant, what]

    def _has_room(self, worker: Worker) -> bool:
        """For its model and its partition, in all and of its tenant."""
        partitions = self.models.get((worker.tenant, worker.model))
        if _find(partitions or (), worker) is not None:
            return True
        of_tenant = [several for (tenant, _), several in self.models.items() if tenant == worker.tenant]
        is_new = partitions is None
        return (
            len(self.models) + is_new <= MAX_MODELS
            and len(of_tenant) + is_new <= MAX_MODELS * self._share
            and sum(map(len, self.models.values())) < MAX_PARTITIONS
            and sum(map(len, of_tenant)) + 1 <= MAX_PARTITIONS * self._share
        )

    def _drop_unused(self) -> None:
        for name, partitions in list(self.models.items()):
            for partition in partitions:
                if not partition.members:
                    self._depart(partition)
            if used := tuple(partition for partition in partitions if partition.members):
                self.models[name] = used
            else:
                del self.models[name]

    def enter(
        self,
        worker: Worker,
        source: Source,
        expires_at_s: float | None,
        restored: PrefixIndex | None = None,
        known: Mapping[int, RankState] | None = None,
    ) -> Present:
        """Errors: ``KVPoolError`` without room for its ranks or its namespace; then it is not entered."""
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
            index = restored
            if index is None:
                index = PrefixIndex(block_tokens=worker.block_tokens, **self._options)
            partition = Partition(Key.of(worker), index, self._seed, self._clock, self._hashes)
            self.models[name] = (*partitions, partition)
        try:
            partition.enter_pools(worker)
        except KVPoolError:
            self._limits.give(nbytes, worker.tenant)
            raise
        ranks = []
        for publisher in worker.publishers:
            state = (known or {}).get(publisher.dp_rank)
            holder = f"rank/{self._next_holder}" if state is None else state.holder
            self._next_holder += 1
            rank = Rank(worker, publisher, partition.index, holder, self._clock, partition.no_hasher)
            if state is not None and state.position is not None:
                rank.restore(state.position, state.incomplete_reason)
            ranks.append(rank)
            self.ranks[worker.id, publisher.dp_rank] = rank
        if partition.no_hasher:
            logger.warning("worker %s: %s", worker.id, unhashed(partition.no_hasher))
        partition.members = Members((*partition.members.ranks, *ranks))
        self._count(worker, 1)
        for endpoint in _endpoints(worker):
            self._followed.setdefault(endpoint, Counter())[worker.tenant] += 1
        self.present[worker.id] = entry = Present(worker, source, expires_at_s, partition, tuple(ranks))
        self.names.enter(worker, partition)
        return entry

    def forget(self, entry: Present) -> None:
        partition = entry.partition
        self._limits.give(len(entry.ranks) * RANK_NBYTES, entry.worker.tenant)
        self.names.leave(entry.worker.id)
        del self.present[entry.worker.id]
        self._count(entry.worker, -1)
        for endpoint in _endpoints(entry.worker):
            self._followed[endpoint] -= Counter({entry.worker.tenant: 1})
            if not self._followed[endpoint]:
                del self._followed[endpoint]
        partition.members = Members(rank for rank in partition.members.ranks if rank not in entry.ranks)
        for rank in entry.ranks:
            del self.ranks[entry.worker.id, rank.publisher.dp_rank]
            rank.leave()
            for name in ("batches", "gaps", "replays", "resets", "malformed"):
                self.departed[name] += getattr(rank, name)
        partition.leave_pools(entry.worker)
        if not partition.members and not len(partition.index):
            # The model stays known; a table's memory does not shrink, so it goes.
            name_of = (partition.key.tenant, partition.key.model)
            self.models[name_of] = tuple(other for other in self.models[name_of] if other is not partition)
            self._depart(partition)

    def _depart(self, partition: Partition) -> None:
        counters = partition.index.counters()
        for name in ("refused", "evicted"):
            self.departed[name] += counters[name]


def _partition_state(partition: Partition, entries: Iterable[Present], now_s: float) -> PartitionState:
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
    """Lease of a restored worker; 0: left out."""
    if state.source == "pool":
        return RESTORED_LEASE_S if announced else 0
    if state.source == "flag" and state.worker.id not in flags:
        return 0
    return None if state.lease_left_s is None else min(max(0, state.lease_left_s - age_s), MAX_LEASE_S)


def _endpoints(worker: Worker) -> list[str]:
    """Publishers without a replay socket count, too: each of their endpoints is connected to."""
    named = (one for publisher in worker.publishers for one in (publisher.events, publisher.replay))
    return [one_spelling(endpoint) for endpoint in named if endpoint]


def is_same_start(known: Worker, worker: Worker) -> bool:
    one, other = ((Key.of(each), each.publishers, each.incarnation) for each in (known, worker))
    return one == other


def _find(partitions: Iterable[Partition], worker: Worker) -> Partition | None:
    return next((one for one in partitions if one.key == Key.of(worker)), None)
