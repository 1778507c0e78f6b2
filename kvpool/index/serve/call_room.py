"""``CallRoom``: the large messages of one call, counted in the index's ``BufferBudget``. One event loop.

Not counted are small messages, whose number ``limiter`` bounds, a reply that is being made, and a request that is being
received: gRPC tells its size only when it is whole. What is received is bounded by the size of a request, by the number
of streams, and for calls with one request by ``late``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvpool.errors import KVPoolError
from kvpool.index.buffer_budget import BufferBudget
from kvpool.index.client.messages import MAX_REQUEST_NBYTES
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
        self._held_nbytes = 0
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._give(self._held_nbytes))

    def late(self) -> bool:
        """Whether there is room for the largest request while one does not arrive; once a call."""
        return self._take(self._budget.limit_of_request_nbytes(MAX_REQUEST_NBYTES))

    def arrived(self) -> None:
        """What ``late`` has taken is free again."""
        self._give(self._held_nbytes)

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
        if nbytes > SMALL_NBYTES and not self._take(nbytes):
            raise KVPoolError(f"there is no room for a reply of {nbytes} bytes now: {_ADVICE}")

    def give_reply(self, nbytes: int) -> None:
        """When it was sent, and only then: of a call that goes on."""
        if nbytes > SMALL_NBYTES:
            self._give(nbytes)

    def _take(self, nbytes: int) -> bool:
        taken = self._budget.take(nbytes, self._owner)
        if taken:
            self._held_nbytes += nbytes
        return taken

    def _give(self, nbytes: int) -> None:
        self._held_nbytes -= nbytes
        if nbytes:
            self._budget.give(nbytes, self._owner)
