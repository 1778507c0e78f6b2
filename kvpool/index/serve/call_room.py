"""``CallRoom``: the large messages of one call, counted in the index's ``BufferBudget``. One event loop.

Not counted are small messages, whose number ``limiter`` bounds, and a request that is still being received: gRPC tells
its size only when it is whole. Those are bounded by the number of calls and streams, and by the size of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvpool.errors import KVPoolError
from kvpool.index.buffer_budget import BufferBudget
from kvpool.index.serve.auth import Permissions

SMALL_NBYTES = 128 << 10  # a request of that size is answered at once, in the event loop
COPIES = 2  # of a request, while it is answered

_ADVICE = "send it again later, ask for less, or raise --max-memory"


def owner_of(caller: Permissions, host: str) -> str:
    """Whose part of the memory the messages of a caller take: callers of all tenants share that of their host."""
    return host if caller.tenants is None else ",".join(sorted(caller.tenants))


class CallRoom:
    """``owner``: whose part it takes. Make it in the task of the call: when that has ended, all is given back.

    gRPC keeps a reply until its caller reads or the connection ends, and the task of the call lasts as long.
    """

    def __init__(self, budget: BufferBudget, owner: str) -> None:
        self._budget, self._owner = budget, owner
        self._replies_nbytes = 0
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._give(self._replies_nbytes))

    @asynccontextmanager
    async def request(self, nbytes: int) -> AsyncIterator[None]:
        """For as long as a large request is answered. Waits ``ROOM_TIMEOUT_S`` at most. Errors: ``KVPoolError``."""
        if not await self._budget.acquire(COPIES * nbytes, self._owner):
            raise KVPoolError(f"there is no room for a request of {nbytes} bytes now: {_ADVICE}")
        try:
            yield
        finally:
            self._budget.give(COPIES * nbytes, self._owner)

    def take_reply(self, nbytes: int) -> None:
        """Before it is sent. Errors: ``KVPoolError``, at once: a reply that waits takes memory, too."""
        if nbytes > SMALL_NBYTES:
            if not self._budget.take(nbytes, self._owner):
                raise KVPoolError(f"there is no room for a reply of {nbytes} bytes now: {_ADVICE}")
            self._replies_nbytes += nbytes

    def give_reply(self, nbytes: int) -> None:
        """When it was sent, and only then: of a call that goes on."""
        if nbytes > SMALL_NBYTES:
            self._give(nbytes)

    def _give(self, nbytes: int) -> None:
        self._replies_nbytes -= nbytes
        if nbytes:
            self._budget.give(nbytes, self._owner)
