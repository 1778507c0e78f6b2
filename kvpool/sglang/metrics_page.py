"""kvpool's metrics on SGLang's ``/metrics``: SGLang shows what is in prometheus_client's registry of each process.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import prometheus_client

from kvpool.metrics import BY_NAME, Metric


@cache  # a registry takes a name once, and backends come and go
def _exported(metric: Metric) -> Any:
    labels = ["rank", metric.label] if metric.label else ["rank"]
    if metric.is_counter:
        return prometheus_client.Counter(metric.name, metric.help, labels)
    if metric.is_gauge:
        return prometheus_client.Gauge(metric.name, metric.help, labels, multiprocess_mode="mostrecent")
    return prometheus_client.Histogram(metric.name, metric.help, labels, buckets=metric.buckets)


def show(samples: Mapping[str, float | list[float]], rank: int) -> None:
    """Add ``samples``, as ``Counters.take`` gives them, to what the page says of ``rank``."""
    for key, sample in samples.items():
        name, _, label = key.partition("/")
        metric = BY_NAME[name]
        shown = _exported(metric).labels(str(rank), *([label] if label else []))
        if isinstance(sample, list):
            for value in sample:
                shown.observe(value)
        elif metric.is_counter:
            shown.inc(sample)
        else:
            shown.set(sample)
