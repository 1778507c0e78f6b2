"""Two engines that split the work: one computes prompts and stores them, the other loads them and generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.e2e.harness import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    connector_config,
    engine_options,
    passing,
    prompt,
    records,
    started,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def test_one_engine_prefills_and_the_other_decodes(llama: Path, tmp_path: Path) -> None:
    pool = f"file://{tmp_path / 'pool'}"
    asked = [prompt(700 + number, 900 + 65 * number) for number in range(3)]
    with started("alone", tmp_path, engine_options(llama, f"file://{tmp_path / 'other'}")) as alone:
        expected = [alone.generate(tokens, GENERATED_TOKENS) for tokens in asked]

    def role(name: str) -> dict[str, object]:
        return engine_options(
            llama,
            pool,
            kv_transfer_config={**connector_config(pool, {"cost_gate": False}), "kv_role": name},
        )

    with passing("prefills", tmp_path, role("kv_producer")) as prefills:
        for tokens in asked:
            assert prefills.generate(tokens, 1)["pool_tokens"] == 0
        whole = [len(tokens) // BLOCK_TOKENS for tokens in asked]
        assert eventually(
            lambda: [len(records(tmp_path / "pool", tokens)) for tokens in asked] == whole, within_s=60
        )
        with passing("decodes", tmp_path, role("kv_consumer")) as decodes:
            for tokens, blocks, one in zip(asked, whole, expected, strict=True):
                answer = decodes.generate(tokens, GENERATED_TOKENS)
                assert answer["pool_tokens"] == blocks * BLOCK_TOKENS, "all whole blocks come from the pool"
                assert answer["tokens"] == one["tokens"]
            unseen = prompt(800, 500)
            decodes.generate(unseen, GENERATED_TOKENS)
            assert records(tmp_path / "pool", unseen) == [], "it stores nothing"
        assert prefills.generate(unseen, 1)["pool_tokens"] == 0
