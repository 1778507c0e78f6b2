"""Hybrid groups, tensor and pipeline parallelism, MLA, and records of several blocks."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.model import kv_cache_of
from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    corrupt,
    engine_options,
    namespaces,
    passing,
    prompt,
    records,
    started,
)
from tests.support.file_record import payload_nbytes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPT, CONTROL = prompt(1, 2500), prompt(2, 2500)
TP2 = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@dataclass
class Computed:
    """What one engine has stored of both prompts, and says when asked again."""

    pool: Path
    answers: list[dict[str, Any]]


def _compute(name: str, folder: Path, options: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """Compute both prompts on a fresh engine, and answer what it says when asked again."""
    with started(name, folder, options, **environment) as engine:
        for tokens in (PROMPT, CONTROL):
            engine.generate(tokens, GENERATED_TOKENS)
        return [engine.generate(tokens, GENERATED_TOKENS) for tokens in (PROMPT, CONTROL)]


@pytest.fixture(scope="module")
def of_one_rank(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    """By an engine of one rank and one stage; the pool is to be copied."""
    folder = tmp_path_factory.mktemp("single")
    answers = _compute("single", folder, engine_options(llama, f"file://{folder}/pool"))
    return Computed(folder / "pool", answers)


def _check_second(
    folder: Path, options: dict[str, Any], reference: list[dict[str, Any]], pool: Path, **environment: str
) -> None:
    """A fresh engine takes the first prompt from the pool, identically; corrupted, the second one differs."""
    for record in records(pool, CONTROL):
        corrupt(record, keep_checksum=False)
    with started("second", folder, options, **environment) as engine:
        answers = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (PROMPT, CONTROL)]
    assert answers[0]["pool_tokens"] == (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert answers[0]["tokens"] == reference[0]["tokens"]
    assert answers[1]["pool_tokens"] > 0
    assert answers[1]["tokens"] != reference[1]["tokens"]


RARE = pytest.mark.rare  # windows beside full attention; llama4 has chunks


@pytest.mark.parametrize(
    "model", [pytest.param("gemma", marks=RARE), pytest.param("gpt_oss", marks=RARE), "llama4"]
)
def test_windows_and_chunks_beside_full_attention(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Layers of a window, or of chunks, need their last blocks: with the others deleted, the whole prompt is a hit.

    The sinks of gpt-oss are weights: a block is as without them.
    """
    folder, pool = request.getfixturevalue(model), tmp_path / "pool"
    options = engine_options(folder, f"file://{pool}")
    reference = _compute("first", tmp_path, options)
    of_prompt = records(pool, PROMPT)
    groups = {record.name.split(".")[-2] for record in of_prompt}
    assert len(groups) > 1, "the model has several KV-cache groups"
    nbytes = sum(payload_nbytes(record) for record in of_prompt)
    of_a_token = kv_cache_of(json.loads((folder / "config.json").read_text())).token_nbytes[0]
    full_tokens = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    assert nbytes == 2 * of_a_token * full_tokens, "32 bits where kvpool size says 16"
    full_group = _full_attention_group(pool)
    hit = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    first_seen = hit // 512 * 512 if model == "llama4" else hit - 512 + 1
    outside = records(pool, PROMPT[: first_seen // BLOCK_TOKENS * BLOCK_TOKENS])
    for record in outside:
        if record.name.split(".")[-2] != full_group:
            record.unlink()
    _check_second(tmp_path, options, reference, pool)


def _full_attention_group(pool: Path) -> str:
    import msgpack

    from kvpool.key.key import FACTS_SUFFIX
    from kvpool.store import open_store

    with open_store(f"file://{pool}") as store:
        announced = store.announcements("kvpool:default:")  # also an engine's traffic, after a while
    (document,) = [document for key, document in announced.items() if key.endswith(FACTS_SUFFIX)]
    facts = msgpack.unpackb(document)["facts"]
    (name,) = [name for name, value in facts.items() if name.endswith(".attention") and value == "full"]
    return str(name.removeprefix("group").removesuffix(".attention"))


@pytest.mark.smoke
def test_tensor_parallel_ranks_share_with_their_like_only(
    llama: Path, of_one_rank: Computed, tmp_path: Path
) -> None:
    pool = shutil.copytree(of_one_rank.pool, tmp_path / "pool")
    double = {**engine_options(llama, f"file://{pool}"), "tensor_parallel_size": 2}
    assert len(namespaces(pool)) == 1
    with started("first", tmp_path, double, **TP2) as engine:
        cold = engine.generate(PROMPT, GENERATED_TOKENS)
        assert cold["pool_tokens"] == 0, "one rank's blocks must not be loaded by two"
        engine.generate(CONTROL, GENERATED_TOKENS)
        reference = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (PROMPT, CONTROL)]
    assert len(namespaces(pool)) == 2
    assert "tensor_parallel is 2 here and 1 there" in (tmp_path / "first.log").read_text()
    _check_second(tmp_path, double, reference, pool, **TP2)


def test_pipeline_stages_share_with_their_like_only(
    llama: Path, of_one_rank: Computed, tmp_path: Path
) -> None:
    """A stage of one layer and one of three; what an engine without stages has stored is not for them."""
    pool = shutil.copytree(of_one_rank.pool, tmp_path / "pool")
    double = {**engine_options(llama, f"file://{pool}"), "pipeline_parallel_size": 2}
    double["worker_cls"] = "tests.support.cpu_pipeline.PipelineCpuWorker"
    environment = {**TP2, "VLLM_PP_LAYER_PARTITION": "1,3"}
    (alone,) = namespaces(pool)
    with started("first", tmp_path, double, **environment) as engine:
        cold = engine.generate(PROMPT, GENERATED_TOKENS)
        assert cold["pool_tokens"] == 0, "what has all layers must not be loaded by a stage"
        engine.generate(CONTROL, GENERATED_TOKENS)
        reference = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (PROMPT, CONTROL)]
    assert reference[0]["cached_tokens"] > 0
    (of_stages,) = namespaces(pool) - {alone}
    assert "pipeline_parallel is 2 here and 1 there" in (tmp_path / "first.log").read_text()
    payloads: dict[tuple[str, str], set[int]] = {}
    for record in records(pool, PROMPT):
        of_rank = payloads.setdefault((record.name.split(".")[1], record.suffix), set())
        of_rank.add(payload_nbytes(record))
    (whole,) = payloads.pop((alone, ".0"))
    assert payloads == {(of_stages, ".0"): {whole // 4}, (of_stages, ".1"): {whole // 4 * 3}}
    _check_second(tmp_path, double, reference, pool, **environment)


@pytest.mark.rare  # of minutes: both ranks on this machine's cores
def test_latent_vectors_are_stored_once_for_two_ranks(deepseek: Path, tmp_path: Path) -> None:
    pool, prompts = tmp_path / "pool", [prompt(seed, 60 * 16 + 1) for seed in (4, 5)]
    options = {
        **engine_options(deepseek, f"file://{pool}"),
        "block_size": 16,  # the only one that vLLM's CPU kernels have for MLA
        "tensor_parallel_size": 2,
        "attention_backend": "CPU_MLA",  # AMX_MLA, which a processor with AMX would get, takes bfloat16 alone
    }
    with started("first", tmp_path, options, **TP2) as engine:
        for tokens in prompts:
            engine.generate(tokens, GENERATED_TOKENS)
        reference = [engine.generate(tokens, GENERATED_TOKENS)["tokens"] for tokens in prompts]
    good, spoilt = (records(pool, tokens, 16) for tokens in prompts)
    assert [record.name.split(".")[-2:] for record in good] == [["0", "0"]] * 60, "group and rank"
    for record in spoilt:
        corrupt(record, keep_checksum=False)
    with started("second", tmp_path, options, **TP2) as engine:
        answers = [engine.generate(tokens, GENERATED_TOKENS) for tokens in prompts]
    assert [answer["pool_tokens"] for answer in answers] == [60 * 16] * 2
    assert answers[0]["tokens"] == reference[0]
    assert answers[1]["tokens"] != reference[1]


def test_records_of_four_blocks_and_a_prefix_in_the_engine_that_ends_inside_one(
    llama: Path, tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    options = engine_options(llama, f"file://{pool}", settings={"blocks_per_record": 4})
    reference = _compute("first", tmp_path, options)
    record_tokens, local_tokens = 4 * BLOCK_TOKENS, 5 * BLOCK_TOKENS
    assert len(records(pool, PROMPT)) == len(PROMPT) // record_tokens
    for record in records(pool, CONTROL):
        corrupt(record, keep_checksum=False)
    hit_tokens = (len(PROMPT) - 1) // record_tokens * record_tokens
    with passing("second", tmp_path, options) as engine:
        begun = [engine.generate([*tokens[:local_tokens], *prompt(4, 60)], 2) for tokens in (PROMPT, CONTROL)]
        assert [answer["pool_tokens"] for answer in begun] == [record_tokens] * 2, (
            "and computes one more block"
        )
        answers = [engine.generate(tokens, GENERATED_TOKENS) for tokens in (PROMPT, CONTROL)]
    for answer in answers:
        assert (answer["cached_tokens"], answer["pool_tokens"]) == (hit_tokens, hit_tokens - local_tokens)
    assert answers[0]["tokens"] == reference[0]["tokens"]
    assert answers[1]["tokens"] != reference[1]["tokens"]
