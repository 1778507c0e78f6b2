"""Threads that tenants share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvpool.index.serve.tenant_threads import TenantThreads

WAIT_S = 60


@pytest.fixture
def threads() -> Iterator[TenantThreads]:
    one = TenantThreads("test", 3, 2)
    yield one
    one.close()


def test_a_tenant_takes_no_more_than_its_part(threads: TenantThreads) -> None:
    ends, begun = threading.Event(), threading.Semaphore(0)

    def work() -> str:
        begun.release()
        assert ends.wait(WAIT_S)
        return "done"

    async def run() -> None:
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(threads.run("a", work)) for _ in range(50)]
        for _ in range(2):
            assert await loop.run_in_executor(None, begun.acquire, True, WAIT_S)
        for tenant in ("b", "c"):
            assert await asyncio.wait_for(threads.run(tenant, lambda: "free"), WAIT_S) == "free"
        assert not begun.acquire(blocking=False)
        assert not any(task.done() for task in asked)
        ends.set()
        assert await asyncio.wait_for(asyncio.gather(*asked), WAIT_S) == ["done"] * 50

    asyncio.run(run())
    assert not threads._parts, "nothing is kept of tenants that ask nothing"


def test_a_caller_that_gives_up_frees_no_thread(threads: TenantThreads) -> None:
    ends, begun = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        assert ends.wait(WAIT_S)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(threads.run("a", work)) for _ in range(3)]
        for _ in range(2):
            assert await loop.run_in_executor(None, begun.acquire, True, WAIT_S)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        last = loop.create_task(threads.run("a", begun.release))
        assert await asyncio.wait_for(threads.run("b", lambda: "b"), WAIT_S) == "b"
        assert not last.done()
        ends.set()
        await asyncio.wait_for(last, WAIT_S)

    asyncio.run(run())
    assert not threads._parts


def test_what_fails_says_so_and_frees_its_thread(threads: TenantThreads) -> None:
    def work() -> None:
        raise ZeroDivisionError

    async def run() -> None:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(threads.run("a", work), WAIT_S)

    asyncio.run(run())
    assert not threads._parts
