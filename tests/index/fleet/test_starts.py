"""What is known of a worker's rank belongs to a start of it: a restart under the same name begins with nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool import Load
from kvpool.index.answer import Pick
from kvpool.index.cost.router import Costs, Router
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.sequence import Sequence
from tests.support.fleets import Clock, a_fleet, say
from tests.support.wire import batch, packed64, removed, stored

PROMPT = list(range(1, 103))
COSTS = Costs(running=0)


def anew_in_its_record(fleet: Fleet, name: str) -> None:
    (worker,) = [one for one in fleet.followed() if one.name == name]
    fleet.add(replace(worker, incarnation="another"), "flag")
    say(fleet, worker.id, 0, 0, batch(stored([7777])))


def anew_in_its_batches(fleet: Fleet, name: str) -> None:
    """As stock vLLM, whose flag stays: its publisher counts from 0 again."""
    rank = fleet.rank(f"default/{name}", 0)
    assert rank is not None
    sequence = Sequence(rank, can_replay=True)
    for payload in (batch(stored([5555])), batch(stored([6666]))):
        sequence.replayed(0, payload)
        sequence.replay_ended()
    sequence.replayed(0, batch(stored([6666])))
    sequence.replay_ended()
    sequence.close()


RESTARTS = pytest.mark.parametrize("restart", [anew_in_its_record, anew_in_its_batches])


def two() -> tuple[Fleet, Router, Clock]:
    clock = Clock()
    fleet = a_fleet("a", "b", clock=clock)
    for name in "ab":
        say(fleet, f"default/{name}", 0, 0, batch(stored([9999])))
    return fleet, Router(fleet, costs=COSTS, clock=clock), clock


def picks(router: Router, blocks: list[int], session: str | None = "s", **wishes: Any) -> dict[str, Pick]:
    ranking = router.route("m", hashes64=packed64(blocks), session_id=session, **wishes)
    return {pick.worker: pick for pick in ranking.picks}


def best(router: Router, blocks: list[int], session: str | None = "s", **wishes: Any) -> str:
    return next(iter(picks(router, blocks, session, **wishes)))


def at_a(router: Router, session: str = "s") -> None:
    """The session's home is a."""
    loads = [Load("a", queued_tokens=0), Load("b", queued_tokens=1 << 30)]
    assert best(router, PROMPT, session, loads=loads) == "a"


@RESTARTS
def test_a_session_goes_where_its_blocks_are_when_its_home_starts_again(
    restart: Callable[[Fleet, str], None],
) -> None:
    fleet, router, clock = two()
    at_a(router)
    say(fleet, "default/a", 0, 1, batch(stored(PROMPT)))
    say(fleet, "default/b", 0, 1, batch(stored(PROMPT[:75])))
    clock.now_s += 11  # loads are forgotten
    assert best(router, PROMPT) == "a"
    restart(fleet, "a")
    found = picks(router, PROMPT)
    assert next(iter(found)) == "b"
    assert (found["a"].prefill_cost, found["b"].prefill_cost) == (102 * 16, 27 * 16)


@RESTARTS
def test_homes_loads_and_reservations_of_a_former_start_do_not_count(
    restart: Callable[[Fleet, str], None],
) -> None:
    fleet, router, _ = two()
    at_a(router)
    router.loads.size("default/a", 0, 100 * 16)
    router.loads.measure("default/a", 0, 0.5)
    router.loads.scrape("default/a", Load("a", running=3, waiting=2), asleep=False)
    held = router.route("m", hashes64=packed64([500]), workers=["a"], reserve_s=60).reservation
    assert picks(router, [600], "t")["a"].move_cost > 0
    restart(fleet, "a")
    assert router.loads.get("default/a", 0) is None
    pick = picks(router, [600], "t")["a"]
    assert (pick.move_cost, pick.reserved_cost, pick.load_source) == (0, 0, "none")
    assert router.release("default", held)
    assert picks(router, [600], "u")["a"].reserved_cost == 0


def test_an_event_after_the_placement_speaks_for_itself() -> None:
    fleet, router, clock = two()
    at_a(router)
    clock.now_s += 11
    assert picks(router, PROMPT)["a"].prefill_cost == 0, "it has told nothing since"
    say(fleet, "default/a", 0, 1, batch(stored(PROMPT), removed(PROMPT[40:])))
    found = picks(router, PROMPT)
    assert (found["a"].prefill_cost, found["b"].prefill_cost) == (62 * 16, 102 * 16)
