"""Who is stale and does not answer is placed last, and said to be so."""

from __future__ import annotations

from kvpool import Load
from kvpool.index import Publisher
from kvpool.index.cost.load import KEEP_FAILED_S, KEEP_S
from kvpool.index.cost.router import Router
from tests.support.fleets import Clock, a_fleet, a_worker
from tests.support.placing import order


def a_dead_worker(clock: Clock) -> Router:
    """Of a, b and c the last is stale since just now; nothing is known of its load."""
    fleet = a_fleet("a", "b", "c", clock=clock)
    fleet.rank("default/c", 0).mark(stale=True, problem="it does not answer")
    return Router(fleet, clock=clock)


BUSY = [Load("a", running=500), Load("b", running=500)]


def test_who_is_stale_and_does_not_answer_gets_no_first_pick() -> None:
    clock = Clock()
    router = a_dead_worker(clock)
    router.loads.fail("default/c", 0)
    firsts = []
    for _ in range(200):
        route = router.route("m", token_ids=[1], reserve_s=1)
        firsts.append(order(route)[0])
        clock.now_s += 0.01
    assert sorted(set(firsts)) == ["a", "b"]
    route = router.route("m", token_ids=[1], loads=BUSY)
    assert [(pick.worker, pick.unreachable) for pick in route.picks] == [
        ("a", False), ("b", False), ("c", True)
    ]  # fmt: skip
    assert order(router.route("m", token_ids=[1], workers=["c"])) == ["c"], "it is said, not left out"
    clock.now_s += KEEP_FAILED_S
    assert not any(pick.unreachable for pick in router.route("m", token_ids=[1], workers=["a", "b"]).picks)


def test_a_feed_that_is_silent_for_long_counts_as_not_reached() -> None:
    clock = Clock()
    router = a_dead_worker(clock)
    one_busy = [Load("a"), Load("b", running=500)]
    assert order(router.route("m", token_ids=[1], loads=one_busy)) == ["a", "c", "b"], (
        "it was heard from just now"
    )
    clock.now_s += KEEP_S + 0.1
    route = router.route("m", token_ids=[1], loads=BUSY)
    assert (route.picks[-1].worker, route.picks[-1].unreachable) == ("c", True)
    assert not any(pick.unreachable for pick in route.picks[:2]), "an idle worker that is not stale is there"


def test_who_is_stale_and_answers_is_placed_by_its_load() -> None:
    clock = Clock()
    router = a_dead_worker(clock)
    clock.now_s += KEEP_S + 0.1
    router.loads.fail("default/c", 0)
    router.loads.scrape("default/c", Load("c", running=1), asleep=False)
    route = router.route("m", token_ids=[1], loads=BUSY)
    assert (route.picks[0].worker, route.picks[0].unreachable) == ("c", False)
    clock.now_s += KEEP_S + 0.1
    router.loads.fail("default/c", 0)
    route = router.route("m", token_ids=[1], loads=[*BUSY, Load("c")])
    assert order(route)[0] == "c", "a router that knows its load has reached it"


def test_who_publishes_nothing_is_not_missed() -> None:
    clock = Clock()
    fleet = a_fleet("a", clock=clock)
    fleet.add(a_worker("mute", publishers=(Publisher(0, ""),)), "flag")
    clock.now_s += 10 * KEEP_S
    picks = {pick.worker: pick for pick in Router(fleet, clock=clock).route("m", token_ids=[1]).picks}
    assert picks["mute"].trust == "fallback"
    assert not picks["mute"].unreachable
