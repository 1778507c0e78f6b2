"""The cost gate by the numbers: open until it knows, closed when loads are slower, opened again by a probe."""

from __future__ import annotations

import pytest

from kvpool import metrics
from kvpool.metrics import Counters
from kvpool.vllm.load.gate import MIN_SAMPLES, MIN_STEP_TOKENS, PROBE_S, CostGate, Source

pytestmark = [pytest.mark.vllm]

TOKENS = 1000
PREFILL_S = 0.1


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> CostGate:
    return CostGate(Counters(), clock)


def computing(gate: CostGate, steps: int = MIN_SAMPLES) -> None:
    for _ in range(steps):
        gate.computed(TOKENS, PREFILL_S)


def loading(gate: CostGate, share: float, loads: int = MIN_SAMPLES) -> None:
    """Loads that take ``share`` of the time in which their tokens are computed."""
    for _ in range(loads):
        gate.loaded(TOKENS, PREFILL_S * share)


def closed_gate(gate: CostGate) -> None:
    computing(gate)
    loading(gate, 2.0)
    assert is_closed(gate)


def is_closed(gate: CostGate, source: Source = "pool") -> bool:
    return gate._loads[source].closed


def results(gate: CostGate) -> dict[str, float]:
    prefix = f"{metrics.GATE_DECISIONS.name}/"
    return {
        key.removeprefix(prefix): count
        for key, count in gate._counters.take().items()
        if key.startswith(prefix)
    }


@pytest.mark.parametrize(("steps", "loads"), [(0, 9), (9, 0), (MIN_SAMPLES - 1, 9), (9, MIN_SAMPLES - 1)])
def test_what_is_not_measured_is_offered(gate: CostGate, steps: int, loads: int) -> None:
    loading(gate, 100.0, loads)
    computing(gate, steps)
    assert gate.admits()
    assert not is_closed(gate)
    assert results(gate) == {"unmeasured": 1}


@pytest.mark.parametrize(("share", "pays"), [(0.5, True), (0.99, True), (1.01, False), (50.0, False)])
def test_a_load_is_offered_when_it_is_faster_than_computing(gate: CostGate, share: float, pays: bool) -> None:
    computing(gate)
    loading(gate, share)
    assert gate.admits() is pays
    assert results(gate) == {"pays" if pays else "too_slow": 1}


def test_small_steps_say_nothing_of_the_rate(gate: CostGate) -> None:
    for _ in range(10):
        gate.computed(MIN_STEP_TOKENS - 1, 10.0)
    computing(gate)
    loading(gate, 2.0)
    assert is_closed(gate)


def test_loads_that_fail_close_it(gate: CostGate) -> None:
    """A pool that is silent costs the budget for each request, and gives nothing."""
    computing(gate)
    for _ in range(MIN_SAMPLES):
        gate.loaded(0, 0.5)
    assert not gate.admits()


def test_loads_that_bring_nothing_close_it_where_no_step_was_large_enough_to_measure(
    gate: CostGate, clock: Clock
) -> None:
    for _ in range(MIN_SAMPLES):
        gate.loaded(0, 0.0)  # for a reason of its own
    for _ in range(MIN_SAMPLES):
        assert gate.admits()
        gate.loaded(0, 0.5)
    assert not gate.admits()
    assert gate.admits("near"), "of the other pool nothing is said"
    clock.now_s += PROBE_S
    assert gate.admits()
    assert not gate.admits(), "one probe"
    gate.loaded(1000, 0.5)
    assert gate.admits()


def test_a_load_that_was_over_before_anyone_looked_is_fast(gate: CostGate) -> None:
    computing(gate)
    for _ in range(MIN_SAMPLES):
        gate.loaded(TOKENS, 0.0)
    assert gate.admits()
    assert results(gate) == {"pays": 1}


def test_a_closed_gate_lets_one_load_through_from_time_to_time(gate: CostGate, clock: Clock) -> None:
    closed_gate(gate)
    assert not gate.admits()
    clock.now_s += PROBE_S
    assert gate.admits()
    assert not gate.admits(), "one"
    clock.now_s += PROBE_S - 0.1
    assert not gate.admits()
    clock.now_s += 0.1
    assert gate.admits(), "also when nothing was heard of the last"
    assert results(gate) == {"too_slow": 3, "probe": 2}


@pytest.mark.parametrize(("share", "opens"), [(0.5, True), (0.79, True), (0.9, False), (3.0, False)])
def test_one_probe_opens_it_if_it_was_clearly_faster(
    gate: CostGate, clock: Clock, share: float, opens: bool
) -> None:
    closed_gate(gate)
    clock.now_s += PROBE_S
    assert gate.admits()
    loading(gate, share, 1)
    assert is_closed(gate) is not opens
    assert gate.admits() is opens


def test_what_was_measured_long_ago_fades(gate: CostGate) -> None:
    computing(gate)
    loading(gate, 0.1, 100)
    loading(gate, 2.0, 10)
    assert is_closed(gate)


def test_rates_can_be_read_from_the_counters(gate: CostGate) -> None:
    computing(gate)
    loading(gate, 0.5)
    counted = gate._counters.take()
    assert counted[metrics.GATE_PREFILL_TOKENS.name] == MIN_SAMPLES * TOKENS
    assert counted[metrics.GATE_PREFILL_SECONDS.name] == pytest.approx(MIN_SAMPLES * PREFILL_S)
    assert counted[metrics.GATE_LOAD_TOKENS.name] == MIN_SAMPLES * TOKENS
    assert counted[metrics.GATE_LOAD_SECONDS.name] == pytest.approx(MIN_SAMPLES * PREFILL_S / 2)


def test_slow_loads_of_one_pool_close_it_for_that_one(gate: CostGate, clock: Clock) -> None:
    computing(gate)
    loading(gate, 2.0)
    for _ in range(MIN_SAMPLES):
        gate.loaded(TOKENS, PREFILL_S * 0.1, near=1.0)
    assert (gate.admits("near"), gate.admits("pool")) == (True, False)
    for _ in range(20):
        gate.loaded(0, 1.0, near=1.0)
    assert (gate.admits("near"), gate.admits("pool")) == (False, False)
    clock.now_s += PROBE_S
    assert gate.admits("pool")
    gate.loaded(TOKENS, PREFILL_S * 0.1)
    assert (gate.admits("near"), gate.admits("pool")) == (True, True), "a probe; and it has opened"
    assert (gate.admits("near"), gate.admits("pool")) == (False, True)


@pytest.mark.parametrize("near", [0.1, 0.5, 0.9])
def test_a_load_from_both_tells_what_the_pool_takes(gate: CostGate, near: float) -> None:
    """Once both rates are known: until then their tokens count alike."""
    computing(gate)
    near_s, pool_s = PREFILL_S * 0.1, PREFILL_S * 0.6  # of all tokens
    for _ in range(MIN_SAMPLES):
        gate.loaded(TOKENS, near_s, near=1.0)
    for _ in range(200):
        gate.loaded(TOKENS, near_s * near + pool_s * (1 - near), near=near)
    rate = gate._loads["pool"].rate
    assert rate.seconds / rate.tokens == pytest.approx(pool_s / TOKENS, rel=0.02)
    counted = gate._counters.take()
    assert counted[metrics.GATE_NEAR_TOKENS.name] == MIN_SAMPLES * TOKENS, "of loads from near alone"
    assert counted[metrics.GATE_NEAR_SECONDS.name] == pytest.approx(MIN_SAMPLES * near_s)
    assert counted[metrics.GATE_LOAD_TOKENS.name] == 200 * round(TOKENS * (1 - near))
