"""kvpool's metrics in SGLang: on each process's page, and a log line per change.

SGLang's ``/metrics`` shows prometheus_client's whole registry.

Threads: any may count; ``show`` is the scheduler's. ``PoolState._lock`` guards ``_away`` and ``_faulty``.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import Any

import prometheus_client

from kvpool import metrics
from kvpool.metrics import Counters, Metric, Samples

logger = logging.getLogger(__name__)


class PoolState:
    """Logs each change once: away and back, and the first fault."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._lock = threading.Lock()
        self._away = False
        self._faulty = False

    def unavailable(self, error: Exception) -> None:
        with self._lock:
            first, self._away = not self._away, True
        if first:
            logger.warning("kvpool: the pool is away, and everything a miss until it is back: %s", error)

    def answered(self) -> None:
        with self._lock:
            back, self._away = self._away, False
        if back:
            logger.info("kvpool: the pool is back")

    def fault(self, what: str, error: Exception | None) -> None:
        """Log the first failed call; the caller counts all."""
        with self._lock:
            first, self._faulty = not self._faulty, True
        if first:
            logger.error(
                "kvpool could not do what SGLang asked for, a miss (%s); more of this is counted and not logged",
                what, exc_info=error,
            )  # fmt: skip


@cache  # a registry accepts a name once, and backends come and go
def _exported(metric: Metric) -> Any:
    labels = ["rank", metric.label] if metric.label else ["rank"]
    if metric.is_counter:
        return prometheus_client.Counter(metric.name, metric.help, labels)
    if metric.is_gauge:
        return prometheus_client.Gauge(metric.name, metric.help, labels, multiprocess_mode="mostrecent")
    return prometheus_client.Histogram(metric.name, metric.help, labels, buckets=metric.buckets)


def show(samples: Samples, rank: int) -> None:
    """Add ``samples``, as from ``Counters.take``, to the page under ``rank``."""
    metrics.export(
        samples, lambda metric, label: _exported(metric).labels(str(rank), *([label] if label else []))
    )
