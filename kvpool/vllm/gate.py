"""``CostGate``: whether a load is expected to be faster than computing the same tokens again.

Both rates are measured, in tokens a second: of the engine's large steps, from their plan to the workers' report, and of
loads from their submission to their end. Both are taken to be in proportion to the tokens, so their ratio decides for
loads of every length. While nothing is known, loads are offered.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvpool import metrics
from kvpool.metrics import Counters

MIN_STEP_TOKENS = 256  # in smaller steps the cost of a step outweighs that of its tokens
MIN_SAMPLES = 3  # of each rate, before the gate may close
KEEP = 0.8  # of what was measured before, with each new sample
REOPEN = 0.8  # a closed gate opens when a load is expected to take this share of the recompute
PROBE_S = 10.0  # how often a closed gate lets one load through, to measure again
STEPS_IN_FLIGHT = 4  # steps that are timed at once; beyond, the report of the oldest is taken for lost


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
    """Open until both rates are known; its decisions are counted in ``counters``."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._prefill, self._load = _Rate(), _Rate()
        self.closed = False  # loads are held back, but for probes
        self._probe_at_s = 0.0
        self._steps: deque[tuple[int, float, int]] = deque(
            maxlen=STEPS_IN_FLIGHT
        )  # number, planned at, tokens
        self._next_step = 1
        self._reported_at_s = 0.0

    def step_begins(self, tokens: int) -> int:
        """The number under which the workers are to report the end of a step that works on prompts."""
        number, self._next_step = self._next_step, self._next_step + 1
        self._steps.append((number, self._clock(), tokens))
        return number

    def step_ended(self, reported: int) -> None:
        """A step has ended: the one of this number, or with 0 one that is not timed."""
        now_s = self._clock()
        while self._steps and self._steps[0][0] <= reported:
            number, planned_at_s, tokens = self._steps.popleft()
            if number == reported:
                # A step that was planned ahead began when the one before it was over.
                self.computed(tokens, now_s - max(planned_at_s, self._reported_at_s))
        self._reported_at_s = now_s

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that worked on prompts has computed ``tokens`` in ``seconds``."""
        if tokens < MIN_STEP_TOKENS or seconds <= 0:
            return
        self._counters.add(metrics.GATE_PREFILL_TOKENS, tokens)
        self._counters.add(metrics.GATE_PREFILL_SECONDS, seconds)
        self._prefill.add(tokens, seconds)

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of ``tokens`` has ended after ``seconds``; 0 tokens: it failed, and the time is lost."""
        self._counters.add(metrics.GATE_LOAD_TOKENS, tokens)
        self._counters.add(metrics.GATE_LOAD_SECONDS, seconds)
        if self.closed:
            # Rates from before it closed are dropped: with them one probe would hardly count.
            self._load = _Rate(samples=MIN_SAMPLES)
        self._load.add(tokens, seconds)
        self._decide()

    def admits(self) -> bool:
        """Whether to offer a load now; asked once for each, as a closed gate lets one through from time to time."""
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
