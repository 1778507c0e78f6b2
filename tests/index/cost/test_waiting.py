"""What a request that waits at a rank costs the next one."""

from __future__ import annotations

import pytest

from kvpool import Load
from kvpool.index.cost.router import Costs, Router
from kvpool.index.prompt import Prompt
from tests.support.fleets import Clock, a_fleet, say
from tests.support.placing import TEN
from tests.support.wire import batch, packed64, stored


def queues(router: Router) -> dict[str, int]:
    route = router.rank(Prompt("m", hashes64=packed64(TEN)), takes_turn=False).unpack()
    return {pick.worker: pick.queue_cost for pick in route.picks}


def test_a_waiting_request_costs_what_was_placed_there() -> None:
    fleet = a_fleet("a", "b")
    say(fleet, "default/a", 0, 1, batch(stored(TEN)))
    router = Router(fleet, costs=Costs(running=16), clock=Clock())
    for name in "ab":
        router.loads.report(f"default/{name}", Load(name, waiting=2))
    assert queues(router) == {"a": 2 * 1024, "b": 2 * 1024}, "nothing was placed yet"
    new = packed64([77, 78])  # 32 tokens
    for _ in range(80):
        for name in "ab":
            router.route("m", hashes64=new, workers=[name])
    assert queues(router) == {"a": 2 * (32 + 16), "b": 2 * (32 + 16)}
    for _ in range(80):
        router.route("m", hashes64=packed64(TEN), workers=["a"])  # all of which it holds
    assert queues(router) == {"a": 2 * 16, "b": 2 * (32 + 16)}, "each by its own, and mostly by the last ones"
    for _ in range(2):
        router.route("m", hashes64=new, workers=["a"])
    assert 2 * 16 < queues(router)["a"] < 2 * (32 + 16), "not by the last one alone"


def test_a_waiting_request_costs_no_more_than_a_coefficient_may() -> None:
    """Or the cost of many of them would not be a number of 64 bits."""
    most = (1 << 32) - 1
    router = Router(a_fleet("a"), clock=Clock())
    router.loads.report("default/a", Load("a", waiting=most))
    for _ in range(400):
        router.route("m", hashes64=packed64(TEN), prompt_tokens=most)
    assert queues(router)["a"] == pytest.approx(most * 1_000_000, rel=1e-6)
    assert queues(router)["a"] <= most * 1_000_000


def test_a_waiting_request_costs_what_was_set() -> None:
    router = Router(a_fleet("a"), costs=Costs(waiting=100), clock=Clock())
    router.loads.report("default/a", Load("a", waiting=2))
    router.route("m", hashes64=packed64(TEN))
    assert queues(router) == {"a": 200}
