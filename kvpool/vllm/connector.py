"""KVPoolConnector: vLLM's connector interface, delegated to a scheduler half and a worker half.

Interface: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` (``KVConnectorBase_V1``, ``SupportsHMA``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

from kvpool.clock import REAL, Clock
from kvpool.config import PoolConfig
from kvpool.errors import ConfigError, EngineRefused, StoreUnavailable
from kvpool.key.key import writer_name
from kvpool.store import StoreURL, open_store
from kvpool.vllm.engine import internals, support
from kvpool.vllm.engine.adapter_loads import AdapterLoads, digest_adapter
from kvpool.vllm.engine.guard import refuse
from kvpool.vllm.engine.identity import adapter_settings, elements_of, engine_facts
from kvpool.vllm.engine.measure import WeightsMeasure
from kvpool.vllm.engine.parts import shared_groups
from kvpool.vllm.engine.weights import model_name, weights_of
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.scheduler import Roles, SchedulerHalf
from kvpool.vllm.tell.announcement import describe
from kvpool.vllm.tell.metrics import PoolPromMetrics, PoolStats
from kvpool.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool")

_NEVER_OPENED = PoolConfig.load({"pool": "file:///unused"}, {})  # stands in for a refused rank's settings


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads KV blocks to a shared pool and loads other engines' blocks.

    Settings: ``kv_connector_extra_config`` holds the fields of ``kvpool.config.PoolConfig``. An unsupported
    engine configuration refuses the start in one sentence.
    """

    clock: ClassVar[Clock] = REAL  # of both halves

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._store = None
        self._config: PoolConfig | None = None
        self._adapters: AdapterLoads | None = None
        stage_ranks = vllm_config.parallel_config.tensor_parallel_size
        try:
            config = PoolConfig.load(self._kv_transfer_config.kv_connector_extra_config)
            support.refuse_unsupported(vllm_config)
            self._geometry = support.geometry_of(vllm_config, kv_cache_config, config.blocks_per_record)
            if role is KVConnectorRole.SCHEDULER:
                # Each worker computes its own; this call can refuse the start.
                logger.info("kvpool: weights %s", weights_of(vllm_config, config).source)
                events = vllm_config.kv_events_config
                self._store = open_store(config.pool, threads=1, must_answer=not config.start_without_pool)
                # Read by ``get_external_cache_hit_sources`` of the base.
                self._cache_hit_source = internals.cache_hit_source(StoreURL.parse(config.pool))
                self._scheduler = SchedulerHalf(
                    config,
                    self._store,
                    self._geometry,
                    roles=Roles(
                        loads=self._kv_transfer_config.is_kv_consumer,
                        stores=self._kv_transfer_config.is_kv_producer,
                        events=bool(events and events.enable_kv_cache_events),
                    ),
                    adapter_settings=adapter_settings(vllm_config),
                    writer=writer_name(f"{self._kv_transfer_config.engine_id} {vllm_config.instance_id}"),
                    is_asleep=internals.watch_engine_calls(self._called, self._named),
                    encoded=internals.encoder_outputs(),
                    clock=self.clock,
                )
                self._scheduler.start()
            else:
                self._config = config
                rank = internals.engine_rank(stage_ranks)
                self._adapters = None if vllm_config.lora_config is None else AdapterLoads(rank)
                self._worker = WorkerHalf(
                    config,
                    self._geometry,
                    rank=rank,
                    model=model_name(vllm_config.model_config, config.model_id),
                    adapters=self._adapters,
                    clock=self.clock,
                )
        except (ConfigError, StoreUnavailable) as error:
            if role is KVConnectorRole.SCHEDULER:
                refuse(error)
            # Workers come first but cannot end an engine in one line: the scheduler refuses for both. A fault
            # of this rank's host alone leaves the engine without the pool.
            self._worker = WorkerHalf(_NEVER_OPENED, Geometry(()), rank=internals.engine_rank(stage_ranks))
            self._worker.switch_off(str(error))

    @property
    def requires_kv_delivery(self) -> bool:
        """A pool is a cache: a dropped store is a later miss."""
        return False

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None or self._config is None:
            return
        cache = self._kv_cache_config
        try:
            layers = internals.layers_of(cache, kv_caches)
            weights = weights_of(self._vllm_config, self._config, internals.began_ns())
            shared = self._shared(layers)
            facts = engine_facts(
                self._vllm_config, cache, weights.facts, layers, self._config.blocks_per_record, shared
            )
        except (ConfigError, StoreUnavailable) as error:
            self._worker.switch_off(str(error))
            return
        if self._adapters is not None:
            self._adapters.held = internals.HeldAdapters.under_construction(digest_adapter)
        self._worker.register(
            layers,
            facts,
            functools.partial(describe, self._vllm_config, cache, self._config),
            self._measure(),
            shared,
            internals.layer_names(cache, kv_caches),
            elements_of(self._vllm_config, cache, layers),
        )

    def _measure(self) -> WeightsMeasure | str:
        """Of this worker's weights; a text: why they cannot be measured."""
        if why := support.why_not_measured(self._vllm_config):
            return why
        try:
            return WeightsMeasure(internals.model_tensors())
        except EngineRefused as error:
            return str(error)

    def _called(self, method: str) -> None:
        if self._scheduler is not None:
            self._scheduler.called(method)

    def _named(self, weight_version: str) -> None:
        if self._scheduler is not None:
            self._scheduler.named(weight_version)

    def _shared(self, layers: Sequence[Sequence[torch.Tensor]]) -> Sequence[Group] | None:
        """The groups as engines of other tensor-parallel sizes share them; None: only those of this size do."""
        assert self._config is not None
        if (wanted := self._config.share_across_tp) is None:
            return None
        try:
            return shared_groups(
                self._vllm_config, self._kv_cache_config, self._geometry.groups, layers, wanted
            )
        except EngineRefused as error:
            logger.warning("kvpool: share_across_tp is off: %s", error)
            return None

    def unregister_kv_caches(self) -> None:
        """Before a sleep, or a discarded cache (vLLM 0.33): what is unmapped now comes back under its addresses."""
        if self._worker is not None:
            self._worker.let_go()

    def restore_kv_caches(self) -> None:
        """After waking up."""
        if self._worker is not None:
            self._worker.take_back()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request is scheduled after its load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """``wait_for_save`` stores blocks whole, over all layers."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_audits(self._step())
            self._worker.start_stores(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        idle = self.has_connector_metadata() and self._step().idle
        if idle:  # some versions of vLLM save nothing in idle steps
            self._worker.start_audits(self._step())
            self._worker.start_stores(self._step())
        ended, failed = self._worker.poll(idle)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report() if self._worker is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self._worker or self._scheduler
        samples = half.stats() if half is not None else {}
        return PoolStats(samples) if samples else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._store is not None:
            self._store.close()

    # Scheduler side.

    def on_new_request(self, request: Request) -> None:
        self._planner().seen(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._planner().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._planner().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._planner().plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, PoolWorkerMetadata)
        self._planner().update(
            report, connector_output.finished_recving or (), connector_output.failed_recving or ()
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Reference counts, not the request, hold blocks while they are copied to staging.
        self._planner().finished(request)
        return False, None

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._planner().bind_block_pool(gpu_block_pool)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._planner().take_events()

    def has_pending_block_frees(self) -> bool:
        return self._planner().frees_blocks()

    def has_pending_push_work(self) -> bool:
        return self._planner().wants_steps()

    def reset_cache(self) -> None:
        """Forget the pool's state, and measure the weights before any of them is used again.

        The shared pool stays. Returns as a connector without anything to reset, because a False makes vLLM
        fail a call to sleep or pause.
        """
        self._planner().reset()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return PoolStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _step(self) -> PoolMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, PoolMetadata)
        return step

    def _planner(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called on a worker"
        return self._scheduler
