"""What both halves say to each other, also through vLLM's queue between processes."""

from __future__ import annotations

import pickle

import numpy as np

from kvpool.vllm.encoder.plan import (
    ComparedOutput,
    EncoderMetadata,
    EncoderWorkerMetadata,
    Loaded,
    Shape,
    Stored,
)
from tests.support.encoder import SPACE

SHAPE = Shape(2, 4, "float32")


def test_a_step_travels_between_processes() -> None:
    """vLLM pickles it for workers in processes of their own, and an engine whose step cannot be pickled ends."""
    payload = np.arange(32, dtype=np.uint8)
    step = EncoderMetadata(
        {"a": Loaded(payload, SHAPE)}, {"b": Stored("key", SHAPE, payload, b"w" * 16)}, wrong=["key"]
    )
    step.spaces = (SPACE,)
    there = pickle.loads(pickle.dumps(step))
    assert there.loads["a"].payload.tobytes() == payload.tobytes()
    assert there.loads["a"].shape == SHAPE
    assert there.stores["b"].record.tobytes() == payload.tobytes()
    assert (there.spaces, there.spaces[0].facts) == ((SPACE,), SPACE.facts)


def test_reports_of_ranks_are_one() -> None:
    compared = ComparedOutput("a", "", b"w", "float32", 0.5, 1.0)
    one = EncoderWorkerMetadata({"a": (4, "float32")}, [compared], {"kvpool_encoder_stored_outputs_total": 1})
    other = EncoderWorkerMetadata(
        samples={"kvpool_encoder_stored_outputs_total": 2}, broken="why", differs=True
    )
    both = pickle.loads(pickle.dumps(one)).aggregate(other)
    assert both == EncoderWorkerMetadata(
        {"a": (4, "float32")}, [compared], {"kvpool_encoder_stored_outputs_total": 3}, "why", True
    )
    assert EncoderWorkerMetadata().is_empty()
    assert not both.is_empty()
