"""Models that need nothing of their own: caches shared by layers, blocks of several sizes, embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess
from tests.support.engine_forks import ONE_THREAD, ForkedEngine, write_model
from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    corrupt,
    engine_options,
    passing,
    prompt,
    records,
    started,
)

pytestmark = [pytest.mark.e2e, pytest.mark.rare, pytest.mark.timeout(1800)]

PROMPT, CONTROL = prompt(1, 2500), prompt(2, 2500)


def corrupt_all(pool: Path, tokens: list[int]) -> None:
    """Whatever a group's blocks hold of tokens."""
    found = {record for count in (1, 2, 3, 4, 6, 8) for record in records(pool, tokens, count * BLOCK_TOKENS)}
    assert len({record.name.split(".")[-2] for record in found}) == len(groups(pool)), "of each group"
    for record in found:
        corrupt(record, keep_checksum=False)


def groups(pool: Path) -> set[str]:
    return {record.name.split(".")[-2] for record in (pool / "blocks").glob("*/*")}


@pytest.mark.parametrize("kind", ["gemma3n", "gemma4"])
def test_layers_without_caches_of_their_own(kind: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind=kind, width=256, layers=9, window=512)
    options = engine_options(model, f"file://{tmp_path}/pool")
    with started("first", tmp_path, options) as engine:
        for tokens in (PROMPT, CONTROL):
            engine.generate(tokens, GENERATED_TOKENS)
        local = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (PROMPT, CONTROL)]
    assert len(groups(tmp_path / "pool")) > 1
    corrupt_all(tmp_path / "pool", CONTROL)
    with passing("second", tmp_path, options) as engine:
        found = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (PROMPT, CONTROL)]
    assert [one["pool_tokens"] for one in found] == [one["cached_tokens"] for one in local]
    assert local[0]["cached_tokens"] > 2000
    assert found[0]["tokens"] == local[0]["tokens"]
    assert found[1]["tokens"] != local[1]["tokens"], "the bytes are used"


def embed(engine: EngineProcess, tokens: list[int]) -> dict[str, Any]:
    return engine.ask({"do": "embed", "tokens": tokens})


def test_an_embedding_is_that_of_a_model_without_a_pool(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="qwen3", width=256, layers=3)
    options = engine_options(model, f"file://{tmp_path}/pool", runner="pooling", convert="embed")
    options["skip_tokenizer_init"] = False

    def engine(name: str) -> ForkedEngine:
        embedding = ForkedEngine(name, tmp_path, options, ONE_THREAD)
        embedding.wait_ready()
        return embedding

    with engine("first") as first:
        cold = [embed(first, tokens) for tokens in (PROMPT, CONTROL)]
        local = [embed(first, tokens) for tokens in (PROMPT, CONTROL)]
        embed(first, prompt(3, 20))  # another step, in which what was stored is reported
        assert first.wait_quiet()
    assert [one["pool_tokens"] for one in cold + local] == [0] * 4
    corrupt_all(tmp_path / "pool", CONTROL)
    with engine("second") as second:
        found = [embed(second, tokens) for tokens in (PROMPT, CONTROL)]
    assert [one["pool_tokens"] for one in found] == [local[0]["cached_tokens"]] * 2
    assert local[0]["cached_tokens"] > 2000
    assert found[0]["embedding"] == local[0]["embedding"]
    assert found[1]["embedding"] != local[1]["embedding"], "the bytes are used"
