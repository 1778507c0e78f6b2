"""Engines whose pool is a directory on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deadlines import Stopwatch, eventually
from tests.support.disks import mounted
from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    call,
    engine_options,
    passing,
    prompt,
    started,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

BUDGET_S = 0.5
MARGIN_S = 20.0  # for a busy machine
PROMPT, OTHER_PROMPT = prompt(60, 2200), prompt(61, 2200)
WHOLE = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_an_engine_computes_while_its_disk_hangs(llama: Path, tmp_path: Path) -> None:
    with mounted(tmp_path) as disk:
        pool = f"file://{disk.place}/pool?capacity=200MiB"
        options = engine_options(llama, pool, settings={"lookup_timeout_s": BUDGET_S})
        with started("first", tmp_path, options) as first:
            cold = first.generate(PROMPT, GENERATED_TOKENS)
        with passing("second", tmp_path, options) as second:

            def asks() -> dict[str, int]:
                watch = Stopwatch()
                answer = second.generate(PROMPT, GENERATED_TOKENS)
                answer["first_token_s"] -= watch.waited_s()
                assert answer["tokens"] == cold["tokens"]
                return answer

            with disk.hanging():
                answer = asks()
                second.generate(OTHER_PROMPT, GENERATED_TOKENS)  # a full queue of stores stops nobody either
            assert answer["pool_tokens"] == 0
            assert answer["first_token_s"] < cold["first_token_s"] + BUDGET_S + MARGIN_S
            assert eventually(lambda: call(second, "reset_prefix_cache") and asks()["pool_tokens"] == WHOLE)
