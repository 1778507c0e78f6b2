"""What a worker answers when it is asked for tokens, and what is remembered of it, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool.index.fleet.start import Start
from kvpool.index.front import renderer
from kvpool.index.front.inference_request import CHAT, RENDERED, read_request
from kvpool.index.front.renderer import NoTokens, Renderer
from kvpool.index.limits import Limits
from kvpool.index.net.worker_url import Url, parse_url
from kvpool.index.prompt import Prompt
from kvpool.index.protocol import bounded_json
from tests.support.deadlines import until
from tests.support.openai_worker import BadWorker, ScriptedWorker, card, scripted, that_accepts_nothing

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def tokens_of(
    rendering: Renderer,
    text: str,
    *workers: ScriptedWorker,
    path: str = COMPLETIONS,
    tenant: str = "default",
    model: str = "m",
    lasts: bool = True,
    timeout_s: float = 60.0,
) -> list[int]:
    """The tokens of a text, of the first of these workers that is not named as one not to ask."""

    async def ask(without: Any, renders: Any) -> tuple[Url, Start]:
        for worker in workers:
            if worker.at not in without:
                return parse_url(f"http://{worker.at}"), Start(worker.name)
        raise NoTokens("no-answer", "no other worker")

    body = json.dumps({"model": model, "prompt": text}).encode()
    request = read_request(path, body, tenant)
    try:
        prompt = await rendering.prompt(request, body, {}, ask, lambda start: lasts, timeout_s)
    except NoTokens as error:
        rendering.warn(request, error)
        raise
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
async def test_few_paths_without_render_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "MAX_AWAY", 2)
    with scripted("a") as (a,):
        async with opened() as rendering:
            a.render_status = 404
            for path in (paths := sorted(RENDERED - {CHAT})):
                with pytest.raises(NoTokens, match="HTTP status 404"):
                    await tokens_of(rendering, "one", a, path=path)
            assert [path for _, _, path in rendering._without] == paths[-2:]


@pytest.mark.anyio
async def test_a_worker_without_the_model_says_nothing_of_its_path() -> None:
    """As one that has just unloaded an adapter, which others serve."""
    with scripted("a", "b") as (a, b):
        a.cards = [card("other")]
        async with opened() as rendering:
            assert await tokens_of(rendering, "one", a, b) == list(b"one")
            assert await tokens_of(rendering, "two", b) == list(b"two")
            with pytest.raises(NoTokens, match="no other worker") as caught:
                await tokens_of(rendering, "three", a)
            assert await tokens_of(rendering, "three", b) == list(b"three")
            assert (caught.value.reason, rendering._without) == ("no-answer", {})


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


@pytest.mark.parametrize(
    "page",
    [
        b"\xff", b"null", b'{"token_ids": [1], "cache_salt": "\xff"}', b'{"token_ids": [1], "x": ' + b"[" * 5000,
        b"[" + b",".join([b'{"token_ids":0}'] * (bounded_json.MAX_CONTAINERS + 1)) + b"]",
    ],
    ids=["no JSON", "null", "no text", "deep", "many"],
)  # fmt: skip
@pytest.mark.anyio
async def test_an_answer_that_cannot_be_read_is_no_tokens_and_no_fault_of_ours(page: bytes) -> None:
    """The last one took 1.7 s of the interpreter's lock where 32 MiB of it came."""

    def answer(client: socket.socket) -> None:
        while not (heard := client.recv(1 << 16)).endswith(b"}"):  # the end of the request's body
            assert heard
        client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page) + page)

    bad = BadWorker("bad", answer)
    try:
        async with opened() as rendering:
            with pytest.raises(NoTokens, match="a worker's answer cannot be read"):
                await tokens_of(rendering, "x", ScriptedWorker("bad", bad.port))
    finally:
        bad.stop()


@pytest.mark.anyio
async def test_images_are_asked_for_without_their_pixels() -> None:
    """Four of 720p are 29 MiB in an answer; above 32 MiB no answer is read."""
    with scripted("a") as (a,):
        a.pixels_nbytes = renderer.MAX_RENDERED_NBYTES
        async with opened() as rendering:
            assert await tokens_of(rendering, "a picture", a) == list(b"a picture")


def test_the_requests_of_vllm_know_the_field_that_leaves_pixels_out(vllm_server: dict[str, Any]) -> None:
    assert vllm_server["payloads"] == ["none"] * 4


@pytest.mark.parametrize(
    ("made", "reason", "says"),
    [
        (400, "refused", "HTTP status 400"),
        (501, "refused", "HTTP status 501"),
        ([1] * 100_000, "large-answer", "answers with more than"),
        ([-1], "no-answer", "holds no tokens"),
    ],
)
@pytest.mark.anyio
async def test_a_prompt_that_a_worker_does_not_render_is_remembered(
    made: Any, reason: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "MAX_RENDERED_NBYTES", 100_000)
    clock = Clock()
    with scripted("a") as (a,):
        if isinstance(made, int):
            a.render_status = made
        else:
            a.render = lambda _: made
        async with opened(clock=clock) as rendering:
            for asked, lasts, later_s in ((1, True, 0.0), (1, True, 0.0), (2, False, 0.0), (3, True, 301.0)):
                clock.now_s += later_s
                with pytest.raises(NoTokens, match=says) as caught:
                    await tokens_of(rendering, "x", a, lasts=lasts)
                assert (caught.value.reason, a.rendered) == (reason, asked)


@pytest.mark.anyio
async def test_a_fault_of_a_worker_is_not_remembered_of_a_prompt() -> None:
    with scripted("a") as (a,):
        async with opened() as rendering:
            for status in (500, 401, 429):
                a.render_status = status
                with pytest.raises(NoTokens):
                    await tokens_of(rendering, "x", a)
            a.render_status = 200
            assert await tokens_of(rendering, "x", a) == list(b"x")


@pytest.mark.anyio
async def test_more_prompts_than_can_be_made_at_once_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "MAX_UNDER_WAY", 3)
    monkeypatch.setattr(renderer, "MAX_OF_TENANT", 2)
    limits = Limits()
    with scripted("a") as (a,):
        a.hold_render.clear()
        async with opened(limits=limits) as rendering:
            texts = [f"text {number}" for number in range(8)]
            made = [asyncio.create_task(tokens_of(rendering, text, a)) for text in texts]
            await until(lambda: a.rendered == 2)
            other = asyncio.create_task(tokens_of(rendering, "another's", a, tenant="other"))
            await until(lambda: a.rendered == 3)
            assert limits.used_nbytes > 0, "bodies, which their requests may have given up"
            a.hold_render.set()
            assert await asyncio.gather(*made) == [list(text.encode()) for text in texts]
            assert await other == list(b"another's")
            assert (limits.used_nbytes, rendering._renders) == (0, {})


@pytest.mark.anyio
@pytest.mark.parametrize("of", [{"tenant": "slow"}, {"model": "slow"}], ids=str)
async def test_slow_renders_of_a_tenants_model_shorten_no_others_wait_in_line(
    monkeypatch: pytest.MonkeyPatch, of: dict[str, str]
) -> None:
    monkeypatch.setattr(renderer, "MAX_UNDER_WAY", 1)
    monkeypatch.setattr(renderer, "MAX_TIMES", 1)
    clock = Clock()
    with scripted("a") as (a,):
        async with opened(clock=clock) as rendering:
            a.hold_render.clear()
            slow = asyncio.create_task(tokens_of(rendering, "slow", a, **of))
            await until(lambda: a.rendered == 1)
            clock.now_s += 1000
            a.hold_render.set()
            assert await slow == list(b"slow")
            a.hold_render.clear()
            first, second = (
                asyncio.create_task(tokens_of(rendering, text, a)) for text in ("first", "second")
            )
            await asyncio.wait({second}, timeout=0.5)
            a.hold_render.set()
            assert (await first, await second) == (list(b"first"), list(b"second"))
            assert [*rendering._took_s] == [("default", "m")]


@pytest.mark.anyio
async def test_prompts_whose_turn_does_not_come_in_time_cost_no_render_and_are_told_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renderer, "MAX_UNDER_WAY", 1)
    clock = Clock()
    with scripted("a") as (a,):
        a.hold_render.clear()
        async with opened(clock=clock) as rendering:
            first = asyncio.create_task(tokens_of(rendering, "first", a))
            await until(lambda: a.rendered == 1)
            for number in range(6):
                clock.now_s += 61 if number == 5 else 0
                with pytest.raises(NoTokens) as caught:
                    await tokens_of(rendering, f"text {number}", a, timeout_s=0.01)
                assert caught.value.reason in ("busy", "late")
            await until(lambda: len(rendering._under_way) == 1)
            a.hold_render.set()
            assert await first == list(b"first")
            assert a.rendered == 1
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[2].split(";")[0] for text in told] == [
        " 1 prompt, the last of m",
        " 5 prompts, the last of m",
    ]
    assert all("--tokenizer m=FOLDER" in text for text in told)


@pytest.mark.parametrize(("passes_s", "is_away"), [(0.0, True), (10.0, False)])
@pytest.mark.anyio
async def test_a_connection_that_was_late_for_this_loop_s_own_sake_is_no_sign_of_its_worker(
    passes_s: float, is_away: bool
) -> None:
    class Passing(Clock):
        def __call__(self) -> float:
            self.now_s += passes_s
            return self.now_s

    with that_accepts_nothing() as port:
        async with opened(clock=Passing()) as rendering:
            with pytest.raises(NoTokens) as caught:
                await tokens_of(rendering, "x", ScriptedWorker("full", port))
            assert caught.value.reason == "no-answer"
            assert bool(rendering._away) is is_away
