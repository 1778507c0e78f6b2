"""``CostGate``: whether a load is expected to be faster than a recompute of the same tokens.

All rates are measured in tokens a second: large steps from plan to report, and loads from submission to end. Loads from
the pool and from a near pool before it are rated and decided on apart. Costs are assumed proportional to tokens, so the
ratio decides for every length. Unmeasured, loads run, unless the last ones brought nothing.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvpool import metrics
from kvpool.metrics import Counters

MIN_STEP_TOKENS = 256  # a smaller step's fixed cost outweighs its tokens
MIN_SAMPLES = 3  # of each rate, before the gate may close
KEEP = 0.8  # weight of earlier measurements per new sample
REOPEN = 0.8  # a closed gate opens when a load costs this share of a recompute
LOST_S = 0.05  # of a load that brought nothing; one that fails sooner held nobody up
PROBE_S = 10.0  # period of a closed gate's probes
STEPS_IN_FLIGHT = 4  # timed at once; beyond, the oldest report counts as lost

Source = Literal["near", "pool"]
_COUNTED = {
    "near": (metrics.GATE_NEAR_TOKENS, metrics.GATE_NEAR_SECONDS),
    "pool": (metrics.GATE_LOAD_TOKENS, metrics.GATE_LOAD_SECONDS),
}


@dataclass
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0
    samples: int = 0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = self.tokens * KEEP + tokens
        self.seconds = self.seconds * KEEP + seconds
        self.samples += 1


@dataclass
class _Loads:
    """From one pool. ``closed``: only probes may load."""

    rate: _Rate
    closed: bool = False
    probe_at_s: float = 0.0
    lost: int = 0  # in a row: that took time and brought nothing


class CostGate:
    """Open until both rates are known, or loads bring nothing; ``counters`` counts its decisions."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._prefill = _Rate()
        self._loads: dict[Source, _Loads] = {"near": _Loads(_Rate()), "pool": _Loads(_Rate())}
        self._steps: deque[tuple[int, float, int]] = deque(
            maxlen=STEPS_IN_FLIGHT
        )  # number, planned at, tokens
        self._next_step = 1
        self._reported_at_s = 0.0

    def step_begins(self, tokens: int) -> int:
        """The number that workers report at the end of a prompt step."""
        number, self._next_step = self._next_step, self._next_step + 1
        self._steps.append((number, self._clock(), tokens))
        return number

    def step_ended(self, reported: int) -> None:
        """End the step of this number; 0: an untimed step."""
        now_s = self._clock()
        while self._steps and self._steps[0][0] <= reported:
            number, planned_at_s, tokens = self._steps.popleft()
            if number == reported:
                # A step planned ahead began at the end of the step before it.
                self.computed(tokens, now_s - max(planned_at_s, self._reported_at_s))
        self._reported_at_s = now_s

    def computed(self, tokens: int, seconds: float) -> None:
        """A prompt step computed ``tokens`` in ``seconds``."""
        if tokens < MIN_STEP_TOKENS or seconds <= 0:
            return
        self._counters.add(metrics.GATE_PREFILL_TOKENS, tokens)
        self._counters.add(metrics.GATE_PREFILL_SECONDS, seconds)
        self._prefill.add(tokens, seconds)

    def loaded(self, tokens: int, seconds: float, near: float = 0.0) -> None:
        """A load of ``tokens``, this share of them from near, ended after ``seconds``.

        0 tokens: it failed, and the time is lost. The time of a load from both is divided by their rates so far, and
        tells of the pool's alone.
        """
        source: Source = "near" if near == 1 else "pool"
        if source == "pool" and near and tokens:
            near_s, pool_s = near * self._each_s("near"), (1 - near) * self._each_s("pool")
            tokens, seconds = round(tokens * (1 - near)), seconds * pool_s / (near_s + pool_s)
        counted_tokens, counted_seconds = _COUNTED[source]
        self._counters.add(counted_tokens, tokens)
        self._counters.add(counted_seconds, seconds)
        loads = self._loads[source]
        if loads.closed:
            # Older rates are dropped: they would outweigh a probe.
            loads.rate = _Rate(samples=MIN_SAMPLES)
        loads.rate.add(tokens, seconds)
        if tokens:
            loads.lost = 0
        elif seconds >= LOST_S:
            loads.lost += 1
        self._decide(loads)

    def admits(self, source: Source = "pool") -> bool:
        """Whether to offer a load from there; ask once per load, because a closed gate admits probes."""
        loads = self._loads[source]
        result = "pays"
        if not (loads.closed or self._measured(loads)):
            result = "unmeasured"
        elif loads.closed and self._clock() >= loads.probe_at_s:
            result = "probe"
            loads.probe_at_s = self._clock() + PROBE_S
        elif loads.closed:
            result = "too_slow"
        self._counters.add(metrics.GATE_DECISIONS, 1, result)
        return result != "too_slow"

    def _each_s(self, source: Source) -> float:
        """Of a token; as long as either is unknown, the same of both."""
        rates = [loads.rate for loads in self._loads.values()]
        rate = self._loads[source].rate
        return rate.seconds / rate.tokens if all(one.tokens and one.seconds for one in rates) else 1.0

    def _measured(self, loads: _Loads) -> bool:
        return min(self._prefill.samples, loads.rate.samples) >= MIN_SAMPLES

    def _decide(self, loads: _Loads) -> None:
        was_closed = loads.closed
        if self._measured(loads):
            load_s = loads.rate.seconds * self._prefill.tokens
            recompute_s = self._prefill.seconds * loads.rate.tokens  # of as many tokens
            loads.closed = load_s > (REOPEN if was_closed else 1.0) * recompute_s
        else:
            loads.closed = loads.lost >= MIN_SAMPLES  # whatever a recompute takes
        if loads.closed and not was_closed:
            loads.probe_at_s = self._clock() + PROBE_S
