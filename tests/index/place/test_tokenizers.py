"""A caller's long text, or one without blanks, keeps no other waiting, and stays within the memory."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import warnings
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool.errors import KVPoolError
from kvpool.index import Chat
from kvpool.index.fleet import Fleet
from kvpool.index.limits import TEXTS, Limits
from kvpool.index.place.placer import Placer
from kvpool.index.place.text_work import SHORT, LongText, TextWork, TooMuchText
from kvpool.index.place.token_cache import MAX_PIECE_CHARS
from kvpool.index.place.tokenizer import Tokenizer
from kvpool.index.place.tokenizers import THREADS, Tokenizers
from kvpool.index.prompt import Prompt
from tests.support.fleets import a_worker
from tests.support.placing import placer_of
from tests.support.tiny_tokenizer import write_tokenizer

WAIT_S = 60.0
LONG = "x" * (SHORT.chars + 1)
TWICE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TWICE)
        return Tokenizer.load("m", str(folder))


def test_other_threads_run_while_a_text_without_blanks_is_made_into_tokens(loaded: Tokenizer) -> None:
    beats, is_made = [], threading.Event()

    def beat() -> None:
        while not is_made.wait(0.001):
            beats.append(time.monotonic())

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        began_s = time.monotonic()
        tokens = loaded.of_text("x" * 400_000)
        ended_s = time.monotonic()
    finally:
        is_made.set()
        beating.join()
    assert len(tokens) > 1000
    assert sum(began_s < at_s < ended_s for at_s in beats) > 5


class Gated:
    """A token is a byte. ``goes_on``: until when a long text's are not made."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.begun = 0
        self.threads: set[str] = set()

    def of_text(self, text: str, work: TextWork) -> array[int]:
        with work.encoding(text):
            self.threads.add(threading.current_thread().name)
            if len(text) >= len(LONG):
                self.begun += 1
                assert self.goes_on.wait(WAIT_S)
            return array("I", list(text.encode()))


@asynccontextmanager
async def gated() -> AsyncIterator[tuple[Gated, Tokenizers]]:
    tokenizer = Gated()
    tokenizers = Tokenizers({"m": tokenizer})  # type: ignore[dict-item]
    try:
        yield tokenizer, tokenizers
    finally:
        tokenizer.goes_on.set()
        tokenizers.close()


@pytest.mark.anyio
async def test_long_texts_wait_for_each_other_and_short_ones_for_none() -> None:
    async with gated() as (tokenizer, tokenizers):
        long = [
            asyncio.ensure_future(tokenizers.in_tokens(Prompt("m", text=LONG, tenant=tenant), "m"))
            for tenant in ["a"] * 3 * THREADS + ["b"]
        ]
        while not tokenizer.begun:
            await asyncio.sleep(0.01)
        for _ in range(3):
            short = await asyncio.wait_for(tokenizers.in_tokens(Prompt("m", text="short"), "m"), WAIT_S)
            assert short.token_ids == array("I", list(b"short"))
        assert tokenizer.begun == 1, "in one thread"
        with pytest.raises(LongText):
            await tokenizers.placed(Prompt("m", text=LONG), "m")
        tokenizer.goes_on.set()
        assert {len(one.token_ids or ()) for one in await asyncio.gather(*long)} == {len(LONG)}
        assert len(tokenizer.threads - {name for name in tokenizer.threads if "-long-" in name}) > 0
        assert sum("-long-" in name for name in tokenizer.threads) == 1


@pytest.mark.anyio
async def test_a_text_that_comes_too_late_for_a_placement_is_not_begun() -> None:
    async with gated() as (tokenizer, tokenizers):
        with pytest.raises(LongText):
            await tokenizers.placed(Prompt("m", text="x" * (MAX_PIECE_CHARS + 1)), "m")
        assert not tokenizer.begun


def two_workers() -> Fleet:
    fleet = Fleet()
    for place, name in enumerate("ab"):
        fleet.add(a_worker(name, port=5000 + place, address=f"http://127.0.0.1:{7000 + place}"), "flag")
    return fleet


async def place(placer: Placer, text: str) -> Any:
    body = json.dumps({"model": "m", "prompt": text}).encode()
    return await placer.place("/v1/completions", {}, body, "default")


@pytest.mark.anyio
async def test_long_texts_are_placed_by_load_while_another_is_made_and_by_their_tokens_after() -> None:
    async with gated() as (tokenizer, tokenizers):
        fleet = two_workers()
        async with placer_of(fleet, tokenizers, timeout_s=WAIT_S) as (placer, _):
            first = asyncio.ensure_future(place(placer, LONG))
            while not tokenizer.begun:
                await asyncio.sleep(0.01)
            for _ in range(3 * THREADS):
                assert (await place(placer, LONG)).promptless == "late"
            assert (await place(placer, "short " * 3000)).prompt_blocks > 0
            tokenizer.goes_on.set()
            assert (await first).prompt_blocks == len(LONG) // 16
            while (
                next_one := await place(placer, LONG)
            ).promptless == "late":  # its tokens are checked meanwhile
                await asyncio.sleep(0.01)
            assert next_one.prompt_blocks == len(LONG) // 16


@pytest.mark.anyio
async def test_a_long_text_that_is_late_is_made_for_the_next_request() -> None:
    async with (
        gated() as (tokenizer, tokenizers),
        placer_of(two_workers(), tokenizers, timeout_s=0.5) as (placer, _),
    ):
        late = await place(placer, LONG)
        assert late.promptless == "late"
        assert late.targets
        tokenizer.goes_on.set()
        while tokenizers._long_under_way:
            await asyncio.sleep(0.01)
        assert tokenizer.begun


@pytest.mark.parametrize(("max_memory_nbytes", "promptless"), [(64 << 20, "busy"), (None, "too-large")])
@pytest.mark.anyio
async def test_a_chat_that_its_template_multiplies_is_refused_and_placed_by_load(
    loaded: Tokenizer, max_memory_nbytes: int | None, promptless: str
) -> None:
    """No worker's /render is asked: that would be the same work once more."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}] * 800,
        "chat_template_kwargs": {"eos_token": "e" * (1 << 19)},
    }
    limits = Limits(max_memory_nbytes)
    tokenizers = Tokenizers({"m": loaded}, limits)
    try:
        with pytest.raises(KVPoolError, match=r"no room|chat template makes"):
            await tokenizers.in_tokens(Prompt("m", chat=Chat.of_request(body)), "m")
        async with placer_of(two_workers(), tokenizers, timeout_s=WAIT_S) as (placer, _):
            placed = await placer.place("/v1/chat/completions", {}, json.dumps(body).encode(), "default")
            assert placed.promptless == promptless
            assert placed.targets
        assert limits._used_by[TEXTS] == limits.used_nbytes == 0
    finally:
        tokenizers.close()
    with pytest.raises(TooMuchText):
        loaded.of_chat(Chat.of_request(body), TextWork())


def test_a_chat_of_many_parts_is_long_before_they_are_looked_at(loaded: Tokenizer) -> None:
    calls = [{"type": "function", "function": {"name": "f"}}] * (SHORT.steps + 1)
    for message in (
        {"role": "user", "content": [""] * (SHORT.steps + 1)},
        {"role": "assistant", "tool_calls": calls},
    ):
        with pytest.raises(LongText):
            loaded.of_chat(Chat([message]), TextWork(SHORT))
