"""A clock that the test moves."""

from __future__ import annotations


class Clock:
    """Stands for the real one (``kvpool.clock``)."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
