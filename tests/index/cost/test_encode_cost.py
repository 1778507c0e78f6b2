"""What items of a prompt cost where their encoder's output has to be computed, against a model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import BlockHasher, ConfigError
from kvpool.index.answer import Ranking
from kvpool.index.cost.router import ENCODE, Costs, Router
from kvpool.index.fleet import media
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.media import find_media
from kvpool.index.fleet.rank import pool_holder
from kvpool.index.limits import NotAtOnce
from kvpool.index.prompt import NO_BLOCKS, Prompt
from kvpool.key.hashing import media_hash
from tests.support.fleets import Clock, a_worker, joined
from tests.support.media import ENCODER, OTHER_ENCODER, follow_outputs
from tests.support.wire import stored

BLOCK_TOKENS = 16
TOKENS = list(range(1000, 1000 + 20 * BLOCK_TOKENS))
NAMES = ("a", "b", "c")
KINDS: tuple[tuple[str, ...], ...] = (
    (),
    (ENCODER.hex,),
    (OTHER_ENCODER.hex,),
    (ENCODER.hex, OTHER_ENCODER.hex),
)
# Of items that do not overlap, by rising offset.
ITEMS = st.lists(st.tuples(st.sampled_from("uvwxyz"), st.integers(0, 9), st.integers(1, 70)), max_size=5)


def laid_out(items: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    placed, at = [], 0
    for identifier, gap, length in items:
        placed.append((identifier, at + gap, length))
        at += gap + length
    return placed


def a_fleet(
    kinds: dict[str, tuple[str, ...]], held: dict[str, int], pooled: dict[str, str], items: Any = ()
) -> Fleet:
    """``held``: leading blocks of TOKENS, by worker; ``pooled``: identifiers of outputs, by namespace."""
    fleet, hashes = Fleet(clock=Clock()), BlockHasher(BLOCK_TOKENS).hashes(TOKENS, multimodal=items)
    for place, name in enumerate(NAMES):
        one = a_worker(name, port=5000 + 2 * place, media_namespaces=kinds[name])
        joined(fleet, one, *([stored(hashes[: held[name]])] if held[name] else []))
    for namespace, identifiers in pooled.items():
        follow_outputs(fleet, identifiers, namespace)
    return fleet


def route(fleet: Fleet, items: Any, **costs: float) -> Ranking:
    router = Router(fleet, costs=Costs(**costs))
    return router.route(Prompt("m", token_ids=TOKENS, multimodal=items))


@given(
    st.fixed_dictionaries(dict.fromkeys(NAMES, st.sampled_from(KINDS))),
    st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(0, 20))),
    st.fixed_dictionaries({ENCODER.hex: st.text("uvwxyz"), OTHER_ENCODER.hex: st.text("uvwxyz")}),
    ITEMS.map(laid_out),
    st.sampled_from([0.0, ENCODE, 2.5]),
)
def test_an_item_costs_where_nobody_has_it(
    kinds: dict[str, tuple[str, ...]],
    held: dict[str, int],
    pooled: dict[str, str],
    items: list[tuple[str, int, int]],
    encode: float,
) -> None:
    """Nothing inside of a rank's prefix, nothing that it can load, and once what is there several times. A worker that
    says nothing of its encoder, as an earlier one, has the blocks, the rows and the other costs that it always had.
    """
    fleet = a_fleet(kinds, held, pooled, items)
    ranking = route(fleet, items, encode=encode)
    earlier = route(a_fleet(dict.fromkeys(NAMES, ()), held, {}, items), items, encode=0.0)
    plain = {pick.worker: pick for pick in earlier.picks}
    lengths = {name: (offset + length, length) for name, offset, length in items}  # the last end
    assert {pick.worker for pick in ranking.picks} == plain.keys() == {*NAMES}
    for pick in ranking.picks:
        there = {one for namespace in kinds[pick.worker] for one in pooled[namespace]}
        missing = [
            length
            for name, (end, length) in lengths.items()
            if name not in there and end > held[pick.worker] * BLOCK_TOKENS
        ]
        assert pick.encode_cost == round(encode * sum(missing))
        assert pick.row.pool_media == len(lengths.keys() & there)
        other = plain[pick.worker]
        assert pick._replace(cost=other.cost, encode_cost=0, row=pick.row._replace(pool_media=0)) == other
        assert pick.cost == other.cost + pick.encode_cost
    costs = [pick.cost for pick in ranking.picks]
    assert costs == sorted(costs)


def test_equal_costs_of_items_change_no_order() -> None:
    """None of them says anything of an encoder: the items cost the same everywhere."""
    fleet = a_fleet(dict.fromkeys(NAMES, ()), {"a": 1, "b": 3, "c": 2}, {})
    items = [("u", 100, 64)]
    hashes64 = BlockHasher(BLOCK_TOKENS).hashes64(TOKENS)
    picks = Router(fleet).route(Prompt("m", hashes64=hashes64, multimodal=items)).picks
    assert [pick.worker for pick in picks] == ["b", "c", "a"]
    assert {pick.encode_cost for pick in picks} == {round(ENCODE * 64)}
    assert {pick.encode_cost for pick in Router(fleet).route(Prompt("m", hashes64=hashes64)).picks} == {0}
    by_load = Router(fleet).rank(Prompt("m", hashes64=NO_BLOCKS), prompt_tokens=100).unpack().picks
    assert {pick.encode_cost for pick in by_load} == {0}


def test_a_request_goes_where_its_picture_is() -> None:
    """Of workers that have as much of its words."""
    kinds = {"a": (), "b": (ENCODER.hex,), "c": (OTHER_ENCODER.hex,)}
    fleet = a_fleet(kinds, dict.fromkeys(NAMES, 1), {ENCODER.hex: "u"})
    assert route(fleet, [("u", 40, 200)]).picks[0].worker == "b"
    fleet = a_fleet(kinds, dict.fromkeys(NAMES, 1), {OTHER_ENCODER.hex: "u"})
    assert route(fleet, [("u", 40, 200)]).picks[0].worker == "c"


def test_an_item_that_ends_where_the_prefix_ends_costs_nothing() -> None:
    fleet = a_fleet(dict.fromkeys(NAMES, ()), {"a": 9, "b": 10, "c": 11}, {})
    hashes64 = BlockHasher(BLOCK_TOKENS).hashes64(TOKENS)
    for length, costs in ((60, {"a": 60, "b": 0, "c": 0}), (61, {"a": 61, "b": 61, "c": 0})):
        picks = Router(fleet, costs=Costs(encode=1)).route(
            "m", hashes64=hashes64, multimodal=[("u", 100, length)]
        )
        assert {pick.worker: pick.encode_cost for pick in picks.picks} == costs


def test_what_a_rank_encodes_is_reserved_there() -> None:
    """So the next request with another picture goes elsewhere."""
    router = Router(a_fleet(dict.fromkeys(NAMES, ()), dict.fromkeys(NAMES, 0), {}))
    prompts = [
        Prompt("m", hashes64=bytes([number] * 8), multimodal=[(str(number), 0, 1000)]) for number in (1, 2)
    ]
    first = router.rank(prompts[0], reserve_s=60, prompt_tokens=16).unpack().picks[0]
    picks = {pick.worker: pick for pick in router.rank(prompts[1], prompt_tokens=16).unpack().picks}
    assert picks[first.worker].reserved_cost == 16 + round(ENCODE * 1000) + Costs().running
    assert {pick.reserved_cost for name, pick in picks.items() if name != first.worker} == {0}


def test_many_items_are_no_work_for_an_event_loop() -> None:
    fleet = a_fleet(dict.fromkeys(NAMES, (ENCODER.hex,)), dict.fromkeys(NAMES, 0), {ENCODER.hex: "u"})
    items = [(str(number), number, 1) for number in range(1700)] + [("u", 1700, 1)]
    prompt = Prompt("m", hashes64=bytes(8), multimodal=items)
    with pytest.raises(NotAtOnce):
        fleet.ask(prompt, at_once=True)
    assert fleet.lookup(prompt).pool_media == (1, 1, 1)
    (pool,) = (one for one in fleet.pools() if one.is_media)
    assert find_media(pool.table.native, [(), (ENCODER.hex,)], [0, 1], items[-1:], True).found == [
        (0, [(1701, 1)]), (1, []),
    ]  # fmt: skip
    ranking = Router(fleet).route(prompt, prompt_tokens=1701)
    assert {pick.encode_cost for pick in ranking.picks} == {round(ENCODE * 1700)}
    assert pool.table.native.pooled(pool_holder("ff" * 16), media_hash("u")[:-9:-1], True) == [False]


def test_what_is_too_much_to_look_for_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three ranks and one kind of encoder with one namespace: five looks an item."""
    monkeypatch.setattr(media, "MAX_LOOKS", 5 * 2 + 4)
    fleet = a_fleet(dict.fromkeys(NAMES, (ENCODER.hex,)), {"a": 20, "b": 10, "c": 0}, {ENCODER.hex: "uvwxy"})
    items = [("u", 0, 10), ("x", 20, 10), ("v", 40, 10), ("w", 170, 20), ("u", 200, 10)]
    assert fleet.lookup("m", hashes64=BlockHasher(16).hashes64(TOKENS), multimodal=items).pool_media == (
        2,
        2,
        2,
    )
    picks = Router(fleet).route("m", hashes64=BlockHasher(16).hashes64(TOKENS), multimodal=items).picks
    assert {pick.worker: pick.encode_cost for pick in picks} == {"a": 0, "b": 9, "c": 9}


@pytest.mark.parametrize("value", [-1.0, float("nan"), 1e9])
def test_the_coefficient_is_a_number(value: float) -> None:
    with pytest.raises(ConfigError, match="the coefficient encode"):
        Costs(encode=value)
