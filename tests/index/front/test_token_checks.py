"""Tokens made here beside those of a worker: a few prompts an hour, over real sockets, by the tests' own clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool.index.fleet.fleet import Fleet
from kvpool.index.front import token_checks
from kvpool.index.front.inference_request import read_request
from kvpool.index.front.placement import Placement
from kvpool.index.front.placer import Placer
from kvpool.index.front.token_checks import (
    CHECK_S,
    DIFFERENT,
    DOUBT_ENDS_S,
    DOUBT_S,
    MAX_CHECKED_NBYTES,
    STARTS_S,
    TokenChecks,
)
from kvpool.index.request_stats import RequestStats
from kvpool.index.tokens.tokenizers import Tokenizers
from tests.support.deadlines import until
from tests.support.fleets import a_worker
from tests.support.openai_worker import ScriptedWorker, render_bytes, scripted
from tests.support.placing import ByteTokenizer, placer_of


def render_otherwise(body: dict[str, Any]) -> list[int]:
    return [*render_bytes(body)[:20], 7]


class Checking:
    """Placer and one worker of model m, whose tokens are bytes here."""

    def __init__(self, fleet: Fleet, worker: ScriptedWorker, tokenizers: Tokenizers) -> None:
        self.fleet, self.worker, self.now_s, self._stats = fleet, worker, 0.0, RequestStats()
        self.checks = TokenChecks(tokenizers, self._stats, clock=lambda: self.now_s, draw=lambda: 0.5)
        self.placer: Placer
        self._number = 0

    async def place(self, tenant: str = "default", key: str = "", **fields: Any) -> Placement:
        self._number += 1
        prompt = f"prompt {self._number} " * 8
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        placement = await self.placer.place("/v1/completions", headers, body, tenant)
        self.placer.release(placement)
        return placement

    async def checked(self, **counts: int) -> None:
        """These results so far, when no check runs."""
        await until(lambda: not any(model.task for model in self.checks._models.values()))
        assert {name: count for name, count in self._stats.totals().checks.items() if count} == counts

    async def find_different(self, tenant: str = "default") -> None:
        """Prompts are compared one after another."""
        self.worker.render = render_otherwise
        for number in range(1, DIFFERENT + 1):
            assert self.trusts(tenant), "one prompt may be odd"
            await self.place(tenant)
            await self.checked(different=number)
        assert not self.trusts(tenant)

    def trusts(self, tenant: str = "default") -> bool:
        request = read_request("/v1/completions", b'{"model": "m", "prompt": "any other"}', tenant)
        return self.checks.trusts(request, "m")

    def promptless(self) -> int:
        return sum(self.placer._stats.totals().promptless.values())


@asynccontextmanager
async def checking() -> AsyncIterator[Checking]:
    fleet, tokenizers = Fleet(), Tokenizers({"m": ByteTokenizer()})  # type: ignore[dict-item]
    with scripted("a") as (worker,):
        fleet.add(worker.worker(), "flag")
        fleet.rank("default/a", 0).heard()
        there = Checking(fleet, worker, tokenizers)
        async with placer_of(fleet, tokenizers, checks=there.checks) as (there.placer, _):
            yield there


@pytest.mark.anyio
async def test_a_few_prompts_an_hour_are_compared_and_no_request_waits_for_it() -> None:
    async with checking() as there:
        there.worker.hold_render.clear()
        assert [(await there.place()).reason for _ in range(4)] == ["load"] * 4
        await until(lambda: there.worker.rendered == 1)
        assert (await there.place()).reason == "load"
        there.worker.hold_render.set()
        await there.checked(same=1)
        there.now_s += CHECK_S - 1
        await there.place()
        await there.checked(same=1)
        there.now_s += 1
        await there.place()
        await there.checked(same=2)
        assert there.worker.rendered == 2


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["incarnation", "lapse"])
async def test_after_a_workers_start_the_next_prompt_is_compared(how: str) -> None:
    """It may have another template, or the tokenizer's own at last."""

    def start_again(name: str) -> None:
        if how == "incarnation":
            there.fleet.add(there.worker.worker(incarnation=name), "flag")
        else:  # one that is named by a flag
            there.fleet.lapse("default/a")
        there.now_s += STARTS_S

    async with checking() as there:
        for _ in range(2):
            await there.place()
            await there.checked(same=1)
            there.now_s += STARTS_S
        there.worker.render = render_otherwise
        start_again("another")
        for number in range(1, DIFFERENT + 1):
            await there.place()
            await there.checked(same=1, different=number)
        assert not there.trusts()
        there.worker.render = render_bytes
        start_again("a third")
        await there.place()
        await there.checked(same=2, different=DIFFERENT)
        assert there.trusts()
        assert there.now_s < CHECK_S / 2


@pytest.mark.anyio
async def test_after_differences_prompts_go_to_render_until_the_last_that_differed_agrees(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with checking() as there:
        await there.find_different()
        assert there.now_s == 0, "at once"
        (told,) = [record.getMessage() for record in caplog.records]
        assert "not those of its workers of tenant default, from token 20 of 21 on" in told
        assert "give --tokenizer the folder that the workers serve" in told
        assert (await there.place()).prompt_blocks == 1, "by the worker's tokens"
        assert there.worker.rendered == DIFFERENT + 1
        there.now_s += CHECK_S
        await there.place()
        await there.checked(different=DIFFERENT + 1)
        assert len(caplog.records) == 1
        # It starts again, with another template.
        there.fleet.add(there.worker.worker(incarnation="another"), "flag")
        there.worker.render = lambda body: (
            render_otherwise(body) if f"prompt {DIFFERENT} " in body["prompt"] else render_bytes(body)
        )
        there.now_s += CHECK_S
        await there.place()
        await there.checked(different=DIFFERENT + 2)
        assert not there.trusts(), "that another prompt agrees would say little"
        # With that of the tokenizer.
        there.fleet.add(there.worker.worker(incarnation="a third"), "flag")
        there.worker.render = render_bytes
        there.now_s += CHECK_S
        await there.place()
        await there.checked(different=DIFFERENT + 2, same=1)
        assert there.trusts()
        rendered = there.worker.rendered
        assert (await there.place()).prompt_blocks == 4
        assert there.worker.rendered == rendered
        assert there.promptless() == 0


def odd(body: dict[str, Any]) -> list[int]:
    return render_otherwise(body) if "odd" in body["prompt"] else render_bytes(body)


@pytest.mark.anyio
async def test_one_odd_prompt_costs_no_other_its_tokenizer() -> None:
    async with checking() as there:
        there.worker.render = odd
        await there.place(prompt="odd " * 20)
        await there.checked(different=1)
        for number in range(1, 4):
            assert (await there.place()).prompt_blocks == 4, "made here"
            await there.checked(different=1, same=number)
            assert (await there.place(prompt="odd " * 20)).prompt_blocks == 1, "by its worker's tokens"
            await there.checked(different=1, same=number)
        assert there.trusts()


@pytest.mark.anyio
async def test_odd_prompts_of_one_caller_cost_no_other_its_tokenizer() -> None:
    async with checking() as there:
        there.worker.render = odd
        await there.place(key="evil", prompt="odd 0 " * 20)
        await there.checked(different=1)
        await there.place(key="evil", prompt="odd 1 " * 20)
        await there.checked(different=1)  # another caller's is compared first
        await there.place(key="honest")
        await there.checked(different=1, same=1)
        for number in range(2, 3 * DIFFERENT):
            there.now_s = number * DOUBT_S
            await there.place(key="evil", prompt=f"odd {number} " * 20)
            await there.checked(different=number, same=1)
            assert there.trusts()


@pytest.mark.parametrize("keys", [["only"] * DIFFERENT, ["a", "b", "c"]])
@pytest.mark.anyio
async def test_a_tokenizer_that_differs_is_found_by_the_prompts_of_any_callers(keys: list[str]) -> None:
    async with checking() as there:
        there.worker.render = render_otherwise
        for number, key in enumerate(keys):
            assert there.trusts()
            there.now_s = DOUBT_S * keys[:number].count(key)
            await there.place(key=key)
            await there.checked(different=number + 1)
        assert not there.trusts()


@pytest.mark.anyio
async def test_a_difference_is_forgotten_after_a_while_and_found_again_by_other_prompts() -> None:
    async with checking() as there:
        await there.find_different()
        there.now_s = DOUBT_ENDS_S
        for number in range(1, DIFFERENT + 1):
            await there.place()
            await there.checked(different=DIFFERENT + number)
            assert there.trusts() == (number < DIFFERENT)
        there.worker.render = render_bytes
        there.fleet.add(there.worker.worker(incarnation="another"), "flag")
        there.now_s = 2 * DOUBT_ENDS_S
        await there.place()
        await there.checked(different=2 * DIFFERENT, same=1)
        assert there.trusts()


@pytest.mark.anyio
async def test_a_tenant_whose_worker_renders_otherwise_costs_no_other_its_tokenizer() -> None:
    async with checking() as there:
        with scripted("evil") as (evil,):
            there.fleet.add(a_worker("evil", tenant="t", address=f"http://{evil.at}"), "flag")
            evil.render = render_otherwise
            await there.find_different(tenant="t")
            there.worker.render = render_bytes
            assert there.trusts()
            assert (await there.place()).prompt_blocks == 4
            await there.checked(different=DIFFERENT, same=1)


@pytest.mark.anyio
async def test_a_caller_whose_key_is_no_utf8_is_one_as_others_are() -> None:
    async with checking() as there:
        body = b'{"model": "m", "prompt": "any"}'
        placed = await there.placer.place(
            "/v1/completions", {"authorization": "Bearer \udcff"}, body, "default"
        )
        assert placed.reason == "load"
        await there.checked(same=1)


@pytest.mark.anyio
async def test_models_of_many_tenants_are_checked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_checks, "MAX_MODELS", 1)
    async with checking() as there:
        there.fleet.add(a_worker("b", tenant="t", address=f"http://{there.worker.at}"), "flag")
        await there.place()
        await there.checked(same=1)
        await there.place(tenant="t")
        await there.checked(same=1)
        there.now_s += CHECK_S
        await there.place(tenant="t")
        await there.checked(same=2)
        assert [*there.checks._models] == [("t", "m")]


@pytest.mark.anyio
async def test_tokens_that_differ_are_better_than_none() -> None:
    async with checking() as there:
        await there.find_different()
        there.worker.render_status = 400
        assert (await there.place()).prompt_blocks == 4
        assert there.worker.rendered == DIFFERENT + 1, "it was asked first"
        assert there.promptless() == 0


@pytest.mark.anyio
async def test_workers_without_render_are_no_reason_to_ask_for_the_tokenizer_that_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with checking() as there:
        there.worker.render = None
        assert (await there.place()).reason == "load"
        await there.checked(unanswered=1)
        assert "were not compared" in caplog.text
        assert "placed by load" not in caplog.text, "its tokens were made here"


@pytest.mark.anyio
async def test_a_worker_that_does_not_answer_costs_no_trust() -> None:
    async with checking() as there:
        there.worker.render = None
        await there.place()
        await there.checked(unanswered=1)
        assert there.trusts()
        assert (await there.place()).reason == "load"


@pytest.mark.parametrize(
    "fields", [{"prompt": [1, 2, 3]}, {"user": "x" * MAX_CHECKED_NBYTES}, {"model": "n"}, {"prompt": 7}]
)
@pytest.mark.anyio
async def test_what_a_tokenizer_does_not_make_and_long_bodies_are_not_compared(
    fields: dict[str, Any],
) -> None:
    async with checking() as there:
        await there.place(**fields)
        await there.checked()
        assert there.worker.rendered == 0
        assert not any(model.due_s > 0 for model in there.checks._models.values()), "the next one may be"
