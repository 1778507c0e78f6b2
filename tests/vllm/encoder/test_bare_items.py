"""Items that bring no tensors (``image_embeds``): from the pool or not at all, and never the engine's end."""

from __future__ import annotations

import pytest

from kvpool.vllm.engine import internals
from tests.support.encoder import SIZE, Encoders, Picture, has, ready, request
from tests.support.scheduler import planted
from tests.support.scripted_store import ScriptedStore

A = Picture("a" * 64, 10)
BARE = Picture("e" * 64, 10, fields=(SIZE,))


def test_an_item_without_tensors_comes_from_the_pool(encoders: Encoders, store: ScriptedStore) -> None:
    has(store, BARE)
    asked = request("r", BARE)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [True]
    assert encoders.half.unavailable() == set()


@pytest.mark.parametrize("why", ["absent", "opted out", "switched off", "adapter", "slow", "fault"])
def test_a_request_whose_item_nobody_has_fails_and_the_engine_goes_on(
    encoders: Encoders, store: ScriptedStore, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that consumes outputs takes items without their tensors, and would end at the first that is lost."""
    bare = Picture("e" * 64, 10, fields=(SIZE,), adapter="mine" if why == "adapter" else "")
    asked = request("r", A, bare, params={"load": False} if why == "opted out" else None)
    if why != "absent":
        has(store, bare)
    if why == "switched off":
        encoders.half.switch_off("in this test")
    if why == "fault":
        monkeypatch.setattr(encoders.half._outputs, "advance", planted)
    encoders.half.seen(asked)
    if why != "slow":
        store.end_all()
    for _ in range(4):
        assert not encoders.half.is_ready(asked, 0)
        encoders.clock.sleep(100.0)
        if why != "slow":
            store.end_all()
    assert encoders.half.unavailable() == {"r"}
    assert encoders.half.unavailable() == set(), "once"
    encoders.half.finished(asked)
    store.end_all()


def test_an_item_without_tensors_waits_for_room(store: ScriptedStore) -> None:
    encoders = Encoders(store, {"staging_nbytes": 1 << 20})
    large = Picture("f" * 64, 10, rows=(1 << 20) // 16)
    has(store, large, BARE)
    first, asked = request("1", large), request("2", BARE)
    for one in (first, asked):
        encoders.half.seen(one)
    ready(encoders, store, first)
    assert not encoders.half.is_ready(asked, 0)
    assert encoders.half.unavailable() == set()
    encoders.schedule(first)
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [True]


def test_an_output_that_another_engine_is_about_to_store_is_waited_for(
    encoders: Encoders, store: ScriptedStore
) -> None:
    asked = request("r", BARE)
    encoders.half.seen(asked)
    for _ in range(3):
        store.end_all()
        assert not encoders.half.is_ready(asked, 0)
        encoders.clock.sleep(1.5)
    has(store, BARE)
    ready(encoders, store, asked)
    assert encoders.half.unavailable() == set()
    assert encoders.schedule(asked) == [True]


@pytest.mark.parametrize(
    ("fields", "fails"),
    [
        ((SIZE,), True),
        ((SIZE, "second_per_grid_ts", "timestamps"), True),
        ((SIZE, "pixel_values"), False),
        (("address", "id"), False),
    ],
    ids=["its size", "a clip's seconds", "a picture", "a picture in shared memory"],
)
def test_only_what_no_encoder_can_run_on_is_without_tensors(
    encoders: Encoders, store: ScriptedStore, fields: tuple[str, ...], fails: bool
) -> None:
    asked = request("r", Picture("e" * 64, 10, fields=fields))
    encoders.half.seen(asked)
    for _ in range(3):
        store.end_all()
        is_ready = encoders.half.is_ready(asked, 0)
        encoders.clock.sleep(100.0)
    assert (encoders.half.unavailable() == {"r"}) is fails
    assert is_ready is not fails


def test_what_the_engine_holds_for_the_request_is_not_asked_for_again(
    encoders: Encoders, store: ScriptedStore
) -> None:
    """A prompt in chunks: the first one ends inside of the item, which the pool may lose meanwhile."""
    has(store, BARE)
    asked = request("r", BARE, Picture("d" * 64, 60))
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.half.has(BARE.identifier)
    encoders.cached.add(BARE.identifier)
    encoders.held.add((BARE.identifier, "r"))
    encoders.half.allocated(asked, 0)
    encoders.plan()
    store.records.clear()
    assert encoders.half.is_ready(asked, BARE.offset + 2)
    assert not store.under_way
    assert encoders.half.unavailable() == set()


def test_what_the_engine_had_itself_is_let_go_behind_it(encoders: Encoders, store: ScriptedStore) -> None:
    has(store, BARE)
    encoders.cached.add(BARE.identifier)
    asked = request("r", BARE, Picture("d" * 64, 60))
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.half._outputs.taken_nbytes
    assert encoders.schedule(asked) == [False], "the other one: it had this one"
    assert encoders.half.is_ready(asked, 99)
    assert not encoders.half._outputs.taken_nbytes


def test_tokens_that_a_caller_embedded_take_a_place_too(encoders: Encoders, store: ScriptedStore) -> None:
    encoders.cached.add(BARE.identifier)
    asked = request("r", Picture("p" * 64, 0, modality="prompt_embeds"), BARE)
    encoders.half.seen(asked)
    for _ in range(3):
        store.end_all()
        assert not encoders.half.is_ready(asked, 0)
        encoders.clock.sleep(100.0)
    assert encoders.half.unavailable() == {"r"}


def test_a_fault_before_anything_is_known_fails_the_request(
    encoders: Encoders, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders.half._hints, "read", planted)
    asked = request("r", BARE)
    encoders.half.seen(asked)
    assert not encoders.half.is_ready(asked, 0)
    assert encoders.half.unavailable() == {"r"}


def test_a_fault_of_the_last_look_fails_the_request(
    encoders: Encoders, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("r", BARE)
    encoders.half.seen(asked)
    monkeypatch.setattr(internals, "places_of", planted)
    assert not encoders.half.is_ready(asked, 0)
    assert encoders.half.unavailable() == {"r"}


def test_while_workers_have_not_heard_of_a_silent_change_it_waits(
    encoders: Encoders, store: ScriptedStore
) -> None:
    has(store, BARE)
    encoders.half._silent = True
    asked = request("r", BARE)
    encoders.half.seen(asked)
    assert not encoders.half.is_ready(asked, 0)
    assert encoders.half.unavailable() == set()
    encoders.plan()
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [True]


def test_a_request_that_ended_is_not_reported(encoders: Encoders, store: ScriptedStore) -> None:
    """Another one may have its name meanwhile."""
    asked = request("r", BARE, params={"load": False})
    encoders.half.seen(asked)
    assert not encoders.half.is_ready(asked, 0)
    encoders.half.finished(asked)
    assert encoders.half.unavailable() == set()


def test_an_item_without_tensors_is_not_audited(store: ScriptedStore) -> None:
    encoders = Encoders(store, {"audit_share": 1.0}, random_number=lambda: 0.0)
    has(store, A, BARE)
    asked = request("r", A, BARE)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    assert encoders.schedule(asked) == [False, True]


def test_the_engines_own_output_counts_where_no_other_item_can_take_its_place(
    encoders: Encoders, store: ScriptedStore
) -> None:
    """vLLM gives the items of a request places one after the other, and evicts what no request holds yet."""
    encoders.cached.add(BARE.identifier)
    alone, beside = request("1", BARE), request("2", A, BARE)
    for asked in (alone, beside):
        encoders.half.seen(asked)
    store.end_all()
    assert encoders.half.is_ready(alone, 0)
    for _ in range(3):
        assert not encoders.half.is_ready(beside, 0)
        encoders.clock.sleep(100.0)
        store.end_all()
    assert encoders.half.unavailable() == {"2"}
    assert encoders.half.is_ready(beside, BARE.offset + BARE.rows), "behind it"
    assert BARE.identifier in encoders.cached, "not evicted"
