"""Workers whose requests or health checks fail: when they get none, and when they get some again."""

from __future__ import annotations

import pytest

from kvpool.index.place import load
from kvpool.index.place.load import EJECT_S, FAILURES, KEEP_FAILED_S, MAX_EJECT_S, TRIAL_S
from kvpool.index.place.router import Router
from tests.support.fleets import Clock, a_fleet, a_worker, say
from tests.support.placing import TEN, order
from tests.support.wire import batch, packed64, stored

BAD = "default/bad"


class Failing:
    """A router before a worker that holds the prompt, and one that does not."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = a_fleet("bad", "good", clock=self.clock)
        say(self.fleet, BAD, 0, 0, batch(stored(TEN)))
        self.router = Router(self.fleet, clock=self.clock)

    def first(self) -> str:
        return order(self.router.route("m", hashes64=packed64(TEN)))[0]

    def fail(self, times: int = FAILURES) -> None:
        for _ in range(times):
            self.router.record(BAD, failed=True)


def test_a_worker_that_fails_in_a_row_gets_no_requests() -> None:
    there = Failing()
    there.fail(FAILURES - 1)
    there.router.record(BAD, failed=False)
    there.fail(FAILURES - 1)
    assert there.first() == "bad"
    there.fail(1)
    assert {there.first() for _ in range(20)} == {"good"}
    there.router.record(BAD, failed=False)
    assert there.first() == "good", "that request was sent before"


def test_one_request_at_a_time_is_a_trial_and_a_failure_doubles_the_time() -> None:
    there = Failing()
    there.fail()
    seconds = EJECT_S
    for _ in range(8):
        there.clock.now_s += seconds - 0.01
        assert there.first() == "good"
        there.clock.now_s += 0.02
        assert [there.first() for _ in range(3)] == ["bad", "good", "good"]
        there.fail(1)
        seconds = min(2 * seconds, MAX_EJECT_S)
    there.clock.now_s += seconds
    assert there.first() == "bad"
    there.clock.now_s += TRIAL_S
    assert [there.first(), there.first()] == ["bad", "good"], "nobody told how the trial went"
    there.router.record(BAD, failed=False)
    assert {there.first() for _ in range(9)} == {"bad"}
    assert len(there.router._reservations) == 0


def test_a_failed_health_check_ejects_until_a_good_one() -> None:
    there = Failing()
    there.router.check(BAD, failed=True)
    there.router.record(BAD, failed=False)
    assert there.first() == "good"
    for _ in range(3):
        there.clock.now_s += KEEP_FAILED_S - 1
        there.router.check(BAD, failed=True)
        assert there.first() == "good"
    there.router.check(BAD, failed=False)
    assert there.first() == "bad"
    there.fail()
    there.router.check(BAD, failed=False)
    assert there.first() == "good", "its requests fail, whatever its health check says"


def test_all_ranks_of_a_worker_are_ejected() -> None:
    clock = Clock()
    fleet = a_fleet("good", clock=clock)
    fleet.add(a_worker("bad", port=7000, ranks=3), "flag")
    router = Router(fleet, clock=clock)
    for _ in range(FAILURES):
        router.record(BAD, failed=True)
    assert order(router.route("m", hashes64=packed64(TEN)))[0] == "good"
    assert len(router._reservations) == 3


def test_of_workers_that_have_left_little_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_FAILING", 10)
    there = Failing()
    there.fail()
    for number in range(9):
        there.router.record(f"default/{number}", failed=True)
    assert there.first() == "good"
    there.router.record("default/one more", failed=True)
    assert there.first() == "bad", "the first one is forgotten"
    assert len(there.router._ejections._failing) == 10
    assert len(there.router._reservations) == 0
