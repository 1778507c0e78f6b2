"""Engines of one rank and of two share blocks that are cut by heads (``share_across_tp``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    corrupt,
    engine_options,
    namespaces,
    prompt,
    records,
    started,
)
from tests.support.file_record import payload_nbytes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TP2 = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
CUT = {"share_across_tp": 2}
KEPT, CHANGED, LOST, LATER = 21, 22, 23, 24
BLOCKS = 19
HIT_TOKENS = BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("model", ["llama", pytest.param("gemma", marks=pytest.mark.rare)])
def test_engines_of_one_and_two_ranks_load_what_the_other_one_has_stored(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    single = engine_options(request.getfixturevalue(model), f"file://{pool}", settings=CUT)
    prompts = {seed: prompt(seed, HIT_TOKENS + 1) for seed in (KEPT, CHANGED, LOST, LATER)}

    with started("one", tmp_path, single) as one:
        for seed in (KEPT, CHANGED, LOST):
            one.generate(prompts[seed], GENERATED_TOKENS)
        local = {seed: one.generate(prompts[seed], GENERATED_TOKENS) for seed in (KEPT, CHANGED, LOST)}
        assert [answer["cached_tokens"] for answer in local.values()] == [HIT_TOKENS] * 3
        for record in records(pool, prompts[CHANGED]):
            corrupt(record, keep_checksum=False)
        lost = BLOCKS // 2
        records(pool, prompts[LOST][: (lost + 1) * BLOCK_TOKENS])[-1].unlink()

        with started("two", tmp_path, {**single, "tensor_parallel_size": 2}, **TP2) as two:
            loaded = {seed: two.generate(prompts[seed], GENERATED_TOKENS) for seed in local}
            again = two.generate(prompts[KEPT], GENERATED_TOKENS)
            two.generate(prompts[LATER], GENERATED_TOKENS)
            later = two.generate(prompts[LATER], GENERATED_TOKENS)
        assert (
            loaded[KEPT]["pool_tokens"]
            == loaded[KEPT]["cached_tokens"]
            == again["cached_tokens"]
            == HIT_TOKENS
        )
        assert loaded[KEPT]["tokens"] == again["tokens"] == local[KEPT]["tokens"]
        assert loaded[CHANGED]["pool_tokens"] == HIT_TOKENS
        assert loaded[CHANGED]["tokens"] != local[CHANGED]["tokens"], "the bytes are used"
        assert loaded[LOST]["pool_tokens"] == lost * BLOCK_TOKENS, "up to the block of which a part is lost"
        assert loaded[LOST]["tokens"] == local[LOST]["tokens"]

        back = one.generate(prompts[LATER], GENERATED_TOKENS)
        assert (back["pool_tokens"], back["tokens"]) == (HIT_TOKENS, later["tokens"])

    assert len(namespaces(pool)) == 1
    parts = records(pool, prompts[KEPT])
    assert "share_across_tp is off" not in (tmp_path / "one.log").read_text()
    if model == "llama":  # 4 KV heads of 32 numbers of 4 bytes, in 4 layers
        part_nbytes = 2 * 2 * 32 * 4 * 4 * BLOCK_TOKENS
        assert [record.suffix for record in parts] == [".0", ".1"] * BLOCKS
        assert {payload_nbytes(record) for record in parts} == {part_nbytes}


def test_where_a_part_would_be_small_sizes_are_kept_apart_and_the_log_says_so(
    llama: Path, tmp_path: Path
) -> None:
    pool, tokens = tmp_path / "pool", prompt(31, 4 * 32 + 1)
    options = engine_options(llama, f"file://{pool}", settings={"share_across_tp": 4}, block_size=32)
    with started("one", tmp_path, options) as one:
        one.generate(tokens, 2)
    log = (tmp_path / "one.log").read_text()
    assert "share_across_tp is off: each of 4 parts of a record of KV-cache group 0 would have 32KiB" in log
    assert [record.suffix for record in records(pool, tokens, 32)] == [".0"] * 4
