"""``Fleet``: the workers that an index follows, what each of them holds, and what is answered about a prompt.

``_workers`` says who is present. ``_present``, ``_ranks`` and ``_models`` are its maps.

Threads: any may call anything, and nothing here does I/O but a line to the log. ``_lock`` guards ``_workers``
and who is in a ``Partition``; readers of ``_present``, ``_ranks`` and ``_models`` see whole values without it.
``Rank.lock`` guards the rank's holder in the table and the rank's fields; it is taken after ``_lock``, never before.
A rank's lock is held while a batch is applied, up to 0.3 s for 34 MiB, and ``_lock`` while a rank that leaves waits for
that. An event loop calls what takes neither: ``ask`` at once, ``followed``, ``incomplete``, ``rank``, ``models``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvpool.discovery.admission import MAX_TEXT_NBYTES, check_worker
from kvpool.discovery.networks import WorkerNetworks
from kvpool.discovery.worker import DEFAULT_TENANT, Worker
from kvpool.errors import ConfigError, KVPoolError, UnknownModel
from kvpool.index.answer import Lookup, Totals, WorkerStatus
from kvpool.index.limits import Limits
from kvpool.index.partition import Answer, Partition, Pool, merged
from kvpool.index.prompt import Prompt, PromptFields, as_prompt
from kvpool.index.rank import Rank, pool_holder
from kvpool.index.snapshot import PartitionState, Snapshot, pack
from kvpool.index.table import DEFAULT_MAX_BLOCKS, TIERS, PrefixIndex
from kvpool.index.workers import (
    MAX_LEASE_S,
    SOURCES,
    Present,
    Source,
    Workers,
    is_same_start,
    unknown_model,
)
from kvpool.key.hashing import seed_id
from kvpool.key.names import check_tenant
from kvpool.text import counted

if TYPE_CHECKING:
    from typing_extensions import Buffer, Unpack

Added = Literal["new", "renewed", "replaced", "kept"]

MAX_MULTIMODAL = 65536

logger = logging.getLogger("kvpool.index")


class Feed(Protocol):
    """Subscribes to workers' events, and has each ``Rank`` apply its own. No call but ``close`` blocks."""

    def follow(self, worker: Worker, ranks: Collection[Rank]) -> None: ...

    def unfollow(self, worker_id: str) -> None: ...

    def close(self) -> None: ...

    @property
    def is_alive(self) -> bool: ...


class Fleet:
    """The workers of an index: adds and removes them, has ``feed`` follow those that are present, answers about them.

    ``max_blocks``, of each partition, and ``reuse_reports``: see ``PrefixIndex``. ``max_memory_nbytes``: see
    ``Limits``. ``seed``: what ``PYTHONHASHSEED`` is for the engines whose prompts come
    as tokens; None: not set. ``tenant_share``: the part of all workers, ranks and models that one tenant may have.
    ``clock``: seconds that only go up. ``feed``: None where events come some other way. ``networks``: where workers are
    that no flag names; None: anywhere.
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
        PrefixIndex(max_blocks=max_blocks, reuse_reports=reuse_reports)  # checks them
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

    @property
    def seed_id(self) -> str:
        """``kvpool.key.hashing.seed_id`` of the seed: what a worker hashes with that names none."""
        return seed_id(self._seed)

    # ---- who

    def add(self, worker: Worker, source: Source, lease_s: float | None = None) -> Added:
        """Follow a worker, for ``lease_s`` seconds or until it is removed.

        A worker of this id that is the same start (same partition, publishers and incarnation) has its lease, source,
        address and namespace renewed: ``renewed``. Any other of this id is forgotten at once with all it held:
        ``replaced``. A worker that a flag or a call has named is not touched by an announcement in the pool: ``kept``.
        Errors: ``ConfigError`` that names the field; ``KVPoolError`` at a limit: no start is followed then.
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
                if known is not None:  # its publisher has started anew, with or without room for it
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
        """Forget a worker and all it holds, but for the pool's blocks; False if it is not known.

        ``source``: only if it was named by this one last.
        """
        with self._lock:
            entry = self._present.get(worker_id)
            if entry is None or source not in (None, entry.source):
                return False
            self._forget(entry)
        logger.info("worker %s is gone", worker_id)
        return True

    def expire(self) -> list[str]:
        """Forget the workers whose lease has ended; their ids.

        Errors: ``KVPoolError`` when the feed has ended: nothing that is known stays true then.
        """
        if self.feed is not None and not self.feed.is_alive:
            raise KVPoolError("the index has stopped and reads no more events; the lines above say why")
        with self._lock:
            now_s = self._clock()
            ended = [
                entry
                for entry in self._present.values()
                if entry.expires_at_s is not None and entry.expires_at_s <= now_s
            ]
            for entry in ended:
                self._forget(entry)
        for entry in ended:
            logger.info("worker %s is gone: its lease has ended", entry.worker.id)
        return [entry.worker.id for entry in ended]

    def close(self) -> None:
        """Stop following all workers."""
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
        """How each worker is followed, by tenant and name. ``ids``, ``tenant``, ``model``: only these; None: all."""
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
        """Ranks with events that were not heard from yet."""
        return sum(rank.joining and bool(rank.publisher.events) for rank in tuple(self._ranks.values()))

    def followed(self) -> list[Worker]:
        """The workers, in no order."""
        return [entry.worker for entry in tuple(self._present.values())]

    def totals(self) -> Totals:
        """What a metrics page shows."""
        with self._lock:
            ranks = list(self._ranks.values())
            partitions = [partition for several in self._models.values() for partition in several]
            departed = Counter(self._workers.departed)
            workers = len(self._present)
        counters = [partition.index.counters() for partition in partitions]
        return Totals(
            workers=workers,
            ranks=len(ranks),
            stale_ranks=sum(rank.stale and bool(rank.publisher.events) for rank in ranks),
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
        """The namespaces of which something is known, for ``PoolReconciler``."""
        with self._lock:
            return [
                Pool(partition.key.tenant, namespace, partition.index, pool_holder(namespace))
                for partitions in self._models.values()
                for partition in partitions
                for namespace in partition.namespaces
            ]

    def forget_pool(self, tenant: str | None = None) -> None:
        """Forget what the pool held of this tenant; None: of all, for it was emptied or is another one."""
        with self._lock:
            for partitions in self._models.values():
                for partition in partitions:
                    if tenant in (None, partition.key.tenant):
                        for namespace in partition.namespaces:
                            partition.index.remove_worker(pool_holder(namespace))
        logger.info(
            "the pool was emptied%s: what it held is forgotten", f" of tenant {tenant}" if tenant else ""
        )

    # ---- at rest

    def snapshot(self) -> tuple[PartitionState, ...]:
        """A copy of what is known of the workers there are: the blocks of a rank are exactly those of its position.

        Batches, and who joins or leaves, wait while the tables are copied (``PrefixIndex.image``); lookups go on.
        """
        with self._lock:
            return self._workers.snapshot()

    @contextmanager
    def packed(self, take: Callable[[], Snapshot]) -> Iterator[list[bytes]]:
        """``take()`` of this fleet, packed, to be used within the block. Errors: ``KVPoolError`` without room."""
        totals = self.totals()
        with self.limits.snapshot(lambda: pack(take()), totals.blocks, totals.memory_nbytes) as parts:
            yield parts

    def restore(self, snapshot: Snapshot, *, age_s: float, flags: Collection[str], life: str | None) -> None:
        """Take over and follow the workers of a snapshot, in a fleet that knows nothing yet.

        Each rank is stale, and not credited, until its publisher has proved that it is still the one of that position
        (``Sequence``). A rank without a position begins with nothing. ``age_s``: of the snapshot, in which leases of
        calls have gone on. ``flags``: ids of those that flags name; others that flags have named stay away.
        ``life``: of the pool now; None: there is no pool, and workers that announced themselves there stay away. A pool
        of another life, or of an unknown one, is taken to hold nothing. Errors: ``SnapshotRefused``: nothing is known.
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
        """Of a worker's present start; None: not known."""
        return self._ranks.get((worker_id, dp_rank))

    def incomplete(self) -> list[tuple[str, int]]:
        """(worker, data-parallel rank) of those that are followed and hold more than is known."""
        ranks = tuple(self._ranks.items())
        return [key for key, rank in ranks if rank.incomplete_reason and not rank.stale]

    # ---- what is asked

    def lookup(self, model: str | Prompt, **fields: Unpack[PromptFields]) -> Lookup:
        """How many leading blocks of a prompt each worker of its model holds: a row for every candidate rank.

        The prompt: a ``Prompt``, or the model's name and the fields of one; with ``token_ids`` or ``hashes64``. Tokens
        are hashed once for each block size and hash scheme among the workers, with the seed of this fleet; workers
        that hash with another seed have no row. Errors: ``ConfigError``; ``UnknownModel`` for a model or tenant that
        no worker has named, and when no worker's hashes can be computed.
        """
        return merged(self.ask(model, **fields))

    def ask(
        self, model: str | Prompt, *, at_once: bool = False, **fields: Unpack[PromptFields]
    ) -> list[Answer]:
        """``lookup`` of each partition: one, unless workers of the model differ in how they hash; or ``NotAtOnce``."""
        prompt = model if isinstance(model, Prompt) and not fields else as_prompt(model, fields)
        candidates = None if prompt.workers is None else prompt.candidates()
        return [one.answer(hashes, candidates, at_once=at_once) for one, hashes in self._asked(prompt)]

    def _asked(self, prompt: Prompt) -> list[tuple[Partition, Buffer]]:
        """Which partitions a prompt is asked of, by which hashes."""
        partitions = self._partitions(prompt.tenant, prompt.model)
        hashes = prompt.checked_hashes()
        if len(prompt.multimodal) > MAX_MULTIMODAL:
            raise ConfigError(
                f"a prompt has at most {MAX_MULTIMODAL} multimodal items, not {len(prompt.multimodal)}"
            )
        if hashes is not None:
            return [(partition, hashes) for partition in partitions]
        asked = [(partition, partition.hashes(prompt)) for partition in partitions if partition.hasher]
        if partitions and not asked:
            raise UnknownModel(
                f'the workers of model "{prompt.model}" {partitions[0].no_hasher}, '
                "or send block hashes instead of tokens"
            )
        return asked

    def check_model(self, model: str, tenant: str = DEFAULT_TENANT) -> None:
        """Errors: those of ``lookup`` for a model or tenant."""
        self._partitions(tenant, model)

    def models(self, tenant: str) -> list[str]:
        """Of the workers of a tenant."""
        return [name for owner, name in list(self._models) if owner == tenant]

    def _partitions(self, tenant: str, model: str) -> tuple[Partition, ...]:
        if isinstance(model, str) and (partitions := self._models.get((tenant, model))) is not None:
            return partitions
        check_tenant(tenant)
        if not isinstance(model, str) or not model or len(model) > MAX_TEXT_NBYTES:
            raise ConfigError(f"name the model, with at most {MAX_TEXT_NBYTES} characters")
        models = self.models(tenant)
        if not models:  # nothing of other tenants: the one who asks may be none of theirs
            raise UnknownModel(
                f'unknown model "{model}": this index follows no worker of tenant "{tenant}"; kvpool top shows whom it '
                "follows, kvpool doctor why not others"
            )
        raise UnknownModel(unknown_model(model, models))
