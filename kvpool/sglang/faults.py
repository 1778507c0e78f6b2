"""Faults on purpose: a pool that misses, dawdles or damages, so that an operator can see that SGLang goes on.

Each is a fault that a pool really can have, and takes the way that the real one takes: a damaged record is written
one byte short, so that every reader finds it damaged, deletes it and counts a miss. No switch
can make a wrong byte reach a KV cache.

Threads: any.
"""

from __future__ import annotations

import random
import threading

from kvpool.config import HiCacheConfig
from kvpool.errors import StoreUnavailable


class Faults:
    """Draws the faults that ``HiCacheConfig`` asks for; none by default."""

    def __init__(self, config: HiCacheConfig) -> None:
        self._miss_ratio = config.fault_miss_ratio
        self._corrupt_ratio = config.fault_corrupt_ratio
        self._delay_s = config.fault_delay_s
        self._ended = threading.Event()
        self._random = random.Random()  # SGLang seeds the module's own alike on all ranks

    def __bool__(self) -> bool:
        return bool(self._miss_ratio or self._corrupt_ratio or self._delay_s)

    def __str__(self) -> str:
        return (
            f"fault_miss_ratio {self._miss_ratio:g}, fault_delay_s {self._delay_s:g}, "
            f"fault_corrupt_ratio {self._corrupt_ratio:g}"
        )

    def miss(self) -> bool:
        """Whether this page is to be missed."""
        return self._random.random() < self._miss_ratio

    def corrupt(self) -> bool:
        """Whether this page is to be written damaged."""
        return self._random.random() < self._corrupt_ratio

    def delay(self, lookup_timeout_s: float) -> None:
        """Be as slow as asked for; blocking, for at most ``lookup_timeout_s``.

        Errors: ``StoreUnavailable`` when that is not enough, as for a pool that does not answer in time.
        """
        if not self._delay_s:
            return
        self._ended.wait(min(self._delay_s, lookup_timeout_s))
        if self._delay_s >= lookup_timeout_s:
            raise StoreUnavailable(
                f"no answer within {lookup_timeout_s:g} s (fault_delay_s is {self._delay_s:g})"
            )

    def end(self) -> None:
        """Wake who is being delayed."""
        self._ended.set()
