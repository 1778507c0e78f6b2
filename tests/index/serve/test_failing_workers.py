"""A worker that fails fast, is busy or ill, behind either front: how many requests it gets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool.index.place import load
from kvpool.index.place.router import Router
from kvpool.index.place.scraper import Scraper
from tests.support.ext_proc import Call, calling, picking, response
from tests.support.fleets import say
from tests.support.fronts import ASKED, Cluster, envoy_cluster, followed, proxy_cluster
from tests.support.http_client import post
from tests.support.openai_worker import scripted
from tests.support.placing import TEN, order
from tests.support.wire import batch, packed64, stored

pytestmark = pytest.mark.usefixtures("grpc_started")


@pytest.fixture(autouse=True)
def _no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(load, "EJECT_S", 600.0)


@contextmanager
def front(kind: str, folder: Path) -> Iterator[Cluster]:
    """Worker a, which holds the prompt, and b, which does not."""
    with envoy_cluster(folder, names=("a", "b")) if kind == "envoy" else proxy_cluster("a", "b") as there:
        there.hold("a")
        assert post(there.url, ASKED).worker == "a"
        yield there


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_a_worker_that_fails_fast_costs_few_requests(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there, ThreadPoolExecutor(16) as callers:
        there.workers["a"].status = 500
        statuses = list(callers.map(lambda _: post(there.url, ASKED).status, range(160)))
        assert sorted(set(statuses)) == [200, 500]
        assert statuses.count(500) <= 40


@pytest.mark.parametrize("kind", ["envoy", "router"])
@pytest.mark.parametrize("status", [429, 503])
def test_what_a_busy_worker_refuses_goes_to_an_idle_one(kind: str, status: int, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there:
        there.workers["a"].status = status
        before = len(there.workers["a"].bodies)
        assert [post(there.url, ASKED).worker for _ in range(20)] == ["b"] * 20
        assert len(there.workers["a"].bodies) - before <= load.FAILURES, "then nobody asks"


@pytest.mark.parametrize("kind", ["envoy", "router"])
def test_if_all_workers_refuse_the_caller_learns_it(kind: str, tmp_path: Path) -> None:
    with front(kind, tmp_path) as there:
        for worker in there.workers.values():
            worker.status = 429
        assert {post(there.url, ASKED).status for _ in range(10)} == {429}
        for worker in there.workers.values():
            worker.status = 200
        assert post(there.url, ASKED).status == 200


def test_where_envoy_goes_on_for_a_failure_or_a_404_it_is_no_success_of_the_first() -> None:
    """Workers that lack a model answer with 404, dead ones not at all, and Envoy does not say which."""
    with picking("a", "b") as index, calling(index) as channel:

        def first(status: str) -> str:
            call = Call(channel)
            targets = call.place()
            call.ask(response(served="127.0.0.1:9002", status=status))
            call.end()
            return targets[0]

        assert [first(status) for status in ("200", "200", "404", "200")] == ["127.0.0.1:9001"] * 4
        assert first("200") == "127.0.0.1:9002", "three failures in a row are known"


def test_a_connection_that_fails_counts(tmp_path: Path) -> None:
    with front("router", tmp_path) as there:
        there.workers["a"].stop()
        assert [post(there.url, ASKED).worker for _ in range(10)] == ["b"] * 10
        assert there.index.proxy_stats.totals().retries["unreachable"] <= 4  # type: ignore[index]


@pytest.mark.anyio
async def test_a_worker_that_fails_its_health_check_gets_no_requests_until_it_passes_one() -> None:
    with scripted("a", "b") as workers:
        fleet = followed(workers)
        say(fleet, "default/a", 0, 0, batch(stored(TEN)))
        router = Router(fleet)
        scraper = Scraper(fleet, router.loads, interval_s=0.05, check=router.check)
        scraper.start()

        async def goes_to(name: str) -> None:
            ends_s = time.monotonic() + 60
            while order(router.route("m", hashes64=packed64(TEN)))[0] != name:
                assert time.monotonic() < ends_s, name
                await asyncio.sleep(0.01)

        try:
            for status, name in ((200, "a"), (503, "b"), (404, "a"), (500, "b"), (200, "a")):
                workers[0].health_status = status
                await goes_to(name)
        finally:
            await scraper.close()
