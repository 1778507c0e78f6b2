"""A name is never worse than none, also where one key or session id stands for a whole application."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest

from kvpool.index.cost.router import Router
from tests.support.fleets import Clock, a_fleet, say
from tests.support.placing import order
from tests.support.wire import batch, packed64, removed, stored

NAMES = ("a", "b", "c", "d")
ROOM = 600  # blocks of a worker


class Caches:
    """Four workers with a cache each, which tell what they store and evict."""

    def __init__(self, *, knows_room: bool = True) -> None:
        self.clock = Clock()
        self.fleet = a_fleet(*NAMES, clock=self.clock)
        self.router = Router(self.fleet, clock=self.clock)
        self._held: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in NAMES}
        self._told = Counter[str]()
        self.hits = self.asked = 0
        self.went = Counter[str]()
        for name in NAMES:
            say(self.fleet, f"default/{name}", 0, 0, batch(stored([9999])))
            if knows_room:
                self.router.loads.size(f"default/{name}", 0, ROOM * 16)

    def ask(self, blocks: list[int], key: str | None, session: str | None = None) -> None:
        """One at a time."""
        ranking = self.router.route(
            "m", hashes64=packed64(blocks), prompt_cache_key=key, session_id=session, reserve_s=9
        )
        self.router.release("default", ranking.reservation)
        name = order(ranking)[0]
        held = self._held[name]
        new = [block for block in blocks if block not in held]
        self.hits += len(blocks) - len(new)
        self.asked += len(blocks)
        self.went[name] += 1
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        gone = [held.popitem(last=False)[0] for _ in range(len(held) - ROOM)]
        self._told[name] += 1
        events = [stored(new)] * bool(new) + [removed(gone)] * bool(gone)
        say(self.fleet, f"default/{name}", 0, self._told[name], batch(*events))
        self.clock.now_s += 1


def talk(
    there: Caches,
    key: str | None,
    session: str | None = None,
    *,
    common: int = 0,
    conversations: int = 40,
    rounds: int = 3,
) -> float:
    """The share of hits after the first round."""
    for turn in range(rounds):
        if turn == 1:
            there.hits = there.asked = 0
        for number in range(conversations):
            own = [1000 * (number + 1) + block for block in range(40 - common)]
            there.ask([*range(1, common + 1), *own], key, session)
    return there.hits / there.asked


@pytest.mark.parametrize("knows_room", [True, False])
def test_one_key_for_a_whole_application_costs_no_hit(knows_room: bool) -> None:
    """40 conversations of 40 blocks: all caches together hold them, one cache 15."""
    assert talk(Caches(knows_room=knows_room), None) == 1
    assert talk(Caches(knows_room=knows_room), "app") == 1


@pytest.mark.parametrize("common", [0, 8])
def test_one_session_id_for_a_whole_application_costs_no_hit(common: int) -> None:
    """Conversations that begin alike, or not at all."""
    assert talk(Caches(), None, "app", common=common) == 1


def test_a_key_leads_its_requests_to_one_worker_while_that_has_room() -> None:
    there = Caches()
    for number in range(15):
        there.ask([1000 * (number + 1) + block for block in range(40)], "app")
    assert len(there.went) == 1
    for number in range(15, 30):
        there.ask([1000 * (number + 1) + block for block in range(40)], "app")
    assert sorted(there.went.values()) == [15, 15], "and then to the next one"


def test_what_was_placed_long_ago_takes_no_room() -> None:
    there = Caches()
    for number in range(15):
        there.ask([1000 * (number + 1) + block for block in range(40)], "app")
    there.clock.now_s += 3600
    there.ask([90_000 + block for block in range(40)], "app")
    assert len(there.went) == 1


def test_beyond_all_room_a_key_is_none() -> None:
    """Twice as many as fit: requests go round as without a key."""
    there = Caches()
    talk(there, "app", conversations=120, rounds=1)
    there.went.clear()
    for number in range(40):
        there.ask([500_000 + 1000 * number + block for block in range(40)], "app")
    assert set(there.went.values()) == {10}
