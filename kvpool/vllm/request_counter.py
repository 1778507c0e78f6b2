"""``RequestCounter``: how many requests have had a block, for the blocks that were seen last.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

MAX_BLOCKS = 1 << 18  # about 40 MB of the scheduler's process, when all are in use


class RequestCounter:
    """Counts by block hash and group. The block that was seen longest ago is forgotten beyond ``max_blocks``."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._counts: dict[tuple[bytes, int], int] = {}  # oldest first

    def add(self, block_hash: bytes, group: int) -> int:
        """Count one more request, and return how many there were with it."""
        key = (block_hash[-8:], group)  # a collision only stores a block a little early
        count = self._counts.pop(key, 0) + 1
        if len(self._counts) >= self._max_blocks:
            del self._counts[next(iter(self._counts))]
        self._counts[key] = count
        return count

    def count(self, block_hash: bytes, group: int) -> int:
        """How many requests there were."""
        return self._counts.get((block_hash[-8:], group), 0)
