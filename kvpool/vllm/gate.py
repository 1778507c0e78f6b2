"""``CostGate``: whether a load is expected to be faster than a recompute of the same tokens.

Both rates are measured in tokens a second: large steps from plan to report, and loads from submission to end.
Both costs are assumed proportional to tokens, so the ratio decides for every length. Unmeasured, loads run.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvpool import metrics
from kvpool.metrics import Counters

MIN_STEP_TOKENS = 256  # a smaller step's fixed cost outweighs its tokens
MIN_SAMPLES = 3  # of each rate, before the gate may close
KEEP = 0.8  # weight of earlier measurements per new sample
REOPEN = 0.8  # a closed gate opens when a load costs this share of a recompute
PROBE_S = 10.0  # period of a closed gate's probes
STEPS_IN_FLIGHT = 4  # timed at once; beyond, the oldest report counts as lost


@dataclass
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0
    samples: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * KEEP + tokens
        self.seconds = self.seconds * KEEP + seconds
        self.samples += 1


class CostGate:
    """Open until both rates are known; ``counters`` counts its decisions."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._prefill, self._load = _Rate(), _Rate()
        self.closed = False  # only probes may load
        self._probe_at_s = 0.0
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

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of ``tokens`` ended after ``seconds``; 0 tokens: it failed, and the time is lost."""
        self._counters.add(metrics.GATE_LOAD_TOKENS, tokens)
        self._counters.add(metrics.GATE_LOAD_SECONDS, seconds)
        if self.closed:
            # Older rates are dropped: they would outweigh a probe.
            self._load = _Rate(samples=MIN_SAMPLES)
        self._load.add(tokens, seconds)
        self._decide()

    def admits(self) -> bool:
        """Whether to offer a load; ask once per load, because a closed gate admits probes."""
        result = "pays"
        if not self._measured():
            result = "unmeasured"
        elif self.closed and self._clock() >= self._probe_at_s:
            result = "probe"
            self._probe_at_s = self._clock() + PROBE_S
        elif self.closed:
            result = "too_slow"
        self._counters.add(metrics.GATE_DECISIONS, 1, result)
        return result != "too_slow"

    def _measured(self) -> bool:
        return min(self._prefill.samples, self._load.samples) >= MIN_SAMPLES

    def _decide(self) -> None:
        if not self._measured():
            return
        load_s = self._load.seconds * self._prefill.tokens
        recompute_s = self._prefill.seconds * self._load.tokens  # of as many tokens
        if self.closed:
            self.closed = load_s > REOPEN * recompute_s
        elif load_s > recompute_s:
            self.closed = True
            self._probe_at_s = self._clock() + PROBE_S
