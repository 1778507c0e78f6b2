"""Workers whose engines fail: when they get no requests, and when some again; and what is a request's own fault."""

from __future__ import annotations

import itertools

import pytest

from kvpool.index.cost import ejections
from kvpool.index.cost.ejections import (
    EJECT_S,
    FAILURES,
    FORGET_S,
    MARK_S,
    MAX_EJECT_S,
    TRIAL_S,
    Judged,
)
from kvpool.index.cost.load import KEEP_FAILED_S
from kvpool.index.cost.router import Router
from tests.support.fleets import Clock, a_fleet, a_worker, say
from tests.support.placing import TEN, order
from tests.support.wire import batch, packed64, stored

BAD = "default/bad"


class Failing:
    """A router before a worker that holds the prompt, and others that do not."""

    def __init__(self, *others: str) -> None:
        self.clock = Clock()
        self.fleet = a_fleet("bad", *(others or ("good",)), clock=self.clock)
        say(self.fleet, BAD, 0, 0, batch(stored(TEN)))
        self.router = Router(self.fleet, clock=self.clock)
        self._marks = itertools.count()

    def first(self) -> str:
        """Where the next request goes."""
        name = order(self.router.route("m", hashes64=packed64(TEN)))[0]
        self.router.try_at(f"default/{name}")
        return name

    def ejected(self) -> list[str]:
        return [name for name, one in self.router._ejections._failing.items() if one.names]

    def says(self, judged: Judged, mark: bytes = b"", worker: str = BAD) -> None:
        """Of a request like no other, unless it has a mark."""
        mark = mark or str(next(self._marks)).encode()
        self.router.record(self.fleet.start(worker), mark, judged)

    def fail(self, times: int = FAILURES, worker: str = BAD) -> None:
        for _ in range(times):
            self.says("failed", worker=worker)

    @property
    def known(self) -> int:
        return len(self.router._ejections._failing)


@pytest.mark.parametrize("judged", ["failed", "unreached"])
def test_a_worker_that_fails_in_a_row_gets_no_requests(judged: Judged) -> None:
    there = Failing()
    for _ in range(FAILURES - 1):
        there.says(judged)
    there.says("served")
    for _ in range(FAILURES - 1):
        there.says(judged)
    assert there.first() == "bad"
    there.says(judged)
    assert {there.first() for _ in range(20)} == {"good"}
    there.says("served")
    assert there.first() == "bad", "whenever it was sent, its engine has served it now"
    assert there.known == 0


def test_one_request_at_a_time_is_a_trial_and_a_failure_doubles_the_time() -> None:
    there = Failing()
    there.fail()
    seconds = EJECT_S
    for _ in range(9):
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
    there.says("served")
    assert {there.first() for _ in range(9)} == {"bad"}
    assert len(there.router._reservations) == 0


def test_failures_are_forgotten() -> None:
    there = Failing()
    there.fail(FAILURES - 1)
    there.clock.now_s += FORGET_S + 1
    there.fail(FAILURES - 1)
    assert there.first() == "bad"
    there.fail(1)
    assert there.first() == "good"


def test_a_request_that_fails_again_counts_once() -> None:
    there = Failing()
    for _ in range(9):
        there.says("failed", b"poison")
    there.fail(FAILURES - 2)
    assert there.first() == "bad"
    there.fail(1)
    assert there.first() == "good"


def test_a_request_that_fails_at_a_second_worker_is_its_own_fault() -> None:
    there = Failing()
    poison = [str(number).encode() for number in range(-9, 0)]
    for mark in poison[:FAILURES]:
        there.says("failed", mark)
    assert there.first() == "good"
    assert there.router.failed_at(poison[0]) == BAD
    there.says("failed", poison[0], "default/good")
    assert there.first() == "bad", "two are too few"
    assert there.router.failed_at(poison[0]) is None
    for mark in poison:
        there.says("failed", mark, "default/good")
        there.says("failed", mark)
        there.says("failed", mark, "default/good")
    assert there.first() == "bad"
    assert order(there.router.route("m", hashes64=packed64([999])))[0] in ("good", "bad")
    there.clock.now_s += MARK_S + 1
    there.says("failed", poison[0])
    assert there.router.failed_at(poison[0]) == BAD, "what was known of it is over"


def test_one_that_is_served_elsewhere_has_failed_by_its_worker() -> None:
    there = Failing()
    for mark in (b"1", b"2", b"3")[:FAILURES]:
        there.says("failed", mark)
        there.says("served", mark, "default/good")
        assert there.router.failed_at(mark) is None
    assert there.first() == "good"


def test_one_request_is_enough_if_another_worker_serves_it_each_time() -> None:
    there = Failing()
    for number in range(FAILURES):
        assert there.first() == "bad", number
        there.says("failed", b"same")
        there.says("served", b"same", "default/good")
    assert there.first() == "good"


def test_a_trial_by_such_a_request_says_nothing() -> None:
    there = Failing()
    there.says("failed", b"poison")
    there.says("failed", b"poison", "default/good")
    there.fail()
    there.clock.now_s += EJECT_S
    assert there.first() == "bad"
    there.says("failed", b"poison")
    assert [there.first(), there.first()] == ["bad", "good"], "the next request is the trial"
    there.fail(1)
    there.clock.now_s += 2 * EJECT_S - 0.01
    assert there.first() == "good"


def test_a_trial_that_its_worker_refuses_for_its_callers_fault_says_nothing() -> None:
    there = Failing()
    there.says("refused")
    there.fail()
    there.says("refused")
    assert there.first() == "good", "that one was sent before"
    there.clock.now_s += EJECT_S
    for _ in range(3):
        assert [there.first(), there.first()] == ["bad", "good"]
        there.says("refused")
    assert there.first() == "bad"
    there.fail(1)
    there.clock.now_s += 2 * EJECT_S - 0.01
    assert there.first() == "good"


def test_requests_that_fail_eject_half_of_the_workers_at_most() -> None:
    there = Failing("good", "third", "fourth")
    for name in ("bad", "good", "third", "fourth"):
        there.fail(9, f"default/{name}")
    assert there.ejected() == ["default/bad", "default/good"]
    for name in ("third", "fourth"):
        for _ in range(FAILURES):
            there.says("unreached", worker=f"default/{name}")
    assert len(there.ejected()) == 4, "these do not answer"


@pytest.mark.parametrize("how", ["unreached", "ill"])
def test_workers_that_are_away_are_not_among_those_of_which_half_may_be_ejected(how: str) -> None:
    """One that is named by a flag is away for as long as nobody takes the flag back."""
    there = Failing("good", "third", "fourth")
    away = ["default/third", "default/fourth"]
    for name in away:
        if how == "ill":
            there.router.check(there.fleet.start(name), failed=True)
        for _ in range(FAILURES if how == "unreached" else 0):
            there.says("unreached", worker=name)
    there.fail()
    assert there.ejected() == [*away, BAD]
    there.fail(worker="default/good")
    assert there.ejected() == [*away, BAD], "it is the last one"


def test_a_worker_whose_blocks_have_another_size_is_ejected_beside_others_of_its_model() -> None:
    """As the first one of an update, which fails."""
    clock = Clock()
    fleet = a_fleet("a", "b", "c", clock=clock)
    fleet.add(a_worker("bad", port=7000, block_tokens=32), "flag")
    router = Router(fleet, clock=clock)
    for number in range(FAILURES):
        router.record(fleet.start(BAD), bytes([number]), "failed")
    assert order(router.route("m", token_ids=list(range(640))))[-1] == "bad"
    assert len(router._reservations) == 1


def test_a_trial_that_has_begun_to_answer_lets_others_in() -> None:
    """It may take minutes; it proves the engine at its end alone."""
    there = Failing()
    there.fail()
    there.says("begun")
    assert there.first() == "good", "that one was sent before"
    there.clock.now_s += EJECT_S
    assert [there.first(), there.first()] == ["bad", "good"]
    there.says("begun")
    assert {there.first() for _ in range(9)} == {"bad"}
    there.says("failed")
    assert there.first() == "good", "one failure is enough until one is served"
    there.clock.now_s += 2 * EJECT_S - 0.01
    assert there.first() == "good"
    there.clock.now_s += 0.02
    assert there.first() == "bad"
    there.says("begun")
    there.says("served")
    there.fail(FAILURES - 1)
    assert there.first() == "bad"


def test_who_varies_what_fails_takes_workers_for_moments() -> None:
    """Five failures a second, aimed at all workers, beside ten good requests: each of these proves its engine."""
    names = ("bad", "good", "third", "fourth")
    there = Failing(*names[1:])
    for name in names[1:]:
        say(there.fleet, f"default/{name}", 0, 0, batch(stored([99])))
    away = 0
    for tick in range(600):
        there.clock.now_s += 0.1
        if tick % 2:
            there.fail(1, f"default/{names[tick // 2 % 4]}")
        worker = order(there.router.route("m", hashes64=packed64([999])))[0]
        there.says("served", worker=f"default/{worker}")
        away += sum(bool(one.names) for one in there.router._ejections._failing.values())
    assert away < 0.02 * 600 * len(names)


def test_an_only_worker_stays() -> None:
    clock = Clock()
    fleet = a_fleet("bad", clock=clock)
    router = Router(fleet, clock=clock)
    for number in range(9):
        router.record(fleet.start(BAD), bytes([number]), "failed")
    assert len(router._reservations) == 0
    assert len(router._ejections._failing[BAD].failed) == FAILURES, "however many"


def test_what_no_engine_computes_says_nothing_of_it() -> None:
    there = Failing()
    there.fail(FAILURES - 1)
    there.router.record(there.fleet.start(BAD), b"", "served")
    there.fail(1)
    assert there.first() == "good", "such an answer proves no engine"
    there.says("served")
    for _ in range(9):
        there.router.record(there.fleet.start(BAD), b"", "failed")
    assert there.first() == "bad"


def test_a_failed_health_check_ejects_until_a_good_one() -> None:
    there = Failing()
    start = there.fleet.start(BAD)
    there.router.check(start, failed=True)
    there.says("served")
    assert there.first() == "good"
    for _ in range(3):
        there.clock.now_s += KEEP_FAILED_S - 1
        there.router.check(start, failed=True)
        assert there.first() == "good"
    there.router.check(start, failed=False)
    assert there.first() == "bad"
    there.fail()
    there.router.check(start, failed=False)
    assert there.first() == "good", "its requests fail, whatever its health check says"


def test_without_another_health_check_a_trial_ends_the_ejection() -> None:
    there = Failing()
    there.router.check(there.fleet.start(BAD), failed=True)
    there.clock.now_s += KEEP_FAILED_S
    assert [there.first(), there.first()] == ["bad", "good"]
    there.fail(1)
    assert there.first() == "good"
    there.clock.now_s += EJECT_S
    assert there.first() == "bad"
    there.says("served")
    assert there.first() == "bad"


def test_one_that_was_not_reached_is_tried_again_after_a_good_health_check() -> None:
    there = Failing()
    for _ in range(FAILURES):
        there.says("unreached")
    assert there.first() == "good"
    there.router.check(there.fleet.start(BAD), failed=False)
    assert there.first() == "bad"
    there.says("unreached")
    assert there.first() == "bad", "in a row since then"


@pytest.mark.parametrize("how", ["incarnation", "address", "left", "publisher"])
def test_a_worker_that_starts_again_begins_clean(how: str) -> None:
    there = Failing()
    former = there.fleet.start(BAD)
    there.fail()
    assert there.first() == "good"
    if how == "publisher":
        rank = there.fleet.rank(BAD, 0)
        assert rank is not None
        rank.reset("its publisher was started anew", anew=True)
    else:
        if how == "left":
            there.fleet.remove(BAD)
        fields = {"incarnation": "2"} if how == "incarnation" else {"address": "http://elsewhere:8000"}
        there.fleet.add(a_worker("bad", **({} if how == "left" else fields)), "flag")
    there.fleet.rank(BAD, 0).heard()  # type: ignore[union-attr]
    say(there.fleet, BAD, 0, 0, batch(stored(TEN)))
    assert there.first() == "bad"
    for number in range(9):  # its connections end now
        there.router.record(former, bytes([number]), "failed")
        there.router.record(former, b"", "unreached")
    there.router.check(former, failed=True)
    assert there.first() == "bad"
    assert (there.known, len(there.router._reservations)) == (0, 0)


def test_all_ranks_of_a_worker_are_ejected() -> None:
    clock = Clock()
    fleet = a_fleet("good", clock=clock)
    fleet.add(a_worker("bad", port=7000, ranks=3), "flag")
    router = Router(fleet, clock=clock)
    for number in range(FAILURES):
        router.record(fleet.start(BAD), bytes([number]), "failed")
    assert order(router.route("m", hashes64=packed64(TEN)))[0] == "good"
    assert len(router._reservations) == 3


def test_little_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ejections, "MAX_FAILING", 10)
    monkeypatch.setattr(ejections, "MAX_MARKS", 20)
    there = Failing(*(f"w{number}" for number in range(20)))
    there.fail()
    for number in range(9):
        there.fail(1, f"default/w{number}")
    assert there.first() != "bad"
    there.fail(1, "default/w9")
    assert there.first() == "bad", "the first one is forgotten"
    for number in range(10, 20):
        there.fail(FAILURES - 1, f"default/w{number}")
    assert (there.known, len(there.router._ejections._marks)) == (10, 20)
    there.fleet.remove("default/w19")
    there.first()
    assert there.known == 9
