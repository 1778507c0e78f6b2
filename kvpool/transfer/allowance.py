"""``Allowance``: bytes that may be sent now, so that a rate holds on average.

A bucket of one second that may go into debt: whoever finds it above zero takes what it needs, of whatever size. So one
that is larger than the bucket passes, and the others wait until the debt is paid. To wait for a bucket that has all of
it would be for ever there, and among small ones that empty it.

Threads: the owner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_S = 1.0


class Allowance:
    """``nbytes_per_s``: 0: no limit. ``clock``: in seconds, never back."""

    def __init__(self, nbytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = nbytes_per_s, clock
        self._nbytes, self._at_s = nbytes_per_s * BURST_S, clock()

    def refill(self) -> None:
        """Add what has come since the last call."""
        now_s = self._clock()
        came = (now_s - self._at_s) * self._rate
        self._nbytes, self._at_s = min(self._rate * BURST_S, self._nbytes + came), now_s

    def take(self, nbytes: int) -> bool:
        """Whether ``nbytes`` may be sent; they are then counted."""
        if not self._rate:
            return True
        if self._nbytes <= 0:
            return False
        self._nbytes -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Taken, and not sent."""
        self._nbytes += nbytes
