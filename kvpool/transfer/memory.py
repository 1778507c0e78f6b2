"""``Memory`` of items while a store moves them: the caller's own, or staging slots.

Staging is a fixed number of equal slots of host memory between the KV cache and the store. I/O threads and an
accelerator's copies access slots while the engine continues. A slot is reused only after the last access, so
a late byte never lands in another request's KV cache.

Threads: the mover's owner acquires and releases; I/O threads touch the bytes of slots in use.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kvpool.errors import ConfigError
from kvpool.store.file_records import FILE_BLOCK
from kvpool.text import format_nbytes
from kvpool.transfer.device import DONE, Event
from kvpool.transfer.job import Item, Part

MAX_PARTS = 8  # in flight at a time, of host memory


class Memory(Protocol[Item]):
    """Memory of items while the store moves them; each item has a slot."""

    part_items: int  # most items per part
    patience_s: float  # grace of a batch after its deadline; its slots stay taken until it ends

    def room(self, parts: int) -> int:
        """How many items may start, with ``parts`` in flight."""
        ...

    def acquire(self, items: Sequence[Item]) -> list[Any]: ...

    def release(self, slots: list[Any]) -> None:
        """Return slots that neither the store nor a copy touches."""
        ...

    def views(self, items: Sequence[Item], slots: Sequence[Any]) -> list[memoryview]: ...

    def nbytes(self, item: Item) -> int: ...

    def mark(self) -> Event:
        """Ready when loads may write their blocks."""
        ...

    def scatter(self, parts: Sequence[Part[Item]]) -> Event:
        """Copy loaded slots to their items' places; returns the event of its end."""
        ...

    def hold_engine(self) -> None:
        """Order the engine's further work after copies in flight."""
        ...


class Record(NamedTuple):
    key: str
    view: memoryview


class HostMemory:
    """The caller's memory, moved in place; it returns to the caller when its job is reported."""

    patience_s = math.inf

    def __init__(self, part_items: int) -> None:
        self.part_items = part_items

    def room(self, parts: int) -> int:
        return (MAX_PARTS - parts) * self.part_items

    def acquire(self, items: Sequence[Record]) -> list[Any]:
        return [item.view for item in items]

    def release(self, slots: list[Any]) -> None: ...

    def views(self, items: Sequence[Record], slots: Sequence[Any]) -> list[memoryview]:
        return list(slots)

    def nbytes(self, item: Record) -> int:
        return item.view.nbytes

    def mark(self) -> Event:
        return DONE

    def scatter(self, parts: Sequence[Part[Record]]) -> Event:
        return DONE

    def hold_engine(self) -> None: ...


# Default staging memory: two steps, so that the engine fills one while the pool takes the other. At most 2
# GiB: a link of 100 Gbit/s takes that in 0.17 s, and 8 ranks pin 16 GiB of a host; the excess waits in the
# engine's own memory. At least 256 MiB, for loads.
STAGED_STEPS = 2
MIN_STAGING_NBYTES = 256 << 20
MAX_STAGING_NBYTES = 2 << 30
LOAD_RESERVE = 0.25  # the share of slots reserved for loads
# Bytes. Two I/O threads share no cache line; a disk moves whole blocks from and to such addresses.
SLOT_ALIGNMENT = 64
DISK_ALIGNMENT = 512


def default_nbytes(step_records: int, slot_nbytes: int) -> int:
    """Default staging of an engine that computes at most ``step_records`` records a step."""
    wanted = int(STAGED_STEPS * step_records * slot_nbytes / (1 - LOAD_RESERVE))
    return min(max(wanted, MIN_STAGING_NBYTES), MAX_STAGING_NBYTES)


def slot_size(slot_nbytes: int) -> int:
    """Bytes of an aligned slot."""
    alignment = SLOT_ALIGNMENT if slot_nbytes < FILE_BLOCK else DISK_ALIGNMENT
    return -(-slot_nbytes // alignment) * alignment


class Staging:
    """Equal slots in one allocation, ``tensor``. Errors: ``ConfigError`` when the host cannot pin them."""

    def __init__(self, slot_nbytes: int, slots: int, pinned: bool = False) -> None:
        assert slot_nbytes > 0
        assert slots > 0
        self.slot_nbytes = slot_size(slot_nbytes)
        self.slots = slots
        nbytes = slots * self.slot_nbytes
        try:
            memory = torch.empty(nbytes + DISK_ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            raise ConfigError(
                f"this host has no {format_nbytes(nbytes)} of {'pinned ' if pinned else ''}memory for staging; "
                "set a lower staging_nbytes"
            ) from error
        self.tensor = memory[-memory.data_ptr() % DISK_ALIGNMENT :][:nbytes]
        self._bytes = memoryview(self.tensor.numpy().data).cast("B")
        self._free = list(range(slots))  # a heap: neighbouring slots are copied as one
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, count: int) -> list[int]:
        """Take the ``count`` lowest free slots, in order."""
        assert 0 <= count <= len(self._free), f"{count} slots wanted, {len(self._free)} free"
        slots = [heapq.heappop(self._free) for _ in range(count)]
        self._taken.update(slots)
        return slots

    def release(self, slots: list[int]) -> None:
        """Return slots; the caller guarantees that neither I/O nor a copy touches them."""
        for slot in slots:
            assert slot in self._taken, "a slot was released twice"
            self._taken.remove(slot)
            heapq.heappush(self._free, slot)

    def view(self, slot: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` bytes of a slot, writable."""
        assert 0 < nbytes <= self.slot_nbytes
        start = slot * self.slot_nbytes
        return self._bytes[start : start + nbytes]
