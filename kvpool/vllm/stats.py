"""kvpool's metrics on vLLM's own metrics page and in its log, through vLLM's connector statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool import metrics


@dataclass
class PoolStats(KVConnectorStats):
    """Samples of ``kvpool.metrics`` of one interval, of all ranks."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PoolStats:
        metrics.add_samples(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's periodic log line shows; of a histogram the mean."""
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


class PoolPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics in the API server and adds what the engines report."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shown = {metric.name: self._registered(metric) for metric in metrics.ALL}
        for metric in metrics.ALL:
            first = metric.values or (("",) if metric.is_counter and not metric.label else ())
            for engine in self.per_engine_labelvalues:
                for value in first:
                    self._of_engine(metric.name, engine, value)

    def _registered(self, metric: metrics.Metric) -> Any:
        labels = [*self._labelnames, *([metric.label] if metric.label else [])]
        about: dict[str, Any] = {"name": metric.name, "documentation": metric.help, "labelnames": labels}
        kind: Any = self._counter_cls
        if metric.is_gauge:
            kind, about["multiprocess_mode"] = self._gauge_cls, "mostrecent"
        elif metric.buckets:
            kind, about["buckets"] = self._histogram_cls, list(metric.buckets)
        return kind(**about)

    def _of_engine(self, name: str, engine: int, label: str) -> Any:
        labels: Sequence[object] = [*self.per_engine_labelvalues[engine], *([label] if label else [])]
        return self._shown[name].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's samples of one engine; samples of a newer kvpool than ours are left out."""
        for key, sample in transfer_stats_data.items():
            name, _, label = key.partition("/")
            if (metric := metrics.BY_NAME.get(name)) is None:
                continue
            shown = self._of_engine(name, engine_idx, label)
            if metric.is_counter:
                shown.inc(sample)
            elif metric.is_gauge:
                shown.set(sample)
            else:
                for value in sample:
                    shown.observe(value)
