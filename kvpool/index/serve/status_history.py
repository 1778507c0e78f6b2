"""``StatusHistory``: what was reused and how full the pool was, every few seconds of the last hour.

A task of the event loop takes the samples; other threads read copies under ``_lock``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvpool.index.request_stats import Placed, Reuse

EVERY_S = 5.0
SAMPLES = 720  # an hour


class Sample(NamedTuple):
    """``at_s``: seconds since the start. ``reuse``, ``placed``: since then. ``pool_nbytes``: used; None: not known."""

    at_s: float
    reuse: Reuse
    placed: Placed
    pool_nbytes: int | None


class StatusHistory:
    """``take``: what a sample has but its time, now. ``start``, then ``close``."""

    def __init__(
        self, take: Callable[[], tuple[Reuse, Placed, int | None]], *, every_s: float = EVERY_S
    ) -> None:
        self.every_s = every_s
        self._take = take
        self._lock = threading.Lock()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._taken = 0  # samples in all
        self._started_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take samples from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Take no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def since(self, number: int) -> tuple[int, list[Sample]]:
        """The number of the first sample that follows, and all from sample ``number`` on that are kept. Any thread."""
        with self._lock:
            first = self._taken - len(self._samples)
            begin = number if first <= number <= self._taken else first
            return begin, list(self._samples)[begin - first :]

    async def _run(self) -> None:
        while True:
            sample = Sample(time.monotonic() - self._started_s, *self._take())
            with self._lock:
                self._samples.append(sample)
                self._taken += 1
            await asyncio.sleep(self.every_s)
