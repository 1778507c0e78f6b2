"""KVPoolECConnector: vLLM's interface for outputs of encoders, delegated to a scheduler half and a worker half.

Interface: ``vllm/distributed/ec_transfer/ec_connector/base.py`` (``ECConnectorBase``).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.distributed.ec_transfer import get_ec_transfer
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvpool.clock import REAL, Clock
from kvpool.config import EncoderConfig
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import Namespace, writer_name
from kvpool.store import open_store
from kvpool.vllm.encoder.identity import encoder_facts, refuse_unsupported
from kvpool.vllm.encoder.plan import EncoderMetadata, EncoderWorkerMetadata
from kvpool.vllm.encoder.scheduler import EncoderScheduler, Engine
from kvpool.vllm.encoder.stats import EncoderPromMetrics, EncoderStats, PoolOfEncoders
from kvpool.vllm.encoder.worker import EncoderWorker
from kvpool.vllm.engine import internals, support
from kvpool.vllm.engine.guard import refuse
from kvpool.vllm.engine.weights import model_name, weights_of
from kvpool.vllm.plan import Measured
from kvpool.vllm.tell.media import say

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvpool")

_NEVER_OPENED = EncoderConfig.load({"pool": "file:///unused"}, {})  # stands in for a refused rank's settings


class KVPoolECConnector(ECConnectorBase):
    """Keeps outputs of encoders in a shared pool and loads those of other engines.

    Settings: ``ec_connector_extra_config`` holds the fields of ``kvpool.config.EncoderConfig``. An unsupported
    engine configuration refuses the start in one sentence.
    """

    clock: ClassVar[Clock] = REAL

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._scheduler: EncoderScheduler | None = None
        self._worker: EncoderWorker | None = None
        self._store = None
        transfer = vllm_config.ec_transfer_config
        stage_ranks = vllm_config.parallel_config.tensor_parallel_size
        assert transfer is not None, "or this connector was not made"
        self._device = torch.device(current_platform.device_type)
        try:
            config = EncoderConfig.load(transfer.ec_connector_extra_config)
            refuse_unsupported(vllm_config)
            if role is ECConnectorRole.WORKER:
                is_first = internals.engine_rank(stage_ranks) == 0
                self._worker = EncoderWorker(
                    config,
                    stores=is_first,
                    model=model_name(vllm_config.model_config, config.model_id),
                    tell=functools.partial(say, vllm_config.instance_id),
                    alone=_is_alone(vllm_config),
                )
                return
            weights = weights_of(vllm_config, config, internals.began_ns())
            logger.info("kvpool: encoder: weights %s", weights.source)
            must_answer = not config.start_without_pool
            self._store = open_store(config.pool, threads=config.threads or 1, must_answer=must_answer)
            engine = getattr(vllm_config.kv_transfer_config, "engine_id", None) or transfer.engine_id
            is_asleep = internals.watch_engine_calls(self._called, lambda _: None)
            run = internals.on_workers()
            self._scheduler = EncoderScheduler(
                config,
                self._store,
                encoder_facts(vllm_config, weights.facts),
                Engine(
                    lambda: run(_measured),
                    is_asleep,
                    internals.encoder_outputs(),
                    internals.output_evictor(),
                    internals.output_holder(),
                    internals.size_fields(vllm_config) if self.is_consumer else lambda _: (),
                ),
                stores=self.is_producer,
                needs_bytes=self.is_consumer,
                widths=internals.output_widths(vllm_config),
                width=vllm_config.model_config.get_inputs_embeds_size(),
                dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
                writer=writer_name(f"{engine} {vllm_config.instance_id}"),
                alone=_is_alone(vllm_config),
                clock=self.clock,
            )
            internals.watch_arrivals(self._scheduler.seen, self._scheduler.reset)
            run(functools.partial(_heard, self._scheduler.spaces()))  # steps come with requests
            self._scheduler.start()
        except (ConfigError, StoreUnavailable) as error:
            if role is ECConnectorRole.SCHEDULER:
                refuse(error)
            # Workers come first but cannot end an engine in one line: the scheduler refuses for both.
            self._worker = EncoderWorker(_NEVER_OPENED, stores=False)
            self._worker.switch_off(str(error))

    def measured(self, worker: Any) -> Measured:
        """What this worker's encoder holds."""
        if self._worker is None:
            return Measured(why="it is no worker")
        return self._worker.measure(worker, support.why_not_measured(self._vllm_config))

    def heard(self, spaces: tuple[Namespace, ...]) -> None:
        if self._worker is not None:
            self._worker.hear(spaces)

    def _called(self, method: str) -> None:
        if self._scheduler is not None:
            self._scheduler.called(method)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._store is not None:
            self._store.close()

    # Worker side.

    def start_save_caches(self, **kwargs: Any) -> None:
        if not self.is_consumer and self._worker is not None:
            self._worker.load(self._step(), kwargs.get("encoder_cache", {}), self._device)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step(), encoder_cache, self._device)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.save(self._step(), encoder_cache, mm_hash)

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        return self._worker.take_report() if self._worker is not None else None

    # Scheduler side.

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._planner().is_ready(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._planner().has(identifier)

    def take_unavailable_requests(self) -> set[str]:
        return self._planner().unavailable()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._planner().allocated(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        return self._planner().plan(scheduler_output)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        report = connector_output.ec_connector_worker_meta
        assert report is None or isinstance(report, EncoderWorkerMetadata)
        if report is not None:
            self._planner().update(report)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._planner().finished(request)
        return False, None

    def get_ec_connector_stats(self) -> Any:
        samples = self._scheduler.stats() if self._scheduler is not None else {}
        return EncoderStats(samples) if samples else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return EncoderStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        shown = PoolOfEncoders if _is_alone(vllm_config) else EncoderPromMetrics
        return shown(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _step(self) -> EncoderMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, EncoderMetadata)
        return step

    def _planner(self) -> EncoderScheduler:
        assert self._scheduler is not None, "called on a worker"
        return self._scheduler


def _is_alone(config: VllmConfig) -> bool:
    """Whether no other connector may tell how the pool is."""
    return config.kv_transfer_config is None


def _measured(worker: Any) -> Measured:
    """Runs on each worker."""
    connector = get_ec_transfer()
    if not isinstance(connector, KVPoolECConnector):
        return Measured(why="another connector has its encoder")
    return connector.measured(worker)


def _heard(spaces: tuple[Namespace, ...], _: Any) -> None:
    """Runs on each worker."""
    connector = get_ec_transfer()
    if isinstance(connector, KVPoolECConnector):
        connector.heard(spaces)
