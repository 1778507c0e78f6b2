"""``BufferBudget``: the memory that an index holds beside its tables, which its peers make it hold.

Batches on their way, those that wait for a replay, what is remembered of batches, ranks, large requests and replies,
bodies over HTTP, snapshots: each takes its bytes here and gives them back. Where nothing is left, the answer is no, and
the caller does without.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

from kvpool.index.table import MemoryBudget

DEFAULT_NBYTES = 1 << 30  # without --max-memory
ROOM_TIMEOUT_S = 10.0  # how long a large message waits for room
ROOM_RETRY_S = 0.01
REQUESTS = 15  # of the largest size, in an owner's part: 33 MiB each without --max-memory
REQUEST_NBYTES = 5 << 20  # a prompt of a million tokens, or of 4 MiB of text
SHARE = 4  # one part in four of --max-memory
# Owners that are no tenants.
INDEX = ""
INFERENCE = "inference requests"


class BufferBudget:
    """``limit_nbytes``: of all owners. One owner, a tenant or a host, takes at most half of it; ``INDEX`` may take all.

    Any thread; nothing blocks.
    """

    def __init__(self, limit_nbytes: int = DEFAULT_NBYTES) -> None:
        self.limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._used_nbytes = 0
        self._used_by: Counter[str] = Counter()

    @property
    def limit_of_owner_nbytes(self) -> int:
        return self.limit_nbytes // 2

    @property
    def used_nbytes(self) -> int:
        return self._used_nbytes

    def limit_of_request_nbytes(self, most_nbytes: int) -> int:
        """How large one request may be; ``most_nbytes``: at most. Those that are being received are counted nowhere."""
        of_owner = self.limit_of_owner_nbytes
        return min(most_nbytes, max(of_owner // REQUESTS, min(of_owner // 2, REQUEST_NBYTES)))

    def take(self, nbytes: int, owner: str, *, optional: bool = False) -> bool:
        """Whether there was room for it; it is taken then.

        ``optional``: what can be done without, and would stay: it leaves half of either limit to what comes and goes.
        """
        part = 2 if optional else 1
        with self._lock:
            if self._used_nbytes + nbytes > self.limit_nbytes // part:
                return False
            if owner != INDEX and self._used_by[owner] + nbytes > self.limit_of_owner_nbytes // part:
                return False
            self._used_nbytes += nbytes
            self._used_by[owner] += nbytes
            return True

    async def acquire(self, nbytes: int, owner: str) -> bool:
        """``take``, which waits for room up to ``ROOM_TIMEOUT_S`` seconds. Any event loop."""
        until = time.monotonic() + ROOM_TIMEOUT_S
        while not self.take(nbytes, owner):
            if nbytes > self.limit_of_owner_nbytes or time.monotonic() >= until:
                return False
            await asyncio.sleep(ROOM_RETRY_S)
        return True

    def give(self, nbytes: int, owner: str) -> None:
        """What was taken is free again."""
        with self._lock:
            self._used_nbytes -= nbytes
            self._used_by[owner] -= nbytes
            if not self._used_by[owner]:
                del self._used_by[owner]


def budgets_of(max_memory_nbytes: int | None) -> tuple[MemoryBudget | None, BufferBudget]:
    """The parts of the tables and of all else; None: tables have no limit. Errors: ``ConfigError``."""
    if max_memory_nbytes is None:
        return None, BufferBudget()
    buffers = BufferBudget(max_memory_nbytes // SHARE)
    return MemoryBudget(max_memory_nbytes - buffers.limit_nbytes), buffers
