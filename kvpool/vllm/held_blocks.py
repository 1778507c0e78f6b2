"""``HeldBlocks``: references to blocks of the engine's memory, so that they keep their bytes until they are copied.

The engine may free a block in the very step that stores it: when its request ends, is preempted, or its window moves.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool

from kvpool.vllm import internals

MAX_HELD_S = 1.0  # how long the engine waits, or steps, for held blocks; a copy takes milliseconds


class HeldBlocks:
    """Counts the references that we add to blocks of one engine."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._references: dict[int, int] = {}  # by block id: ours
        self._waited_since: float | None = None  # the engine waits for one of them
        self._stepped_since: float | None = None  # the engine steps for them alone

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def pool(self) -> BlockPool:
        """The engine's memory."""
        assert self._pool is not None, "vLLM binds its block pool before the first step"
        return self._pool

    def hold(self, block_ids: Sequence[int]) -> None:
        internals.hold(self.pool, block_ids)
        self._stepped_since = None
        for block_id in block_ids:
            self._references[block_id] = self._references.get(block_id, 0) + 1

    def release(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
        if block_ids:
            self._waited_since = self._stepped_since = None
            internals.release(self.pool, block_ids)

    def frees_soon(self) -> bool:
        """Whether some block has no other holder, so comes back when it is copied.

        The engine then waits instead of preempting a request; after ``MAX_HELD_S`` without one this is false.
        """
        if not any(internals.references(self.pool, one) == ours for one, ours in self._references.items()):
            return False
        now = time.monotonic()
        if self._waited_since is None:
            self._waited_since = now
        return now - self._waited_since < MAX_HELD_S

    def wants_steps(self) -> bool:
        """Whether an engine without requests should step on for them: their copies may be over, and only a step tells.

        While one is held, vLLM does not reset its prefix cache. After ``MAX_HELD_S`` without an end this is false.
        """
        if not self._references:
            return False
        now = time.monotonic()
        if self._stepped_since is None:
            self._stepped_since = now
        return now - self._stepped_since < MAX_HELD_S
