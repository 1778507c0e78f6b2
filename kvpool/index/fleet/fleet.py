"""``Fleet``: the workers of an index, the blocks that each holds, and replies about a prompt.

``_workers`` has the present workers; ``_present``, ``_ranks`` and ``_models`` are its maps.

Threads: any; no I/O but log lines. ``_lock`` guards ``_workers`` and the members of a ``Partition``;
``_present``, ``_ranks`` and ``_models`` are read without it, as whole values. ``Rank.lock`` guards the rank's
holder in the table and its fields; it is taken after ``_lock``, never before. Applying a batch holds a rank's
lock, up to 0.3 s for 34 MiB, and a leaving rank makes ``_lock`` wait for that. An event loop calls only
``ask`` with ``at_once``, ``followed``, ``incomplete``, ``lapse`` to ``ranks_of`` and ``names``, which take neither.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvpool.discovery.networks import WorkerNetworks
from kvpool.discovery.worker import Worker, check_worker
from kvpool.errors import ConfigError, KVPoolError, UnknownModel
from kvpool.index.answer import FleetTotals, Lookup, WorkerStatus
from kvpool.index.fleet.names import Name, Serving
from kvpool.index.fleet.partition import Answer, Pool, merged
from kvpool.index.fleet.rank import Rank, RankKey
from kvpool.index.fleet.snapshot import PartitionState, Snapshot, pack
from kvpool.index.fleet.start import Start
from kvpool.index.fleet.table import DEFAULT_MAX_BLOCKS, TIERS, PrefixIndex
from kvpool.index.fleet.workers import (
    MAX_LEASE_S,
    SOURCES,
    Present,
    Source,
    Workers,
    is_same_start,
)
from kvpool.index.limits import Limits
from kvpool.index.prompt import Prompt, PromptFields, as_prompt
from kvpool.key.hashing import seed_id
from kvpool.text import counted

if TYPE_CHECKING:
    from typing_extensions import Buffer, Unpack

Added = Literal["new", "renewed", "replaced", "kept"]

MAX_MULTIMODAL = 65536

logger = logging.getLogger("kvpool.index")


class Feed(Protocol):
    """Subscribes to workers' events; each ``Rank`` applies its own. Only ``close`` blocks."""

    def follow(self, worker: Worker, ranks: Collection[Rank]) -> None: ...

    def unfollow(self, worker_id: str) -> None: ...

    def close(self) -> None: ...

    @property
    def is_alive(self) -> bool: ...


class Fleet:
    """Adds and removes workers, has ``feed`` follow the present ones, and answers lookups.

    ``max_blocks``, of each partition, and ``reuse_reports``: as in ``PrefixIndex``. ``max_memory_nbytes``: as
    in ``Limits``. ``seed``: ``PYTHONHASHSEED`` of the engines whose prompts come as tokens; None: unset.
    ``tenant_share``: a tenant's largest share of workers, ranks and models. ``clock``: monotonic seconds.
    ``feed``: None: events come some other way. ``networks``: allowed for workers that no flag names; None: any.
    """

    def __init__(
        self,
        *,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        max_memory_nbytes: int | None = None,
        reuse_reports: bool = True,
        seed: str | None = None,
        tenant_share: float = 1.0,
        feed: Feed | None = None,
        networks: WorkerNetworks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        PrefixIndex(max_blocks=max_blocks, reuse_reports=reuse_reports)  # validates them
        self.limits = Limits(max_memory_nbytes)
        self.feed, self.networks = feed, networks
        self._options: dict[str, Any] = {
            "max_blocks": max_blocks,
            "reuse_reports": reuse_reports,
            "memory": self.limits.tables,
        }
        self._seed = seed
        self._clock = clock
        self._lock = threading.Lock()
        workers = self._workers = Workers(self._options, seed, clock, tenant_share, self.limits)
        self._present, self._ranks, self._models = workers.present, workers.ranks, workers.models
        self.names = workers.names

    @property
    def seed_id(self) -> str:
        """``kvpool.key.hashing.seed_id`` of the seed, for workers that name none."""
        return seed_id(self._seed)

    # ---- workers

    def add(self, worker: Worker, source: Source, lease_s: float | None = None) -> Added:
        """Follow a worker, for ``lease_s`` seconds or until it is removed.

        ``renewed``: the same start (partition, publishers, incarnation) gets a new lease, source, address and
        namespace. ``replaced``: another start of this id; all blocks of the former are forgotten. ``kept``:
        an announcement in the pool changes no worker that a flag or a call named. Errors: ``ConfigError``
        that names the field; ``KVPoolError`` at a limit: then no start is followed.
        """
        if source != "flag" and self.networks is not None:
            self.networks.check(worker)
        check_worker(worker)
        assert source in SOURCES
        if lease_s is not None and not 0 < lease_s <= MAX_LEASE_S:
            raise ConfigError(
                f"worker {worker.name}: a lease is more than 0 and at most {MAX_LEASE_S:g} seconds, not {lease_s:g}"
            )
        with self._lock:
            expires_at_s = None if lease_s is None else self._clock() + lease_s
            known = self._present.get(worker.id)
            if known is not None and source == "pool" and known.source != "pool":
                return "kept"
            if known is not None and is_same_start(known.worker, worker):
                self._workers.renew(known, worker)
                known.source, known.expires_at_s = source, expires_at_s
                return "renewed"
            try:
                self._workers.make_room(worker, known)
            finally:
                if known is not None:  # its publisher has restarted, whether or not the new start fits
                    self._forget(known)
            entry = self._workers.enter(worker, source, expires_at_s)
            self._follow(entry)
        followed = any(publisher.events for publisher in worker.publishers)
        ranks = counted(len(worker.publishers), "rank") if followed else "no events"
        if known is None:
            logger.info('worker %s joins: model "%s", %s, by %s', worker.id, worker.model, ranks, source)
            return "new"
        logger.info("worker %s starts again: what it held is forgotten; %s, by %s", worker.id, ranks, source)
        return "replaced"

    def remove(self, worker_id: str, source: Source | None = None) -> bool:
        """Forget a worker and its blocks, but for the pool's; False: unknown.

        ``source``: only if this source named it last.
        """
        with self._lock:
            entry = self._present.get(worker_id)
            if entry is None or source not in (None, entry.source):
                return False
            self._forget(entry)
        logger.info("worker %s is gone", worker_id)
        return True

    def expire(self) -> list[str]:
        """Forget the workers whose lease has ended; returns their ids.

        Errors: ``KVPoolError`` once the feed has ended: its state goes out of date.
        """
        if self.feed is not None and not self.feed.is_alive:
            raise KVPoolError("the index has stopped and reads no more events; the lines above say why")
        with self._lock:
            now_s = self._clock()
            present = self._present.values()
            ended = [one for one in present if one.expires_at_s is not None and one.expires_at_s <= now_s]
            for entry in ended:
                self._forget(entry)
        for entry in ended:
            logger.info("worker %s is gone: its lease has ended", entry.worker.id)
        return [entry.worker.id for entry in ended]

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()

    def _follow(self, entry: Present) -> None:
        if self.feed is not None:
            self.feed.follow(entry.worker, entry.ranks)

    def _forget(self, entry: Present) -> None:
        self._workers.forget(entry)
        if self.feed is not None:
            self.feed.unfollow(entry.worker.id)

    def workers(
        self, ids: Collection[str] | None = None, *, tenant: str | None = None, model: str | None = None
    ) -> list[WorkerStatus]:
        """Status of each worker, by tenant and name. ``ids``, ``tenant``, ``model``: filters; None: all."""
        now_s = self._clock()
        found = [
            WorkerStatus(
                worker=entry.worker,
                source=entry.source,
                lease_left_ms=entry.lease_left_ms(now_s),
                publishers=tuple(rank.status(now_s) for rank in entry.ranks),
            )
            for entry in tuple(self._present.values())
            if entry.is_among(ids, tenant, model)
        ]
        return sorted(found, key=lambda status: (status.worker.tenant, status.worker.name))

    @property
    def joining(self) -> int:
        """Ranks whose feed has not confirmed every batch yet."""
        return sum(rank.joining and bool(rank.publisher.events) for rank in tuple(self._ranks.values()))

    def followed(self) -> list[Worker]:
        """The workers, unordered."""
        return [entry.worker for entry in tuple(self._present.values())]

    def totals(self) -> FleetTotals:
        with self._lock:
            ranks = list(self._ranks.values())
            partitions = [partition for several in self._models.values() for partition in several]
            departed = Counter(self._workers.departed)
            workers = len(self._present)
            nears = [(partition.index, holder) for partition in partitions for holder in partition.nears]
            media = [pool for pool in self._known_pools() if pool.is_media]
        near_blocks = sum(index.held_by(holder)["pool"] for index, holder in nears)
        pool_media = sum(pool.table.held_by(pool.holder)["pool"] for pool in media)
        counters = [partition.index.counters() for partition in partitions]
        return FleetTotals(
            workers=workers,
            ranks=len(ranks),
            stale_ranks=sum(rank.stale and bool(rank.publisher.events) and not rank.sleeps for rank in ranks),
            incomplete_ranks=sum(bool(rank.incomplete_reason) for rank in ranks),
            blocks=sum(counter["blocks"] for counter in counters),
            memory_nbytes=sum(counter["memory_nbytes"] for counter in counters),
            **{
                name: departed[name] + sum(getattr(rank, name) for rank in ranks)
                for name in ("batches", "gaps", "replays", "resets")
            },
            malformed_batches=departed["malformed"] + sum(rank.malformed for rank in ranks),
            refused_blocks=departed["refused"] + sum(counter["refused"] for counter in counters),
            evicted_blocks=departed["evicted"] + sum(counter["evicted"] for counter in counters),
            near_blocks=near_blocks,
            # A table has a near pool's blocks and outputs of encoders among the blocks of pools.
            pool_blocks=max(0, sum(one["pool_blocks"] for one in counters) - near_blocks - pool_media),
            pool_media=pool_media,
            **{
                f"{tier}_blocks": sum(counter[f"{tier}_blocks"] for counter in counters) for tier in TIERS[:3]
            },
        )

    def pools(self) -> list[Pool]:
        """Every known namespace, for ``PoolReconciler``."""
        with self._lock:
            return list(self._known_pools())

    def _known_pools(self) -> Iterator[Pool]:
        partitions = chain.from_iterable(self._models.values())
        return chain.from_iterable(partition.pools() for partition in partitions)

    def forget_pool(self, tenant: str | None = None) -> None:
        """Forget the pool's blocks of this tenant; None: of all tenants, after a flush or for another pool."""
        with self._lock:
            for pool in self._known_pools():
                if tenant in (None, pool.tenant):
                    pool.table.remove_worker(pool.holder)
        logger.info(
            "the pool was emptied%s: what it held is forgotten", f" of tenant {tenant}" if tenant else ""
        )

    # ---- at rest

    def snapshot(self) -> tuple[PartitionState, ...]:
        """A copy of the present workers' state: the blocks of a rank are exact at its position.

        Batches, joins and leaves wait while the tables are copied (``PrefixIndex.image``); lookups go on.
        """
        with self._lock:
            return self._workers.snapshot()

    @contextmanager
    def packed(self, take: Callable[[], Snapshot]) -> Iterator[list[bytes]]:
        """``take()``, packed, for use within the block. Errors: ``KVPoolError`` without room."""
        totals = self.totals()
        with self.limits.snapshot(lambda: pack(take()), totals.blocks, totals.memory_nbytes) as parts:
            yield parts

    def restore(self, snapshot: Snapshot, *, age_s: float, flags: Collection[str], life: str | None) -> None:
        """Restore and follow the workers of a snapshot, in an empty fleet.

        Each rank is stale, with no credit, until its publisher proves the position (``Sequence``). A rank
        without a position begins empty. ``age_s``: of the snapshot; leases of calls ran on meanwhile.
        ``flags``: ids of the present flags; other workers of former flags are left out. ``life``: incarnation
        of the pool; None: no pool, and workers announced there are left out. A pool of another or an unknown
        incarnation counts as empty. Errors: ``SnapshotRefused``: the fleet stays empty.
        """
        indexes = [
            PrefixIndex.of_image(
                state.packed_image,
                block_tokens=state.workers[0].worker.block_tokens if state.workers else None,
                **self._options,
            )
            for state in snapshot.partitions
        ]
        with self._lock:
            for entry in self._workers.restore(snapshot, indexes, age_s=age_s, flags=flags, life=life):
                try:
                    if entry.worker.id not in flags and self.networks is not None:
                        self.networks.check(entry.worker)
                except ConfigError as error:
                    logger.warning("%s", error)
                    self._workers.forget(entry)
                else:
                    self._follow(entry)

    def rank(self, worker_id: str, dp_rank: int) -> Rank | None:
        """Of a worker's present start; None: unknown."""
        return self._ranks.get((worker_id, dp_rank))

    def start(self, worker_id: str) -> Start:
        """The worker's present one; of an unknown worker: without a life."""
        entry = self._present.get(worker_id)
        return Start(worker_id) if entry is None else entry.start

    def lasts(self, start: Start) -> bool:
        """Whether a worker is present in this ``start``, and was reached ever since."""
        return bool(start.life) and self.start(start.worker_id) == start

    def lapse(self, worker_id: str) -> None:
        """A worker could not be reached."""
        if (entry := self._present.get(worker_id)) is not None:
            entry.lapses += 1

    def peers(self, worker_id: str) -> set[Start]:
        """The present starts of the workers of this one's model, its own among them; empty: unknown."""
        entry = self._present.get(worker_id)
        return set() if entry is None else self.starts(entry.worker.tenant, entry.worker.model)

    def starts(self, tenant: str, model: str) -> set[Start]:
        """Of a model's workers, the present ones."""
        partitions = self._models.get((tenant, model), ())
        return {self.start(rank.worker.id) for partition in partitions for rank in partition.members.ranks}

    def read_names(self, start: Start, names: Iterable[Name]) -> None:
        """What a worker in this ``start`` serves, as it lists it now."""
        with self._lock:
            if self.lasts(start):
                self._workers.names.read(start.worker_id, names)

    def ranks_of(self, worker_id: str) -> list[RankKey]:
        """Of a present worker, in its present start; empty: unknown."""
        entry = self._present.get(worker_id)
        return [] if entry is None else [rank.key for rank in entry.ranks]

    def incomplete(self) -> list[tuple[str, int]]:
        """(worker, data-parallel rank) of followed ranks that hold more than is known."""
        ranks = tuple(self._ranks.items())
        return [key for key, rank in ranks if rank.incomplete_reason and not rank.stale]

    # ---- lookups

    def lookup(self, model: str | Prompt, **fields: Unpack[PromptFields]) -> Lookup:
        """How many leading blocks of a prompt each worker of its model holds: a row for every candidate rank.

        ``model``: a ``Prompt``, or a name with the fields of one, ``token_ids`` or ``hashes64`` among them.
        Tokens are hashed once for each block size and hash scheme, with this fleet's seed; workers with
        another seed have no row. Errors: ``ConfigError``; ``UnknownModel`` for a model or tenant that no
        worker has, and when no worker's hashes can be computed.
        """
        return merged(self.ask(model, **fields))

    def ask(
        self, model: str | Prompt, *, at_once: bool = False, **fields: Unpack[PromptFields]
    ) -> list[Answer]:
        """``lookup`` per partition: several only if workers of the model hash differently. ``NotAtOnce``: too slow."""
        prompt = model if isinstance(model, Prompt) and not fields else as_prompt(model, fields)
        candidates = None if prompt.workers is None else prompt.candidates()
        answers = []
        for one, hashes in self._asked(prompt):
            members = one.members if candidates is None else one.members.among(candidates)
            answers.append(one.partition.answer(members, hashes, prompt.multimodal, at_once=at_once))
        return answers

    def _asked(self, prompt: Prompt) -> list[tuple[Serving, Buffer]]:
        serving = self.names.serving(prompt.tenant, prompt.model)
        hashes = prompt.checked_hashes()
        if (items := len(prompt.multimodal)) > MAX_MULTIMODAL:
            raise ConfigError(f"a prompt has at most {MAX_MULTIMODAL} multimodal items, not {items}")
        if hashes is not None:
            return [(one, hashes) for one in serving]
        asked = [(one, one.partition.hashes(prompt, one.lora)) for one in serving if one.partition.hasher]
        if serving and not asked:
            raise UnknownModel(
                f'the workers of model "{prompt.model}" {serving[0].partition.no_hasher}, '
                "or send block hashes instead of tokens"
            )
        return asked
