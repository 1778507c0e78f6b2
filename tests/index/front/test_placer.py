"""``Placer`` with tokens that are made here, also where that takes too long."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.names import Name
from kvpool.index.front import placer as placer_module
from kvpool.index.front.inference_request import MAX_READ_NBYTES
from kvpool.index.front.placer import Placer
from kvpool.index.tokens.tokenizers import Tokenizers
from kvpool.tracing import Tracing
from tests.support.deadlines import ends_within
from tests.support.fleets import a_worker, applying
from tests.support.placing import LONG, ByteTokenizer, Placing, placer_of, placing


@pytest.mark.parametrize(("text", "in_thread"), [(LONG, True), (LONG[:64], False)])
@pytest.mark.anyio
async def test_a_prompt_goes_to_its_holder(text: str, in_thread: bool) -> None:
    async with placing() as there:
        placement = await there.place(text)
        assert (placement.reason, placement.targets[0].worker) == ("prefix", "b")
        assert placement.targets[0].matched_blocks == placement.prompt_blocks == len(text) // 16
        assert there.reservations == 1
        there.placer.release(placement)
        assert there.reservations == 0
        assert (there.tokenizer.threads == {threading.current_thread().name}) is not in_thread


@pytest.mark.anyio
async def test_tokens_that_come_too_late_cost_no_request_and_reserve_nothing() -> None:
    async with placing(timeout_s=0.2) as there:
        there.tokenizer.goes_on.clear()
        with ends_within(20):  # the tokens would take 60
            placement = await there.place(LONG)
        assert (placement.reason, len(placement.targets)) == ("no-tokens", 2)
        assert placement.detail == "its tokens were not made within 0.2 s", "and no worker is asked"
        assert there.reservations == 1, "of what was placed"
        there.tokenizer.goes_on.set()
        while there.placer._under_way:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert there.reservations == 1, "the route that came late is given back"


@pytest.mark.anyio
async def test_a_name_that_goes_while_its_request_is_placed_is_unknown_and_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with placing() as there:
        fleet, names = there.placer._fleet, there.placer.names
        fleet.read_names(fleet.start("default/a"), [Name("sql", "/p")])
        check = names.check

        def checked(*args: Any) -> None:
            check(*args)
            fleet.read_names(fleet.start("default/a"), [])  # the worker's list is read

        monkeypatch.setattr(names, "check", checked)
        body = b'{"model": "sql", "input": "x"}'
        placement = await there.placer.place("/v1/embeddings", {}, body, "default")
        assert (placement.reason, len(placement.targets)) == ("no-tokens", 2)


@pytest.mark.anyio
async def test_a_request_is_placed_by_load_while_batches_of_events_are_applied() -> None:
    async with placing() as there:
        fleet = there.placer._fleet
        with applying(fleet, "default/a"), applying(fleet, "default/b"):
            placement = await there.placer.place("/v1/embeddings", {}, b'{"model": "m"}', "default")
        assert (placement.reason, len(placement.targets)) == ("no-tokens", 2)


@pytest.mark.anyio
async def test_a_request_that_is_given_up_reserves_nothing() -> None:
    async with placing() as there:
        there.tokenizer.goes_on.clear()
        asked = asyncio.create_task(there.place(LONG))
        while not there.placer._under_way:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        there.tokenizer.goes_on.set()
        while there.placer._under_way:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert there.reservations == 0


@pytest.mark.anyio
async def test_bodies_that_wait_to_be_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer_module, "MAX_UNDER_WAY", 4)
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


@pytest.mark.anyio
async def test_a_body_that_nobody_waits_for_any_more_is_not_begun() -> None:
    """Else the line of a burst is worked on for nobody, and what comes then is late, too."""
    async with placing(timeout_s=0.2) as there:
        begun: list[str] = []
        made = there.tokenizer.of_text

        def of_text(text: str, work: object = None) -> Any:
            begun.append(text[:2])
            return made(text, work)

        there.tokenizer.of_text = of_text  # type: ignore[method-assign]
        there.tokenizer.goes_on.clear()
        burst = [asyncio.create_task(there.place(f"{one:02}{LONG}")) for one in range(8)]
        gone = asyncio.create_task(there.place("gone" + LONG))
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        gone.cancel()
        assert {(await one).detail for one in burst} == {"its tokens were not made within 0.2 s"}
        there.tokenizer.goes_on.set()
        while there.placer._under_way:
            await asyncio.sleep(0.01)
        assert begun == ["00", "01"]
        await asyncio.sleep(0)
        assert there.reservations == 8, "of what was placed by load"


@pytest.mark.parametrize("most", [1, 1000])
@pytest.mark.parametrize(("tenant", "times"), [("other", 1), ("default", 8)], ids=["tenant", "size"])
@pytest.mark.anyio
async def test_bodies_wait_for_those_of_their_tenant_and_size_alone(
    monkeypatch: pytest.MonkeyPatch, most: int, tenant: str, times: int
) -> None:
    monkeypatch.setattr(placer_module, "MAX_UNDER_WAY_OF_LINE", 2 * most)
    fleet = Fleet()
    fleet.add(a_worker("a", address="http://127.0.0.1:7000"), "flag")
    fleet.add(a_worker("b", port=6000, tenant=tenant, model="n", address="http://127.0.0.1:7001"), "flag")
    slow, quick = ByteTokenizer(), ByteTokenizer()
    slow.goes_on.clear()
    tokenizers = Tokenizers({"m": slow, "n": quick})  # type: ignore[dict-item]

    async def place(placer: Placer, model: str, tenant: str, text: str) -> Any:
        body = json.dumps({"model": model, "prompt": text}).encode()
        return await placer.place("/v1/completions", {}, body, tenant)

    async with placer_of(fleet, tokenizers) as (placer, _):
        burst = [asyncio.create_task(place(placer, "m", "default", LONG * times)) for _ in range(9)]
        while len(slow.threads) < 2:
            await asyncio.sleep(0.01)
        try:
            for _ in range(3):
                placed = await asyncio.wait_for(place(placer, "n", tenant, LONG), 20)
                assert placed.prompt_blocks == len(LONG) // 16
        finally:
            slow.goes_on.set()
        assert [(await one).promptless for one in burst].count("busy") == (7 if most == 1 else 0)
        assert not placer._under_way


class Recorder(Tracing):
    """Keeps the attributes of each span."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[dict[str, Any]] = []

    @contextmanager
    def span(self, name: str, headers: Any) -> Iterator[Any]:
        self.spans.append({})
        yield SimpleNamespace(set=self.spans[-1].update)


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/completions", "text_completion"),
        ("/v1/responses?x=1", "chat"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/audio/transcriptions", ""),
    ],
)
@pytest.mark.anyio
async def test_a_span_says_what_is_asked_for_and_of_which_model(path: str, operation: str) -> None:
    async with placing() as there:
        there.placer._tracing = recorder = Recorder()
        await there.placer.place(path, {}, b'{"model": "m", "prompt": "x", "input": "x"}', "default")
    (span,) = recorder.spans
    assert (span["operation"], span["model"]) == (operation, "m")


# ---- before workers of several models: a request goes to those of its own

MODELS = "mn"  # of worker a, and of worker b
CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/transcriptions"


def said(**fields: object) -> bytes:
    return json.dumps({**fields, "model": "n"}).encode()


def form(**fields: bytes) -> bytes:
    parts = (
        b'--x\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in fields.items()
    )
    return b"".join(parts) + b"--x--\r\n"


async def targets(there: Placing, path: str, body: bytes) -> list[str]:
    """Where a request goes; its reservation is ended."""
    placement = await there.placer.place(path, {}, body, "default")
    assert there.reservations == 1
    there.placer.release(placement)
    assert there.reservations == 0
    return [target.worker for target in placement.targets]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/completions", said(prompt="x"), id="small"),
        pytest.param("/v1/embeddings", said(input="x"), id="embeddings"),
        pytest.param("/v1/completions", said(prompt=7), id="a prompt that is none"),
        pytest.param(CHAT, said(messages="x" * MAX_READ_NBYTES), id="more than is read"),
        pytest.param(CHAT, said(messages=[[0]] * (1 << 19)), id="more values than are read"),
        pytest.param("/v1/models/n", b"", id="path"),
        pytest.param("/v1/models/%6E?x=m", b"", id="escaped path"),
        pytest.param(SPEECH, form(model=b"n", file=b"\0\1"), id="form"),
        pytest.param(SPEECH, form(file=b"\r\n--y\0" * MAX_READ_NBYTES, model=b"n"), id="large form"),
    ],
)
@pytest.mark.anyio
async def test_a_request_goes_to_workers_of_its_model_whatever_is_read_of_it(path: str, body: bytes) -> None:
    async with placing(models=MODELS) as there:
        assert [await targets(there, path, body) for _ in range(3)] == [["b"]] * 3


@pytest.mark.parametrize("under_way", [0, placer_module.MAX_UNDER_WAY], ids=["beside too many", "too late"])
@pytest.mark.anyio
async def test_a_request_that_is_not_read_in_time_goes_to_workers_of_its_model(
    monkeypatch: pytest.MonkeyPatch, under_way: int
) -> None:
    monkeypatch.setattr(placer_module, "MAX_UNDER_WAY", under_way)
    async with placing(timeout_s=0.1, models=MODELS) as there:
        there.tokenizer.goes_on.clear()
        assert await targets(there, "/v1/completions", said(prompt=LONG)) == ["b"]


@pytest.mark.parametrize("body", [b'{"model": "an adapter", "prompt": "x"}', b"{", b"--x", b"--x\r\n\r\n"])
@pytest.mark.anyio
async def test_a_request_of_no_known_model_goes_to_the_worker_with_the_least_to_do(body: bytes) -> None:
    async with placing(models=MODELS) as there:
        first, second = [await there.placer.place("/v1/completions", {}, body, "default") for _ in range(2)]
        assert {first.targets[0].worker, second.targets[0].worker} == {"a", "b"}
        assert {len(first.targets), len(second.targets), there.reservations} == {2}
        for placement in (first, second):
            there.placer.release(placement)
        taken = [(await targets(there, "/v1/completions", body))[0] for _ in range(4)]
        assert sorted(taken) == ["a", "a", "b", "b"], "of equals not always the same"


@pytest.mark.anyio
async def test_a_session_goes_on_where_its_last_request_was_answered() -> None:
    async with placing() as there:
        fresh = LONG[::-1]
        named: list[tuple[dict[str, str], dict[str, Any]]] = [
            ({"x-session-id": "s"}, {}), ({}, {"session_id": "s"}), ({}, {"vllm_xargs": {"session_id": "s"}})
        ]  # fmt: skip
        first = await there.place(fresh, *named[0][:1])
        home = first.targets[0].worker
        for headers, fields in named:
            there.placer.release(first)
            placement = await there.place(fresh, headers, **fields)
            there.placer.release(placement)
            assert placement.targets[0].worker == home
        other = placement.targets[1]
        there.placer.record(placement, placement.targets[0])
        there.placer.record(placement, other, 200)
        moved = await there.place(fresh, {"x-session-id": "s"})
        assert moved.targets[0].worker == other.worker != home
        totals = there.placer._stats.totals().sessions
        assert totals == {"first": 1, "stayed": 4, "moved": 0, "aside": 0}


@pytest.mark.anyio
async def test_a_session_of_two_models_has_a_home_at_each() -> None:
    """As an agent's, which asks a large and a small one by one name."""
    async with placing(models=MODELS) as there:
        for turn in range(3):
            for model in MODELS:
                placement = await there.place(LONG[::-1] + "more " * turn, {"x-session-id": "s"}, model=model)
                there.placer.release(placement)
        totals = there.placer._stats.totals().sessions
        assert totals == {"first": 2, "stayed": 4, "moved": 0, "aside": 0}


@pytest.mark.parametrize("models", ["mm", MODELS])
@pytest.mark.anyio
async def test_a_request_that_nobody_reads_goes_on_at_the_home_of_its_session(models: str) -> None:
    async with placing(models=models) as there:
        for number in range(6):
            session = {"x-session-id": str(number)}
            read = await there.place(f"{number} " + LONG[::-1], session)
            body = b'{"model": "m", "prompt": "' + b"x" * MAX_READ_NBYTES + b'"}'
            unread = await there.placer.place("/v1/completions", session, body, "default")
            assert (unread.promptless, unread.targets[0].worker) == ("too-large", read.targets[0].worker)
            for placement in (read, unread):
                there.placer.release(placement)
        assert there.placer._stats.totals().sessions["first"] == 6


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/completions"])
@pytest.mark.anyio
async def test_a_session_of_a_prompt_that_nobody_reads_stays(path: str) -> None:
    async with placing() as there:

        async def placed(headers: dict[str, str]) -> str:
            body = b'{"model": "m", "input": "x"}' if "embed" in path else b"{" + b" " * MAX_READ_NBYTES
            placement = await there.placer.place(path, headers, body, "default")
            there.placer.release(placement)
            return str(placement.targets[0].worker)

        assert len({await placed({"x-session-id": "s"}) for _ in range(6)}) == 1
        assert len({await placed({}) for _ in range(6)}) == 2
