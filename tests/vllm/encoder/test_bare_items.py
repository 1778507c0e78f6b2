"""Items that bring no tensors (``image_embeds``): from the pool or not at all, and never the engine's end."""

from __future__ import annotations

import pytest

from tests.support.encoder import SIZE, Encoders, Picture, has, ready, request
from tests.support.scheduler import planted
from tests.support.scripted_store import ScriptedStore

A = Picture("a" * 64, 10)
BARE = Picture("e" * 64, 10, fields=(SIZE,))


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def encoders(store: ScriptedStore) -> Encoders:
    return Encoders(store)


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
    assert not encoders.half.is_ready(beside, 0)
    assert encoders.half.unavailable() == {"2"}
    assert encoders.half.is_ready(beside, BARE.offset + BARE.rows), "behind it"
    assert BARE.identifier in encoders.cached, "not evicted"
