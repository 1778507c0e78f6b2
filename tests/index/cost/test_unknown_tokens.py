"""Sessions whose tokens nobody knows: the hash of session and rank decides, so replicas agree."""

from __future__ import annotations

import random
from collections import Counter

from kvpool import Load
from kvpool.index.cost.router import Router
from kvpool.index.prompt import NO_BLOCKS
from tests.support.fleets import Clock, a_fleet, say
from tests.support.placing import order
from tests.support.wire import batch, packed64, stored

NAMES = ("a", "b", "c", "d")
TOKENS = 50_000


def replicas(count: int = 2) -> list[Router]:
    clock = Clock()
    fleet = a_fleet(*NAMES, clock=clock)
    for name in NAMES:
        say(fleet, f"default/{name}", 0, 0, batch(stored([9999])))
    return [Router(fleet, clock=clock) for _ in range(count)]


def ask(router: Router, session: str, tokens: int = TOKENS, loads: tuple[Load, ...] = ()) -> str:
    ranking = router.route(
        "m", hashes64=NO_BLOCKS, prompt_tokens=tokens, session_id=session, reserve_s=9, loads=loads
    )
    router.release("default", ranking.reservation)
    return order(ranking)[0]


def test_replicas_that_take_turns_send_a_session_to_one_worker() -> None:
    routers, chance = replicas(), random.Random(5)
    went: dict[str, list[str]] = {}
    for turn in range(6):
        for number in range(40):
            router = routers[turn % 2] if turn else chance.choice(routers)
            went.setdefault(f"s{number}", []).append(ask(router, f"s{number}", TOKENS + 100 * turn))
    assert all(len(set(workers)) == 1 for workers in went.values())
    assert min(Counter(workers[0] for workers in went.values()).values()) >= 4, "and spread"


def test_it_leaves_a_worker_whose_queue_is_longer_than_the_prompt() -> None:
    (router,) = replicas(1)
    home = ask(router, "s")
    busy = tuple(Load(name, queued_tokens=10 * TOKENS if name == home else 0) for name in NAMES)
    assert ask(router, "s", loads=busy) != home
    idle = tuple(Load(name, queued_tokens=0) for name in NAMES)
    assert ask(router, "s", loads=idle) == home, "and comes back: the hash is the same"


def test_a_first_request_is_reserved_whole() -> None:
    (router,) = replicas(1)
    ranking = router.route("m", hashes64=NO_BLOCKS, prompt_tokens=TOKENS, session_id="s", reserve_s=60)
    home = order(ranking)[0]
    (pick,) = router.route("m", hashes64=packed64([1]), workers=[home]).picks
    assert pick.reserved_cost >= TOKENS


def test_a_turn_without_tokens_stays_where_its_tokens_led_before() -> None:
    (router,) = replicas(1)
    blocks = list(range(1, 201))
    names = [f"s{number}" for number in range(12)]
    for number, name in enumerate(names):
        home = NAMES[number % 4]
        busy = [Load(one, queued_tokens=0 if one == home else 1 << 20) for one in NAMES]
        own = [number * 1000 + block for block in blocks]
        first = router.route("m", hashes64=packed64(own), session_id=name, loads=busy)
        assert order(first)[0] == home
    idle = tuple(Load(name, queued_tokens=0) for name in NAMES)
    for _ in range(2):
        assert [ask(router, name, 3300, idle) for name in names] == [*NAMES] * 3
