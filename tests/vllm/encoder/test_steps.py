"""What reaches the workers, whatever vLLM does with a step; and requests that others stand beside."""

from __future__ import annotations

import pytest

from kvpool.key.hashing import media_hash
from kvpool.vllm.encoder.plan import EncoderWorkerMetadata
from kvpool.vllm.encoder.scheduler import ON_ITS_WAY_S
from tests.support.encoder import DTYPE, Encoders, Picture, has, ready, request
from tests.support.scheduler import planted
from tests.support.scripted_store import ScriptedStore

A, B = Picture("a" * 64, 10), Picture("b" * 64, 40)


def test_a_step_without_tokens_keeps_its_messages_for_the_next_one(
    encoders: Encoders, store: ScriptedStore
) -> None:
    """vLLM shows such a step to no connector of encoders: it makes one while a request waits, and behind each end."""
    asked = request("r", A)
    encoders.half.seen(asked)
    encoders.half._outputs.wrong.append("a wrong record")
    encoders.half.update(EncoderWorkerMetadata(differs=True))
    store.end_all()
    encoders.schedule(asked)
    empty, step, later = encoders.plan(tokens=0), encoders.plan(), encoders.plan()
    assert (empty.spaces, empty.wrong, empty.silent) == (None, [], False)
    assert step.spaces == (), "not known since the silent change"
    assert (step.wrong, step.silent) == (["a wrong record"], True)
    assert (later.spaces, later.wrong, later.silent) == (None, [], False)


def test_what_a_step_without_tokens_was_to_store_is_not_stored(encoders: Encoders) -> None:
    """The item may be computed later with other weights."""
    encoders.schedule(request("r", A))
    encoders.plan(tokens=0)
    assert encoders.plan().stores == {}


def test_a_request_that_loads_nothing_gets_nothing_that_another_one_loads(
    encoders: Encoders, store: ScriptedStore
) -> None:
    has(store, A)
    first, other = request("1", A), request("2", A, params={"load": False})
    for one in (first, other):
        encoders.half.seen(one)
    ready(encoders, store, first)
    assert encoders.half.is_ready(other, 0)
    assert encoders.schedule(other) == [False]
    assert encoders.count("misses", "opted_out") == 1


def test_calls_of_the_workers_delay_no_request_for_good(encoders: Encoders, store: ScriptedStore) -> None:
    """Each of them may have changed the weights, so all questions and loads begin anew."""
    asked, waited_s = request("r", A), 0.0
    encoders.half.seen(asked)
    while not encoders.half.is_ready(asked, 0):
        encoders.clock.sleep(0.4)
        waited_s += 0.4
        assert waited_s < 15
        encoders.half.called("anything")
    assert encoders.schedule(asked) == [False]


def test_a_feature_that_no_encoder_makes_is_looked_at_once(encoders: Encoders, store: ScriptedStore) -> None:
    asked = request("r", A, Picture("p" * 64, 60, modality="prompt_embeds"))
    encoders.half.seen(asked)
    state = encoders.half._requests["r"]
    assert not encoders.half.is_ready(asked, 0)
    assert encoders.half._requests["r"] is state


def test_a_request_that_failed_stays_without_the_pool(
    encoders: Encoders, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("r", A)
    monkeypatch.setattr(encoders.half._params, "read", planted)
    encoders.half.seen(asked)
    monkeypatch.undo()
    assert encoders.half.is_ready(asked, 0)
    assert not store.under_way


def test_an_engine_that_only_loads_learns_the_width_of_what_it_encodes(store: ScriptedStore) -> None:
    """vLLM measures widths for engines that store alone; with another one it would find nothing, ever."""
    encoders = Encoders(store, stores=False)
    clips = [Picture(name * 64, 10, modality="video") for name in "cd"]
    asked = request("1", clips[0], A)
    encoders.half.seen(asked)
    ready(encoders, store, asked)
    encoders.schedule(asked)
    assert encoders.plan().stores == {clips[0].identifier: ("", (8, 4, DTYPE), None, b"")}
    encoders.half.update(EncoderWorkerMetadata(forms={clips[0].identifier: (16, DTYPE)}))
    later = request("2", clips[1])
    encoders.half.seen(later)
    wide = encoders.half._namespaces.of(f"16 {DTYPE}")
    assert wide is not None
    assert store.under_way[0].keys == [wide.key(media_hash(clips[1].identifier), 0, 0)]
    encoders.schedule(later)
    assert encoders.plan().stores == {}


def test_an_encoder_of_its_own_encodes_again_what_the_pool_has_lost(store: ScriptedStore) -> None:
    """Its engine has the item, or takes it for one that it has; engines that only load would encode it each time."""
    encoders = Encoders(store, needs_bytes=False)
    has(store, A)
    for turn, is_there in enumerate((True, False, True)):
        encoders.clock.sleep(ON_ITS_WAY_S)
        asked = request(f"{turn}", A)
        encoders.half.seen(asked)
        assert not encoders.half.is_ready(asked, 0)
        store.end_all()
        assert encoders.half.is_ready(asked, 0)
        encoders.schedule(asked)
        assert bool(encoders.plan().stores) is not is_there
        encoders.half.finished(asked)
        store.records.clear()
        if not is_there:
            has(store, A)


def test_what_an_encoder_of_its_own_is_storing_is_not_encoded_again(store: ScriptedStore) -> None:
    encoders = Encoders(store, needs_bytes=False)
    for turn in range(3):
        asked = request(f"{turn}", A)
        encoders.half.seen(asked)
        store.end_all()
        assert encoders.half.is_ready(asked, 0)
        encoders.schedule(asked)
        assert bool(encoders.plan().stores) is (turn == 0)
        encoders.half.finished(asked)
