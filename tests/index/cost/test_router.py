"""A ranked pick: the terms of its cost, ties, trust and load."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import BlockHasher, ConfigError, Load
from kvpool.index.answer import Pick, Row
from kvpool.index.cost.load import KEEP_S
from kvpool.index.cost.router import Costs, Router
from kvpool.index.prompt import Prompt
from kvpool.index.protocol.messages import decode_route
from kvpool.v1 import index_pb2 as pb
from tests.support.fleets import Clock, a_fleet, a_worker, joined, say
from tests.support.placing import COSTS, NAMESPACE, TEN, order
from tests.support.wire import batch, packed64, stored


@pytest.mark.parametrize(
    ("device", "local", "pool", "prompt_tokens", "terms"),
    [
        (0, 0, range(0), 167, (167, 0)),
        (10, 10, range(0), 167, (7, 0)),
        (10, 10, range(0), 100, (0, 0)),  # fewer than its blocks hold: not below 0
        (2, 6, range(6, 9), None, (16, 16 + 24)),
    ],
)
def test_what_is_left_to_compute_and_to_fetch(
    device: int, local: int, pool: range, prompt_tokens: int | None, terms: tuple[int, int]
) -> None:
    fleet = a_fleet("w", namespace=NAMESPACE)
    held = [
        stored(TEN[:device]), stored(TEN[device:local], medium="CPU"),
        stored([TEN[place] for place in pool], medium="STORAGE"),
    ]  # fmt: skip
    say(fleet, "default/w", 0, 0, batch(*held))
    router = Router(fleet, costs=COSTS, clock=Clock())
    (pick,) = router.route("m", hashes64=packed64(TEN), prompt_tokens=prompt_tokens).picks
    assert (pick.prefill_cost, pick.fetch_cost) == terms
    assert (pick.queue_cost, pick.cost) == (0, sum(terms))


def test_of_a_prompt_without_a_full_block_all_is_computed() -> None:
    (pick,) = Router(a_fleet("w")).route("m", token_ids=list(range(9))).picks
    assert (pick.row.prompt_blocks, pick.prefill_cost, pick.fetch_cost) == (0, 9, 0)


@pytest.mark.parametrize(
    ("told", "reserved", "queue"),
    [
        (None, 0, 77),  # not known: what is typical
        (None, 5, 82),
        ({}, 0, 0),
        ({"running": 3}, 0, 300),
        ({"waiting": 2, "running": 1}, 40, 2140),
        ({"waiting": 2, "queued_tokens": 50}, 0, 50),  # known: how many wait says no more
        ({"waiting": 2, "queued_tokens": 0}, 0, 0),
        ({"kv_usage": 0.8}, 0, 0),
        ({"kv_usage": 0.9}, 0, 100),
        ({"kv_usage": 1}, 0, 200),
    ],
)
def test_what_is_there_before(told: dict[str, Any] | None, reserved: int, queue: int) -> None:
    clock = Clock()
    router = Router(a_fleet("w", "x"), costs=COSTS, clock=clock)
    router.loads.report("default/x", Load("x", queued_tokens=77))
    if told is not None:
        router.loads.report("default/w", Load("w", **told))
    if reserved:
        router._reservations.add("default", router._fleet.ranks_of("default/w")[0], reserved, 60)
    picks = {pick.worker: pick for pick in router.route("m", hashes64=packed64(TEN)).picks}
    pick = picks["w"]
    assert (pick.queue_cost, pick.reserved_cost, pick.cost) == (queue, reserved, 160 + queue)


def test_a_pick_says_what_it_is_made_of() -> None:
    clock = Clock()
    fleet = a_fleet("w", clock=clock)
    say(fleet, "default/w", 0, 1, batch(stored(TEN[:1])))
    router = Router(fleet, costs=COSTS, clock=clock)
    router._reservations.add("default", router._fleet.ranks_of("default/w")[0], 7, 60)
    router.loads.scrape("default/w", Load("w", 0, 3, 2, 50, 0.9), asleep=True)
    clock.now_s += 0.25  # in which 25 of the 50 tokens that waited are computed
    assert router.route("m", hashes64=packed64(TEN)).picks == (
        Pick(
            row=Row("w", 0, "http://w:8000", 16, 10, 1, 1, 0, 1, 250, False, 1),
            trust="exact", cost=144 + 25 + 300 + 100 + 7, prefill_cost=144, fetch_cost=0,
            queue_cost=432, running=3, waiting=2, queued_tokens=50, kv_usage_permille=900, reserved_cost=7,
            load_source="scraped", load_age_ms=250, asleep=True, unreachable=False,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("coefficient", ["local", "pool", "waiting", "running", "usage", "speed"])
def test_coefficients_are_judged(coefficient: str) -> None:
    for value in (-0.1, float("nan"), float("inf"), 1e7):
        with pytest.raises(ConfigError, match=f"the coefficient {coefficient} is a number from 0"):
            Costs(**{coefficient: value})


# ---- over a fleet


def test_trust() -> None:
    fleet = a_fleet("a", "b")
    fleet.add(a_worker("c", port=6000), "flag")  # not heard from
    hashes = packed64([1, 2])
    for name in "ab":
        say(fleet, f"default/{name}", 0, 4, batch(stored([1, 2])))
    fleet.rank("default/b", 0).mark(stale=True, problem="no answer")
    route = Router(fleet).route("m", hashes64=hashes)
    trust = {pick.worker: (pick.trust, pick.prefill_cost) for pick in route.picks}
    assert trust == {"a": ("exact", 0), "b": ("degraded", 32), "c": ("fallback", 32)}


def test_the_mean_of_the_longest_queues_is_a_number() -> None:
    """The sum of these is none of 64 bits."""
    names = [f"w-{number}" for number in range(2_200)]
    router = Router(a_fleet("a", *names), clock=Clock())
    longest = (1 << 53) - 1
    loads = [Load(name, queued_tokens=longest) for name in names]
    queues = {pick.worker: pick.queue_cost for pick in router.route("m", token_ids=[1], loads=loads).picks}
    assert queues["a"] == pytest.approx(longest)


def test_reported_loads_stay_for_others_and_end() -> None:
    clock = Clock()
    router = Router(a_fleet("a", "b"), clock=clock)
    router.route(
        "m", token_ids=[1], loads=[Load("a", running=3), Load("x", running=1), Load("b", 9, running=1)]
    )
    clock.now_s += 2
    picks = {pick.worker: pick for pick in router.route("m", token_ids=[1]).picks}
    assert (picks["a"].running, picks["a"].load_source, picks["a"].load_age_ms) == (3, "reported", 2000)
    assert picks["b"].load_source == "none"
    assert router.loads.get("default/x", 0) is None, "nobody of that name was asked about"
    assert router.loads.get("default/b", 9) is None
    clock.now_s += KEEP_S
    assert {pick.load_source for pick in router.route("m", token_ids=[1]).picks} == {"none"}


def test_ties_go_to_the_least_load_then_to_the_least_recently_picked() -> None:
    fleet = a_fleet("a", "b", "c")
    hashes = BlockHasher(16).hashes(range(16))
    say(fleet, "default/c", 0, 0, batch(stored(hashes)))
    router = Router(fleet, costs=Costs(running=16))
    tokens = list(range(32))
    # c holds one block, and has one request more: it costs as much, and has the greater load.
    loads = [Load("a"), Load("b"), Load("c", running=1)]
    firsts = [order(router.route("m", token_ids=tokens, loads=loads))[0] for _ in range(4)]
    assert firsts == ["a", "b", "a", "b"]
    equal = [Load("a"), Load("b"), Load("c")]
    assert order(router.route("m", token_ids=tokens, loads=equal)) == ["c", "a", "b"]
    assert order(router.route("m", token_ids=[1], loads=equal)) == ["a", "b", "c"]


# ---- reservations


def test_routers_that_ask_at_once_spread() -> None:
    """A second one cannot choose between what the first has read and what it reserves."""
    fleet = a_fleet("a", "b")
    tokens = list(range(48))
    say(fleet, "default/a", 0, 0, batch(stored(BlockHasher(16).hashes(tokens[:16]))))
    router = Router(fleet)
    reserve, found = router._reservations.add, []
    choosing, chosen = threading.Event(), threading.Event()

    def slowly(*args: Any) -> str:
        if not choosing.is_set():
            choosing.set()
            chosen.wait(0.3)  # more than enough for the second, if it may
        return reserve(*args)

    router._reservations.add = slowly  # type: ignore[method-assign]

    def ask() -> None:
        found.append(order(router.route("m", token_ids=tokens, reserve_s=60))[0])

    first = threading.Thread(target=ask)
    first.start()
    assert choosing.wait(60)
    ask()
    chosen.set()
    first.join()
    assert sorted(found) == ["a", "b"], "a is cheaper for one of them"


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"limit": 0}, "limit is the number of picks"),
        ({"reserve_s": 0}, "a reservation is for more than 0"),
        ({"reserve_s": 601}, "a reservation is for more than 0 and at most 600 seconds, not 601"),
        ({"reserve_s": float("nan")}, "a reservation is for"),
        ({"prompt_tokens": 0, "token_ids": None, "hashes64": bytes(8)}, "prompt_tokens is from 1"),
        ({"hashes64": bytes(8)}, "only once"),
    ],
)
def test_wishes_that_make_no_sense(wishes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Router(a_fleet("a")).route("m", **{"token_ids": [1], **wishes})


# ---- any fleet


@given(st.integers(0, 1 << 32))
def test_any_ranking_is_by_cost_and_its_terms_add_up(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"w{place}" for place in range(chance.randrange(1, 9))]
    fleet = a_fleet(*names, namespace=NAMESPACE)
    for name in names:
        for medium in ("GPU", "CPU", "STORAGE"):
            say(
                fleet,
                f"default/{name}",
                0,
                chance.randrange(9),
                batch(stored(range(1, chance.randrange(1, 12)), medium=medium)),
            )
        if chance.random() < 0.2:
            fleet.rank(f"default/{name}", 0).mark(stale=True, problem="x")
    clock = Clock()
    router = Router(fleet, costs=COSTS, clock=clock)
    loads = [
        Load(name, 0, chance.randrange(5), chance.randrange(5), chance.choice([None, 70]), chance.random())
        for name in names if chance.random() < 0.7
    ]  # fmt: skip
    for name in names:
        if chance.random() < 0.2:
            router.loads.scrape(f"default/{name}", Load(name), asleep=True)
    for name in names:
        if chance.random() < 0.2:
            router.loads.fail(f"default/{name}", 0)
    prompt = Prompt("m", hashes64=packed64(range(1, 11)))
    if chance.random() < 0.5:
        router.rank(prompt, loads=loads)
        clock.now_s += chance.choice([0.25, 0.5, 2])
    ranking = router.rank(
        prompt, loads=loads if chance.random() < 0.5 else [], reserve_s=chance.choice([None, 5])
    )
    route = ranking.unpack()
    assert {pick.worker for pick in route.picks} == set(names)
    keys = [(pick.unreachable, pick.asleep, pick.cost, pick.queue_cost) for pick in route.picks]
    assert keys == sorted(keys)
    known = [pick for pick in route.picks if pick.load_source != "none"]
    typical = sum(map(queue, known)) / len(known) if known else 0.0
    for pick in route.picks:
        row = pick.row
        assert pick.cost == pick.prefill_cost + pick.fetch_cost + pick.queue_cost
        assert pick.prefill_cost == 160 - 16 * row.loadable_blocks
        local, pool = row.local_blocks - row.device_blocks, row.loadable_blocks - row.local_blocks
        assert pick.fetch_cost == round((COSTS.local * local + COSTS.pool * pool) * 16)
        assert 0 <= pick.fetch_cost <= 160 - pick.prefill_cost, "to fetch is not dearer than to compute"
        if pick.load_source == "none":
            assert abs(pick.queue_cost - pick.reserved_cost - typical) <= 1
        if row.stale:
            assert pick.trust != "exact"
            assert row.device_blocks == row.local_blocks == 0
        assert pick.unreachable <= row.stale
    # What goes over gRPC is the same, byte for byte as protobuf packs it.
    assert decode_route(pb.RouteResponse.FromString(ranking.pack())) == route
    assert pb.RouteResponse.FromString(ranking.pack()).SerializeToString() == ranking.pack()
    limit = chance.randrange(1, 9)
    first, all_of_them = (router.rank(prompt, limit=most).unpack().picks for most in (limit, None))
    assert [pick.cost for pick in first] == [pick.cost for pick in all_of_them[:limit]]


def queue(pick: Pick) -> float:
    """What is there before, of what a pick says; its usage to a thousandth."""
    told = pick.queued_tokens or (COSTS.waiting * pick.waiting)
    queued = max(0.0, told - COSTS.speed * pick.load_age_ms / 1000)
    tight = max(0.0, pick.kv_usage_permille / 1000 - 0.8) / 0.2
    return queued + COSTS.running * pick.running + COSTS.usage * tight


def test_workers_that_hash_in_different_ways_are_ranked_together() -> None:
    fleet = a_fleet("a", "b")
    joined(fleet, a_worker("c", block_tokens=32, port=7000))
    tokens = list(range(64))
    say(fleet, "default/c", 0, 0, batch(stored(BlockHasher(32).hashes(tokens))))
    say(fleet, "default/b", 0, 0, batch(stored(BlockHasher(16).hashes(tokens)[:1])))
    router = Router(fleet, clock=Clock())
    route = router.route("m", token_ids=tokens, reserve_s=5)
    assert [(pick.worker, pick.cost) for pick in route.picks] == [("c", 0), ("b", 48), ("a", 64)]
    assert router.route("m", token_ids=tokens).picks[-1].reserved_cost == 64, "of c, the first"
