"""Sessions: a home is credited and left as its costs say."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvpool import Load
from kvpool.index.answer import Ranking
from kvpool.index.cost import sessions
from kvpool.index.cost.load import LoadBoard
from kvpool.index.cost.router import Costs, Router
from kvpool.index.cost.sessions import ANNOUNCE_S, KEEP_S, Home, Sessions
from kvpool.index.fleet.rank import RankKey
from kvpool.index.prompt import NO_BLOCKS, Session
from tests.support.fleets import Clock, a_fleet, say
from tests.support.placing import NAMESPACE, order
from tests.support.wire import batch, packed64, removed, stored

NAMES = ("a", "b", "c", "d")
PROMPT = list(range(1, 101))  # 1,600 tokens
NEXT = [*PROMPT, *range(201, 211)]
COSTS = Costs(pool=0.5, running=0, move=0.5)


class Fleeting:
    """A router of a fleet; a request's reservation ends at once."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.clock = Clock()
        self.fleet = fleet = a_fleet(*(names or NAMES), clock=self.clock, **options)
        self.router = Router(fleet, costs=COSTS, clock=self.clock)
        self._batches: Counter[str] = Counter()

    def say(self, worker: str, *events: Any) -> None:
        say(self.fleet, f"default/{worker}", 0, self._batches[worker], batch(*events))
        self._batches[worker] += 1

    def forget(self) -> None:
        """All start again, and are not heard."""
        for worker in self.fleet.followed():
            self.fleet.add(replace(worker, incarnation="new"), "flag")

    def route(self, blocks: list[int], session: str | None = "s", **wishes: Any) -> Ranking:
        ranking = self.router.route(
            "m", hashes64=packed64(blocks), session_id=session, reserve_s=wishes.pop("reserve_s", 9), **wishes
        )
        if ranking.reservation:
            self.router.release("default", ranking.reservation)
        return ranking

    def first(self, blocks: list[int], session: str | None = "s", **wishes: Any) -> str:
        return order(self.route(blocks, session, **wishes))[0]


def awake(there: Fleeting, *names: str) -> None:
    """Their events are trusted."""
    for name in names or NAMES:
        there.say(name, stored([9999]))


def test_a_next_turn_finds_its_worker_before_the_blocks_are_announced() -> None:
    there = Fleeting()
    awake(there)
    home = there.first(PROMPT)
    assert {there.first(NEXT) for _ in range(8)} == {home}
    assert len({there.first(NEXT, session=None) for _ in range(8)}) > 1, (
        "without a session any of equal ranks"
    )
    pick = there.route(NEXT).picks[0]
    assert (pick.worker, pick.prefill_cost, pick.fetch_cost, pick.move_cost) == (home, 0, 0, 0)


def test_ids_that_are_no_utf8_are_several() -> None:
    """Each such byte of a header is a surrogate of its own."""
    one, other = (Session.of("t", "m", f"s{byte}") for byte in ("\udcfe", "\udcff"))
    assert one != other


def test_what_is_not_announced_in_time_is_not_there() -> None:
    there = Fleeting()
    awake(there)
    home = there.first(PROMPT)
    there.clock.now_s += ANNOUNCE_S
    assert there.route(NEXT, reserve_s=None).picks[0].prefill_cost == 160
    there = Fleeting()
    awake(there)
    home = there.first(PROMPT)
    there.clock.now_s += ANNOUNCE_S + 1
    picks = there.route(NEXT).picks
    assert {pick.prefill_cost for pick in picks} == {1760}
    assert home in {pick.worker for pick in picks}


def test_a_home_whose_events_are_not_trusted_is_credited_for_longer() -> None:
    there = Fleeting()
    there.forget()
    home = there.first(PROMPT)
    there.clock.now_s += KEEP_S
    (pick,) = [pick for pick in there.route(NEXT, reserve_s=None).picks if pick.worker == home]
    assert (pick.trust, pick.prefill_cost) == ("fallback", 160)
    there = Fleeting()
    there.forget()
    there.first(PROMPT)
    there.clock.now_s += KEEP_S + 1
    assert {pick.prefill_cost for pick in there.route(NEXT).picks} == {1760}


def test_a_session_moves_when_waiting_costs_more_than_the_move() -> None:
    """Its 1,600 tokens are in the pool: 800 to fetch them, and 400 that others fetch again."""
    there = Fleeting("a", "b", namespace=NAMESPACE)
    there.say("a", stored(PROMPT), stored(PROMPT, medium="STORAGE"))
    there.say("b", stored([9999]))
    assert there.first(PROMPT) == "a"

    def waits(name: str, tokens: int) -> list[Load]:
        return [Load(one, queued_tokens=tokens if one == name else 0) for one in "ab"]

    assert there.first(PROMPT, loads=waits("a", 1199)) == "a"
    (_, other) = there.route(PROMPT, loads=waits("a", 0)).picks
    assert (other.fetch_cost, other.move_cost, other.cost) == (800, 400, 1200)
    assert there.first(PROMPT, session=None, loads=waits("a", 1199)) == "b", "no session: no move"
    assert there.first(PROMPT, loads=waits("a", 1201)) == "b"
    there.say("b", stored(PROMPT))
    there.say("a", removed(PROMPT))
    assert there.first(PROMPT, loads=waits("b", 1199)) == "b", "it stays where it has moved to"


def test_without_a_pool_others_compute_again_what_a_move_displaces() -> None:
    there = Fleeting("a", "b")
    there.say("a", stored(PROMPT))
    there.say("b", stored([9999]))
    assert there.first(PROMPT) == "a"
    assert there.route(PROMPT).picks[1].move_cost == 800


def test_a_worker_that_goes_takes_its_sessions_home_along() -> None:
    there = Fleeting()
    awake(there)
    home = there.first(PROMPT)
    there.fleet.remove(f"default/{home}")
    new = there.first(NEXT)
    assert new != home
    assert {there.first(NEXT) for _ in range(5)} == {new}
    assert {pick.move_cost for pick in there.route(NEXT).picks} == {0, 800 + 80}


def test_indexes_place_first_requests_alike() -> None:
    one, other = Fleeting(), Fleeting(*reversed(NAMES))
    for number in range(7):  # what is placed counts beside sessions, in both alike
        for there in (one, other):
            there.first([5000 + number], session=None)
    names = [str(number) for number in range(200)]
    blocks = {name: [int(name) + 1] for name in names}
    firsts = {name: one.first(blocks[name], name) for name in names}
    assert firsts == {name: other.first(blocks[name], name) for name in names}
    assert min(Counter(firsts.values()).values()) > 25, "and spread"


def test_a_cache_key_chooses_among_equals_and_pins_nothing() -> None:
    there = Fleeting()
    awake(there)
    for one in NAMES:
        there.router.loads.size(f"default/{one}", 0, 1 << 20)

    def of_key(**wishes: Any) -> str:
        return there.first(PROMPT, None, prompt_cache_key="app", **wishes)

    chosen = {of_key() for _ in range(5)}
    assert len(chosen) == 1
    (name,) = chosen
    busy = [Load(one, waiting=1 if one == name else 0) for one in NAMES]
    assert of_key(loads=busy) != name
    assert len(there.router._sessions) == 0
    assert {pick.move_cost for pick in there.route(PROMPT, None, prompt_cache_key="app").picks} == {0}


def test_sub_agents_spread_and_leave_the_home() -> None:
    there = Fleeting()
    awake(there)
    home = there.first(PROMPT)
    went = Counter()
    for number in range(8):
        own = [1000 + 40 * number + place for place in range(40)]  # less than half of the session
        ranking = there.router.route("m", hashes64=packed64(own), session_id="s", reserve_s=60)
        went[order(ranking)[0]] += 1
    assert len(went) == len(NAMES)
    assert max(went.values()) <= 3
    assert there.router._sessions.home(Session.of("default", "m", "s")).rank[:2] == (f"default/{home}", 0)  # type: ignore


def test_what_its_home_computes_now_is_counted_once() -> None:
    there = Fleeting("a", "b")
    awake(there, "a", "b")
    first = there.router.route("m", hashes64=packed64(PROMPT), session_id="s", reserve_s=60)
    home = order(first)[0]
    (pick,) = [pick for pick in there.route(NEXT, reserve_s=None).picks if pick.worker == home]
    assert pick.cost == 160 + 1600, "its own part, after the first's"


def test_without_tokens_the_home_counts() -> None:
    there = Fleeting()

    def by_load(session: str | None) -> str:
        ranking = there.router.route(
            "m", hashes64=NO_BLOCKS, prompt_tokens=5000, session_id=session, reserve_s=None
        )
        return order(ranking)[0]

    home = by_load("s")
    assert {by_load("s") for _ in range(6)} == {home}
    assert len({by_load(None) for _ in range(6)}) > 1


def test_of_a_prompt_that_differs_behind_a_block_all_but_as_much_again_is_shared() -> None:
    chance = random.Random(5)
    rank = RankKey("default/a", 0, 1)
    for blocks in [*range(1, 40), 1000, 1650]:
        there = Sessions(Clock(), LoadBoard())
        session = Session("t", b"s")
        hashes = [chance.randrange(1, 1 << 64) for _ in range(blocks)]
        there.place(session, rank, 0, packed64(hashes), 16 * blocks)
        home = there.home(session)
        assert home is not None
        for same in {0, 1, blocks // 2, blocks - 1, blocks}:
            other = [*hashes[:same], *(chance.randrange(1, 1 << 64) for _ in range(chance.randrange(1, 9)))]
            shared = home.shared(memoryview(packed64(other)).cast("B"))
            assert max(0, 2 * same - blocks) <= shared <= same
        assert home.shared(memoryview(packed64(hashes[: max(1, blocks // 2)])).cast("B")) <= max(
            1, blocks // 2
        )


def test_homes_are_bounded_and_a_tenant_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 100)
    there = Sessions(Clock(), LoadBoard(), tenant_share=0.75)
    calm, loud = (Session.of(tenant, "m", "s") for tenant in ("calm", "loud"))
    assert calm is not None
    assert loud is not None
    assert calm.digest == loud.digest, "tenants are apart by more than an id"
    there.place(calm, RankKey("calm/w", 0, 1), 0, NO_BLOCKS, 10)
    for number in range(1000):
        other = Session.of("loud", "m", f"s{number}")
        assert other is not None
        there.place(other, RankKey("loud/w", 0, 1), 0, NO_BLOCKS, 10)
    assert len(there) == 76
    assert there.home(loud) is None
    home = there.home(calm)
    assert isinstance(home, Home)
    assert home.rank[:2] == ("calm/w", 0)
    assert sum(map(len, there._homes.values())) == len(there)


def test_a_request_that_went_elsewhere_takes_its_session_along() -> None:
    there = Fleeting()
    home = there.first(PROMPT)
    other = next(name for name in NAMES if name != home)
    session = Session.of("default", "m", "s")
    assert session is not None
    there.router.settle(session, (f"default/{home}", 0), (f"default/{other}", 0))
    assert there.first(NEXT) == other
    there.router.settle(session, (f"default/{home}", 0), (f"default/{home}", 0))
    assert there.first(NEXT) == other, "an answer of before changes nothing"
