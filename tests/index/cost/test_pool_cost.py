"""What a token from the pool, or near, costs a worker: from the pages of its cost gate to the order of a ranking."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvpool.index.cost.router import POOL, Costs, Router
from kvpool.index.follow.metrics_page import (
    HALF_LIFE_S,
    MIN_TOKENS,
    EngineLoad,
    GateCounters,
    LoadCosts,
    read_page,
)
from kvpool.index.follow.scraper import Scraper
from tests.support.fleets import Clock, a_fleet, a_worker, joined, say
from tests.support.metrics_pages import page, serving_page
from tests.support.placing import NAMESPACE, TEN, order
from tests.support.wire import batch, packed64, stored

FAST = GateCounters(load_tokens=100_000.0, load_s=1.0, prefill_tokens=100_000.0, prefill_s=10.0)
SLOW = FAST._replace(load_s=8.0)
NEAR = FAST._replace(near_tokens=100_000.0, near_s=0.2)


def test_a_page_tells_of_the_gate_of_each_engine() -> None:
    assert read_page(page({0: EngineLoad(gate=FAST), 1: EngineLoad()})) == {
        0: EngineLoad(gate=FAST),
        1: EngineLoad(),
    }
    partly = page({0: EngineLoad(gate=FAST)}).replace(b"kvpool_gate_load_seconds_total", b"other")
    assert read_page(partly) == {0: EngineLoad()}
    earlier = page({0: EngineLoad(gate=NEAR)}).replace(b"kvpool_gate_near", b"other")
    assert read_page(earlier) == {0: EngineLoad(gate=FAST)}


@pytest.mark.parametrize("field", ["load_tokens", "prefill_tokens"])
def test_little_that_was_timed_says_nothing(field: str) -> None:
    cost = LoadCosts()
    cost.update(FAST._replace(**{field: MIN_TOKENS - 1}), 0.0)
    assert cost.pool is None
    cost.update(FAST, 1.0)
    assert cost.pool is not None


def test_a_pool_that_is_slower_than_computing_costs_as_much() -> None:
    cost = LoadCosts()
    cost.update(FAST._replace(load_s=1000.0), 0.0)
    assert cost.pool == 1.0
    cost.update(FAST._replace(prefill_s=0.0), 1.0)


def test_what_is_new_counts_more() -> None:
    cost = LoadCosts()
    cost.update(FAST, 0.0)
    # As much again, eight times as slow, after the time in which the first half counts half.
    cost.update(GateCounters(200_000.0, 9.0, 200_000.0, 20.0), HALF_LIFE_S)
    assert cost.pool == pytest.approx((0.5 * 1 + 8) / (0.5 * 10 + 10))
    assert cost.pool > (1 + 8) / 20


def test_an_engine_that_began_anew_is_counted_from_there() -> None:
    cost = LoadCosts()
    cost.update(FAST, 0.0)
    cost.update(GateCounters(0.0, 0.0, 0.0, 0.0), 1.0)
    assert cost.pool == pytest.approx(0.1), "until there is more"
    cost.update(GateCounters(50_000.0, 2.0, 50_000.0, 5.0), 2.0)
    assert cost.pool == pytest.approx(0.4)


def test_near_has_a_cost_of_its_own() -> None:
    cost = LoadCosts()
    cost.update(FAST._replace(near_tokens=MIN_TOKENS - 1, near_s=1.0), 0.0)
    assert (cost.pool, cost.near) == (pytest.approx(0.1), None)
    cost = LoadCosts()
    cost.update(GateCounters(0.0, 0.0, 100_000.0, 10.0, near_tokens=100_000.0, near_s=0.2), 0.0)
    assert (cost.pool, cost.near) == (None, pytest.approx(0.02)), "of the pool nothing is known"
    cost.update(NEAR, 1.0)
    assert (cost.pool, cost.near) == (pytest.approx(0.1), pytest.approx(0.02))


def fetching(router: Router) -> dict[str, int]:
    picks = router.route("m", hashes64=packed64(TEN)).picks
    return {pick.worker: pick.fetch_cost for pick in picks}


def test_each_rank_is_ranked_by_its_own() -> None:
    fleet = a_fleet("a", "b", "c", namespace=NAMESPACE)
    say(fleet, "default/a", 0, 0, batch(stored(TEN, medium="STORAGE")))
    router = Router(fleet, clock=Clock())
    assert fetching(router) == dict.fromkeys("abc", round(160 * POOL))
    router.loads.measure("default/b", 0, 0.1)
    router.loads.measure("default/c", 0, 0.8)
    assert fetching(router) == {"a": 32, "b": 16, "c": 128}
    assert order(router.route("m", hashes64=packed64(TEN))) == ["b", "a", "c"]


def test_a_coefficient_that_was_set_is_that_of_all() -> None:
    fleet = a_fleet("a", "b", namespace=NAMESPACE)
    say(fleet, "default/a", 0, 0, batch(stored(TEN, medium="STORAGE")))
    router = Router(fleet, costs=Costs(pool=0.5), clock=Clock())
    router.loads.measure("default/b", 0, 0.1)
    assert fetching(router) == {"a": 80, "b": 80}


@pytest.mark.anyio
async def test_a_scraper_reads_it() -> None:
    with serving_page() as fast, serving_page() as slow:
        fast.show({0: EngineLoad(gate=FAST)})
        slow.show({0: EngineLoad(gate=SLOW)})
        fleet = a_fleet()
        for place, (name, server) in enumerate((("fast", fast), ("slow", slow))):
            joined(fleet, a_worker(name, port=5600 + 2 * place, address=server.address, namespace=NAMESPACE))
        say(fleet, "default/fast", 0, 0, batch(stored(TEN, medium="STORAGE")))
        router = Router(fleet)
        scraper = Scraper(fleet, router.loads, interval_s=0.05)
        scraper.start()
        ends_s = time.monotonic() + 60
        while fetching(router) != {"fast": 16, "slow": 128} and time.monotonic() < ends_s:
            await asyncio.sleep(0.01)
        await scraper.close()
        assert fetching(router) == {"fast": 16, "slow": 128}
