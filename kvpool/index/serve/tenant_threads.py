"""``TenantThreads``: threads for what would hold up an event loop, of which no tenant takes more than its part.

What a tenant wants done beyond its part waits, in order. So each tenant is served after at most one part of every
other. One event loop; the work runs in any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Value = TypeVar("Value")


class TenantThreads:
    """``threads``: in all; ``of_tenant``: that work for one tenant at a time. ``close`` ends them."""

    def __init__(self, name: str, threads: int, of_tenant: int) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._of_tenant = of_tenant
        self._parts: dict[str, _Part] = {}  # of tenants that something is done for

    async def run(self, tenant: str, work: Callable[[], Value]) -> Value:
        """What ``work`` returns. A thread is taken until it has, also when the caller is cancelled."""
        loop = asyncio.get_running_loop()
        part = self._parts.setdefault(tenant, _Part(self._of_tenant))
        part.users += 1
        try:
            await part.free.acquire()
        except BaseException:
            self._leave(tenant, part)
            raise

        def done() -> None:
            part.free.release()
            self._leave(tenant, part)

        try:
            job = self._threads.submit(work)
        except BaseException:
            done()
            raise
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(done))
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Blocking, for as long as what is being done takes."""
        self._threads.shutdown()

    def _leave(self, tenant: str, part: _Part) -> None:
        part.users -= 1
        if not part.users:
            del self._parts[tenant]


class _Part:
    def __init__(self, of_tenant: int) -> None:
        self.free = asyncio.Semaphore(of_tenant)
        self.users = 0  # that wait or are served
