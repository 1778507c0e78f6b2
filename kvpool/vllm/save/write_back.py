"""``WriteBack``: records that are stored when their blocks are next to be evicted (``store_policy``).

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from kvpool import metrics
from kvpool.metrics import Counters
from kvpool.vllm.engine import internals
from kvpool.vllm.plan import PoolMetadata
from kvpool.vllm.save.store_queue import StoreQueue, Wanted


class WriteBack:
    """``blocks_ahead``: that the engine may evict in its next steps."""

    def __init__(self, queue: StoreQueue, *, blocks_ahead: int, counters: Counters) -> None:
        self._queue, self._blocks_ahead, self._counters = queue, blocks_ahead, counters
        self._kept: dict[int, Wanted] = {}  # by block id, so bounded by the engine

    def keep(self, wanted: Wanted) -> None:
        (block_id,) = wanted.block.block_ids  # by the settings
        earlier = self._kept.pop(block_id, None)
        if earlier is not None and earlier.block != wanted.block:
            self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "evicted")
        self._kept[block_id] = wanted

    def plan(self, step: PoolMetadata) -> None:
        """Store the blocks that the engine may evict; they are stable during this step."""
        if not self._kept:
            return
        due = []
        for block_id, key in internals.next_evicted(self._queue.held.pool, self._blocks_ahead):
            if (wanted := self._kept.pop(block_id, None)) is None:
                continue
            if key == wanted.cache_key:
                due.append(wanted._replace(contents=(key,)))
            else:
                self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "evicted")
        for wanted in sorted(due, key=lambda each: each.priority):
            self._queue.offer(step, wanted)

    def clear(self) -> None:
        self._kept.clear()
