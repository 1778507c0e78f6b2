"""kvpool's counters on SGLang's ``/metrics``: SGLang shows what is in prometheus_client's registry of each process.

Threads: the scheduler's only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import prometheus_client

from kvpool.metrics import BY_NAME, Metric


@cache  # a registry takes a name once, and backends come and go
def _exported(metric: Metric) -> prometheus_client.Counter:
    labels = ["rank", metric.label] if metric.label else ["rank"]
    return prometheus_client.Counter(metric.name, metric.help, labels)


def show(samples: Mapping[str, float], rank: int) -> None:
    """Add ``samples``, as ``Counters.take`` gives them, to what the page says of ``rank``."""
    for sample, amount in samples.items():
        name, _, label = sample.partition("/")
        _exported(BY_NAME[name]).labels(str(rank), *([label] if label else [])).inc(amount)
