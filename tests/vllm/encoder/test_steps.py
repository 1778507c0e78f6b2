"""What reaches the workers, whatever vLLM does with a step."""

from __future__ import annotations

import pytest

from kvpool.vllm.encoder.plan import EncoderWorkerMetadata
from tests.support.encoder import SPACE, Encoders, Picture, request
from tests.support.scripted_store import ScriptedStore

A, B = Picture("a" * 64, 10), Picture("b" * 64, 40)


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def encoders(store: ScriptedStore) -> Encoders:
    return Encoders(store)


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
    assert (empty.spaces, empty.wrong, empty.silent) == ([], [], False)
    assert step.spaces == [SPACE]
    assert (step.wrong, step.silent) == (["a wrong record"], True)
    assert (later.spaces, later.wrong, later.silent) == ([], [], False)


def test_what_a_step_without_tokens_was_to_store_is_not_stored(encoders: Encoders) -> None:
    """The item may be computed later with other weights."""
    encoders.schedule(request("r", A))
    encoders.plan(tokens=0)
    assert encoders.plan().stores == {}
