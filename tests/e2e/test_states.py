"""Models with recurrent states beside attention: short convolutions, gated delta nets, Mamba-2; and with drafts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from demo.tiny_model import VOCABULARY
from kvpool import BlockHasher
from tests.support.engine_forks import write_model
from tests.support.engines import (
    GENERATED_TOKENS,
    corrupt,
    drafted,
    engine_options,
    passing,
    prompt,
    records,
    started,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

# The kernels of gated delta nets compute in bfloat16.
KINDS = {"lfm2": "float32", "qwen3_next": "bfloat16", "granite4": "float32"}
# One token behind whole blocks of any of these models: it is computed from the state alone.
WHOLE, CORRUPTED, LOST = prompt(1, 2305), prompt(2, 2305), prompt(3, 2305)


def options_of(kind: str, folder: Path, **more: Any) -> dict[str, Any]:
    model, drafts = folder / "model", "speculative_config" in more
    if not model.exists():
        write_model(model, kind=kind, width=256, layers=4, said_words=16 if drafts else VOCABULARY)
    if kind == "granite4" or drafts:
        more["worker_cls"] = "tests.support.cpu_states.StatesCpuWorker"
    return engine_options(model, f"file://{folder}/pool", dtype=KINDS[kind], **more)


def block_tokens(pool: Path, tokens: list[int]) -> int:
    """vLLM makes a block of attention as large as a state."""
    return next(count for count in range(128, 2049, 128) if records(pool, tokens, count))


def states(pool: Path, tokens: list[int]) -> list[Path]:
    """The records of a prompt's states: of these groups only its end is stored."""
    found = records(pool, tokens, block_tokens(pool, tokens))
    count = Counter(record.name.split(".")[-2] for record in found)
    kept = [record for record in found if count[record.name.split(".")[-2]] == 1]
    assert kept
    assert len(kept) < len(found)
    return kept


@pytest.mark.parametrize(
    "kind", ["qwen3_next", *(pytest.param(name, marks=pytest.mark.rare) for name in ("lfm2", "granite4"))]
)
def test_another_engine_goes_on_behind_states_of_the_pool(kind: str, tmp_path: Path) -> None:
    options, pool = options_of(kind, tmp_path), tmp_path / "pool"
    with started("first", tmp_path, options) as engine:
        cold = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (WHOLE, CORRUPTED, LOST)]
        local = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (WHOLE, CORRUPTED, LOST)]
    assert all(one["cached_tokens"] > 2000 for one in local)
    assert [one["pool_tokens"] for one in cold + local] == [0] * 6
    for record in states(pool, CORRUPTED):
        corrupt(record, keep_checksum=False)
    for record in states(pool, LOST)[:1]:
        record.unlink()
    with passing("second", tmp_path, options) as engine:
        found = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (WHOLE, CORRUPTED, LOST)]
    assert found[0]["pool_tokens"] == local[0]["cached_tokens"]
    assert found[0]["tokens"] == local[0]["tokens"]
    assert found[1]["pool_tokens"] == local[1]["cached_tokens"]
    assert found[1]["tokens"] != local[1]["tokens"], "the bytes of states are used"
    assert found[2]["pool_tokens"] == 0, "a hit needs all states at its end"
    assert found[2]["tokens"] == cold[2]["tokens"]


def test_a_prompt_of_whole_blocks_is_found_again_as_in_vllms_own_cache(tmp_path: Path) -> None:
    options = options_of("lfm2", tmp_path)
    with passing("probe", tmp_path, options) as engine:
        engine.generate(WHOLE, GENERATED_TOKENS)
    block = block_tokens(tmp_path / "pool", WHOLE)
    prompts = [prompt(40 + beside, 3 * block + beside) for beside in (-1, 0, 1)]
    with started("first", tmp_path, options) as engine:
        for tokens in prompts:
            engine.generate(tokens, 1)
        own = [engine.generate(tokens, 1)["cached_tokens"] for tokens in prompts]
    assert own == [2 * block, 2 * block, 3 * block]
    with passing("second", tmp_path, options) as engine:
        assert [engine.generate(tokens, 1)["pool_tokens"] for tokens in prompts] == own


def test_a_hit_ends_inside_of_a_block(tmp_path: Path) -> None:
    options, pool = options_of("lfm2", tmp_path, prefix_match_unit=32), tmp_path / "pool"
    whole, corrupted, lost = (prompt(number, 2500) for number in (1, 2, 3))
    with started("first", tmp_path, options) as engine:
        cold = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (whole, corrupted, lost)]
        local = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (whole, corrupted, lost)]
    end = (len(whole) - 1) // 32 * 32
    assert [one["cached_tokens"] for one in local] == [end] * 3
    of_end = [
        sorted((pool / "blocks").glob(f"*/*.{BlockHasher(32).hashes(tokens[:end])[-1].hex()}.*"))
        for tokens in (whole, corrupted, lost)
    ]
    assert len({len(found) for found in of_end}) == 1
    assert of_end[0]
    for record in of_end[1]:
        corrupt(record, keep_checksum=False)
    of_end[2][0].unlink()
    with passing("second", tmp_path, options) as engine:
        found = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (whole, corrupted, lost)]
        longer = engine.generate(whole + prompt(9, 300), GENERATED_TOKENS)
    assert [one["pool_tokens"] for one in found[:2]] == [end] * 2
    assert found[0]["tokens"] == local[0]["tokens"]
    assert found[1]["tokens"] != local[1]["tokens"], "the bytes of the tail are used"
    assert 0 < found[2]["pool_tokens"] < end
    assert found[2]["tokens"] == cold[2]["tokens"]
    assert longer["cached_tokens"] == end, "a longer prompt goes on there, too"


@pytest.mark.rare
def test_where_prompts_part_states_are_stored_for_the_next_one(tmp_path: Path) -> None:
    """A prompt whose beginning is in the pool without states stops there once, and keeps them."""
    options = options_of("lfm2", tmp_path)
    common = prompt(5, 1280)
    ways = [common + prompt(10 + number, 700) for number in range(3)]
    with passing("first", tmp_path, options) as first, passing("second", tmp_path, options) as second:
        cold = [first.generate(ways[0], GENERATED_TOKENS), second.generate(ways[1], GENERATED_TOKENS)]
        third = first.generate(ways[2], GENERATED_TOKENS)
    assert [one["pool_tokens"] for one in cold] == [0, 0]
    assert third["cached_tokens"] == len(common)
    with passing("alone", tmp_path, {**options, "kv_transfer_config": None}) as alone:
        assert alone.generate(ways[2], GENERATED_TOKENS)["tokens"] == third["tokens"]


@pytest.mark.rare
def test_engines_whose_states_are_others_share_nothing(tmp_path: Path) -> None:
    options = options_of("qwen3_next", tmp_path)
    with started("first", tmp_path, options) as engine:
        engine.generate(WHOLE, GENERATED_TOKENS)
    ways: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "dtype": ({"mamba_ssm_cache_dtype": "bfloat16"}, {}),
        "layout": ({}, {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}),
    }
    for name, (other, environment) in ways.items():
        with passing(name, tmp_path, {**options, **other}, **environment) as engine:
            assert engine.generate(WHOLE, GENERATED_TOKENS)["pool_tokens"] == 0, name


@pytest.mark.rare
def test_drafts_beside_states(tmp_path: Path) -> None:
    """MTP: what is loaded of a layer that drafts drafts as well as what was computed."""
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    options = options_of("qwen3_next", tmp_path, speculative_config=drafts, kv_cache_memory_bytes=400 << 20)
    pool = tmp_path / "pool"
    # Of some prompts such a model accepts nothing.
    whole, changed, lost = (
        [prompt(10 * kind + n, 2305) for n in range(count)] for kind, count in enumerate((4, 4, 1))
    )
    wanted = [*whole, *changed, *lost]

    with started("first", tmp_path, options) as engine:
        cold = [drafted(engine, tokens) for tokens in wanted]
        local = [drafted(engine, tokens) for tokens in wanted]
    assert {one.pool for one in cold + local} == {0}
    hit = local[0].cached
    assert hit > 1000
    states(pool, lost[0])[0].unlink()
    for tokens in changed:
        kept = set(states(pool, tokens))
        for record in records(pool, tokens, block_tokens(pool, tokens)):
            if record not in kept:  # a layer of the model, and the one that drafts
                corrupt(record, keep_checksum=False, first_share=0.5)
    with passing("second", tmp_path, options) as engine:
        found = [drafted(engine, tokens) for tokens in wanted]
    assert [one.pool for one in found] == [hit] * 8 + [0]
    assert [one.tokens for one in found] == [one.tokens for one in local]
    accepted, of_local = ([one.accepted for one in answered] for answered in (found, local))
    assert accepted[:4] == of_local[:4]
    assert sum(accepted[:4]) > 0
    assert accepted[4:8] != of_local[4:8], "the bytes of the layer that drafts are used"
    with passing("alone", tmp_path, {**options, "speculative_config": None}) as engine:
        assert engine.generate(WHOLE, GENERATED_TOKENS)["pool_tokens"] == 0
