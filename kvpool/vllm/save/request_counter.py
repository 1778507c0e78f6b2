"""``RequestCounter``: how many requests have had a block.

Threads: one at a time.
"""

from __future__ import annotations

MAX_BLOCKS = 1 << 18  # about 40 MB of the scheduler's process, when full


class RequestCounter:
    """Counts requests by block hash and group. Beyond ``max_blocks`` the least recently seen is forgotten."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._counts: dict[tuple[bytes, int], int] = {}  # oldest first

    def add(self, block_hash: bytes, group: int) -> int:
        """Count one more request; returns the total."""
        key = (block_hash[-8:], group)  # a collision only stores a block a little early
        count = self._counts.pop(key, 0) + 1
        if len(self._counts) >= self._max_blocks:
            del self._counts[next(iter(self._counts))]
        self._counts[key] = count
        return count

    def count(self, block_hash: bytes, group: int) -> int:
        return self._counts.get((block_hash[-8:], group), 0)
