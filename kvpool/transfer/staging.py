"""Staging: a fixed number of equal slots of host memory between the KV cache and the store.

Native I/O threads read and write slots while the engine goes on; a slot is handed out again only when
nobody can touch it any more, so a late byte can never land in somebody's KV cache.

Threads: one (the worker's model thread) acquires and releases; I/O threads touch the bytes of slots in use.
"""

from __future__ import annotations

import torch

SLOT_ALIGNMENT = 64  # bytes; one cache line, so that two I/O threads never share one


class Staging:
    """``slots`` slots of at least ``slot_nbytes`` bytes each, in one allocation."""

    def __init__(self, slot_nbytes: int, slots: int) -> None:
        assert slot_nbytes > 0
        assert slots > 0
        self.slot_nbytes = -(-slot_nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.slots = slots
        self.tensor = torch.empty((slots, self.slot_nbytes), dtype=torch.uint8)
        self._bytes = memoryview(self.tensor.numpy().data).cast("B")
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that can be acquired now."""
        return len(self._free)

    def acquire(self, count: int) -> list[int]:
        """Take ``count`` slots, which must be free."""
        assert 0 <= count <= len(self._free), f"{count} slots wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def release(self, slots: list[int]) -> None:
        """Give slots back; the caller vouches that no I/O touches them any more."""
        self._free.extend(slots)
        assert len(self._free) <= self.slots, "a slot was released twice"

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` bytes of a slot, writable."""
        assert 0 < nbytes <= self.slot_nbytes
        start = slot * self.slot_nbytes
        return self._bytes[start : start + nbytes]
