"""What a worker answers when it is asked for tokens, and what is remembered of it, over real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool.index.limits import Limits
from kvpool.index.place import renderer
from kvpool.index.place.endpoints import Url, parse_url
from kvpool.index.place.inference_request import read_request
from kvpool.index.place.renderer import NoTokens, Renderer
from kvpool.index.prompt import Prompt
from tests.support.openai_worker import ScriptedWorker, scripted

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"


async def tokens_of(
    rendering: Renderer, text: str, *workers: ScriptedWorker, path: str = COMPLETIONS
) -> list[int]:
    """The tokens of a text, of the first of these workers that is not named as one not to ask."""

    async def ask(without: Any) -> tuple[Url, tuple[str, str]]:
        for worker in workers:
            if worker.at not in without:
                return parse_url(f"http://{worker.at}"), (worker.name, "")
        raise NoTokens("no other worker")

    body = json.dumps({"model": "m", "prompt": text}).encode()
    request = read_request(path, body)
    prompt = await rendering.prompt(request, body, {}, ask, lambda start: True, 60.0)
    assert isinstance(prompt.token_ids, array)
    return list(prompt.token_ids)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Renderer]:
    rendering = Renderer(**options)
    try:
        yield rendering
    finally:
        await rendering.close()


@pytest.mark.anyio
async def test_a_request_whose_content_cannot_be_rendered_costs_no_other_its_tokens() -> None:
    """vLLM answers it with 501, such as for a data URL that is none."""
    with scripted("a", "b") as (a, b):
        async with opened() as rendering:
            a.render_status = 501
            with pytest.raises(NoTokens, match="HTTP status 501"):
                await tokens_of(rendering, "bad", a, b)
            assert (a.rendered, b.rendered) == (1, 0), "the other one would say the same"
            a.render_status = 200
            assert await tokens_of(rendering, "good", a, b) == list(b"good")


@pytest.mark.parametrize("status", [403, 404, 405])
@pytest.mark.anyio
async def test_a_path_without_render_is_remembered_and_no_other_path(status: int) -> None:
    with scripted("a") as (a,):
        async with opened() as rendering:
            a.render_status = status
            with pytest.raises(NoTokens, match=f"HTTP status {status}"):
                await tokens_of(rendering, "one", a, path=MESSAGES)
            a.render_status = 200
            with pytest.raises(NoTokens, match="the workers of m have no /v1/messages/render"):
                await tokens_of(rendering, "two", a, path=MESSAGES)
            assert a.rendered == 1
            assert await tokens_of(rendering, "one", a) == list(b"one")
            with pytest.raises(NoTokens, match="the workers of m have no /v1/messages/render"):
                await tokens_of(rendering, "three", a, path=MESSAGES)
            assert a.rendered == 2, "it is not asked for what it does not have"


@pytest.mark.anyio
async def test_that_a_path_has_no_render_is_forgotten_as_soon_as_one_answers_there() -> None:
    with scripted("a", "b") as (a, b):
        async with opened() as rendering:
            a.render_status, b.render_delay_s = 404, 0.3
            slow = asyncio.create_task(tokens_of(rendering, "slow", b))
            while not b.rendered:
                await asyncio.sleep(0.01)
            with pytest.raises(NoTokens, match="HTTP status 404"):
                await tokens_of(rendering, "other", a)
            assert rendering._without
            assert await slow == list(b"slow")
            assert not rendering._without
            assert await tokens_of(rendering, "another", b) == list(b"another")


@pytest.mark.parametrize(("count", "in_loop"), [(100, True), (300_000, False)])
@pytest.mark.anyio
async def test_a_large_answer_is_decoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, count: int, in_loop: bool
) -> None:
    threads: list[threading.Thread] = []
    make = renderer._prompt

    def seen(*arguments: Any) -> Prompt:
        threads.append(threading.current_thread())
        return make(*arguments)

    monkeypatch.setattr(renderer, "_prompt", seen)
    made = [0, (1 << 32) - 1, *range(count)]
    limits = Limits()
    with scripted("a") as (a,):
        a.render = lambda _: made
        async with opened(limits=limits) as rendering:
            assert await tokens_of(rendering, "x", a) == made
    assert [thread is threading.main_thread() for thread in threads] == [in_loop]
    assert limits.used_nbytes == 0


@pytest.mark.anyio
async def test_an_answer_for_which_there_is_no_room_is_not_read() -> None:
    limits = Limits(400_000)  # a quarter is for answers
    with scripted("a") as (a,):
        a.render = lambda _: [0] * 100_000
        async with opened(limits=limits) as rendering:
            with pytest.raises(NoTokens, match="there is no room for the answer"):
                await tokens_of(rendering, "x", a)
            assert limits.used_nbytes == 0
            a.render = lambda _: [1, 2]
            assert await tokens_of(rendering, "y", a) == [1, 2]


@pytest.mark.parametrize("made", [[1 << 32], [-1], [1.5], ["1"], [[1]], None, {}])
@pytest.mark.anyio
async def test_tokens_that_are_none_are_no_tokens(made: Any) -> None:
    with scripted("a") as (a,):
        a.render = lambda _: made
        async with opened() as rendering:
            with pytest.raises(NoTokens, match="a list that holds no tokens"):
                await tokens_of(rendering, "x", a)
