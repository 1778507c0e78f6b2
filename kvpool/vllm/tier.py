"""KVPoolTier: the pool as a secondary tier of vLLM's ``TieringOffloadingSpec``.

Interface: ``vllm/v1/kv_offload/tiering/base.py`` (``SecondaryTierManager``). The engine's worker copies
chunks between the device and rows of shared memory; the tier moves whole rows between that memory and the
pool without a copy. A row holds a chunk of every rank, so a chunk is one record, of rank 0.

``lookup`` collects questions (``load/chunks.py``); the engine's job loads a present chunk through a
``BlockMover``. A missing or damaged chunk is a miss for every request that asked for it. A job is reported,
and its rows returned to the engine, when nothing touches them any more.

A fault of a key, batch or job (such as an exception of the store) fails it alone, with the cause ``fault``.
Any other exception is a bookkeeping fault, and disables the tier.

Threads: the engine's scheduler thread only. Bytes move in the store's own threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
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
from kvpool.clock import REAL, Clock
from kvpool.config import TierConfig
from kvpool.discovery.facts import announce_facts
from kvpool.discovery.quota_watch import QuotaWatch
from kvpool.errors import ConfigError, EngineRefused, StoreUnavailable
from kvpool.key.checkpoint import served_digest
from kvpool.key.key import Fact, Namespace, writer_name
from kvpool.metrics import Counters
from kvpool.store import StoreURL, open_store
from kvpool.transfer import BlockMover, HostMemory, Moved, Need, Record
from kvpool.transfer.mover import PART_NBYTES, STORE_TIMEOUT_S
from kvpool.vllm.engine.guard import guarded, refuse
from kvpool.vllm.engine.identity import tier_facts
from kvpool.vllm.engine.internals import cache_hit_source, engine_under_construction, job_result
from kvpool.vllm.engine.weights import PATTERNS
from kvpool.vllm.load.chunks import ChunkLookups, is_spellable
from kvpool.vllm.tell.events import EVENT_OWNER
from kvpool.vllm.tell.metrics import tier_definitions, tier_stats

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = init_logger("vllm.kvpool")

DRAIN_STEP_S = 1.0


@dataclass(slots=True)
class _Job:
    is_load: bool
    keys: list[OffloadKey]


class KVPoolTier(SecondaryTierManager):
    """Keeps chunks in a shared pool, under its own namespace.

    Settings: ``kvpool.config.TierConfig``, in this tier's entry of ``secondary_tiers``; ``locality`` and
    ``backpressure`` are vLLM's. A wrong pool or setting refuses the start in one sentence. Afterwards faults
    of kvpool never reach the engine: the tier answers "miss" and fails its jobs.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    clock: ClassVar[Clock] = REAL

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
            self._row_nbytes = _row_nbytes(primary_kv_view, offloading_spec.config)
            engine, cache = engine_under_construction()
            patterns = PATTERNS.get(str(engine.load_config.load_format))
            self._facts: dict[str, Fact] = {
                **tier_facts(offloading_spec.config, engine, cache, self._config.model_id, self._row_nbytes),
                "weights": served_digest(
                    offloading_spec.config.model.name, self._config.model_path, patterns
                ),
            }
            self._namespace = Namespace(self._config.tenant, self._facts)
            self._store = open_store(
                self._config.pool,
                threads=self._config.threads,
                must_answer=not self._config.start_without_pool,
            )
            self._store.writer = writer_name(secrets.token_hex(16))
        except (ConfigError, StoreUnavailable) as error:
            refuse(error)
        try:
            for sentence in announce_facts(self._store, self._namespace, self._config.model_id):
                logger.warning("kvpool: %s", sentence)
        except StoreUnavailable as error:
            logger.warning(
                "kvpool: the facts of this tier are not in the pool, so doctor cannot show them: %s", error
            )
        # vLLM would derive a disk from ``medium``, whatever the pool is.
        self.cache_hit_source = cache_hit_source(StoreURL.parse(self._config.pool))  # type: ignore[misc]
        self._rows = primary_kv_view.cast("B")
        self._rows_count = len(primary_kv_view)
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []
        self._broken = False
        self._faults = 0
        self.counters = Counters()
        self._quota = QuotaWatch(self._store, self._config.tenant, self.counters, logger)
        self._quota.start()
        self._mover = BlockMover(
            self._store, HostMemory(max(1, PART_NBYTES // self._row_nbytes)), self.counters, self.clock
        )
        self._lookups = ChunkLookups(
            self._store,
            lambda keys: self._names(keys),
            timeout_s=self._config.lookup_timeout_s,
            counters=self.counters,
            cause=self._cause,
            clock=self.clock.monotonic,
        )
        logger.info(
            "kvpool tier: namespace %s of tenant %s on %r, weights %s, %d bytes a chunk, lookup timeout %g s",
            self._namespace.hex[:8], self._config.tenant, self._store, str(self._facts["weights"])[:8] or "of model_id",
            self._row_nbytes, self._config.lookup_timeout_s,
        )  # fmt: skip

    # Existence.

    @guarded(LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._broken:
            return LookupResult.MISS
        present = self._lookups.lookup(key, req_context.req_id)
        if present is None:
            return LookupResult.RETRY
        return LookupResult.HIT if present else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.counters.add(metrics.LOOKUP_REQUESTS)
        return RequestOffloadingContext()

    @guarded(None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    @guarded(None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.collect()
        if self._broken:
            self._lookups.drop_questions()
        else:
            self._lookups.send()

    @guarded(None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._lookups.touch(keys)

    def _cause(self, error: Exception) -> str:
        """The label of a failed batch. Faults of kvpool are logged, the first with its stack."""
        if isinstance(error, StoreUnavailable):
            return "store_unavailable"
        self._faults += 1
        if self._faults == 1:
            logger.error("kvpool failed inside the engine; what was asked for is a miss", exc_info=error)
        return "fault"

    # Jobs.

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=True)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=False)

    def _submit(self, wanted: TransferJob, *, is_load: bool) -> None:
        self._jobs[wanted.job_id] = job = _Job(is_load, list(wanted.keys))
        self._start(wanted, job)
        self._advance()

    @guarded(None)
    def _start(self, wanted: TransferJob, job: _Job) -> None:
        """Hand a job to the mover; ``_advance`` reports an invalid one as failed."""
        rows = [int(row) for row in wanted.chunk_ids]
        if self._broken:
            self._refuse(wanted.job_id, "store_unavailable")
        elif len(rows) != len(job.keys) or not all(map(is_spellable, job.keys)) or not self._has_rows(rows):
            self._refuse(wanted.job_id, "fault")
        elif not job.is_load and self._quota.is_over():
            self._refuse(wanted.job_id, "quota")
        else:
            try:
                names = self._names(job.keys)
                records = [Record(name, self._row(row)) for name, row in zip(names, rows, strict=True)]
            except Exception as error:
                self._refuse(wanted.job_id, self._cause(error))
                return
            if job.is_load:
                self._mover.load(
                    wanted.job_id,
                    records,
                    timeout_s=self._config.lookup_timeout_s,
                    max_s=self._config.max_load_s,
                    need=Need.EACH,
                )
            else:
                self._mover.store(wanted.job_id, records, max_s=STORE_TIMEOUT_S)

    def _refuse(self, job_id: int, cause: str) -> None:
        """End a job that the mover does not have."""
        job = self._jobs[job_id]
        if job.is_load:
            self.counters.add(metrics.LOAD_REQUESTS, 1, cause)
        else:
            self.counters.add(metrics.STORE_SKIPPED_BLOCKS, len(job.keys), cause)
        self._end_job(Moved(job_id, cause, [False] * len(job.keys), [], 0, 0, 0.0, None))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._advance()
        results, self._results = self._results, []
        return results

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the engine's rows, within the batches' deadlines. Only for cache resets."""
        while self._jobs:
            self._drain()
            self._advance()
        if not self._config.weights_never_change:
            self._begin_epoch()

    @guarded(None)
    def _drain(self) -> None:
        self._mover.drain(DRAIN_STEP_S)

    @guarded(None)
    def _begin_epoch(self) -> None:
        """Continue in a private namespace, because the weights may have changed."""
        self._events.clear()  # of unreachable chunks; first, before anything that could fail
        first = "epoch" not in self._facts
        self._facts["epoch"] = secrets.token_hex(8)
        self._namespace = Namespace(self._config.tenant, self._facts)
        self._lookups.restart()
        (logger.warning if first else logger.info)(
            "kvpool: the caches were reset, perhaps for other weights: until this engine restarts its tier goes on in "
            "a namespace of its own, %s, and shares with no other one; where its weights never change in place, set "
            "weights_never_change to true",
            self._namespace.hex[:8],
        )

    def shutdown(self) -> None:
        """Cancel pending jobs without a report, and wait until nothing touches the engine's rows.

        Blocks as ``Store.close``. Errors: ``StoreUnavailable`` when a thread is stuck in the system: it may
        touch the rows for ever, so kvpool and vLLM keep them.
        """
        self._quota.close()
        self._store.close()
        self._jobs.clear()
        self._lookups.clear()
        self._mover.close()  # nothing is in flight any more
        self._rows.release()

    @guarded(None)
    def _advance(self) -> None:
        if self._broken:
            for job_id in self._jobs:
                self._mover.cancel(job_id, "store_unavailable")
        loads, _, stores = self._mover.poll()
        for moved in [*loads, *stores]:
            self._end_job(moved)
        if self._broken:
            for job_id in [job_id for job_id in self._jobs if not self._mover.moves(job_id)]:
                self._refuse(job_id, "store_unavailable")

    def _end_job(self, moved: Moved) -> None:
        job_id = cast(int, moved.job)
        job = self._jobs.pop(job_id)
        came = [key for key, ok in zip(job.keys, moved.moved, strict=True) if ok]
        failed = [key for key, ok in zip(job.keys, moved.moved, strict=True) if not ok]
        # First, before anything that could fail: an unreported job pins its rows for ever.
        self._results.append(
            job_result(
                job_id=job_id,
                success=not failed,
                successful_keys=came if failed and came and job.is_load else None,
                transfer_time=moved.seconds,
                transfer_bytes=len(came) * self._row_nbytes,
            )
        )
        if moved.error is not None:
            self._cause(moved.error)
        if job.is_load:
            self._lookups.miss(failed)
            self._tell([job.keys[place] for place in moved.missing], removed=True)
        else:
            self._tell(came, removed=False)

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

    def switch_off(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            logger.error("kvpool: the tier is switched off: %s", reason)

    # Figures and events for vLLM.

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
        return tier_definitions()

    @guarded(None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        self._store.count_health(self.counters)
        self.counters.set(metrics.ENABLED, float(not self._broken))
        samples = self.counters.take()
        return tier_stats(samples) if samples else None


def _row_nbytes(view: memoryview, config: Any) -> int:
    """Bytes of a row of the primary tier: a chunk of every rank, and the padding of its last page.

    Errors: ``EngineRefused`` for memory of partial rows, or too small for vLLM's chunk.
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
