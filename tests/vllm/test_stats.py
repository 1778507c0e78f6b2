"""The connector's metrics on vLLM's page: zeros before the first request, then what the engines tell."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpool import metrics
from kvpool.vllm.metrics import PoolPromMetrics, PoolStats

pytestmark = pytest.mark.vllm


@pytest.fixture
def page() -> tuple[PoolPromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    kinds: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = type("Config", (), {"kv_transfer_config": None})()
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    return PoolPromMetrics(config, kinds, ["model_name", "engine"], engines), registry


def value(registry: CollectorRegistry, name: str, engine: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


def test_what_can_be_counted_is_there_from_the_start(page: tuple[Any, CollectorRegistry]) -> None:
    """``rate()`` does not see a series' first value."""
    _, registry = page
    for result in metrics.REQUEST_RESULTS:
        assert value(registry, "kvpool_requests_total", "1", result=result) == 0.0
    assert value(registry, "kvpool_disconnections_total", "0") == 0.0
    assert value(registry, "kvpool_enabled", "0") is None, "not known yet"


def test_each_kind_of_sample(page: tuple[Any, CollectorRegistry]) -> None:
    shown, registry = page
    stats = PoolStats({"kvpool_enabled": 0.0, "kvpool_requests_total/hit": 2, "kvpool_hit_ratio/1h": 0.25})
    stats.aggregate(PoolStats({"kvpool_lookup_wait_seconds/answered": [0.0, 0.3], "kvpool_of_later": 1}))
    shown.observe(stats.to_dict(), 1)
    assert value(registry, "kvpool_enabled", "1") == 0.0
    assert value(registry, "kvpool_requests_total", "1", result="hit") == 2.0
    assert value(registry, "kvpool_requests_total", "0", result="hit") == 0.0
    assert value(registry, "kvpool_hit_ratio", "1", window="1h") == 0.25
    waited = partial(value, registry, engine="1", result="answered")
    assert waited("kvpool_lookup_wait_seconds_count") == 2.0
    assert waited("kvpool_lookup_wait_seconds_bucket", le="0.0") == 1.0
    assert waited("kvpool_lookup_wait_seconds_sum") == 0.3
    assert stats.reduce()["lookup_wait_seconds/answered_mean"] == 0.15
