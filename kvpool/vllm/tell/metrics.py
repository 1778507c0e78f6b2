"""kvpool's metrics in vLLM: the connector's statistics on vLLM's page and log, and requests' outcomes.

A request is admitted when the engine allocates its blocks. A loading request counts when its load ends, as a
hit only on success. A resumed request (after a preemption) is not counted again.

Threads: of ``Outcomes``, the engine's scheduler thread only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.request import Request

from kvpool import _native, metrics
from kvpool.discovery.sample import SampledRequest
from kvpool.discovery.traffic import Seen
from kvpool.discovery.traffic_slots import Traffic
from kvpool.key.key import Namespace
from kvpool.metrics import Counters, Metric, Samples
from kvpool.tracing import Tracing
from kvpool.vllm.load.state import RequestState, Wait


class SampleStats:
    """One interval's samples of ``kvpool.metrics``, of all ranks, as vLLM's connectors hand them on."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> Self:
        metrics.add_samples(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values of vLLM's periodic log line; histograms as means."""
        shown: dict[str, int | float] = {}
        for key, sample in sorted(self.data.items()):
            name = key.removeprefix("kvpool_").replace("_total", "")
            if isinstance(sample, list):
                shown[f"{name}_mean"] = round(sum(sample) / len(sample), 4)
            else:
                shown[name] = round(sample, 4)
        return shown

    def is_empty(self) -> bool:
        return not self.data


@dataclass
class PoolStats(SampleStats, KVConnectorStats):
    """Of ``KVPoolConnector``."""


class ShownMetrics:
    """``METRICS`` on vLLM's page, beside vLLM's own base of a connector's metrics."""

    METRICS: ClassVar[Sequence[Metric]]
    per_engine_labelvalues: dict[int, list[object]]
    _labelnames: list[str]
    _counter_cls: Any
    _gauge_cls: Any
    _histogram_cls: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shown = {metric.name: self._registered(metric) for metric in self.METRICS}
        for metric in self.METRICS:
            first = metric.values or (("",) if metric.is_counter and not metric.label else ())
            for engine in self.per_engine_labelvalues:
                for value in first:
                    self._of_engine(engine, metric, value)

    def _registered(self, metric: Metric) -> Any:
        labels = [*self._labelnames, *([metric.label] if metric.label else [])]
        about: dict[str, Any] = {"name": metric.name, "documentation": metric.help, "labelnames": labels}
        kind: Any = self._counter_cls
        if metric.is_gauge:
            kind, about["multiprocess_mode"] = self._gauge_cls, "mostrecent"
        elif metric.buckets:
            kind, about["buckets"] = self._histogram_cls, list(metric.buckets)
        return kind(**about)

    def _of_engine(self, engine: int, metric: Metric, label: str) -> Any:
        labels: Sequence[object] = [*self.per_engine_labelvalues[engine], *([label] if label else [])]
        return self._shown[metric.name].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's samples of one engine. Those of metrics that others show are left out."""
        own = {
            key: sample for key, sample in transfer_stats_data.items() if key.partition("/")[0] in self._shown
        }
        metrics.export(own, functools.partial(self._of_engine, engine_idx))


class PoolPromMetrics(ShownMetrics, KVConnectorPromMetrics):
    METRICS = metrics.ALL


def tier_definitions() -> dict[str, OffloadingMetricMetadata]:
    return {metric.name: _definition(metric) for metric in metrics.ALL}


def tier_stats(samples: Samples) -> OffloadingConnectorStats:
    """One interval's ``samples`` in vLLM's form for a tier."""
    stats = OffloadingConnectorStats()
    for key, sample in samples.items():
        name, _, label = key.partition("/")
        labels = (label,) if label else ()
        if isinstance(sample, list):
            for value in sample:
                stats.observe_histogram(name, value, labels)
        elif metrics.BY_NAME[name].is_counter:
            stats.increase_counter(name, sample, labels)
        else:
            stats.set_gauge(name, sample, labels)
    return stats


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    labels = (metric.label,) if metric.label else ()
    if metric.is_counter:
        return OffloadingCounterMetadata(documentation=metric.help, labelnames=labels)
    if metric.is_gauge:
        return OffloadingGaugeMetadata(documentation=metric.help, labelnames=labels)
    return OffloadingHistogramMetadata(documentation=metric.help, labelnames=labels, buckets=metric.buckets)


# Of ``metrics.MISS_REASONS``, by the result that decides.
_REASONS = {"too_slow": "gate", "no_room": "no_room", "switched_off": "switched_off"}
RATIOS_S = 0.1  # between two estimates of a busy engine
AGED_S = 10.0  # between two estimates of an idle engine: old requests leave the windows


class Outcomes:
    """Counts in ``counters``. ``record_tokens``: of the blocks behind the given hashes.

    ``tell``: receives all windows of the traffic, and requests that were sampled since, ten times a second at most.
    ``clock``: in seconds.
    ``tracing``: takes spans of prompts, lookups and loads.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        record_tokens: int,
        tell: Callable[[dict[str, Seen], Sequence[SampledRequest]], None],
        clock: Callable[[], float],
        tracing: Tracing,
    ) -> None:
        self._counters, self._record_tokens = counters, record_tokens
        self._tell, self._clock = tell, clock
        self._traffic = Traffic(clock)
        self._tracing = tracing
        self._told_at_s = self._counted_at_s = clock() - RATIOS_S
        self._counted_more = False  # since the last estimate

    def begins(self, state: RequestState, local_tokens: int) -> None:
        """The engine asks for a request of which its own cache has so many tokens."""
        state.outcome.local_tokens = local_tokens

    def waited(self, state: RequestState, wait: Wait) -> None:
        """A request's lookup ended or was given up; observed once per lookup."""
        if wait.seconds is not None:
            headers = getattr(state.asked.request, "trace_headers", None)
            self._tracing.record("kvpool.lookup", headers, wait.seconds, answered=wait.answered)
        if state.outcome.waits != state.found.lookups:
            state.outcome.waits = state.found.lookups
            result = "answered" if wait.answered else "failed"
            self._counters.observe(metrics.LOOKUP_WAIT_SECONDS, wait.seconds or 0.0, result)

    def admitted(
        self,
        state: RequestState,
        hashes: Sequence[bytes],
        namespace: Namespace | None,
        *,
        usable_tokens: int,
        loads: bool,
    ) -> None:
        """The engine allocated blocks. ``hashes``: of the prompt's full blocks; ``loads``: a load begins."""
        if state.outcome.counted:
            return
        state.outcome.counted, state.outcome.usable_tokens = True, usable_tokens
        if namespace is not None:
            self._traffic.add(
                _native.pack_hashes(hashes),
                len(hashes[0]) if hashes else 8,
                salt=int(namespace.hex[:16], 16),
                block_tokens=self._record_tokens,
                prompt_tokens=state.asked.request.num_prompt_tokens,
            )
        if loads:
            state.outcome.loads_first = True
        else:
            self._count(state, state.found.result, 0)

    def loaded(self, state: RequestState, *, ok: bool) -> None:
        tokens = state.load.tokens
        self._counters.add(metrics.LOADED_TOKENS, tokens if ok else 0)
        headers = getattr(state.asked.request, "trace_headers", None)
        self._tracing.record("kvpool.load", headers, state.load.seconds, tokens=tokens, loaded=ok)
        if state.outcome.loads_first:
            state.outcome.loads_first = False
            self._count(state, "hit" if ok else "load_failed", tokens if ok else 0)

    def audited(self, request: Request, verdict: str, distance: float, layer: str, seconds: float) -> None:
        """A hit was audited; ``layer``: the first one that is too far."""
        self._tracing.record(
            "kvpool.audit",
            getattr(request, "trace_headers", None),
            seconds,
            verdict=verdict,
            distance=distance,
            layer=layer,
        )

    def tell_ratios(self) -> None:
        """Update the gauges of the hit ratio.

        After newly counted requests: ``RATIOS_S`` after the last such estimate; else after ``AGED_S``. An
        estimate takes 10 us. The two intervals are separate, because a request counts at its load's end: an
        earlier estimate must not delay the last one before the engine idles.
        """
        now_s = self._clock()
        if self._counted_more and now_s - self._counted_at_s >= RATIOS_S:
            self._counted_at_s, self._counted_more = now_s, False
        elif now_s - self._told_at_s < AGED_S:
            return
        self._told_at_s = now_s
        windows = self._traffic.windows()
        for window, seen in windows.items():
            if seen.prompt_tokens:
                self._counters.set(metrics.HIT_RATIO, round(seen.hit_ratio, 4), window)
        self._tell(windows, self._traffic.sampled())

    def _count(self, state: RequestState, result: str, loaded: int) -> None:
        assert result in metrics.REQUEST_RESULTS, result
        request, outcome = state.asked.request, state.outcome
        prompt = request.num_prompt_tokens
        local = min(outcome.local_tokens, prompt)
        missed = max(0, min(outcome.usable_tokens, prompt) - local - loaded)
        reason = _REASONS.get(result, state.reason)
        assert reason in metrics.MISS_REASONS, reason
        self._counters.add(metrics.REQUESTS, 1, result)
        self._counters.add(metrics.PROMPT_TOKENS, local, "engine_cache")
        self._counters.add(metrics.PROMPT_TOKENS, loaded, "pool")
        self._counters.add(metrics.PROMPT_TOKENS, max(0, prompt - local - loaded), "computed")
        self._counters.add(metrics.MISSED_TOKENS, missed, reason)
        if headers := getattr(request, "trace_headers", None):
            self._tracing.record(
                "kvpool.prompt",
                headers,
                max(0.0, time.time() - request.arrival_time),
                result=result,
                engine_cache_tokens=local,
                pool_tokens=loaded,
                missed_tokens=missed,
                miss_reason=reason if missed else "",
                input_tokens=prompt,
                cache_read_tokens=local + loaded,
            )
        self._traffic.spare(local + loaded)
        self._counted_more = True
