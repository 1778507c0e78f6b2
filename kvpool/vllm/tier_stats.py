"""kvpool's metrics among those of vLLM's offloading connector, for ``KVPoolTier``."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvpool import metrics
from kvpool.metrics import Metric, Samples


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """What vLLM has to register, by name."""
    return {metric.name: _definition(metric) for metric in metrics.ALL}


def packed(samples: Samples) -> OffloadingConnectorStats:
    """``samples`` of one interval, as vLLM takes them."""
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
