"""``SnapshotRoom``: the memory that snapshots take, counted in the index's ``BufferBudget``. Any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpool.errors import KVPoolError
from kvpool.index.buffer_budget import INDEX, BufferBudget
from kvpool.index.snapshot import MAX_NBYTES, Snapshot, pack

# Of a block: 12 copied out, 8 sorted, 9 packed, and again 8 as Python's bytes, when the sorted ones are free again.
PACK_BLOCK_NBYTES = 32
READ_COPIES = 3  # of the bytes of a snapshot: they, and a half more of each block read


class SnapshotRoom:
    """``budget``: None: without a limit. ``blocks``: how many a snapshot of now would have."""

    def __init__(self, budget: BufferBudget | None = None, blocks: Callable[[], int] = lambda: 0) -> None:
        self._budget, self._blocks = budget, blocks

    @property
    def max_read_nbytes(self) -> int:
        """How large a snapshot may be that is read at the start, where nothing else has taken room yet."""
        return (
            MAX_NBYTES if self._budget is None else min(MAX_NBYTES, self._budget.limit_nbytes // READ_COPIES)
        )

    @contextmanager
    def packed(self, take: Callable[[], Snapshot]) -> Iterator[list[bytes]]:
        """``take()``, packed; it is to be used within the block. Errors: ``KVPoolError`` when there is no room."""
        if self._budget is None:
            yield pack(take())
            return
        nbytes = PACK_BLOCK_NBYTES * self._blocks()
        if not self._budget.take(nbytes, INDEX):
            raise KVPoolError(
                f"there is no room for a snapshot, which takes {nbytes} bytes for a moment: raise --max-memory, a "
                "quarter of which is for this and for what is on its way"
            )
        try:
            parts = pack(take())
            packed_nbytes = min(nbytes, sum(map(len, parts)))
            self._budget.give(nbytes - packed_nbytes, INDEX)
            nbytes = packed_nbytes
            yield parts
        finally:
            self._budget.give(nbytes, INDEX)
