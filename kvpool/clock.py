"""The clock that an engine's halves get, so that a simulated one can stand for the real one.

What only reads the time gets ``Clock.monotonic``, or the present time with each call.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""

    def sleep(self, seconds: float, /) -> None: ...


REAL: Clock = time
