"""``Fleet``: the workers that an index follows, what each of them holds, and what is answered about a prompt.

A partition is a ``PrefixIndex`` for workers that share tenant, model, hash algorithm, seed and block size. In it a
holder is one rank of one start of a worker (``rank/N``, with a number that is never given again), or the pool of one
namespace (``pool/NAMESPACE``). So nothing that is said late about an earlier start can be taken for a later one's,
and no name of a worker can be taken for a pool.

Threads: any may call anything, and nothing here does I/O but a line to the log. ``_lock`` guards ``_entries``,
``_ranks``, ``_models``, ``_next_holder``, ``_departed`` and who is in a ``Partition``; readers of ``_ranks`` and
``_models`` see whole values without it. ``DpRank.lock`` guards the rank's holder in the table and the rank's fields; it
is taken after ``_lock``, never before.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvpool.discovery.admission import MAX_PUBLISHERS, MAX_TEXT_NBYTES, check_worker
from kvpool.discovery.worker import DEFAULT_TENANT, Position, Worker
from kvpool.errors import ConfigError, KVPoolError, SnapshotRefused, UnknownModel
from kvpool.index.answer import Lookup, TierRow, WorkerStatus
from kvpool.index.dp_rank import DpRank, Progress, pool_holder
from kvpool.index.partition import Key, Members, Partition
from kvpool.index.prompt import Prompt, PromptFields, as_prompt
from kvpool.index.snapshot import PartitionState, RankState, Snapshot, WorkerState
from kvpool.index.table import DEFAULT_MAX_BLOCKS, TIERS, MemoryBudget, PrefixIndex
from kvpool.key.hashing import len_tokens, seed_id
from kvpool.key.names import check_tenant
from kvpool.text import nearest, unknown

if TYPE_CHECKING:
    from typing_extensions import Buffer, Unpack

Source = Literal["pool", "flag", "call"]
SOURCES: tuple[Source, ...] = ("pool", "flag", "call")
Added = Literal["new", "renewed", "replaced", "kept"]

MAX_MODELS = 1024  # (tenant, model) pairs; those without workers make room
MAX_PARTITIONS = 1024  # of a fleet
MAX_WORKERS = 16384
MAX_RANKS = 32768  # of all workers; a table has room for 65,536 holders
MAX_NAMESPACES = 1024  # of a partition
MAX_PROMPT_BLOCKS = 1 << 22
MAX_PROMPT_TOKENS = 1 << 22
MAX_MULTIMODAL = 65536
MAX_LEASE_S = 86400.0
# How long a worker that comes back from a snapshot waits for the pool to announce it: as long as a watch keeps those
# that it cannot read (kvpool.discovery.worker_watch).
RESTORED_LEASE_S = 60.0
MOST_NAMED = 10  # of the known models, in an error

assert MAX_RANKS + MAX_NAMESPACES <= 65536
assert MAX_PUBLISHERS <= MAX_RANKS

logger = logging.getLogger("kvpool.index")

_HOLDER = re.compile(r"rank/([0-9]{1,18})")


class Totals(NamedTuple):
    """Since the fleet was made, of all workers that there were, and what is there now."""

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


class Pool(NamedTuple):
    """What one namespace has in the pool, as one partition knows it: ``holder`` in its ``table``."""

    tenant: str
    namespace: str
    table: PrefixIndex
    holder: str


class _Entry:
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


class Fleet:
    """The workers of an index; an ``EventSink`` for whoever follows their events.

    ``max_blocks``, of each partition, and ``reuse_reports``: see ``PrefixIndex``. ``max_memory_nbytes``: of all
    partitions together, see ``MemoryBudget``; None: no limit. ``seed``: what ``PYTHONHASHSEED`` is for the engines
    whose prompts come as tokens; None: not set. ``clock``: seconds that only go up.
    """

    def __init__(
        self,
        *,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        max_memory_nbytes: int | None = None,
        reuse_reports: bool = True,
        seed: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        PrefixIndex(max_blocks=max_blocks, reuse_reports=reuse_reports)  # judges them
        self._max_blocks = max_blocks
        self._reuse_reports = reuse_reports
        self._memory = None if max_memory_nbytes is None else MemoryBudget(max_memory_nbytes)
        self._seed = seed
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._ranks: dict[tuple[str, int], DpRank] = {}
        self._models: dict[tuple[str, str], tuple[Partition, ...]] = {}  # (): known, nobody is there now
        self._next_holder = 0
        self._departed: Counter[str] = Counter()

    @property
    def seed_id(self) -> str:
        """``kvpool.key.hashing.seed_id`` of the seed: what a worker hashes with that names none."""
        return seed_id(self._seed)

    # ---- who

    def add(self, worker: Worker, source: Source, lease_s: float | None = None) -> Added:
        """Follow a worker, for ``lease_s`` seconds or until it is removed.

        A worker of this id that is the same start (same partition, publishers and incarnation) has its lease, source,
        address and namespace renewed: ``renewed``. Any other of this id is forgotten at once with all it held:
        ``replaced``. What a flag or a call has named is not touched by what the pool announces: ``kept``.
        Errors: ``ConfigError`` that names the field; ``KVPoolError`` when a limit is reached.
        """
        check_worker(worker)
        assert source in SOURCES
        if lease_s is not None and not 0 < lease_s <= MAX_LEASE_S:
            raise ConfigError(
                f"worker {worker.name}: a lease is more than 0 and at most {MAX_LEASE_S:g} seconds, not {lease_s:g}"
            )
        with self._lock:
            now_s = self._clock()
            expires_at_s = None if lease_s is None else now_s + lease_s
            known = self._entries.get(worker.id)
            if known is not None and source == "pool" and known.source != "pool":
                return "kept"
            if known is not None and _same_start(known.worker, worker):
                self._renew(known, worker)
                known.source, known.expires_at_s = source, expires_at_s
                return "renewed"
            self._make_room(worker, known)
            if known is not None:
                self._forget(known)
            self._enter(worker, source, expires_at_s, now_s)
        ranks = f"{len(worker.publishers)} ranks" if len(worker.publishers) > 1 else "1 rank"
        if not any(publisher.events for publisher in worker.publishers):
            ranks = "no events"
        if known is None:
            logger.info('worker %s joins: model "%s", %s, by %s', worker.id, worker.model, ranks, source)
            return "new"
        logger.info("worker %s starts again: what it held is forgotten; %s, by %s", worker.id, ranks, source)
        return "replaced"

    def replaces(self, worker: Worker, source: Source) -> bool:
        """Whether ``add`` would forget another start of this worker. Errors: ``ConfigError``, as ``add``."""
        check_worker(worker)
        with self._lock:
            known = self._entries.get(worker.id)
            if known is None or (source == "pool" and known.source != "pool"):
                return False
            return not _same_start(known.worker, worker)

    def remove(self, worker_id: str, source: Source | None = None) -> bool:
        """Forget a worker and all it holds, but for the pool's blocks; False if it is not known.

        ``source``: only if this is who named it last.
        """
        with self._lock:
            entry = self._entries.get(worker_id)
            if entry is None or source not in (None, entry.source):
                return False
            self._forget(entry)
        logger.info("worker %s is gone", worker_id)
        return True

    def expire(self) -> list[str]:
        """Forget the workers whose lease has ended; their ids."""
        with self._lock:
            now_s = self._clock()
            ended = [
                entry
                for entry in self._entries.values()
                if entry.expires_at_s is not None and entry.expires_at_s <= now_s
            ]
            for entry in ended:
                self._forget(entry)
        for entry in ended:
            logger.info("worker %s is gone: its lease has ended", entry.worker.id)
        return [entry.worker.id for entry in ended]

    def workers(self, *, tenant: str | None = None, model: str | None = None) -> list[WorkerStatus]:
        """How each worker is followed, by tenant and name. ``tenant``, ``model``: only these; None: all."""
        with self._lock:
            now_s = self._clock()
            entries = [
                entry
                for entry in self._entries.values()
                if tenant in (None, entry.worker.tenant) and model in (None, entry.worker.model)
            ]
            found = [
                WorkerStatus(
                    worker=entry.worker,
                    source=entry.source,
                    # 1 at least: 0 says that there is no lease
                    lease_left_ms=0
                    if entry.expires_at_s is None
                    else max(1, int((entry.expires_at_s - now_s) * 1000)),
                    publishers=tuple(rank.status(now_s) for rank in entry.ranks),
                )
                for entry in entries
            ]
        return sorted(found, key=lambda status: (status.worker.tenant, status.worker.name))

    @property
    def joining(self) -> int:
        """Ranks with events that were not heard from yet."""
        return sum(rank.joining and bool(rank.publisher.events) for rank in tuple(self._ranks.values()))

    def followed(self) -> list[Worker]:
        """The workers, in no order."""
        with self._lock:
            return [entry.worker for entry in self._entries.values()]

    def totals(self) -> Totals:
        """What a metrics page shows."""
        with self._lock:
            ranks = list(self._ranks.values())
            partitions = [partition for several in self._models.values() for partition in several]
            departed = Counter(self._departed)
            workers = len(self._entries)
        counters = [partition.index.counters() for partition in partitions]
        return Totals(
            workers=workers,
            ranks=len(ranks),
            stale_ranks=sum(rank.stale for rank in ranks),
            incomplete_ranks=sum(bool(rank.incomplete_reason) for rank in ranks),
            blocks=sum(counter["blocks"] for counter in counters),
            memory_nbytes=sum(counter["memory_nbytes"] for counter in counters),
            batches=departed["batches"] + sum(rank.batches for rank in ranks),
            gaps=departed["gaps"] + sum(rank.gaps for rank in ranks),
            replays=departed["replays"] + sum(rank.replays for rank in ranks),
            resets=departed["resets"] + sum(rank.resets for rank in ranks),
            malformed_batches=departed["malformed"] + sum(rank.malformed for rank in ranks),
            refused_blocks=departed["refused"] + sum(counter["refused"] for counter in counters),
            evicted_blocks=departed["evicted"] + sum(counter["evicted"] for counter in counters),
            **{f"{tier}_blocks": sum(counter[f"{tier}_blocks"] for counter in counters) for tier in TIERS},
        )

    def pools(self) -> list[Pool]:
        """The namespaces of which something is known: for whoever sees what the pool itself holds."""
        with self._lock:
            return [
                Pool(partition.key.tenant, namespace, partition.index, pool_holder(namespace))
                for partitions in self._models.values()
                for partition in partitions
                for namespace in partition.namespaces
            ]

    def forget_pool(self) -> None:
        """The pool was emptied, or is another one: forget what it held, of all namespaces."""
        with self._lock:
            for partitions in self._models.values():
                for partition in partitions:
                    for namespace in partition.namespaces:
                        partition.index.remove_worker(pool_holder(namespace))
        logger.info("the pool was emptied: what it held is forgotten")

    # ---- at rest

    def snapshot(self) -> tuple[PartitionState, ...]:
        """A copy of what is known of the workers there are: the blocks of a rank are exactly those of its position.

        Batches, and who joins or leaves, wait while the tables are copied (``PrefixIndex.image``); lookups go on.
        """
        with self._lock:
            now_s = self._clock()
            entries: dict[Partition, list[_Entry]] = {}
            for entry in self._entries.values():
                entries.setdefault(entry.partition, []).append(entry)
            return tuple(
                _partition_state(partition, members, now_s) for partition, members in entries.items()
            )

    def restore(
        self, snapshot: Snapshot, *, age_s: float, flags: Collection[str], life: str | None
    ) -> list[tuple[Worker, dict[int, Position]]]:
        """Take over what a snapshot knows, into a fleet that knows nothing yet; who is to be followed, and from where.

        Each rank is stale, and not credited, until its publisher has proved that it is still the one of that position
        (``Subscriber`` asks). A rank without a position begins with nothing. ``age_s``: of the snapshot, in which
        leases of calls have gone on. ``flags``: ids of those that flags name; others that flags have named stay away.
        ``life``: of the pool now; None: there is no pool, and who announced itself there stays away. A pool of another
        life, or of none that is known, is taken to hold nothing. Errors: ``SnapshotRefused``; nothing is known then.
        """
        indexes = [
            PrefixIndex.of_image(
                state.packed_image,
                max_blocks=self._max_blocks,
                reuse_reports=self._reuse_reports,
                block_tokens=state.workers[0].worker.block_tokens if state.workers else None,
                memory=self._memory,
            )
            for state in snapshot.partitions
        ]
        pooled = bool(life) and life == snapshot.life
        with self._lock:
            assert not self._entries
            # Behind all that the snapshot names, so that no start of now is taken for one of them.
            numbers = [_HOLDER.fullmatch(name) for index in indexes for name in index.workers()]
            self._next_holder = max((int(found[1]) + 1 for found in numbers if found), default=0)
            try:
                entries: list[_Entry] = []
                for state, index in zip(snapshot.partitions, indexes, strict=True):
                    workers = [
                        (one, lease_s)
                        for one in state.workers
                        if (lease_s := _restored_lease_s(one, age_s, flags, life is not None)) != 0
                    ]
                    entries += self._restore_partition(index, workers, state.namespaces if pooled else ())
                return [
                    (
                        entry.worker,
                        {rank.publisher.dp_rank: rank.position for rank in entry.ranks if rank.position},
                    )
                    for entry in entries
                ]
            except KVPoolError as error:
                self._entries, self._ranks, self._models = {}, {}, {}
                raise SnapshotRefused(f"this snapshot cannot be followed: {error}") from error

    # ---- what they say (EventSink)

    def apply(self, worker_id: str, dp_rank: int, sequence: int, payload: bytes) -> None:
        """One batch of a rank. Errors: ``MalformedEvents``, and then nothing of it was applied."""
        if (rank := self._ranks.get((worker_id, dp_rank))) is not None:
            rank.apply(sequence, payload, self._clock())

    def heard(self, worker_id: str, dp_rank: int) -> None:
        """The rank has just said that there is no later batch than the last one applied.

        Until this, or ``mark`` with ``stale=False``, has come for the first time, a rank is stale.
        """
        if (rank := self._ranks.get((worker_id, dp_rank))) is not None:
            rank.heard(self._clock())

    def reset(self, worker_id: str, dp_rank: int, problem: str, *, anew: bool = False) -> None:
        """Forget what a rank holds, but for the pool's blocks; unless it begins ``anew``, it is incomplete then."""
        if (rank := self._ranks.get((worker_id, dp_rank))) is not None:
            rank.reset(problem, self._clock(), anew=anew)

    def mark(self, worker_id: str, dp_rank: int, *, stale: bool, problem: str = "") -> None:
        """From now on a rank is not to be trusted, for the reason given; or is again."""
        if (rank := self._ranks.get((worker_id, dp_rank))) is not None:
            rank.mark(stale=stale, problem=problem)

    def gap(self, worker_id: str, dp_rank: int, *, closed: bool) -> None:
        """Batches were found missing; or a replay has brought those that were."""
        if (rank := self._ranks.get((worker_id, dp_rank))) is not None:
            rank.gap(closed=closed)

    # ---- who has to be asked

    def incomplete(self) -> list[tuple[str, int]]:
        """(worker, data-parallel rank) of those that are followed and hold more than is known."""
        with self._lock:
            ranks = list(self._ranks.items())
        return [key for key, rank in ranks if rank.incomplete_reason and not rank.stale]

    def asked(self, worker_id: str, dp_rank: int) -> None:
        """A rank was asked to tell all it holds."""
        if (rank := self._ranks.get((worker_id, dp_rank))) is not None:
            rank.ask()

    def progress(self, worker_id: str, dp_rank: int) -> Progress | None:
        """How far a rank has come, for ``emptied``; None if it is not known."""
        rank = self._ranks.get((worker_id, dp_rank))
        return None if rank is None else rank.progress

    def emptied(self, worker_id: str, dp_rank: int, since: Progress) -> None:
        """A rank is asleep, and was when it had come as far as ``since``: an engine empties its cache for that, and
        says so with the first batch after it woke. Until a later batch has come, the rank is stale.
        """
        if (rank := self._ranks.get((worker_id, dp_rank))) is not None:
            rank.empty(since)

    # ---- what is asked

    def lookup(self, model: str | Prompt, **fields: Unpack[PromptFields]) -> Lookup:
        """How many leading blocks of a prompt each worker of its model holds: a row for every candidate rank.

        The prompt: a ``Prompt``, or the model's name and the fields of one; with ``token_ids`` or ``hashes64``. Tokens
        are hashed once for each block size and hash scheme among the workers, with the seed of this fleet; workers
        that hash with another seed have no row.
        Errors: ``ConfigError``; ``UnknownModel`` for a model or tenant that no worker has named, and when no worker's
        hashes can be computed.
        """
        prompt = as_prompt(model, fields)
        candidates = _candidates(prompt.workers)
        answers = [partition.answer(hashes, candidates) for partition, hashes in self._asked(prompt)]
        if len(answers) == 1:
            return answers[0]
        return Lookup.of(sorted((row for answer in answers for row in answer), key=lambda row: row[:2]))

    def lookup_tiers(self, model: str | Prompt, **fields: Unpack[PromptFields]) -> list[TierRow]:
        """``lookup``, tier by tier, as of some batch of each rank that is not named; by name and rank."""
        prompt = as_prompt(model, fields)
        candidates = _candidates(prompt.workers)
        rows = [
            row for partition, hashes in self._asked(prompt) for row in partition.tiers(hashes, candidates)
        ]
        return sorted(rows, key=lambda row: row[:2])

    def _asked(self, prompt: Prompt) -> list[tuple[Partition, Buffer]]:
        """Which partitions a prompt is asked of, by which hashes."""
        partitions = self._partitions(prompt.tenant, prompt.model)
        hashes = _prompt_hashes(prompt)
        if len(prompt.multimodal) > MAX_MULTIMODAL:
            raise ConfigError(
                f"a prompt has at most {MAX_MULTIMODAL} multimodal items, not {len(prompt.multimodal)}"
            )
        if hashes is not None:
            return [(partition, hashes) for partition in partitions]
        assert prompt.token_ids is not None
        asked: list[tuple[Partition, Buffer]] = []
        for partition in partitions:
            if partition.hasher is not None:
                of_tokens = partition.hasher.hashes64(
                    prompt.token_ids,
                    lora=prompt.lora,
                    cache_salt=prompt.cache_salt,
                    multimodal=prompt.multimodal,
                )
                asked.append((partition, of_tokens))
        if partitions and not asked:
            raise UnknownModel(
                f'the workers of model "{prompt.model}" {partitions[0].no_hasher}, '
                "or send block hashes instead of tokens"
            )
        return asked

    def check_model(self, model: str, tenant: str = DEFAULT_TENANT) -> None:
        """Errors: ``ConfigError``, ``UnknownModel``: those of ``lookup`` for a model or tenant."""
        self._partitions(tenant, model)

    def _partitions(self, tenant: str, model: str) -> tuple[Partition, ...]:
        check_tenant(tenant)
        if not isinstance(model, str) or not model or len(model) > MAX_TEXT_NBYTES:
            raise ConfigError(f"name the model, with at most {MAX_TEXT_NBYTES} characters")
        partitions = self._models.get((tenant, model))
        if partitions is not None:
            return partitions
        with self._lock:
            models = [name for owner, name in self._models if owner == tenant]
        if not models:  # nothing of other tenants: the one who asks may be none of theirs
            raise UnknownModel(
                f'unknown model "{model}": no worker of tenant "{tenant}" has joined this index yet'
            )
        raise UnknownModel(_unknown_model(model, models))

    # ---- under _lock

    def _restore_partition(
        self,
        index: PrefixIndex,
        workers: Iterable[tuple[WorkerState, float | None]],
        namespaces: Sequence[str],
    ) -> list[_Entry]:
        now_s = self._clock()
        entries: list[_Entry] = []
        kept: set[str] = set()
        for state, lease_s in workers:
            if state.worker.id in self._entries:
                raise SnapshotRefused(f"worker {state.worker.id} is there twice")
            known = {rank.publisher.dp_rank: rank for rank in state.ranks if rank.position is not None}
            for rank in known.values():
                if rank.holder in kept or _HOLDER.fullmatch(rank.holder) is None:
                    raise SnapshotRefused(f"worker {state.worker.id} has blocks that are not its own")
                kept.add(rank.holder)
            self._make_room(state.worker, None)
            source = next((source for source in SOURCES if source == state.source), None)
            if source is None:
                raise SnapshotRefused(f"worker {state.worker.id} was named by nobody that this version knows")
            expires_at_s = None if lease_s is None else now_s + lease_s
            entries.append(self._enter(state.worker, source, expires_at_s, now_s, index, known))
            if entries[-1].partition.index is not index:
                raise SnapshotRefused("workers of one table do not belong together")
        for namespace in namespaces[:MAX_NAMESPACES] if entries else ():
            entries[0].partition.namespaces.setdefault(namespace, 0)
            kept.add(pool_holder(namespace))
        for holder in set(index.workers()) - kept:
            index.remove_worker(holder)
        return entries

    def _renew(self, entry: _Entry, worker: Worker) -> None:
        if entry.worker.namespace != worker.namespace:
            self._enter_namespace(entry.partition, worker.namespace)
            self._leave_namespace(entry.partition, entry.worker.namespace)
        if entry.worker == worker:
            return
        entry.worker = worker
        for rank in entry.ranks:
            rank.rename(worker)
        entry.partition.members = Members(entry.partition.members.ranks)

    def _make_room(self, worker: Worker, known: _Entry | None) -> None:
        """Check every limit before anything is changed; what no worker uses any more makes room."""
        ranks = len(self._ranks) - (len(known.ranks) if known else 0) + len(worker.publishers)
        if known is None and len(self._entries) >= MAX_WORKERS:
            raise KVPoolError(
                f"this index follows {MAX_WORKERS} workers already: remove one, or start another"
            )
        if ranks > MAX_RANKS:
            raise KVPoolError(f"this index would follow more than {MAX_RANKS} ranks: start another")
        for attempt in range(2):
            partitions = self._models.get((worker.tenant, worker.model))
            if (partitions is not None or len(self._models) < MAX_MODELS) and (
                _find(partitions, worker) is not None or sum(map(len, self._models.values())) < MAX_PARTITIONS
            ):
                return
            if attempt == 0:
                self._drop_unused()
        raise KVPoolError(
            f"this index follows {MAX_MODELS} models, or {MAX_PARTITIONS} hash schemes and block sizes of them, "
            "already: start another"
        )

    def _drop_unused(self) -> None:
        for name, partitions in list(self._models.items()):
            used = tuple(partition for partition in partitions if partition.members)
            for partition in partitions:
                if not partition.members:
                    self._depart(partition)
            if used:
                self._models[name] = used
            else:
                del self._models[name]

    def _enter(
        self,
        worker: Worker,
        source: Source,
        expires_at_s: float | None,
        now_s: float,
        restored: PrefixIndex | None = None,
        known: Mapping[int, RankState] | None = None,
    ) -> _Entry:
        name = (worker.tenant, worker.model)
        partitions = self._models.get(name, ())
        partition = _find(partitions, worker)
        if partition is None:
            index = restored or PrefixIndex(
                max_blocks=self._max_blocks,
                reuse_reports=self._reuse_reports,
                block_tokens=worker.block_tokens,
                memory=self._memory,
            )
            partition = Partition(Key.of(worker), index, self._seed, self._clock)
            self._models[name] = (*partitions, partition)
        self._enter_namespace(partition, worker.namespace)
        ranks = []
        for publisher in worker.publishers:
            state = (known or {}).get(publisher.dp_rank)
            holder = f"rank/{self._next_holder}" if state is None else state.holder
            self._next_holder += 1
            rank = DpRank(worker, publisher, partition.index, holder, now_s)
            if state is not None and state.position is not None:
                rank.restore(state.position, state.incomplete_reason, now_s)
            ranks.append(rank)
            self._ranks[worker.id, publisher.dp_rank] = rank
        partition.members = Members((*partition.members.ranks, *ranks))
        self._entries[worker.id] = entry = _Entry(worker, source, expires_at_s, partition, tuple(ranks))
        return entry

    def _forget(self, entry: _Entry) -> None:
        partition = entry.partition
        del self._entries[entry.worker.id]
        partition.members = Members(rank for rank in partition.members.ranks if rank not in entry.ranks)
        for rank in entry.ranks:
            del self._ranks[entry.worker.id, rank.publisher.dp_rank]
            rank.leave()
            for name in ("batches", "gaps", "replays", "resets", "malformed"):
                self._departed[name] += getattr(rank, name)
        self._leave_namespace(partition, entry.worker.namespace)
        if not partition.members and not len(partition.index):
            # The model stays known; a table's memory does not shrink, so it goes.
            name_of = (partition.key.tenant, partition.key.model)
            self._models[name_of] = tuple(other for other in self._models[name_of] if other is not partition)
            self._depart(partition)

    def _depart(self, partition: Partition) -> None:
        counters = partition.index.counters()
        for name in ("refused", "evicted"):
            self._departed[name] += counters[name]

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


def _partition_state(partition: Partition, entries: Iterable[_Entry], now_s: float) -> PartitionState:
    """Under ``_lock``: nobody else takes the locks of several ranks."""
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


def _find(partitions: Iterable[Partition] | None, worker: Worker) -> Partition | None:
    key = Key.of(worker)
    return next((partition for partition in partitions or () if partition.key == key), None)


def _same_start(known: Worker, worker: Worker) -> bool:
    return (Key.of(known), known.publishers, known.incarnation) == (
        Key.of(worker),
        worker.publishers,
        worker.incarnation,
    )


def _candidates(workers: Sequence[str] | None) -> frozenset[str] | None:
    if workers is not None and len(workers) > MAX_WORKERS:
        raise ConfigError(f"at most {MAX_WORKERS} candidates can be asked about, not {len(workers)}")
    return None if workers is None else frozenset(workers)


def _prompt_hashes(prompt: Prompt) -> memoryview | None:
    """None when tokens are given. Errors: ``ConfigError``."""
    if prompt.token_ids is not None:
        count = len_tokens(prompt.token_ids)
        if not 1 <= count <= MAX_PROMPT_TOKENS:
            raise ConfigError(f"a prompt has 1 to {MAX_PROMPT_TOKENS} tokens, not {count}")
        return None
    if prompt.hashes64 is None:
        raise ConfigError("make tokens of a text or a chat first: give token_ids or hashes64")
    try:
        hashes = memoryview(prompt.hashes64).cast("B")
    except TypeError as error:
        raise ConfigError(f"hashes64 is a contiguous buffer: {error}") from error
    if hashes.nbytes % 8:
        raise ConfigError(f"block hashes are packed u64s, 8 bytes each; {hashes.nbytes} bytes are not")
    if not 1 <= hashes.nbytes // 8 <= MAX_PROMPT_BLOCKS:
        raise ConfigError(f"a prompt has 1 to {MAX_PROMPT_BLOCKS} blocks, not {hashes.nbytes // 8}")
    return hashes


def _unknown_model(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    if len(names) <= MOST_NAMED or nearest(name, names) is not None:
        return unknown("model", name, names)
    return f'unknown model "{name}"; {len(names)} are known, among them {", ".join(names[:MOST_NAMED])}'
