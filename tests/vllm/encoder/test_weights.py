"""Weights that change in a living engine: its encoder's outputs go where those of the same weights are."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.vllm.encoder.plan import EncoderWorkerMetadata
from kvpool.vllm.plan import Measured
from tests.support.encoder import SPACE, Encoders, Picture, has, key, request
from tests.support.scripted_store import ScriptedStore

A = Picture("a" * 64, 10)


def test_other_weights_have_other_keys(encoders: Encoders, store: ScriptedStore) -> None:
    has(store, A)
    before, after = request("1", A), request("2", A)
    encoders.half.seen(before)
    store.end_all()
    encoders.half.is_ready(before, 0)
    encoders.measured = [Measured("others")]
    encoders.half.called("reload_weights")
    assert encoders.half._outputs.of(A.identifier) is None, "what was fetched is of the weights before"
    store.end_all()
    encoders.half.seen(after)
    (question,) = store.under_way
    assert question.keys != [key(A.identifier)]
    store.end_all()
    encoders.measured = [Measured("the start's")]
    encoders.half.called("reload_weights")
    last = request("3", A)
    encoders.half.seen(last)
    assert store.under_way[0].keys == [key(A.identifier)], "they are back"


def test_a_call_that_leaves_the_encoder_alone_changes_nothing(
    encoders: Encoders, store: ScriptedStore
) -> None:
    """As an update of the language model alone."""
    encoders.half.called("update_weights")
    encoders.half.seen(request("r", A))
    assert store.under_way[0].keys == [key(A.identifier)]


def test_weights_that_cannot_be_measured_share_with_nobody(encoders: Encoders, store: ScriptedStore) -> None:
    encoders.measured = [Measured(why="they move")]
    encoders.half.called("update_weights")
    encoders.half.seen(request("r", A))
    (alone,) = store.under_way[0].keys
    assert alone != key(A.identifier)
    assert Encoders(ScriptedStore()).half._namespaces.of("4 float32") is not None


def test_weights_that_sleep_have_no_pool(encoders: Encoders, store: ScriptedStore) -> None:
    encoders.is_asleep = True
    encoders.half.called("sleep")
    asked = request("r", A)
    encoders.half.seen(asked)
    assert not store.under_way
    assert encoders.half.is_ready(asked, 0)
    assert encoders.schedule(asked) == [False]
    assert not encoders.plan().stores
    assert not encoders.plan().watch


def change_silently(encoders: Encoders, digest: str) -> None:
    encoders.measured = [Measured(digest)]
    encoders.half.update(EncoderWorkerMetadata(differs=True))


def test_a_silent_change_deletes_what_was_stored_lately(encoders: Encoders) -> None:
    assert encoders.plan().watch
    encoders.measured = [Measured("others")]
    encoders.half.update(EncoderWorkerMetadata(differs=True))
    step = encoders.plan()
    assert step.silent
    assert not step.watch, "until they are measured"
    assert not encoders.plan().silent


def test_workers_hear_where_outputs_are_when_that_changes(encoders: Encoders) -> None:
    assert encoders.plan().spaces == (SPACE,)
    assert encoders.plan().spaces is None
    encoders.half.called("reload_weights")
    assert encoders.plan().spaces == (), "nobody knows yet"
    encoders.measured = [Measured("others")]
    encoders.half.seen(request("r", A))
    (other,) = encoders.plan().spaces or ()
    assert other != SPACE


def test_workers_delete_what_they_stored_before_they_measure_again(
    encoders: Encoders, store: ScriptedStore
) -> None:
    """A measure forgets which keys these were."""
    happened: list[str] = []

    def measure() -> Sequence[Measured]:
        happened.append("measured")
        return encoders.measured

    encoders.half._namespaces._measure = measure
    change_silently(encoders, "others")
    asked = request("1", A)
    encoders.half.seen(asked)
    assert encoders.half.is_ready(asked, 0), "it goes without the pool"
    assert encoders.schedule(asked) == [False]
    step = encoders.plan()
    assert (step.silent, step.stores, happened) == (True, {}, [])
    encoders.half.seen(request("2", Picture("c" * 64, 10)))
    assert happened == ["measured"]
    assert store.under_way[0].keys != [key("c" * 64)]


def test_each_silent_change_is_found(encoders: Encoders) -> None:
    for digest in ("second", "third"):
        assert encoders.plan().watch
        change_silently(encoders, digest)
        step = encoders.plan()
        assert (step.silent, step.watch) == (True, False)
        encoders.half.seen(request(digest, A))


def test_a_measure_that_fails_is_made_again(encoders: Encoders, store: ScriptedStore) -> None:
    """Else outputs of the new weights would be shared as those of the old ones."""

    def fail() -> Sequence[Measured]:
        raise RuntimeError("a worker gave no answer")

    encoders.measured = [Measured("others")]
    encoders.half._namespaces._measure = fail
    encoders.half.called("reload_weights")
    encoders.half.seen(request("1", A))
    assert not store.under_way
    encoders.half._namespaces._measure = lambda: encoders.measured
    encoders.half.seen(request("2", A))
    (question,) = store.under_way
    assert question.keys != [key(A.identifier)]
