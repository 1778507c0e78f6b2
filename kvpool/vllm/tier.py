"""KVPoolTier: the pool as a secondary tier of vLLM's ``TieringOffloadingSpec``.

Interface: ``vllm/v1/kv_offload/tiering/base.py`` (``SecondaryTierManager``). The engine's worker copies chunks between
the device and rows of shared memory; this moves whole rows between that memory and the pool, and nothing is copied on
the way. A row holds a chunk of every rank, so a chunk is one record, of rank 0.

A chunk's way: ``lookup`` collects questions, the end of the step sends them as one batch, a later step has the answer;
a chunk that is there is loaded by a job of the engine's, in parts of a few MiB, each with the deadline of the budget.
A chunk that turned out not to be there, or not to prove itself, is a miss for every request that has asked for it. A
store asks first what is there, and sends the rest.

A job is reported when nothing touches its rows any more, and not before: its rows are the engine's again then.

What goes wrong with one key, batch or job (a key that cannot be spelled, an exception of the store) fails that batch or
job alone, with the cause ``fault``. An exception anywhere else is a fault of the bookkeeping: the tier is off then.

Threads: the engine's scheduler thread only. Bytes move in the store's own threads.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvpool import metrics
from kvpool.config import TierConfig
from kvpool.discovery.facts import announce_facts
from kvpool.errors import ConfigError, EngineRefused, StoreUnavailable
from kvpool.key.key import MAX_HASH_NBYTES, MAX_INDEX, MIN_HASH_NBYTES, Fact, Namespace
from kvpool.key.served_weights import served_digest
from kvpool.metrics import Counters
from kvpool.store import Transfer, open_store
from kvpool.transfer.mover import PART_NBYTES, STORE_TIMEOUT_S
from kvpool.vllm.events import EVENT_OWNER
from kvpool.vllm.facts import tier_facts
from kvpool.vllm.guard import Guard, refuse
from kvpool.vllm.lookups import LOOKUP_GRACE_S

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = init_logger("vllm.kvpool")

MAX_PARTS = 8  # under way at a time
DRAIN_STEP_S = 1.0
ASK_KEYS = 1 << 16  # in one question; a store takes 2^20, and a long request has more
MAX_TOUCHES = 1 << 16  # chunks that wait to be counted as used; of more, the rest is not


@dataclass(slots=True)
class _Probe:
    """What is known of one chunk, for as long as a request that has asked for it lives."""

    asked_at: float
    present: bool | None = None
    requests: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Job:
    """A load or a store. ``pending``: chunks, by their place in it, that no part has taken yet."""

    job_id: int
    is_load: bool
    keys: list[OffloadKey]
    rows: list[int]
    started: float
    deadline: float
    pending: list[int]
    parts: int = 0
    moved: set[int] = field(default_factory=set)  # in the pool now, or in their rows
    missing: set[int] = field(default_factory=set)  # a load found that the pool does not hold them
    cause: str = ""  # why it failed; "" while it has not


@dataclass(slots=True)
class _Part:
    job: _Job
    places: list[int]
    transfer: Transfer
    asking: bool = False  # a store whose existence check is under way


class KVPoolTier(SecondaryTierManager):
    """Keeps chunks in a shared pool, under a namespace of its own.

    Settings: ``kvpool.config.TierConfig``, in this tier's entry of ``secondary_tiers``; ``locality`` and
    ``backpressure`` are vLLM's. Refuses to start, with one sentence, when the pool or a setting is wrong. After that no
    fault of ours reaches the engine: the tier answers "miss" and fails its jobs.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        versioned: dict[str, Any] = {}
        if backpressure_detector is not None:  # from 0.31
            versioned["backpressure_detector"] = backpressure_detector
        super().__init__(offloading_spec, primary_kv_view, tier_type, **versioned)
        self.locality = Locality.REMOTE if locality is None else Locality(locality)
        self._events: list[OffloadingEvent] = []
        self._events_wanted = offloading_spec.kv_events_config.enable_kv_cache_events
        try:
            self._config = TierConfig.load(settings)
            if self._config.pool.startswith("memory:"):
                raise EngineRefused(
                    "a memory:// pool is this process's own; use file:///dir or valkey://host:6379"
                )
            self._row_nbytes = _row_nbytes(primary_kv_view, offloading_spec.config)
            self._facts: dict[str, Fact] = {
                **tier_facts(offloading_spec.config, self._config.model_id, self._row_nbytes),
                "weights": served_digest(offloading_spec.config.model.name, self._config.model_path),
            }
            self._namespace = Namespace(self._config.tenant, self._facts)
            self._store = open_store(self._config.pool, threads=self._config.threads)
        except (ConfigError, StoreUnavailable) as error:
            refuse(error)
        try:
            for sentence in announce_facts(self._store, self._namespace, self._config.model_id):
                logger.warning("kvpool: %s", sentence)
        except StoreUnavailable as error:
            logger.warning(
                "kvpool: the facts of this tier are not in the pool, so doctor cannot show them: %s", error
            )
        self._rows = primary_kv_view.cast("B")
        self._rows_count = len(primary_kv_view)
        self._part_chunks = max(1, PART_NBYTES // self._row_nbytes)
        self._probes: dict[OffloadKey, _Probe] = {}
        self._asked_by: dict[str, set[OffloadKey]] = {}
        self._questions: list[OffloadKey] = []
        self._touches: dict[OffloadKey, None] = {}
        self._touching: list[Transfer] = []
        self._batches: list[tuple[list[OffloadKey], Transfer]] = []
        self._jobs: dict[int, _Job] = {}
        self._parts: list[_Part] = []
        self._results: list[JobResult] = []
        self._broken = False
        self._faults = 0
        self._guard = Guard(self._break)
        self.counters = Counters()
        logger.info(
            "kvpool tier: namespace %s of tenant %s on %r, weights %s, %d bytes a chunk, budget %g s",
            self._namespace.hex[:8], self._config.tenant, self._store, str(self._facts["weights"])[:8] or "of model_id",
            self._row_nbytes, self._config.lookup_timeout_s,
        )  # fmt: skip

    # Existence.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._guard.run(lambda: self._lookup(key, req_context.req_id), LookupResult.MISS)

    def _lookup(self, key: OffloadKey, request_id: str) -> LookupResult:
        if self._broken:
            return LookupResult.MISS
        self._collect()
        now = time.monotonic()
        probe = self._probes.get(key)
        if probe is None:
            probe = self._probes[key] = _Probe(now)
            self._questions.append(key)
        probe.requests.add(request_id)
        self._asked_by.setdefault(request_id, set()).add(key)
        if probe.present is None and now - probe.asked_at > self._config.lookup_timeout_s + LOOKUP_GRACE_S:
            probe.present = False
            self.counters.add(metrics.LOOKUP_FAILURES, 1, "timeout")
        if probe.present is None:
            return LookupResult.RETRY
        return LookupResult.HIT if probe.present else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.counters.add(metrics.LOOKUP_REQUESTS)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._guard.run(lambda: self._forget(req_context.req_id), None)

    def _forget(self, request_id: str) -> None:
        for key in self._asked_by.pop(request_id, ()):
            probe = self._probes[key]
            probe.requests.discard(request_id)
            if not probe.requests:
                del self._probes[key]  # an answer that comes later is for nobody

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._guard.run(self._end_step, None)

    def _end_step(self) -> None:
        self._collect()
        questions = [key for key in dict.fromkeys(self._questions) if key in self._probes]
        self._questions.clear()
        if self._broken:
            return
        for first in range(0, len(questions), ASK_KEYS):
            self._ask(questions[first : first + ASK_KEYS])
        self._send_touches()

    def _ask(self, keys: list[OffloadKey]) -> None:
        """Ask whether the pool has these, which counts them as used."""
        spelled = [key for key in keys if _is_spellable(key)]
        if len(spelled) < len(keys):
            self._unanswered([key for key in keys if not _is_spellable(key)], "fault")
        if not spelled:
            return
        self.counters.add(metrics.LOOKUP_BLOCKS, len(spelled))
        try:
            transfer = self._store.submit_touch(self._names(spelled), timeout_s=self._config.lookup_timeout_s)
        except Exception as error:
            self._unanswered(spelled, self._cause(error))
        else:
            self._batches.append((spelled, transfer))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._guard.run(lambda: self._touch(keys), None)

    def _touch(self, keys: Collection[OffloadKey]) -> None:
        for key in keys:
            if len(self._touches) >= MAX_TOUCHES:
                return
            if _is_spellable(key) and key not in self._probes:  # who was asked for has been counted
                self._touches[key] = None

    def _send_touches(self) -> None:
        """Count as used what the engine has used. One batch at a time; nobody waits for the answer."""
        self._touching = [transfer for transfer in self._touching if not transfer.done()]
        if not self._touches or self._touching:
            return
        names = self._names(self._touches)
        self._touches.clear()
        try:
            self._touching.append(self._store.submit_touch(names, timeout_s=STORE_TIMEOUT_S))
        except Exception as error:
            self._cause(error)

    def _collect(self) -> None:
        """Take in the answers that are there."""
        for batch in [batch for batch in self._batches if batch[1].done()]:
            self._batches.remove(batch)
            keys, transfer = batch
            try:
                answers = transfer.wait()
            except Exception as error:
                self._unanswered(keys, self._cause(error))
                continue
            for key, present in zip(keys, answers, strict=True):
                probe = self._probes.get(key)
                if probe is not None and probe.present is None:
                    probe.present = present

    def _unanswered(self, keys: Iterable[OffloadKey], cause: str) -> None:
        self.counters.add(metrics.LOOKUP_FAILURES, 1, cause)
        self._miss(keys)

    def _cause(self, error: Exception) -> str:
        """What a batch failed by. A fault of ours is told in the log, the first time with its stack."""
        if isinstance(error, StoreUnavailable):
            return "store_unavailable"
        self._faults += 1
        if self._faults == 1:
            logger.error("kvpool failed inside the engine; what was asked for is a miss", exc_info=error)
        return "fault"

    def _miss(self, keys: Iterable[OffloadKey]) -> None:
        """These are not offered again to any request that has asked for them."""
        for key in keys:
            if (probe := self._probes.get(key)) is not None:
                probe.present = False

    # Jobs.

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=True)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=False)

    def _submit(self, wanted: TransferJob, *, is_load: bool) -> None:
        keys = list(wanted.keys)
        now = time.monotonic()
        limit_s = self._config.max_load_s if is_load else STORE_TIMEOUT_S
        rows = [int(row) for row in wanted.chunk_ids]
        places = list(range(len(keys)))[::-1]  # taken from the end
        self._jobs[wanted.job_id] = job = _Job(wanted.job_id, is_load, keys, rows, now, now + limit_s, places)
        if self._broken:
            self._fail(job, "store_unavailable")
        elif len(rows) != len(keys) or not all(map(_is_spellable, keys)) or not self._has_rows(rows):
            self._fail(job, "fault")
        self._guard.run(self._advance, None)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._guard.run(self._advance, None)
        results, self._results = self._results, []
        return results

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the engine's rows; each batch has a deadline, so it ends.

        vLLM calls this when it resets its caches and at no other time, which it does when weights are changed in place.
        """
        while self._jobs:
            if self._parts:
                self._parts[0].transfer.settle(DRAIN_STEP_S)
            self._guard.run(self._advance, None)
        if not self._config.weights_never_change:
            self._guard.run(self._begin_epoch, None)

    def _begin_epoch(self) -> None:
        """From now on in a namespace that no other engine knows: nobody can tell what the weights are."""
        first = "epoch" not in self._facts
        self._facts["epoch"] = secrets.token_hex(8)
        self._namespace = Namespace(self._config.tenant, self._facts)
        self._miss(self._probes)
        for batch in self._batches:
            batch[1].cancel()
        self._batches.clear()
        self._questions.clear()
        self._touches.clear()
        self._events.clear()  # of chunks that this engine finds no more
        (logger.warning if first else logger.info)(
            "kvpool: the caches were reset, perhaps for other weights: until this engine restarts its tier goes on in "
            "a namespace of its own, %s, and shares with no other one; where its weights never change in place, set "
            "weights_never_change to true",
            self._namespace.hex[:8],
        )

    def shutdown(self) -> None:
        """Cancel what is under way, and wait until nothing touches the engine's rows; no job is reported any more.

        Blocking, for as long as ``Store.close``. Errors: ``StoreUnavailable`` when a thread is stuck in the system:
        it may touch the rows for ever, so they are held on to, and so does vLLM.
        """
        self._store.close()
        for held in (self._jobs, self._parts, self._batches, self._touching):
            held.clear()
        self._rows.release()

    def _advance(self) -> None:
        now = time.monotonic()
        for part in [part for part in self._parts if part.transfer.done()]:
            self._parts.remove(part)
            part.job.parts -= 1
            self._end_part(part)
        for job in self._jobs.values():
            if now > job.deadline:
                self._fail(job, "too_slow")
        # Loads first: somebody waits for them.
        for job in sorted(self._jobs.values(), key=lambda job: not job.is_load):
            while job.pending and not job.cause and len(self._parts) < MAX_PARTS:
                places = [job.pending.pop() for _ in range(min(self._part_chunks, len(job.pending)))]
                self._start(job, places, asking=not job.is_load)
        for job in [job for job in self._jobs.values() if not job.parts and (job.cause or not job.pending)]:
            del self._jobs[job.job_id]
            self._end_job(job, now)

    def _start(self, job: _Job, places: list[int], *, asking: bool) -> None:
        try:
            names = self._names([job.keys[place] for place in places])
            rows = [self._row(job.rows[place]) for place in places]
            if job.is_load:
                transfer = self._store.submit_get(names, rows, timeout_s=self._config.lookup_timeout_s)
            elif asking:
                transfer = self._store.submit_touch(names, timeout_s=STORE_TIMEOUT_S)
            else:
                transfer = self._store.submit_put(names, rows, timeout_s=STORE_TIMEOUT_S)
        except Exception as error:
            self._fail(job, self._cause(error))
            return
        job.parts += 1
        self._parts.append(_Part(job, places, transfer, asking))

    def _end_part(self, part: _Part) -> None:
        job = part.job
        try:
            answers = part.transfer.wait()
        except Exception as error:
            self._fail(job, self._cause(error))
            return
        done = {place for place, ok in zip(part.places, answers, strict=True) if ok}
        rest = [place for place in part.places if place not in done]
        job.moved |= done
        if job.is_load:
            job.missing.update(rest)
        elif part.asking:
            self.counters.add(metrics.STORE_SKIPPED_BLOCKS, len(done), "already_there")
            if rest and not job.cause:
                self._start(job, rest, asking=False)
        else:
            self._count_stored(len(done))
            if rest:
                self._fail(job, "pool_full")

    def _end_job(self, job: _Job, now: float) -> None:
        if job.missing:
            job.cause = job.cause or "missing"
        failed = [key for place, key in enumerate(job.keys) if place not in job.moved]
        moved = [key for place, key in enumerate(job.keys) if place in job.moved]
        # Before anything that could fail: the rows of a job that is not reported are pinned for ever.
        self._results.append(
            JobResult(
                job_id=job.job_id,
                success=not failed,
                successful_keys=moved if failed and moved and job.is_load else None,
                transfer_time=now - job.started,
                transfer_bytes=len(moved) * self._row_nbytes,
            )
        )
        if job.is_load:
            self.counters.add(metrics.LOAD_REQUESTS, 1, job.cause or "ok")
            self.counters.add(metrics.LOADED_BLOCKS, len(moved))
            self.counters.add(metrics.LOADED_BYTES, len(moved) * self._row_nbytes)
            self.counters.add(metrics.LOAD_SECONDS, now - job.started)
            self._miss(failed)
            self._tell([job.keys[place] for place in sorted(job.missing)], removed=True)
        else:
            if failed:
                self.counters.add(metrics.STORE_SKIPPED_BLOCKS, len(failed), job.cause)
            self._tell(moved, removed=False)

    def _fail(self, job: _Job, cause: str) -> None:
        if not job.cause:
            job.cause = cause
            for part in self._parts:
                if part.job is job:
                    part.transfer.cancel()

    def _count_stored(self, chunks: int) -> None:
        self.counters.add(metrics.STORED_BLOCKS, chunks)
        self.counters.add(metrics.STORED_BYTES, chunks * self._row_nbytes)

    def _row(self, row: int) -> memoryview:
        return self._rows[row * self._row_nbytes : (row + 1) * self._row_nbytes]

    def _has_rows(self, rows: list[int]) -> bool:
        return all(0 <= row < self._rows_count for row in rows)

    def _names(self, keys: Collection[OffloadKey]) -> list[str]:
        of_group: dict[int, Iterator[str]] = {}
        groups = list(map(get_offload_group_idx, keys))
        for group in set(groups):
            hashes = [
                get_offload_block_hash(key) for key, of in zip(keys, groups, strict=True) if of == group
            ]
            of_group[group] = iter(self._namespace.keys(hashes, group, 0))
        return [next(of_group[group]) for group in groups]

    def _break(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            logger.error("kvpool: the tier is switched off: %s", reason)
        for job in self._jobs.values():
            self._fail(job, "store_unavailable")

    # What others see.

    def _tell(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if keys and self._events_wanted:
            self._events.append(
                OffloadingEvent(
                    keys=keys,
                    medium=self.medium,
                    removed=removed,
                    locality=self.locality,
                    ownership=EVENT_OWNER,
                )
            )

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            metric.name: OffloadingCounterMetadata(
                documentation=metric.help, labelnames=(metric.label,) if metric.label else ()
            )
            for metric in metrics.ALL
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._guard.run(self._statistics, None)

    def _statistics(self) -> OffloadingConnectorStats | None:
        self.counters.add_growth(metrics.REFUSED_KEYS, self._store.counters().get("refused", 0))
        samples = self.counters.take()
        if not samples:
            return None
        stats = OffloadingConnectorStats()
        for sample, amount in samples.items():
            name, _, label = sample.partition("/")
            stats.increase_counter(name, amount, (label,) if label else ())
        return stats


def _is_spellable(key: OffloadKey) -> bool:
    """Whether a chunk has a name in the pool: all have whose hash is one of vLLM's block hashes."""
    return (
        MIN_HASH_NBYTES <= len(get_offload_block_hash(key)) <= MAX_HASH_NBYTES
        and get_offload_group_idx(key) <= MAX_INDEX
    )


def _row_nbytes(view: memoryview, config: Any) -> int:
    """Bytes of a row of the primary tier: a chunk of every rank, and what fills up the last page.

    Errors: ``EngineRefused`` for memory that is not whole rows, or that cannot hold what vLLM says of a chunk.
    """
    if view.ndim != 2 or not view.c_contiguous or view.readonly or not view.nbytes:
        raise EngineRefused(
            f"the primary tier hands over memory of shape {view.shape} and strides {view.strides}, which is not rows "
            "of chunks that can be written: use vLLM's own TieringOffloadingSpec, and cpu_bytes_to_use for some chunks"
        )
    row_nbytes = view.nbytes // len(view)
    copies = 1 if config.replicated_layout else config.parallel.world_size
    chunk_nbytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk * copies
    if row_nbytes < chunk_nbytes:
        raise EngineRefused(
            f"a row of the primary tier has {row_nbytes} bytes, and a chunk {chunk_nbytes}: use vLLM's own "
            "TieringOffloadingSpec"
        )
    return row_nbytes
