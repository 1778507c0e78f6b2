"""A worker that takes longer than others for a token costs as many times more, as its cost gate measures it."""

from __future__ import annotations

import pytest

from kvpool import Load
from kvpool.index.answer import Pick
from kvpool.index.cost.router import Costs, Router
from kvpool.index.follow.metrics_page import HALF_LIFE_S, MIN_TOKENS, GateCounters, LoadCosts
from kvpool.index.prompt import Prompt
from tests.support.fleets import Clock, a_fleet, say
from tests.support.placing import NAMESPACE
from tests.support.wire import batch, packed64, stored

PROMPT = list(range(1, 101))  # 1,600 tokens


def a_router(costs: Costs | None = None, **speeds: float) -> Router:
    clock = Clock()
    fleet = a_fleet(*speeds, clock=clock, namespace=NAMESPACE)
    router = Router(fleet, costs=costs, clock=clock)
    for name, speed in speeds.items():
        say(fleet, f"default/{name}", 0, 0, batch(stored(PROMPT[:50], medium="STORAGE")))
        router.loads.measure(f"default/{name}", 0, 0.5, speed=speed or None)
    return router


def picks(router: Router, **wishes: object) -> dict[str, Pick]:
    ranking = router.route("m", hashes64=packed64(PROMPT), **wishes)  # type: ignore[arg-type]
    return {pick.worker: pick for pick in ranking.picks}


def test_each_term_is_as_many_times_more() -> None:
    router = a_router(a=8000, b=8000, c=800)
    found = picks(router, loads=[Load(name, queued_tokens=100) for name in "abc"])
    assert (found["a"].prefill_cost, found["a"].fetch_cost, found["a"].queue_cost) == (800, 400, 100)
    assert (found["c"].prefill_cost, found["c"].fetch_cost, found["c"].queue_cost) == (8000, 4000, 1000)
    assert found["c"].cost == 13_000
    items = picks(router, multimodal=[("a picture", 900, 500)])
    assert [items[name].encode_cost for name in "abc"] == [150, 150, 1500]


@pytest.mark.parametrize("speeds", [{"a": 8000, "b": 9000, "c": 4100}, {"a": 8000, "b": 8000, "c": 0}])
def test_what_may_be_other_prompts_or_is_unknown_changes_nothing(speeds: dict[str, float]) -> None:
    assert {pick.cost for pick in picks(a_router(**speeds)).values()} == {1200}


def test_a_given_speed_is_that_of_all() -> None:
    router = a_router(Costs(speed=8000), a=8000, b=8000, c=800)
    assert {pick.cost for pick in picks(router).values()} == {1200}


def test_it_leaves_its_session_once_that_is_cheaper() -> None:
    router = a_router(a=8000, b=8000, c=800)
    assert next(iter(picks(router, session_id="s", workers=["c"]))) == "c"
    say(router._fleet, "default/c", 0, 1, batch(stored(PROMPT)))
    assert next(iter(picks(router, session_id="s"))) == "c", "it has all of the prompt"
    assert next(iter(picks(router, session_id="s", loads=[Load("c", queued_tokens=800)]))) != "c"


def test_its_reservations_last_as_long_as_it_takes() -> None:
    router = a_router(a=8000, b=8000, c=800)
    clock = router.loads.clock
    assert isinstance(clock, Clock)
    router.loads.scrape("default/c", Load("c"), asleep=False)
    prompt = [5000 + block for block in range(500)]  # 8,000 tokens: a second, or ten
    wanted = Prompt("m", hashes64=packed64(prompt), workers=["c"])
    router.rank(wanted, reserve_s=60, until_computed=True)
    clock.now_s += 9
    assert picks(router)["c"].reserved_cost > 0
    clock.now_s += 2
    assert picks(router)["c"].reserved_cost == 0


def test_speed_is_measured_and_forgotten() -> None:
    costs = LoadCosts()
    costs.update(GateCounters(0, 0, MIN_TOKENS - 1, 1), 0)
    assert costs.speed is None
    costs.update(GateCounters(0, 0, 8 * MIN_TOKENS, 8), 1)
    assert costs.speed == pytest.approx(MIN_TOKENS, rel=0.01)
    costs.update(GateCounters(0, 0, 8 * MIN_TOKENS, 8), 4 * HALF_LIFE_S)
    assert costs.speed is None, "it has computed nothing for long: it may be as quick as others"
