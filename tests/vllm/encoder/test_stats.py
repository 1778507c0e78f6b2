"""Metrics of outputs on vLLM's page, beside those of blocks or alone."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpool.vllm.encoder.connector import KVPoolECConnector
from kvpool.vllm.tell.metrics import PoolPromMetrics
from tests.support.encoder import Encoders
from tests.support.scripted_store import ScriptedStore

SAMPLES = {
    "kvpool_encoder_outputs_total/pool": 2,
    "kvpool_request_faults_total/lookup": 1,
    "kvpool_of_later": 1,
}


@pytest.mark.parametrize("alone", [True, False])
def test_both_connectors_show_each_metric_once(alone: bool) -> None:
    """vLLM ends if two of one name are registered, or a sample has no metric."""
    registry = CollectorRegistry()
    kinds: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    transfer = None if alone else SimpleNamespace(engine_id="e")
    config: Any = SimpleNamespace(kv_transfer_config=transfer, ec_transfer_config=None)
    arguments: Any = (config, kinds, ["engine"], {0: ["0"]})
    if not alone:
        PoolPromMetrics(*arguments)
    shown = KVPoolECConnector.build_prom_metrics(*arguments)
    stats = KVPoolECConnector.build_ec_connector_stats(SAMPLES)
    assert not stats.is_empty()
    shown.observe(stats.data, 0)
    values = partial(registry.get_sample_value)
    assert values("kvpool_encoder_outputs_total", {"engine": "0", "source": "pool"}) == 2.0
    assert values("kvpool_encoder_misses_total", {"engine": "0", "reason": "absent"}) == 0.0
    faults = values("kvpool_request_faults_total", {"engine": "0", "where": "lookup"})
    assert faults == (1.0 if alone else 0.0), "the other connector shows its own"


def test_an_engine_without_another_connector_tells_how_the_pool_is() -> None:
    for alone in (True, False):
        encoders = Encoders(ScriptedStore(), alone=alone)
        encoders.half._store.counters = lambda: {"up_connections": 2}  # type: ignore[method-assign]
        assert ("kvpool_up" in encoders.half.stats()) is alone
