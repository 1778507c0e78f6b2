"""Requests that arrive at once, with one prefix, at an engine that has nothing of it in its own cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess
from tests.support.engines import BLOCK_TOKENS, engine_options, passing, prompt, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

COMMON_BLOCKS = 20
MEMORY_BLOCKS = 64  # of 1 MiB: for three prompts that share nothing
REQUESTS, ANSWER_TOKENS, CHOICES = 16, 8, 4
BURST, CHOSEN, COMPUTED = (prompt(40 + number, COMMON_BLOCKS * BLOCK_TOKENS) for number in range(3))
WITHOUT_POOL = {"kvpool": {"load": False, "store": False}}


@pytest.fixture(scope="module")
def cold(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine beside one that has stored ``BURST`` and ``CHOSEN``."""
    folder = tmp_path_factory.mktemp("bursts")
    options = engine_options(llama, f"file://{folder}/pool", kv_cache_memory_bytes=MEMORY_BLOCKS << 20)
    with started("first", folder, options) as first:
        for common in (BURST, CHOSEN):
            first.generate([*common, 7], 2)
    with passing("second", folder, options) as second:
        yield second


def loaded_blocks(engine: EngineProcess, prompts: list[list[int]], **more: Any) -> tuple[float, int]:
    """Blocks loaded for ``prompts`` that arrive at once, and the engine's steps."""
    name = "kvpool_loaded_tokens_total"
    before = engine.ask({"do": "metrics"}).get(name, 0.0)
    answer = engine.ask({"do": "burst", "prompts": prompts, "max_tokens": ANSWER_TOKENS, **more})
    return (engine.ask({"do": "metrics"}).get(name, 0.0) - before) / BLOCK_TOKENS, answer["steps"]


def with_prefix(common: list[int]) -> list[list[int]]:
    return [[*common, *prompt(100 + number, 20)] for number in range(REQUESTS)]


def test_a_burst_loads_what_is_common_once_in_no_more_steps_than_computing(cold: EngineProcess) -> None:
    computed, computing_steps = loaded_blocks(cold, with_prefix(COMPUTED), transfer_params=WITHOUT_POOL)
    assert computed == 0
    loaded, steps = loaded_blocks(cold, with_prefix(BURST))
    assert COMMON_BLOCKS <= loaded <= 1.2 * COMMON_BLOCKS
    assert steps <= 1.4 * computing_steps


def test_several_answers_to_one_prompt_load_it_once(cold: EngineProcess) -> None:
    loaded, _ = loaded_blocks(cold, [[*CHOSEN, *prompt(200, 20)]], n=CHOICES)
    assert loaded == COMMON_BLOCKS
