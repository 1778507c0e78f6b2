"""Memory: where the bytes of items lie while a store moves them.

Threads: those of the mover's owner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvpool.transfer.job import Item, Part
from kvpool.transfer.lane import DONE, Event

MAX_PARTS = 8  # of host memory under way at a time


class Memory(Protocol[Item]):
    """Where the bytes of items lie while the store moves them: each has a slot then."""

    part_items: int  # most that a part has
    patience_s: float  # how long after its deadline a batch is waited for; its slots stay taken until it ends

    def room(self, parts: int) -> int:
        """How many items may be started, with ``parts`` under way."""
        ...

    def acquire(self, items: Sequence[Item]) -> list[Any]:
        """A slot for each item."""
        ...

    def release(self, slots: list[Any]) -> None:
        """Give slots back that neither the store nor a copy touches any more."""
        ...

    def views(self, items: Sequence[Item], slots: Sequence[Any]) -> list[memoryview]:
        """What the store reads or writes."""
        ...

    def nbytes(self, item: Item) -> int:
        """Bytes of its payload."""
        ...

    def mark(self) -> Event:
        """Ready when what loads write may be written."""
        ...

    def scatter(self, parts: Sequence[Part[Item]]) -> Event:
        """Copy loaded slots on to where items belong; ready when that is done."""
        ...

    def hold_engine(self) -> None:
        """Have what the engine computes from now on come after copies under way."""
        ...


class Record(NamedTuple):
    """A key, and the caller's memory for its payload."""

    key: str
    view: memoryview


class HostMemory:
    """Memory of the caller, which is moved as it lies. It is the caller's again when its job is reported."""

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
