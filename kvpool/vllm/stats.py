"""kvpool's counters on vLLM's own metrics page and in its log, through vLLM's connector statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool import metrics


@dataclass
class PoolStats(KVConnectorStats):
    """Samples of ``kvpool.metrics`` of one interval: ``{key: number}``, summed over ranks."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PoolStats:
        metrics.add_samples(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's periodic log line shows."""
        return {
            key.removeprefix("kvpool_").replace("_total", ""): round(amount, 4)
            for key, amount in sorted(self.data.items())
        }

    def is_empty(self) -> bool:
        return not self.data


class PoolPromMetrics(KVConnectorPromMetrics):
    """Registers the counters in the API server and adds what the engines report."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters: dict[str, Any] = {
            metric.name: self._counter_cls(
                name=metric.name,
                documentation=metric.help,
                labelnames=[*self._labelnames, *([metric.label] if metric.label else [])],
            )
            for metric in metrics.ALL
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's samples of one engine; samples of a newer kvpool than ours are left out."""
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition("/")
            if name in self._counters:
                labels = [*self.per_engine_labelvalues[engine_idx], *([label] if label else [])]
                self._counters[name].labels(*labels).inc(amount)
