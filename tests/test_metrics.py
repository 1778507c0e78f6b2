"""Samples of metrics: sums, gauges that are told when they change, and a bounded number of observations."""

from __future__ import annotations

from kvpool import metrics
from kvpool.metrics import Counters, Samples, add_samples


def test_a_gauge_is_told_when_it_changes_and_from_time_to_time() -> None:
    now_s = 0.0
    counters = Counters(clock=lambda: now_s)

    def told(value: float) -> Samples:
        counters.set(metrics.ENABLED, value)
        return counters.take()

    assert told(1.0) == {"kvpool_enabled": 1.0}
    assert told(1.0) == {}
    assert told(0.0) == {"kvpool_enabled": 0.0}
    now_s = metrics.REPEAT_S - 1
    assert told(0.0) == {}
    now_s = metrics.REPEAT_S
    assert told(0.0) == {"kvpool_enabled": 0.0}


def test_observations_are_bounded() -> None:
    counters = Counters()
    for _ in range(3 * metrics.MAX_OBSERVATIONS):
        counters.observe(metrics.LOOKUP_WAIT_SECONDS, 0.5, "answered")
    samples = counters.take()
    add_samples(samples, dict(samples))
    assert samples == {"kvpool_lookup_wait_seconds/answered": [0.5] * metrics.MAX_OBSERVATIONS}
    assert counters.take() == {}


def test_samples_of_several_ranks() -> None:
    into: Samples = {
        "kvpool_up": 1.0,
        "kvpool_stored_blocks_total": 2,
        "kvpool_lookup_wait_seconds/failed": [1.0],
    }
    add_samples(
        into,
        {
            "kvpool_up": 0.0,
            "kvpool_stored_blocks_total": 3,
            "kvpool_lookup_wait_seconds/failed": [2.0],
            "kvpool_requests_total/hit": 1,
            "kvpool_of_a_later_version/x": 1,
        },
    )
    assert into == {
        "kvpool_up": 0.0,
        "kvpool_stored_blocks_total": 5,
        "kvpool_lookup_wait_seconds/failed": [1.0, 2.0],
        "kvpool_requests_total/hit": 1,
        "kvpool_of_a_later_version/x": 1,
    }


def test_growth_is_counted_by_label() -> None:
    counters = Counters()
    counters.add_growth(metrics.DAMAGED_BLOCKS, 3, "checksum")
    counters.add_growth(metrics.DAMAGED_BLOCKS, 2, "length")
    counters.add_growth(metrics.DAMAGED_BLOCKS, 4, "checksum")
    assert counters.take() == {
        "kvpool_damaged_blocks_total/checksum": 4,
        "kvpool_damaged_blocks_total/length": 2,
    }


def test_every_metric_is_of_one_kind() -> None:
    for metric in metrics.ALL:
        assert metric.is_counter + metric.is_gauge + bool(metric.buckets) == 1, metric.name
        assert bool(metric.label) >= bool(metric.values), metric.name
        assert tuple(sorted(metric.buckets)) == metric.buckets, metric.name
