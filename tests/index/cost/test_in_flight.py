"""Requests with a common prefix that come before the first of them is computed."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool import Load
from kvpool.index.cost import load
from kvpool.index.cost.ejections import FAILURES
from kvpool.index.cost.router import Router
from tests.support.fleets import Clock, a_fleet, say
from tests.support.placing import order
from tests.support.wire import batch, packed64, stored

BLOCKS = list(range(1, 501))  # 8,000 tokens
LOADS = [Load("busy", running=50, waiting=30, queued_tokens=2000), Load("idle")]


def fleet_of(*names: str) -> tuple[Router, Clock]:
    """The first holds BLOCKS."""
    clock = Clock()
    fleet = a_fleet(*names, clock=clock)
    say(fleet, f"default/{names[0]}", 0, 0, batch(stored(BLOCKS)))
    return Router(fleet, clock=clock), clock


@pytest.mark.parametrize("own", [0, 3])
def test_of_callers_at_once_a_busy_holder_gets_only_its_part(own: int) -> None:
    """``own``: blocks of each caller behind those that all share."""
    router, _ = fleet_of("busy", "idle")
    went = Counter(
        order(
            router.route(
                "m",
                hashes64=packed64([*BLOCKS, *range(10_000 * n, 10_000 * n + own)]),
                loads=LOADS,
                reserve_s=60,
            )
        )[0]
        for n in range(1, 101)
    )
    assert went["busy"] <= 80
    assert went["idle"] <= 80


def test_a_prompt_in_flight_is_counted_once() -> None:
    router, _ = fleet_of("holder", "idle", "other")
    shared, alone = [*range(2001, 2101)], [*range(3001, 3101)]
    first = router.route("m", hashes64=packed64(shared), reserve_s=60)
    costs = {pick.worker: pick.cost for pick in router.route("m", hashes64=packed64(shared + alone)).picks}
    assert costs[order(first)[0]] == 1600 + 1600 + 64, "after the first, its own part"
    assert {costs[name] for name in order(first)[1:]} == {3200}
    loads = [Load(name, running=99 if number else 0) for number, name in enumerate(order(first))]
    same = router.route("m", hashes64=packed64(shared), loads=loads, reserve_s=60)
    assert order(same)[0] == order(first)[0]
    (pick,) = [
        pick for pick in router.route("m", hashes64=packed64(alone)).picks if pick.worker == order(first)[0]
    ]
    assert pick.reserved_cost == 1600 + 64 + 64, "the second computes none of it"


def test_what_is_in_flight_ends_with_its_reservation() -> None:
    router, clock = fleet_of("a", "b")
    prompt = packed64(range(5001, 5101))
    for end in ("release", "time"):
        ranking = router.route("m", hashes64=prompt, reserve_s=60)
        (first, second) = router.route("m", hashes64=prompt).picks
        assert (first.cost, second.cost) == (1600, 1664)
        if end == "release":
            router.release("default", ranking.reservation)
        else:
            clock.now_s += 60
        assert [pick.cost for pick in router.route("m", hashes64=prompt).picks] == [1600, 1600]
    assert router._in_flight._nbytes == 0


def test_blocks_that_a_worker_holds_by_now_are_no_credit() -> None:
    router, _ = fleet_of("a")
    prompt = list(range(5001, 5101))
    router.route("m", hashes64=packed64(prompt), reserve_s=60)
    say(router._fleet, "default/a", 0, 1, batch(stored(prompt[:50])))
    (pick,) = router.route("m", hashes64=packed64(prompt)).picks
    assert (pick.prefill_cost, pick.reserved_cost) == (800, 1600 + 64 - 800)


def test_an_ejected_worker_stays_so_whatever_it_computes() -> None:
    router, _ = fleet_of("a", "b")
    prompt = packed64(range(5001, 5101))
    (first, _) = order(router.route("m", hashes64=prompt, reserve_s=60))
    for number in range(FAILURES):
        router.record(router._fleet.start(f"default/{first}"), bytes([number]), "failed")
    (_, last) = router.route("m", hashes64=prompt).picks
    assert (last.worker, last.reserved_cost >= load.EJECTED) == (first, True)


def test_little_is_remembered_of_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_IN_FLIGHT_NBYTES", 20 * (load.ENTRY_NBYTES + 80))
    monkeypatch.setattr(load, "MAX_ALIKE", 5)
    router, _ = fleet_of("a")
    for number in range(100):
        router.route("m", hashes64=packed64(range(100 * number + 1, 100 * number + 11)), reserve_s=60)
        router.route("m", hashes64=packed64([7, *range(100 * number + 1, 100 * number + 10)]), reserve_s=60)
    kept = router._in_flight
    assert kept._nbytes == sum(len(of) for of in kept._alike.values()) * (load.ENTRY_NBYTES + 80)
    assert kept._nbytes <= load.MAX_IN_FLIGHT_NBYTES
    assert max(len(of) for of in kept._alike.values()) == 5


def test_nothing_is_left_of_prompts_that_are_asked_about_when_they_are_computed() -> None:
    router, clock = fleet_of("a")
    prompts = [packed64(range(100 * number + 1, 100 * number + 11)) for number in range(50)]
    for prompt in prompts:
        router.route("m", hashes64=prompt, reserve_s=1)
    clock.now_s += 60
    for prompt in prompts:
        router.route("m", hashes64=prompt)
    assert not router._in_flight._alike
    assert router._in_flight._nbytes == 0
