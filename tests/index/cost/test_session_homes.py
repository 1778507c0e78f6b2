"""Where sessions begin: beside the fewest others, and where these leave room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvpool import Load
from kvpool.index.answer import Pick, Ranking
from kvpool.index.cost import sessions
from kvpool.index.cost.load import LoadBoard
from kvpool.index.cost.router import Costs, Router
from kvpool.index.cost.sessions import ENDED_AT_ONCE, KEEP_S, Sessions
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.rank import RankKey
from kvpool.index.prompt import NO_BLOCKS, Prompt, Session
from tests.support.fleets import Clock, a_fleet, a_worker, say
from tests.support.placing import NAMESPACE, order
from tests.support.wire import batch, packed64, stored

NAMES = ("a", "b", "c", "d")
BLOCK_TOKENS = 16
COSTS = Costs(pool=0.5, running=0, move=0.5)


def prompt(number: int, blocks: int = 10) -> list[int]:
    """Of a session of this number; 160 tokens."""
    return [1000 * (number + 1) + place for place in range(blocks)]


def ask(router: Router, session: str | None, blocks: Sequence[int], **wishes: Any) -> Ranking:
    """Reserves nothing that lasts."""
    ranking = router.route("m", hashes64=packed64(blocks), session_id=session, reserve_s=9, **wishes)
    router.release(wishes.get("tenant", "default"), ranking.reservation)
    return ranking


def look(router: Router, session: str | None, blocks: Sequence[int]) -> Ranking:
    """Places nothing."""
    wanted = Prompt("m", hashes64=packed64(blocks))
    return router.rank(wanted, session=Session.of("default", "m", session), takes_turn=False).unpack()


def first(router: Router, session: str | None, blocks: Sequence[int], **wishes: Any) -> str:
    return order(ask(router, session, blocks, **wishes))[0]


def of(ranking: Ranking, worker: str) -> Pick:
    (pick,) = [pick for pick in ranking.picks if pick.worker == worker]
    return pick


def a_router(*names: str, **options: Any) -> tuple[Router, Clock]:
    clock = Clock()
    fleet = a_fleet(*(names or NAMES), clock=clock, **options)
    for name in names or NAMES:
        say(fleet, f"default/{name}", 0, 0, batch(stored([9999])))
    return Router(fleet, costs=COSTS, clock=clock), clock


def test_sessions_begin_beside_the_fewest_tokens() -> None:
    router, _ = a_router()
    homes = [first(router, f"s{number}", prompt(number)) for number in range(40)]
    for begun in range(4, 41, 4):
        assert set(Counter(homes[:begun]).values()) == {begun // 4}, "no worker gets two more than another"
    long = first(router, "long", prompt(100, 1000))
    others = Counter(first(router, f"t{number}", prompt(200 + number)) for number in range(60))
    assert long not in others
    assert set(others.values()) == {20}


def test_load_and_blocks_count_before_the_sessions_beside() -> None:
    router, _ = a_router("a", "b")
    home = first(router, "s", prompt(0))
    other = "b" if home == "a" else "a"
    busy = [Load(other, queued_tokens=1), Load(home, queued_tokens=0)]
    assert first(router, "t", prompt(1), loads=busy) == home
    idle = [Load(name, queued_tokens=0) for name in (home, other)]
    assert first(router, "u", prompt(2), loads=idle) == other
    say(router._fleet, f"default/{home}", 0, 1, batch(stored(prompt(3, 5))))
    router._sessions.place(
        Session("default", b"long"), *router._fleet.ranks_of(f"default/{other}"), 1, NO_BLOCKS, 9999
    )
    alike = [Load(home, queued_tokens=5 * BLOCK_TOKENS), Load(other, queued_tokens=0)]
    assert {pick.cost for pick in ask(router, None, prompt(3), loads=alike).picks} == {10 * BLOCK_TOKENS}
    assert first(router, "v", prompt(3), loads=alike) == other, (
        "of equal costs the least queue, then the homes"
    )


def test_of_workers_that_have_all_of_its_blocks_a_session_stays_at_its_own() -> None:
    """Those with fewer homes came first, and a session went to and fro between equal ones."""
    router, _ = a_router()
    homes = {number: first(router, f"s{number}", prompt(number)) for number in range(8)}
    for name in NAMES:
        say(router._fleet, f"default/{name}", 0, 1, batch(*(stored(prompt(number)) for number in homes)))
    assert {number: first(router, f"s{number}", prompt(number)) for number in homes} == homes


def test_a_session_that_leaves_its_home_goes_where_the_fewest_are() -> None:
    """Of workers that cost the same; whichever its hash prefers."""
    router, _ = a_router("a", "b", "c")
    names = [f"s{number}" for number in range(40)]
    homes = {name: first(router, name, prompt(number)) for number, name in enumerate(names)}
    full, empty, left = "abc"
    at_full = router._fleet.ranks_of(f"default/{full}")
    for number in range(20):
        router._sessions.place(Session("default", bytes([number])), *at_full, 1, NO_BLOCKS, 99_999)
    busy = [Load(left, queued_tokens=100_000), Load(full, queued_tokens=0), Load(empty, queued_tokens=0)]
    movers = [number for number, name in enumerate(names) if homes[name] == left]
    assert len(movers) > 1
    assert {first(router, names[number], prompt(number), loads=busy) for number in movers} == {empty}


def test_a_session_begins_where_the_homes_leave_room() -> None:
    """A worker holds 100 blocks. 95 of them are homes', so 10 more displace 5: at half of 0.5 tokens each."""
    router, _ = a_router("a", "b", namespace=NAMESPACE)
    home = first(router, "s", prompt(0, 95))
    other = "b" if home == "a" else "a"
    router.loads.size(f"default/{home}", 0, 100 * BLOCK_TOKENS)

    def displaced(blocks: int, session: str | None = "t") -> tuple[int, int]:
        ranking = look(router, session, prompt(1, blocks))
        return of(ranking, home).move_cost, of(ranking, other).move_cost

    assert displaced(5) == (0, 0)
    assert displaced(10) == (5 * BLOCK_TOKENS // 4, 0)
    assert displaced(200) == (200 * BLOCK_TOKENS // 4 - 5 * BLOCK_TOKENS // 4, 0)
    assert displaced(10, session=None) == (0, 0)


def test_a_session_that_begins_counts_as_what_sessions_come_to() -> None:
    """Ten of one block count beside a long one as ten of the mean, not as ten blocks."""
    router, _ = a_router("a", "b")
    first(router, "long", prompt(0, 600), workers=["b"])
    for number in range(10):
        first(router, f"s{number}", prompt(1 + number, 1), workers=["a"])
    (begun,), (long,) = (router.loads.of(router._fleet.ranks_of(f"default/{name}")) for name in "ab")
    assert begun is not None
    assert long is not None
    assert long.session_tokens == 600 * BLOCK_TOKENS
    assert begun.session_tokens > long.session_tokens


def test_a_session_that_begins_counts_as_those_of_its_model_do() -> None:
    """A tenant's small model has small sessions, whatever the large one's come to."""
    router, _ = a_router("a")
    router._fleet.add(a_worker("b", port=7000, model="n"), "flag")
    for number in range(3):
        ask(router, f"s{number}", prompt(number, 100))
        router.route("n", hashes64=packed64(prompt(number, 1)), session_id=f"s{number}")
    counted = {key.worker_id: tokens for key, tokens in router._sessions._tokens.items()}
    assert counted == {"default/a": 3 * 100 * BLOCK_TOKENS, "default/b": 3 * BLOCK_TOKENS}


def test_what_was_placed_without_a_session_takes_room_too() -> None:
    router, clock = a_router("a", "b")
    for name in "ab":
        router.loads.size(f"default/{name}", 0, 100 * BLOCK_TOKENS)
    first(router, None, prompt(0, 95), workers=["a"])
    moves = [of(look(router, "t", prompt(1)), name).move_cost for name in "ab"]
    assert moves == [5 * BLOCK_TOKENS // 2, 0]
    clock.now_s += 60
    assert of(look(router, "t", prompt(1)), "a").move_cost < moves[0], "and less as time goes by"
    clock.now_s += KEEP_S
    assert of(look(router, "t", prompt(1)), "a").move_cost == 0


def test_what_a_beginning_displaces_is_at_most_itself() -> None:
    router, _ = a_router("a", "b")
    for name in ("a", "b"):
        router.loads.size(f"default/{name}", 0, 10 * BLOCK_TOKENS)
    for number in range(8):
        first(router, f"s{number}", prompt(number, 100))
    assert {pick.move_cost for pick in look(router, "t", prompt(50)).picks} == {10 * BLOCK_TOKENS // 2}


def test_what_a_worker_has_of_the_prompt_displaces_nothing() -> None:
    router, _ = a_router("a", "b")
    say(router._fleet, "default/a", 0, 1, batch(stored(prompt(1, 6))))
    for name in ("a", "b"):
        router.loads.size(f"default/{name}", 0, 0)
    ranking = look(router, "t", prompt(1))
    assert [of(ranking, name).move_cost for name in ("a", "b")] == [2 * BLOCK_TOKENS, 5 * BLOCK_TOKENS]


def test_without_a_known_capacity_nothing_is_displaced() -> None:
    router, _ = a_router("a", "b")
    for number in range(8):
        first(router, f"s{number}", prompt(number, 100))
    assert {pick.move_cost for pick in look(router, "t", prompt(50)).picks} == {0}


def test_a_session_stays_though_another_index_knows_other_homes() -> None:
    """Two indexes on the same events. Their counts differ, so they place a beginning differently, and no later turn."""
    clock = Clock()
    fleet = a_fleet(*NAMES, clock=clock)
    one, other = (Router(fleet, costs=COSTS, clock=clock) for _ in range(2))
    for name in NAMES:
        say(fleet, f"default/{name}", 0, 0, batch(stored([9999])))
    seeds = [f"s{number}" for number in range(40)]
    alone = {
        seed: first(Router(fleet, costs=COSTS, clock=clock), seed, prompt(at))
        for at, seed in enumerate(seeds)
    }
    homes: dict[str, str] = {}
    batches = Counter[str]()
    for at, seed in enumerate(seeds):
        homes[seed] = home = first(one, seed, prompt(at))
        batches[home] += 1
        say(fleet, f"default/{home}", 0, batches[home], batch(stored(prompt(at))))
    assert homes != alone, "what an index has placed counts"
    for _ in range(3):
        for router in (other, one):
            for at, seed in enumerate(seeds):
                assert first(router, seed, [*prompt(at), 1000 * (at + 1) + 500]) == homes[seed]


def test_homes_are_counted_as_long_as_they_are_kept() -> None:
    clock, loads = Clock(), LoadBoard()
    there = Sessions(clock, loads)

    def tokens(name: str) -> int:
        (rank,) = loads.of([RankKey(name, 0, 0)])
        return 0 if rank is None else rank.session_tokens

    one, two = (Session("t", name) for name in (b"one", b"two"))
    there.place(one, RankKey("t/a", 0, 0), 0, NO_BLOCKS, 100)
    there.place(two, RankKey("t/a", 0, 0), 0, NO_BLOCKS, 40)
    assert tokens("t/a") == 200, "a short one counts as the mean of those before"
    there.place(one, RankKey("t/a", 0, 0), 0, NO_BLOCKS, 110)
    there.place(two, RankKey("t/a", 0, 0), 0, NO_BLOCKS, 50)
    assert tokens("t/a") == 110 + 75
    there.place(one, RankKey("t/b", 0, 0), 0, NO_BLOCKS, 120)
    assert (tokens("t/a"), tokens("t/b")) == (75, 120)
    there.place(one, RankKey("t/a", 0, 0), 0, NO_BLOCKS, 20)  # a sub-agent
    assert (tokens("t/a"), tokens("t/b")) == (75, 120)
    there.settle(one, ("t/b", 0), RankKey("t/a", 0, 0), 0)
    assert (tokens("t/a"), tokens("t/b")) == (195, 0)
    clock.now_s += KEEP_S + 1
    there.home(Session("t", b"three"))
    assert (tokens("t/a"), len(there)) == (0, 0)
    assert not there._tokens
    assert not there._said


def test_a_call_ends_a_few_homes() -> None:
    clock = Clock()
    there = Sessions(clock, LoadBoard())
    for number in range(10 * ENDED_AT_ONCE):
        there.place(Session("t", bytes([number])), RankKey("t/a", 0, 0), 0, NO_BLOCKS, 1)
    clock.now_s += KEEP_S + 1
    there.home(Session("t", b"other"))
    assert len(there) == 9 * ENDED_AT_ONCE
    assert there.home(Session("t", bytes([79]))) is None, "one that is over is none, dropped or not"


def test_a_loud_tenant_moves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are of a tenant, and so are the homes that count at them; the one with the most loses some when full."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 200)

    def placed(loud: int) -> list[str]:
        clock = Clock()
        fleet = Fleet(clock=clock)
        for tenant in ("calm", "loud"):
            for at, name in enumerate(NAMES):
                fleet.add(a_worker(name, tenant=tenant, port=6000 + at), "flag")
        router = Router(fleet, costs=COSTS, clock=clock)
        for tenant in ("calm", "loud"):
            for name in NAMES:
                router.loads.size(f"{tenant}/{name}", 0, 100 * BLOCK_TOKENS)
        found = []
        for number in range(60):
            found.append(first(router, f"s{number}", prompt(number), tenant="calm"))
            for other in range(loud):
                first(router, f"{number} {other}", prompt(other, 200), tenant="loud")
        assert len(router._sessions) <= 200
        assert len(router._sessions._homes["calm"]) == 60
        return found

    assert placed(0) == placed(20)


def test_many_sessions_of_a_caller_cost_another_its_own_prompt_at_most() -> None:
    """In one tenant: they spread as all do, and a beginning between them still goes to a worker that has its prefix."""
    router, _ = a_router()
    for name in NAMES:
        router.loads.size(f"default/{name}", 0, 100 * BLOCK_TOKENS)
    say(router._fleet, "default/c", 0, 1, batch(stored(prompt(0, 8))))
    many = Counter(first(router, f"many{number}", prompt(1 + number, 100)) for number in range(400))
    assert set(many.values()) == {100}
    ranking = look(router, "s", prompt(0))
    assert ranking.picks[0].worker == "c"
    assert max(pick.move_cost for pick in ranking.picks) == 10 * BLOCK_TOKENS // 2
