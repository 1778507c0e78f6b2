"""``Placer`` with tokens that are made here, also where that takes too long."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool.index.fleet import Fleet
from kvpool.index.place import placer as placer_module
from kvpool.index.place.endpoints import Endpoints
from kvpool.index.place.placer import INLINE_NBYTES, Placer
from kvpool.index.place.renderer import Renderer
from kvpool.index.place.router import Router
from kvpool.index.place.tokenizers import Tokenizers
from kvpool.index.resolver import Resolver
from kvpool.key.hashing import BlockHasher
from tests.index.fleets import a_worker, say
from tests.index.wire import batch, stored

LONG = "word " * INLINE_NBYTES


class ByteTokenizer:
    """A token is a byte. ``goes_on``: until when texts are not made."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.threads: set[str] = set()

    def of_text(self, text: str) -> array[int]:
        self.threads.add(threading.current_thread().name)
        assert self.goes_on.wait(30)
        return array("I", list(text.encode()))


class Placing:
    def __init__(self, placer: Placer, router: Router, tokenizer: ByteTokenizer) -> None:
        self.placer, self.router, self.tokenizer = placer, router, tokenizer

    async def place(self, text: str) -> Any:
        body = json.dumps({"model": "m", "prompt": text}).encode()
        return await self.placer.place("/v1/completions", body)

    @property
    def reservations(self) -> int:
        return len(self.router._reservations)


@asynccontextmanager
async def placing(timeout_s: float = 20.0, models: str = "mm") -> AsyncIterator[Placing]:
    """Worker b holds LONG. ``models``: of the workers a and b."""
    fleet = Fleet()
    for place, (name, model) in enumerate(zip("ab", models, strict=True)):
        address = f"http://127.0.0.1:{7000 + place}"
        fleet.add(a_worker(name, port=5000 + 2 * place, address=address, model=model), "flag")
    say(fleet, "default/b", 0, 0, batch(stored(BlockHasher(16).hashes(list(LONG.encode())))))
    router, tokenizer = Router(fleet), ByteTokenizer()
    tokenizers = Tokenizers(dict.fromkeys(models, tokenizer))  # type: ignore[arg-type]
    renderer = Renderer()
    placer = Placer(fleet, router, tokenizers, renderer, Endpoints(fleet, Resolver()), timeout_s=timeout_s)
    try:
        yield Placing(placer, router, tokenizer)
    finally:
        tokenizer.goes_on.set()
        await renderer.close()
        placer.close()
        tokenizers.close()


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
