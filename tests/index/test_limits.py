"""What owners share: threads, and memory."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from kvpool.index.limits import Limits, Work
from tests.support.deadlines import eventually

WAIT_S = 60


@pytest.fixture
def shared() -> Iterator[Work]:
    one = Work(3, 2, "test")
    yield one
    one.close()


def is_forgotten(shared: Work) -> bool:
    def is_empty() -> bool:
        gc.collect()  # of tracebacks
        return not shared._owners

    return eventually(is_empty)  # a thread lets go of its work when it has told the loop


def test_a_tenant_takes_no_more_than_its_part(shared: Work) -> None:
    ends, begun = threading.Event(), threading.Semaphore(0)

    def work() -> str:
        begun.release()
        assert ends.wait(WAIT_S)
        return "done"

    async def run() -> None:
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(shared.run("a", work)) for _ in range(50)]
        for _ in range(2):
            assert await loop.run_in_executor(None, begun.acquire, True, WAIT_S)
        for tenant in ("b", "c"):
            assert await asyncio.wait_for(shared.run(tenant, lambda: "free"), WAIT_S) == "free"
        assert not begun.acquire(blocking=False)
        assert not any(task.done() for task in asked)
        ends.set()
        assert await asyncio.wait_for(asyncio.gather(*asked), WAIT_S) == ["done"] * 50

    asyncio.run(run())
    assert is_forgotten(shared), "nothing is kept of tenants without work"


def test_a_caller_that_gives_up_frees_no_thread(shared: Work) -> None:
    ends, begun = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        assert ends.wait(WAIT_S)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(shared.run("a", work)) for _ in range(3)]
        for _ in range(2):
            assert await loop.run_in_executor(None, begun.acquire, True, WAIT_S)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        last = loop.create_task(shared.run("a", begun.release))
        assert await asyncio.wait_for(shared.run("b", lambda: "b"), WAIT_S) == "b"
        assert not last.done()
        ends.set()
        await asyncio.wait_for(last, WAIT_S)

    asyncio.run(run())
    assert is_forgotten(shared)


def test_work_that_outlives_its_loop_ends_without_a_word(
    shared: Work, caplog: pytest.LogCaptureFixture
) -> None:
    ends, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert ends.wait(WAIT_S)

    async def run() -> None:
        task = asyncio.create_task(shared.run("a", work))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        task.cancel()

    asyncio.run(run())
    ends.set()
    shared.close()
    assert not caplog.records
    assert is_forgotten(shared)


def test_what_fails_says_so_and_frees_its_thread(shared: Work) -> None:
    def work() -> None:
        raise ZeroDivisionError

    async def run() -> None:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(shared.run("a", work), WAIT_S)

    asyncio.run(run())
    assert is_forgotten(shared)


def test_optional_bytes_leave_half_of_the_room() -> None:
    limits = Limits(4000)  # a quarter is for what is not a table
    assert limits.take(250, "a", optional=True)
    assert not limits.take(1, "a", optional=True)
    assert limits.take(250, "a")
    assert not limits.take(1, "a")
    assert not limits.take(1, "b", optional=True), "half of all is taken"
    assert limits.take(500, "b")
