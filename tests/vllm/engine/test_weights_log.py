"""What the log says when the weights in memory were measured: where the engine goes on, and what to do."""

from __future__ import annotations

import logging

import pytest

from kvpool.key.key import EPOCH_FACT, MEMORY_FACT
from kvpool.metrics import Counters
from kvpool.vllm.engine.namespace import EngineNamespace
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import Measured, PoolMetadata

pytestmark = pytest.mark.vllm

FACTS = {"engine": "vllm", "weights": "of files"}


def started(of_start: Measured) -> EngineNamespace:
    namespace = EngineNamespace("t", Geometry((Group(16),)), Counters())
    assert namespace.learn({0: dict(FACTS)}, {(0, 0): of_start}) == ""
    return namespace


def answered(namespace: EngineNamespace, measured: Measured) -> None:
    """In an idle step."""
    step = PoolMetadata(idle=True)
    namespace.add_to(step)
    namespace.learn({}, {(0, step.measure): measured})


def changed(namespace: EngineNamespace, measured: Measured) -> None:
    """After a reset that succeeds."""
    namespace.reset(in_use=False)
    answered(namespace, measured)


def test_the_log_says_where_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kvpool")
    namespace = started(Measured("a"))
    assert namespace.current is not None
    first = namespace.current
    changed(namespace, Measured("a"))
    assert namespace.current == first
    changed(namespace, Measured("b"))
    assert MEMORY_FACT in namespace.current.facts
    second = namespace.current
    changed(namespace, Measured(why="its weights are on the moon"))
    assert EPOCH_FACT in namespace.current.facts
    third = namespace.current
    same, silent, other, why, alone = caplog.messages
    assert same.endswith(f"weights are as before: it is in namespace {first.hex[:8]}")
    assert "and no call has written them" in silent
    assert f"weights are others than before: it is in namespace {second.hex[:8]}" in other
    assert "rank 0 cannot measure its weights in memory: its weights are on the moon" in why
    assert f"in a namespace of its own, {third.hex[:8]}" in alone


def test_a_version_of_the_weights_is_said_beside_the_namespace_that_they_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A trainer names them after its update, before or behind the workers' answer."""
    caplog.set_level(logging.INFO, "vllm.kvpool")
    namespace = started(Measured("a"))
    for number, behind in enumerate((False, True)):
        namespace.reset(in_use=False)
        namespace.called("finish_weight_update")
        if not behind:
            namespace.named("step-0")
        assert not [text for text in caplog.messages if "version" in text]
        answered(namespace, Measured(f"b{number}"))
        if behind:
            namespace.named("step-1\n")
        assert namespace.current is not None
        said = caplog.messages[-1]
        assert f"namespace {namespace.current.hex[:8]} are version 'step-{number}" in said
        assert "\n" not in said
        caplog.clear()
    answered(namespace, Measured("b1"))
    changed(namespace, Measured("b1"))
    assert "version" not in caplog.text, "it was said once"


def test_after_an_update_that_is_reset_later_the_log_says_where_the_engine_is_by_the_last_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvpool")
    namespace = started(Measured("a"))
    computes = PoolMetadata(idle=False)
    for weights, known in (("b", "others than before"), ("a", "those of its start again")):
        namespace.add_to(computes)
        namespace.called("reload_weights")
        answered(namespace, Measured(weights))
        assert namespace.is_off
        assert "after reload_weights this engine's cache has blocks" in caplog.messages[-1]
        changed(namespace, Measured(weights))
        assert f"after reset this engine's weights are {known}: it is in namespace" in caplog.messages[-1]
    for call in ("sleep", "reload_weights", "wake_up"):
        namespace.reset(in_use=False)
        namespace.called(call)
    answered(namespace, Measured("a"))
    assert "after wake_up this engine's weights are as before: it is in namespace" in caplog.messages[-1]
