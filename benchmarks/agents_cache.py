"""``DeviceCache``: the blocks in a scripted engine's memory, as vLLM's ``BlockPool`` keeps them. No threads, no I/O.

A block is empty, in use, or cached and free. What a request ends with goes to the end of the free ones, its last block
first, and the first free ones are evicted. A request takes all its blocks when it begins, those of its answer, too, so
none is preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class Admitted(NamedTuple):
    """``hit``: leading blocks that were cached. ``evicted``: blocks that made room."""

    hit: int
    evicted: list[int]


class DeviceCache:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._uses: dict[int, int] = {}  # of cached blocks, by requests
        self._free: OrderedDict[int, None] = OrderedDict()  # cached and unused, the next to be evicted first
        self._unnamed = 0  # taken and not cached

    @property
    def usage(self) -> float:
        return (len(self._uses) - len(self._free) + self._unnamed) / self.blocks

    def held(self) -> list[int]:
        return list(self._uses)

    def admit(self, prompt: Sequence[int], blocks: int) -> Admitted | None:
        """Take ``blocks`` for a request, among them the leading ones of ``prompt`` that are cached. None: no room."""
        uses, free = self._uses, self._free
        hit = sum(1 for _ in takewhile(uses.__contains__, prompt))
        empty = self.blocks - len(uses) - self._unnamed
        needed = blocks - hit
        if needed > empty + len(free) - sum(block in free for block in prompt[:hit]):
            return None
        for block in prompt[:hit]:
            uses[block] += 1
            free.pop(block, None)
        evicted = [free.popitem(last=False)[0] for _ in range(needed - empty)]
        for block in evicted:
            del uses[block]
        self._unnamed += needed
        return Admitted(hit, evicted)

    def fill(self, blocks: Sequence[int]) -> list[int]:
        """Taken blocks were computed or loaded: those of them that no request had cached meanwhile."""
        stored = [block for block in blocks if block not in self._uses]
        self._uses.update(dict.fromkeys(stored, 1))
        self._unnamed -= len(stored)
        return stored

    def release(self, named: Sequence[int], blocks: int) -> None:
        """A request of ``blocks`` ends, of which it had cached or found the ``named`` ones."""
        self._unnamed -= blocks - len(named)
        for block in reversed(named):
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None
