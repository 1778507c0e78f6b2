"""``SnapshotRoom``: the memory that snapshots take, of what ``--max-memory`` leaves. Any thread; nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpool.errors import KVPoolError
from kvpool.index.buffer_budget import INDEX, BufferBudget
from kvpool.index.snapshot import MAX_NBYTES, Snapshot, pack

# Of a block: 12 copied out, 8 sorted, 9 packed, then 8 as Python's bytes in the place of those sorted; 28 measured.
PACK_BLOCK_NBYTES = 32
# Of each byte that is read: 3 until there is a table of it, which takes up to 29 bytes for the 8 of a block.
READ_COPIES = 7


class SnapshotRoom:
    """``tables_nbytes``: what tables may take; None: there is no limit, of snapshots neither. ``budget``: of the rest.

    ``tables``: how many blocks they have now, and how many bytes they take.
    """

    def __init__(
        self,
        tables_nbytes: int | None = None,
        budget: BufferBudget | None = None,
        tables: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.tables_nbytes = tables_nbytes
        self._budget = budget or BufferBudget()
        self._tables = tables

    @property
    def max_read_nbytes(self) -> int:
        """How large a snapshot may be that is read at the start, where there is nothing else yet."""
        if self.tables_nbytes is None:
            return MAX_NBYTES
        return min(MAX_NBYTES, (self.tables_nbytes + self._budget.limit_nbytes) // READ_COPIES)

    @contextmanager
    def packed(self, take: Callable[[], Snapshot]) -> Iterator[list[bytes]]:
        """``take()``, packed, to be used within the block. Errors: ``KVPoolError`` when there is no room."""
        if self.tables_nbytes is None:
            yield pack(take())
            return
        blocks, nbytes = self._tables()
        spare_nbytes = max(0, self.tables_nbytes - nbytes)  # tables grow little meanwhile
        wanted_nbytes = PACK_BLOCK_NBYTES * blocks
        taken_nbytes = max(0, wanted_nbytes - spare_nbytes)
        if not self._budget.take(taken_nbytes, INDEX):
            raise KVPoolError(
                f"there is no room for a snapshot, which takes {wanted_nbytes} bytes beside the tables for a moment: "
                "raise --max-memory"
            )
        try:
            parts = pack(take())
            kept_nbytes = min(taken_nbytes, max(0, sum(map(len, parts)) - spare_nbytes))
            self._budget.give(taken_nbytes - kept_nbytes, INDEX)
            taken_nbytes = kept_nbytes
            yield parts
        finally:
            self._budget.give(taken_nbytes, INDEX)
