"""Weights of encoders that change without a call, and measures that fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpool.vllm.encoder.plan import EncoderWorkerMetadata
from kvpool.vllm.plan import Measured
from tests.support.encoder import Encoders, Picture, key, request
from tests.support.scripted_store import ScriptedStore

A = Picture("a" * 64, 10)


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def encoders(store: ScriptedStore) -> Encoders:
    return Encoders(store)


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
