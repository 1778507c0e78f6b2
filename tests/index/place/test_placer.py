"""``Placer`` with tokens that are made here, also where that takes too long."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvpool.index.place import placer as placer_module
from tests.support.placing import LONG, placing


@pytest.mark.parametrize(("text", "in_thread"), [(LONG, True), (LONG[:64], False)])
def test_a_prompt_goes_to_its_holder(text: str, in_thread: bool) -> None:
    async def ask() -> None:
        async with placing() as there:
            placement = await there.place(text)
            assert (placement.reason, placement.targets[0].worker) == ("prefix", "b")
            assert placement.targets[0].matched_blocks == placement.prompt_blocks == len(text) // 16
            assert there.reservations == 1
            there.placer.release(placement)
            assert there.reservations == 0
            assert (there.tokenizer.threads == {threading.current_thread().name}) is not in_thread

    asyncio.run(ask())


def test_tokens_that_come_too_late_cost_no_request_and_reserve_nothing() -> None:
    async def ask() -> None:
        async with placing(timeout_s=0.2) as there:
            there.tokenizer.goes_on.clear()
            began_s = time.monotonic()
            placement = await there.place(LONG)
            assert time.monotonic() - began_s < 5, "0.2 s, and what a busy machine takes"
            assert (placement.reason, len(placement.targets)) == ("no-tokens", 2)
            assert placement.detail == "its tokens were not made within 0.2 s", "and no worker is asked"
            assert there.reservations == 1, "of what was placed"
            there.tokenizer.goes_on.set()
            while there.placer._under_way:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            assert there.reservations == 1, "the route that came late is given back"

    asyncio.run(ask())


def test_a_request_that_is_given_up_reserves_nothing() -> None:
    async def ask() -> None:
        async with placing() as there:
            there.tokenizer.goes_on.clear()
            asked = asyncio.create_task(there.place(LONG))
            await asyncio.sleep(0.05)
            assert there.placer._under_way == 1
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            there.tokenizer.goes_on.set()
            while there.placer._under_way:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            assert there.reservations == 0

    asyncio.run(ask())


def test_bodies_that_wait_to_be_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer_module, "MAX_UNDER_WAY", 4)

    async def ask() -> None:
        async with placing() as there:
            there.tokenizer.goes_on.clear()
            asked = [asyncio.create_task(there.place(LONG)) for _ in range(6)]
            while sum(task.done() for task in asked) < 2:
                await asyncio.sleep(0.01)
            done = [task for task in asked if task.done()]
            assert {task.result().detail for task in done} == {"4 other bodies are being read"}
            assert len(done) == 2
            there.tokenizer.goes_on.set()
            assert sorted([(await task).reason for task in asked]) == ["no-tokens"] * 2 + ["prefix"] * 4

    asyncio.run(ask())
