"""Engines whose encoders' outputs are in a pool, for the tests in ``tests/e2e``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess, encoder_config
from tests.support.deadlines import eventually
from tests.support.engine_forks import ROOT
from tests.support.engines import GENERATED_TOKENS, PATIENT, call, engine_options, prompt

VISION = ROOT / ".cache" / "vision"
WITH_VISION = pytest.mark.skipif(
    not VISION.is_dir(), reason="make .cache/vision/.stamp fetches what vLLM's models import"
)
MODULES = {"TESTS_MODULES": str(VISION)}
BLOCK = 32
STEP_TOKENS = 512  # and what the engine's own cache of outputs holds: eight pictures


def options_of(model: Path, pool: Path, *, kv: bool = False, **more: Any) -> dict[str, Any]:
    """Of an engine whose pictures are in the pool, and with ``kv`` its blocks, too."""
    settings = more.pop("settings", {})
    options = engine_options(
        model,
        f"file://{pool}",
        skip_tokenizer_init=False,
        block_size=BLOCK,
        max_model_len=2048,
        max_num_batched_tokens=STEP_TOKENS,
        ec_transfer_config=encoder_config(
            f"file://{pool}", {"lookup_timeout_s": PATIENT["lookup_timeout_s"], **settings}
        ),
        **more,
    )
    if not kv:
        del options["kv_transfer_config"]
    return options


def without_pool(model: Path) -> dict[str, Any]:
    options = options_of(model, Path("/unused"))
    del options["ec_transfer_config"]
    return options


def words(seed: int, count: int) -> tuple[int, ...]:
    return tuple(prompt(seed, count))


def generate(
    engine: EngineProcess, tokens: list[int], media: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    return engine.ask(
        {"do": "generate", "tokens": tokens, "media": media, "max_tokens": GENERATED_TOKENS, **more}
    )


def forget(engine: EngineProcess) -> None:
    """The engine's own caches are empty."""
    call(engine, "reset_encoder_cache")
    call(engine, "reset_prefix_cache")


def counts(engine: EngineProcess, name: str) -> dict[str, int]:
    """A counter of encoders' outputs by label."""
    start = f"kvpool_encoder_{name}_total"
    found = engine.ask({"do": "metrics"}).items()
    return {key.removeprefix(start).lstrip("/"): int(value) for key, value in found if key.startswith(start)}


def sources(engine: EngineProcess) -> tuple[int, int]:
    """How many outputs came from the pool, and how many were computed."""
    engine.generate(prompt(99, 20), 2)  # brings what is counted
    found = counts(engine, "outputs")
    return found["pool"], found["computed"]


def settle(engine: EngineProcess, stored: int) -> None:
    """Wait until so many outputs are in the pool."""

    def are_stored() -> bool:
        engine.generate(prompt(99, 20), 2)
        return counts(engine, "stored_outputs").get("", 0) >= stored

    assert eventually(are_stored)
