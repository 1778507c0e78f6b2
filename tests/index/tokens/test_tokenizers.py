"""A caller's long text, or one without blanks, keeps no other waiting, and stays within the memory."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import warnings
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from kvpool.errors import KVPoolError
from kvpool.index import Chat
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front.placer import Placer
from kvpool.index.limits import TEXTS, Limits
from kvpool.index.prompt import Prompt
from kvpool.index.tokens import tokenizers as tokenizers_module
from kvpool.index.tokens.text_work import SHORT, LongText, TextWork, TooMuchText
from kvpool.index.tokens.token_cache import MAX_PIECE_CHARS
from kvpool.index.tokens.tokenizer import Tokenizer
from kvpool.index.tokens.tokenizers import THREADS, Tokenizers
from tests.support.deadlines import until
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
        self.begun = self.made = 0  # long texts, and characters of them
        self.threads: set[str] = set()

    def of_text(self, text: str, work: TextWork) -> array[int]:
        with work.encoding(text):
            self.threads.add(threading.current_thread().name)
            if len(text) >= len(LONG):
                self.begun += 1
                assert self.goes_on.wait(WAIT_S)
                self.made += len(text)
            return array("I", list(text.encode()))

    def of_chat(self, chat: Chat, work: TextWork) -> array[int]:
        return self.of_text(chat.messages[0]["content"], work)


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
        assert tokenizer.begun == 1, "one at a time"
        tokenizer.goes_on.set()
        assert {len(one.token_ids or ()) for one in await asyncio.gather(*long)} == {len(LONG)}
        assert {name.rpartition("_")[0] for name in tokenizer.threads} == {"kvpool-text", "kvpool-long-text"}


@pytest.mark.anyio
async def test_a_text_that_comes_too_late_for_a_placement_is_not_begun() -> None:
    async with gated() as (tokenizer, tokenizers):
        with pytest.raises(LongText):
            await tokenizers.placed(Prompt("m", text="x" * (MAX_PIECE_CHARS + 1)), "m", 0)
        assert not tokenizer.begun


def two_workers() -> Fleet:
    fleet = Fleet()
    for place, name in enumerate("ab"):
        fleet.add(a_worker(name, port=5000 + place, address=f"http://127.0.0.1:{7000 + place}"), "flag")
    return fleet


async def place(placer: Placer, text: str) -> Any:
    body = json.dumps({"model": "m", "prompt": text}).encode()
    return await placer.place("/v1/completions", {}, body, "default")


async def place_chat(placer: Placer, text: str) -> Any:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    return await placer.place("/v1/chat/completions", {}, body, "default")


@pytest.mark.anyio
async def test_long_texts_that_come_at_once_are_all_placed_by_their_tokens() -> None:
    async with (
        gated() as (tokenizer, tokenizers),
        placer_of(two_workers(), tokenizers, timeout_s=WAIT_S) as (placer, _),
    ):
        placed = [asyncio.ensure_future(place(placer, f"{one:02}" + LONG)) for one in range(24)]
        await until(lambda: tokenizer.begun)
        assert (await place(placer, "short " * 3000)).prompt_blocks > 0
        assert tokenizer.begun == 1
        tokenizer.goes_on.set()
        for one in await asyncio.gather(*placed):
            assert one.prompt_blocks == len(LONG + "00") // 16


@pytest.mark.anyio
async def test_as_many_long_texts_as_there_is_room_for_wait_and_the_next_is_placed_by_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizers_module, "PLACED_OF_TENANT", 2)
    async with (
        gated() as (tokenizer, tokenizers),
        placer_of(two_workers(), tokenizers, timeout_s=WAIT_S) as (placer, _),
    ):
        placed = [asyncio.ensure_future(place(placer, LONG)) for _ in range(2)]
        await until(lambda: len(tokenizers._placed) == 2)
        assert (await place(placer, LONG)).promptless == "busy"
        tokenizer.goes_on.set()
        assert [one.prompt_blocks for one in await asyncio.gather(*placed)] == [len(LONG) // 16] * 2
        assert (await place(placer, LONG)).prompt_blocks == len(LONG) // 16
        assert not tokenizers._placed


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.anyio
async def test_a_shorter_text_takes_the_place_of_the_longest(
    monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    """Else callers of huge texts, as many as there are places, keep all others of their tenant from theirs."""
    monkeypatch.setattr(tokenizers_module, "PLACED_OF_TENANT", 3)
    async with (
        gated() as (tokenizer, tokenizers),
        placer_of(two_workers(), tokenizers, timeout_s=WAIT_S) as (placer, _),
    ):
        huge_place = place_chat if is_chat else place
        first = asyncio.ensure_future(place(placer, LONG))
        await until(lambda: tokenizer.begun)
        huge = [asyncio.ensure_future(huge_place(placer, LONG * times)) for times in (8, 9)]
        await until(lambda: len(tokenizers._turns) == 3)
        shorter = [asyncio.ensure_future(place(placer, LONG + "x" * one)) for one in range(2)]
        for one in huge:
            assert (await asyncio.wait_for(one, WAIT_S)).promptless == "late"
        await until(lambda: len(tokenizers._turns) == 3)
        assert (await place(placer, LONG * 2)).promptless == "busy"
        tokenizer.goes_on.set()
        for one in (first, *shorter):
            assert (await one).prompt_blocks == len(LONG) // 16
        await until(lambda: not len(tokenizers._turns))
        assert not tokenizers._placed


@pytest.mark.anyio
async def test_lookups_of_long_texts_take_no_place_of_a_placement() -> None:
    async with (
        gated() as (tokenizer, tokenizers),
        placer_of(two_workers(), tokenizers, timeout_s=WAIT_S) as (placer, _),
    ):
        lookups = [
            asyncio.ensure_future(tokenizers.in_tokens(Prompt("m", text=LONG * 2), "m"))
            for _ in range(2 * tokenizers_module.LONG)
        ]
        await until(lambda: len(tokenizers._turns) == tokenizers_module.LONG_OF_TENANT)
        placed = asyncio.ensure_future(place(placer, LONG))
        await until(lambda: len(tokenizers._turns) == tokenizers_module.LONG_OF_TENANT + 1)
        tokenizer.goes_on.set()
        assert (await placed).prompt_blocks == len(LONG) // 16
        await asyncio.gather(*lookups)


@pytest.mark.anyio
async def test_a_long_text_that_is_late_is_made_for_the_next_request() -> None:
    async with (
        gated() as (tokenizer, tokenizers),
        placer_of(two_workers(), tokenizers, timeout_s=5) as (placer, _),
    ):
        late = await place(placer, LONG)
        assert late.promptless == "late"
        assert late.targets
        tokenizer.goes_on.set()
        await until(lambda: tokenizer.made >= len(LONG))  # a check makes it, too


@contextmanager
def held_pieces(
    loaded: Tokenizer,
) -> Iterator[tuple[Tokenizers, list[str], threading.Event, threading.Event]]:
    """With the pieces of long texts as they are made, whether one has begun, and what lets them go on."""
    pieces: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()
    plain = loaded._cache._encode

    def encode(text: str) -> list[int]:
        if threading.current_thread().name.startswith("kvpool-long"):
            pieces.append(text)
            begun.set()
            assert goes_on.wait(WAIT_S)
        return plain(text)

    loaded._cache._encode = encode
    tokenizers = Tokenizers({"m": loaded})
    try:
        yield tokenizers, pieces, begun, goes_on
    finally:
        goes_on.set()
        tokenizers.close()
        loaded._cache._encode = plain


@pytest.mark.anyio
async def test_a_huge_text_that_is_late_leaves_its_place_to_others_and_what_was_made_of_it_stays(
    loaded: Tokenizer,
) -> None:
    """Nobody has to wait until the whole of it is made."""
    huge = " ".join(f"huge {'abcdefghij'[one % 10]}" * (one % 7) for one in range(100_000))
    honest = " ".join(f"honest {'abcdefghij'[one % 10]}" for one in range(12_000))
    with held_pieces(loaded) as (tokenizers, pieces, begun, goes_on):
        enemy = asyncio.ensure_future(tokenizers.placed(Prompt("m", text=huge), "m", 0))
        await until(begun.is_set)
        waits = asyncio.ensure_future(tokenizers.placed(Prompt("m", text=honest), "m", 0))
        await until(lambda: len(tokenizers._turns) == 2)
        enemy.cancel()  # as at the end of its placement's time
        goes_on.set()
        assert (await asyncio.wait_for(waits, WAIT_S)).token_ids == loaded.of_text(honest)
        await until(lambda: not len(tokenizers._turns))
        of_huge = [one for one in pieces if "huge" in one]
        assert 0 < len(of_huge) < 5, "it ended"
        pieces.clear()
        await tokenizers.placed(Prompt("m", text=huge[:400_000]), "m", 0)
        assert pieces
        assert not set(of_huge) & set(pieces), "known"


@pytest.mark.anyio
async def test_a_huge_text_that_is_waited_for_lets_a_shorter_one_go_first(loaded: Tokenizer) -> None:
    with held_pieces(loaded) as (tokenizers, pieces, begun, goes_on):
        huge = "".join(f" vast {'abcdefghij'[one % 10]}" * (one % 7) for one in range(50_000))
        both = [asyncio.ensure_future(tokenizers.in_tokens(Prompt("m", text=huge), "m"))]
        await until(begun.is_set)
        short = "".join(f" some {'abcdefghij'[one % 10]}" * (one % 5) for one in range(10_000))
        both.append(asyncio.ensure_future(tokenizers.in_tokens(Prompt("m", text=short), "m")))
        await until(lambda: len(tokenizers._turns) == 2)
        goes_on.set()
        await asyncio.gather(*both)
        starts = [one[:4] for one in pieces]
        last = len(starts) - starts[::-1].index(" som")
        assert starts[:last].count(" vas") <= 2, "what was at work, and one that is as long as a piece"


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
