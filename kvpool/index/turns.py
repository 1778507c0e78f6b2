"""``Turns``: how many may do something at a time, in all and of one owner. One event loop."""

from __future__ import annotations

from asyncio import Semaphore
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class Turns:
    """``total`` at a time, ``of_owner`` of them of one owner (a tenant or a host); the others wait in line.

    Only those within their owner's part wait for the whole, so the line before an owner is no longer than the parts
    of the others.
    """

    def __init__(self, total: int, of_owner: int) -> None:
        self._all = Semaphore(total)
        self._of_owner = of_owner
        # Of owners that have a turn or wait for one.
        self._owners: WeakValueDictionary[str, Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def take(self, owner: str) -> AsyncIterator[None]:
        """One of the owner's, for as long as it is open."""
        mine = self._owners.setdefault(owner, Semaphore(self._of_owner))
        async with mine, self._all:
            yield
