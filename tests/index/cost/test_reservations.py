"""What a choice reserves: who sees it, when it ends, and how many there may be."""

from __future__ import annotations

import pytest

from kvpool import Load
from kvpool.index.cost import load as load_module
from kvpool.index.cost.router import Router
from kvpool.index.prompt import Prompt
from tests.support.fleets import Clock, a_fleet
from tests.support.placing import COSTS, order


def test_a_reservation_is_seen_by_others_until_it_ends() -> None:
    clock = Clock()
    router = Router(a_fleet("a", "b"), costs=COSTS, clock=clock)
    one, two, three = (list(range(at, at + 50)) for at in (0, 100, 200))

    def cost_of(name: str) -> int:
        (pick,) = router.route("m", token_ids=[1], workers=[name]).picks
        return pick.reserved_cost

    first = router.route("m", token_ids=one, reserve_s=5)
    assert order(first) == ["a", "b"]
    assert first.reservation
    second = router.route("m", token_ids=two, reserve_s=8)
    assert order(second) == ["b", "a"], "a is busy with the first"
    assert second.picks[1].reserved_cost == second.picks[1].queue_cost == 50 + 100
    third = router.route("m", token_ids=three, reserve_s=8)
    assert order(third) == ["a", "b"]
    assert cost_of("a") == 300
    clock.now_s += 4.999
    assert cost_of("a") == 300
    clock.now_s += 0.001
    assert cost_of("a") == 150, "the first has ended"
    assert not router.release("default", first.reservation)
    assert not router.release("other", third.reservation), "it is of another tenant"
    assert router.release("default", third.reservation)
    assert not router.release("default", third.reservation)
    assert (cost_of("a"), cost_of("b")) == (0, 150)
    clock.now_s += 60
    assert (cost_of("a"), cost_of("b")) == (0, 0)


def test_a_reservation_ends_when_its_prompt_should_be_computed() -> None:
    clock = Clock()
    router = Router(a_fleet("a", "b"), costs=COSTS, clock=clock)
    router.loads.scrape("default/a", Load("a"), asleep=False)

    def reserved(tokens: int = 0, name: str = "a") -> int:
        """What is, and from now on besides: a prompt of so many tokens, at 100 a second, and 100 for that it runs."""
        at = 1000 * tokens  # so that none has blocks of another
        prompt = Prompt("m", token_ids=list(range(at, at + (tokens or 1))), workers=[name])
        (pick,) = router.rank(prompt, reserve_s=3.0 if tokens else None, until_computed=True).unpack().picks
        return pick.reserved_cost

    assert (reserved(50), reserved(20)) == (0, 150)
    clock.now_s += 1.49
    assert reserved() == 150 + 120
    clock.now_s += 0.02
    assert reserved() == 120, "computed behind the first"
    clock.now_s += 1.2
    assert reserved() == 0
    assert reserved(1) == 0
    clock.now_s += 1.02
    assert reserved() == 0, "a rank that had nothing to do begins at once"
    assert (reserved(250), reserved(1)) == (0, 350)
    clock.now_s += 3.01
    assert reserved() == 0, "no longer than was asked for"
    assert (router._reservations._done_s, len(router._reservations._ends)) == ({}, 0)
    # Of b no load is known, so nothing else will show it.
    reserved(50, "b")
    clock.now_s += 2.9
    assert reserved(name="b") == 150


def test_there_are_so_many_reservations_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "MAX_RESERVATIONS", 3)
    clock = Clock()
    router = Router(a_fleet("a"), clock=clock)
    names = [router.route("m", token_ids=[1], reserve_s=5).reservation for _ in range(5)]
    assert [bool(name) for name in names] == [True, True, True, False, False]
    assert len(set(names[:3])) == 3
    assert router.release("default", names[0])
    assert router.route("m", token_ids=[1], reserve_s=5).reservation
    # Those that are released leave nothing behind, however many.
    for _ in range(50):
        router.release("default", names[1])
        names[1] = router.route("m", token_ids=[1], reserve_s=500).reservation
        assert names[1]
    clock.now_s += 6
    assert router.route("m", token_ids=[1], reserve_s=5).reservation
