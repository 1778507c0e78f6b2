"""``Fleet``: the workers that an index follows, what each of them holds, and what is answered about a prompt.

Who is in it is ``Membership``'s. ``_entries``, ``_ranks`` and ``_models`` are the maps of that.

Threads: any may call anything, and nothing here does I/O but a line to the log. ``_lock`` guards ``_members``
and who is in a ``Partition``; readers of ``_entries``, ``_ranks`` and ``_models`` see whole values without it.
``DpRank.lock`` guards the rank's holder in the table and the rank's fields; it is taken after ``_lock``, never before.
A rank's lock is held while a batch is applied, up to 0.3 s for 34 MiB, and ``_lock`` while a rank that leaves waits for
that. An event loop calls what takes neither: ``ask`` at once, ``followed``, ``incomplete``, ``progress``, ``models``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from kvpool.discovery.admission import MAX_TEXT_NBYTES, check_worker
from kvpool.discovery.worker import DEFAULT_TENANT, Position, Worker
from kvpool.errors import ConfigError, UnknownModel
from kvpool.index.answer import Lookup, Totals, WorkerStatus
from kvpool.index.dp_rank import Progress, pool_holder
from kvpool.index.limits import Limits
from kvpool.index.membership import (
    MAX_LEASE_S,
    SOURCES,
    Membership,
    Source,
    is_same_start,
    unknown_model,
)
from kvpool.index.partition import Answer, Partition, Pool, merged
from kvpool.index.prompt import Prompt, PromptFields, as_prompt
from kvpool.index.snapshot import PartitionState, Snapshot, pack
from kvpool.index.table import DEFAULT_MAX_BLOCKS, TIERS, PrefixIndex
from kvpool.key.hashing import seed_id
from kvpool.key.names import check_tenant
from kvpool.text import counted

if TYPE_CHECKING:
    from typing_extensions import Buffer, Unpack

Added = Literal["new", "renewed", "replaced", "kept"]

MAX_MULTIMODAL = 65536

logger = logging.getLogger("kvpool.index")


class Fleet:
    """The workers of an index; an ``EventSink`` for subscribers and receivers of their events.

    ``max_blocks``, of each partition, and ``reuse_reports``: see ``PrefixIndex``. ``max_memory_nbytes``: see
    ``Limits``. ``seed``: what ``PYTHONHASHSEED`` is for the engines whose prompts come
    as tokens; None: not set. ``tenant_share``: the part of all workers, ranks and models that one tenant may have.
    ``clock``: seconds that only go up.
    """

    def __init__(
        self,
        *,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        max_memory_nbytes: int | None = None,
        reuse_reports: bool = True,
        seed: str | None = None,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        PrefixIndex(max_blocks=max_blocks, reuse_reports=reuse_reports)  # checks them
        self.limits = Limits(max_memory_nbytes)
        self._options: dict[str, Any] = {
            "max_blocks": max_blocks,
            "reuse_reports": reuse_reports,
            "memory": self.limits.tables,
        }
        self._seed = seed
        self._clock = clock
        self._lock = threading.Lock()
        members = self._members = Membership(self._options, seed, clock, tenant_share, self.limits)
        self._entries, self._ranks, self._models = members.entries, members.ranks, members.models

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
            if known is not None and is_same_start(known.worker, worker):
                self._members.renew(known, worker)
                known.source, known.expires_at_s = source, expires_at_s
                return "renewed"
            self._members.make_room(worker, known)
            if known is not None:
                self._members.forget(known)
            self._members.enter(worker, source, expires_at_s, now_s)
        followed = any(publisher.events for publisher in worker.publishers)
        ranks = counted(len(worker.publishers), "rank") if followed else "no events"
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
            return not is_same_start(known.worker, worker)

    def remove(self, worker_id: str, source: Source | None = None) -> bool:
        """Forget a worker and all it holds, but for the pool's blocks; False if it is not known.

        ``source``: only if this is who named it last.
        """
        with self._lock:
            entry = self._entries.get(worker_id)
            if entry is None or source not in (None, entry.source):
                return False
            self._members.forget(entry)
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
                self._members.forget(entry)
        for entry in ended:
            logger.info("worker %s is gone: its lease has ended", entry.worker.id)
        return [entry.worker.id for entry in ended]

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
            for entry in tuple(self._entries.values())
            if entry.is_among(ids, tenant, model)
        ]
        return sorted(found, key=lambda status: (status.worker.tenant, status.worker.name))

    @property
    def joining(self) -> int:
        """Ranks with events that were not heard from yet."""
        return sum(rank.joining and bool(rank.publisher.events) for rank in tuple(self._ranks.values()))

    def followed(self) -> list[Worker]:
        """The workers, in no order."""
        return [entry.worker for entry in tuple(self._entries.values())]

    def totals(self) -> Totals:
        """What a metrics page shows."""
        with self._lock:
            ranks = list(self._ranks.values())
            partitions = [partition for several in self._models.values() for partition in several]
            departed = Counter(self._members.departed)
            workers = len(self._entries)
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
            return self._members.snapshot()

    @contextmanager
    def packed(self, take: Callable[[], Snapshot]) -> Iterator[list[bytes]]:
        """``take()`` of this fleet, packed, to be used within the block. Errors: ``KVPoolError`` without room."""
        totals = self.totals()
        with self.limits.snapshot(lambda: pack(take()), totals.blocks, totals.memory_nbytes) as parts:
            yield parts

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
                block_tokens=state.workers[0].worker.block_tokens if state.workers else None,
                **self._options,
            )
            for state in snapshot.partitions
        ]
        with self._lock:
            return self._members.restore(snapshot, indexes, age_s=age_s, flags=flags, life=life)

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

    # ---- which ranks are asked

    def incomplete(self) -> list[tuple[str, int]]:
        """(worker, data-parallel rank) of those that are followed and hold more than is known."""
        ranks = tuple(self._ranks.items())
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
        that hash with another seed have no row. Errors: ``ConfigError``; ``UnknownModel`` for a model or tenant that
        no worker has named, and when no worker's hashes can be computed.
        """
        return merged(self.ask(model, **fields))

    def ask(
        self, model: str | Prompt, *, at_once: bool = False, **fields: Unpack[PromptFields]
    ) -> list[Answer]:
        """``lookup`` of each partition: one, unless workers of the model differ in how they hash; or ``NotAtOnce``."""
        prompt = as_prompt(model, fields)
        candidates = prompt.candidates()
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
        check_tenant(tenant)
        if not isinstance(model, str) or not model or len(model) > MAX_TEXT_NBYTES:
            raise ConfigError(f"name the model, with at most {MAX_TEXT_NBYTES} characters")
        partitions = self._models.get((tenant, model))
        if partitions is not None:
            return partitions
        models = self.models(tenant)
        if not models:  # nothing of other tenants: the one who asks may be none of theirs
            raise UnknownModel(
                f'unknown model "{model}": this index follows no worker of tenant "{tenant}"; kvpool top shows whom it '
                "follows, kvpool doctor why not others"
            )
        raise UnknownModel(unknown_model(model, models))
