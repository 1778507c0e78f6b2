"""``StepTimer``: how long the engine's steps take, for the cost gate. Threads: the engine's scheduler thread only."""

from __future__ import annotations

import time
from collections import deque

from kvpool.vllm.gate import CostGate

STEPS_IN_FLIGHT = 4  # steps that are timed at once; beyond, the report of the oldest is taken for lost


class StepTimer:
    """Numbers steps when they are planned, and tells ``gate`` how long each took when the workers report its end."""

    def __init__(self, gate: CostGate) -> None:
        self._gate = gate
        self._steps: deque[tuple[int, float, int]] = deque(
            maxlen=STEPS_IN_FLIGHT
        )  # number, planned at, tokens
        self._next_step = 1
        self._reported_at = 0.0

    def begins(self, tokens: int) -> int:
        """The number under which the workers are to report the end of this step."""
        number, self._next_step = self._next_step, self._next_step + 1
        self._steps.append((number, time.monotonic(), tokens))
        return number

    def ends(self, reported: int) -> None:
        """A step has ended: the one of this number, or with 0 one that is not timed."""
        now = time.monotonic()
        while self._steps and self._steps[0][0] <= reported:
            number, planned_at, tokens = self._steps.popleft()
            if number == reported:
                # A step that was planned ahead began when the one before it was over.
                self._gate.computed(tokens, now - max(planned_at, self._reported_at))
        self._reported_at = now
