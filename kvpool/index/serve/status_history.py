"""``StatusHistory``: what was reused and how full the pool was, every few seconds of the last hour.

A task of the event loop takes the samples; the pool is asked in a thread of its own, for it may be away. All fields
belong to the event loop, but ``_samples``, of which other threads read copies under ``_lock``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvpool.errors import KVPoolError
from kvpool.index.follow.pool_follower import PoolFollower
from kvpool.index.serve.request_stats import Reuse
from kvpool.store.server.usage import Usage

EVERY_S = 5.0
SAMPLES = 720  # an hour

logger = logging.getLogger("kvpool.index")


class Sample(NamedTuple):
    """``at_s``: seconds since the start. ``reuse``: since then. ``pool_nbytes``: used; None: not known."""

    at_s: float
    reuse: Reuse
    pool_nbytes: int | None


class PoolState(NamedTuple):
    """Of the pool, as it was asked last. ``problem``: why it did not answer; empty: it did."""

    usage: Usage | None = None
    problem: str = ""


class StatusHistory:
    """``reuse``: what was reused until now. ``pool``: None: there is none. ``start``, then ``close``."""

    def __init__(
        self, reuse: Callable[[], Reuse], pool: PoolFollower | None, *, every_s: float = EVERY_S
    ) -> None:
        self.every_s = every_s
        self.pool_state: PoolState | None = None  # None: there is no pool, or it was not asked yet
        self._reuse, self._pool = reuse, pool
        self._thread = ThreadPoolExecutor(1, "kvpool-usage")
        self._lock = threading.Lock()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._taken = 0  # samples in all
        self._started_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take samples from now on."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Take no more. Waits for the pool's answer, a few seconds at most."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    def since(self, number: int) -> tuple[int, list[Sample]]:
        """The number of the first sample that follows, and all from sample ``number`` on that are kept. Any thread."""
        with self._lock:
            first = self._taken - len(self._samples)
            begin = number if first <= number <= self._taken else first
            return begin, list(self._samples)[begin - first :]

    async def _run(self) -> None:
        while True:
            if self._pool is not None:
                self.pool_state = await self._asked(self._pool)
            usage = None if self.pool_state is None else self.pool_state.usage
            with self._lock:
                self._samples.append(
                    Sample(
                        time.monotonic() - self._started_s,
                        self._reuse(),
                        None if usage is None else usage.used_nbytes,
                    )
                )
                self._taken += 1
            await asyncio.sleep(self.every_s)

    async def _asked(self, pool: PoolFollower) -> PoolState:
        try:
            usage = await asyncio.get_running_loop().run_in_executor(self._thread, pool.usage)
        except KVPoolError as error:
            return PoolState(problem=str(error))
        except Exception:  # a fault of ours: the page goes on without it
            logger.exception("asking how full the pool is failed")
            return PoolState(problem="the index failed to ask it; its log says why")
        return PoolState(usage)
