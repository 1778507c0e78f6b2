"""Which worker is asked for the tokens of a prompt, over real sockets: none that is known to be away, and another one
where the first does not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvpool import Load
from kvpool.index.cost.router import Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.scraper import Scraper
from kvpool.index.front import renderer
from kvpool.index.front.placement import Placement
from kvpool.index.front.placer import Placer
from kvpool.index.front.renderer import Renderer
from tests.support.deadlines import until
from tests.support.media import ENCODER, OTHER_ENCODER, follow_outputs
from tests.support.openai_worker import ScriptedWorker, scripted, that_accepts_nothing
from tests.support.placing import placer_of


class Placing:
    """Places prompts that were not seen before."""

    def __init__(self, fleet: Fleet, router: Router, placer: Placer, workers: list[str]) -> None:
        self.fleet, self.router, self._placer, self._workers = fleet, router, placer, workers
        self._number = 0

    async def reason(self) -> str:
        """Why one was placed where it was. The worker that was named first has the most to do."""
        return (await self._place()).reason

    async def again(self) -> str:
        """Why the last one was placed where it was, the second time."""
        self._number -= 1
        return await self.reason()

    async def worker(self) -> str:
        """Where one was placed."""
        return (await self._place()).targets[0].worker

    async def _place(self) -> Placement:
        for waiting, worker in enumerate(reversed(self._workers), 1):
            self.router.loads.report(f"default/{worker}", Load(worker, waiting=waiting))
        self._number += 1
        body = json.dumps({"model": "m", "prompt": f"prompt {self._number}"}).encode()
        placement = await self._placer.place("/v1/completions", {}, body, "default")
        self._placer.release(placement)
        return placement


@asynccontextmanager
async def placing(workers: list[ScriptedWorker], loads: bool = True) -> AsyncIterator[Placing]:
    fleet = Fleet()
    for worker in workers:
        fleet.add(worker.worker(), "flag")
        fleet.rank(f"default/{worker.name}", 0).heard()
    async with placer_of(fleet) as (placer, router):
        yield Placing(fleet, router, placer, [worker.name for worker in workers] if loads else [])


def rendered(workers: list[ScriptedWorker]) -> list[int]:
    return [worker.rendered for worker in workers]


@pytest.mark.anyio
async def test_tokens_are_made_anew_when_the_worker_that_made_them_has_started_again() -> None:
    """It may have another chat template."""
    with scripted("a") as (a,):
        async with placing([a]) as there:
            assert [await there.reason(), await there.again()] == ["load", "load"]
            assert a.rendered == 1
            there.fleet.add(a.worker(incarnation="another"), "flag")
            assert [await there.again(), await there.again()] == ["load", "load"]
            assert a.rendered == 2
            there.fleet.remove("default/a")
            there.fleet.add(a.worker(incarnation="a third"), "flag")
            await there.again()
            assert a.rendered == 3


@pytest.mark.anyio
async def test_tokens_are_made_anew_after_workers_named_by_flags_could_not_be_reached() -> None:
    """They have no incarnation that would tell a new start, and publish no events."""
    with scripted("a", "b") as workers:
        async with placing(workers) as there:
            scraper = Scraper(there.fleet, there.router.loads, interval_s=0.02)
            scraper.start()
            try:
                await there.reason()
                assert sum(rendered(workers)) == 1
                await there.again()
                assert sum(rendered(workers)) == 1
                starts = [there.fleet.start(f"default/{worker.name}") for worker in workers]
                for worker in workers:
                    worker.stop()
                await until(lambda: not any(map(there.fleet.lasts, starts)))
                for worker in workers:
                    worker.start()
                await there.again()
                assert sum(rendered(workers)) == 2
            finally:
                await scraper.close()


@pytest.mark.anyio
async def test_tokens_are_made_anew_when_a_publisher_has_started_again() -> None:
    with scripted("a") as (a,):
        async with placing([a]) as there:
            await there.reason()
            rank = there.fleet.rank("default/a", 0)
            assert rank is not None
            rank.reset("a gap")
            await there.again()
            assert a.rendered == 1
            rank.reset("its publisher was started anew", anew=True)
            await there.again()
            assert a.rendered == 2


@pytest.mark.anyio
async def test_a_worker_that_has_gone_costs_no_prompt_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "AWAY_S", 600.0)
    with scripted("a", "b") as workers:
        workers[1].stop()
        async with placing(workers) as there:
            assert [await there.reason() for _ in range(6)] == ["load"] * 6, "all by their tokens"
            assert rendered(workers) == [6, 0]
            workers[1].start()
            assert [await there.reason() for _ in range(6)] == ["load"] * 6
            assert rendered(workers) == [12, 0], "it could not be reached just now"
            workers[0].stop()
            assert await there.reason() == "no-tokens"
            assert await there.reason() == "no-tokens"


@pytest.mark.anyio
async def test_a_worker_that_could_not_be_reached_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderer, "AWAY_S", 0.2)
    with scripted("a", "b") as workers:
        workers[1].stop()
        async with placing(workers) as there:
            assert [await there.reason() for _ in range(2)] == ["load"] * 2
            workers[1].start()
            await asyncio.sleep(0.3)
            assert [await there.reason() for _ in range(4)] == ["load"] * 4
            assert rendered(workers) == [2, 4]


@pytest.mark.anyio
async def test_a_worker_that_accepts_no_connection_leaves_time_for_another_one() -> None:
    with scripted("a") as workers, that_accepts_nothing() as port:
        async with placing([*workers, ScriptedWorker("full", port)]) as there:
            assert [await there.reason() for _ in range(4)] == ["load"] * 4
            assert rendered(workers) == [4]


@pytest.mark.anyio
async def test_another_worker_is_asked_where_one_fails_but_no_third() -> None:
    with scripted("a", "b", "c") as workers:
        workers[2].render_status = 500
        async with placing(workers) as there:
            assert [await there.reason() for _ in range(3)] == ["load"] * 3
            assert rendered(workers) == [0, 3, 3]
            for worker in workers:
                worker.render_status = 500
            assert await there.reason() == "no-tokens"
            assert rendered(workers) == [0, 4, 4]


@pytest.mark.anyio
async def test_a_worker_that_is_known_to_be_unreachable_is_not_asked() -> None:
    with scripted("a", "b") as workers:
        async with placing(workers, loads=False) as there:
            for name in ("a", "b"):
                there.fleet.rank(f"default/{name}", 0).mark(stale=True, problem="it does not answer")
                there.router.loads.fail(f"default/{name}", 0)
            assert await there.reason() == "no-tokens"
            assert rendered(workers) == [0, 0]


@pytest.mark.anyio
async def test_who_is_asked_for_tokens_has_had_no_turn() -> None:
    """Else, of two workers with nothing to do, one would make all tokens, and the other one serve all requests."""
    with scripted("a", "b") as workers:
        async with placing(workers, loads=False) as there:
            served = [await there.worker() for _ in range(4)]
            assert served in (["a", "b"] * 2, ["b", "a"] * 2)


@pytest.mark.anyio
async def test_the_workers_that_could_not_be_reached_are_remembered_within_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderer, "MAX_AWAY", 2)
    kept = Renderer()
    for name in ("one", "two", "one", "three"):
        kept._set_aside(name)
    assert list(kept._away) == ["one", "three"]


@pytest.mark.anyio
async def test_workers_share_the_renders_of_prompts_that_come_at_once() -> None:
    with scripted("a", "b") as workers:
        for worker in workers:
            worker.hold_render.clear()
        async with placing(workers) as there:
            made = [asyncio.create_task(there.reason()) for _ in range(8)]
            await until(lambda: sum(rendered(workers)) == 8)
            assert rendered(workers) == [4, 4]
            for worker in workers:
                worker.hold_render.set()
            assert await asyncio.gather(*made) == ["load"] * 8


@pytest.mark.anyio
async def test_a_picture_goes_to_a_worker_that_need_not_encode_it() -> None:
    """By the hash and the place that a worker's /render says; of workers that hold none of its words."""
    features = {
        "mm_hashes": {"image": ["a picture"]},
        "mm_placeholders": {"image": [{"offset": 2, "length": 4000}]},
    }
    asked = {"model": "m", "prompt": "a picture"}
    kinds = {"a": (), "b": (OTHER_ENCODER.hex,), "c": (ENCODER.hex,)}
    with scripted(*kinds) as workers:
        fleet = Fleet()
        for worker in workers:
            worker.features = features
            fleet.add(worker.worker(media_namespaces=kinds[worker.name]), "flag")
            fleet.rank(f"default/{worker.name}", 0).heard()
        async with placer_of(fleet) as (placer, _):

            async def place() -> str:
                body = json.dumps(asked).encode()
                placement = await placer.place("/v1/completions", {}, body, "default")
                placer.release(placement)
                return placement.targets[0].worker

            assert len({await place() for _ in range(6)}) == 3, "nobody has it: they take turns"
            follow_outputs(fleet, ["a picture"])
            assert {await place() for _ in range(6)} == {"c"}
            follow_outputs(fleet, ["a picture"], OTHER_ENCODER.hex)
            assert {await place() for _ in range(6)} == {"b", "c"}
