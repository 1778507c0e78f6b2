"""An FP8 cache, drafts and salts, on two engines that have all three: what the one computed the other one loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.engine_process import EngineProcess
from kvpool import BlockHasher
from tests.support.engines import (
    BLOCK_TOKENS,
    ask,
    corrupt,
    engine_options,
    passing,
    prompt,
    records,
    started,
)
from tests.support.file_record import payload_nbytes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="FP8 on a CPU takes AVX-512"),
]

GUESSED = prompt(
    20, 2500
)  # so many words that what is generated is often one of them, and something is guessed
PROMPTS = {"hit": prompt(21, 1500), "corrupted": prompt(22, 1500), "salted": prompt(23, 700)}
LONG_ANSWER = 300  # fills two blocks
FOLLOWING = prompt(24, 10)


@dataclass
class Pair:
    """``first`` has computed everything; ``reference`` is what it answers from its own cache."""

    pool: Path
    second: EngineProcess
    reference: dict[str, dict[str, Any]]
    drafted: dict[str, float]

    @property
    def conversation(self) -> list[int]:
        return [*GUESSED, *self.reference["drafted"]["tokens"], *FOLLOWING]


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("features")
    pool = folder / "pool"
    options = engine_options(
        llama,
        f"file://{pool}",
        kv_cache_dtype="fp8",
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
    )
    reference = {}
    with started("first", folder, options) as first:
        for name, tokens in PROMPTS.items():
            for _ in range(2):
                reference[name] = ask(first, tokens, "mine" if name == "salted" else None)
        reference["drafted"] = first.generate(GUESSED, LONG_ANSWER)
        drafted = first.ask({"do": "metrics"})
        conversation = [*GUESSED, *reference["drafted"]["tokens"], *FOLLOWING]
        reference["conversation"] = ask(first, conversation)
    with passing("second", folder, options) as second:
        yield Pair(pool, second, reference, drafted)


def full(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_an_fp8_cache_is_loaded_as_it_was_stored(pair: Pair) -> None:
    (record, *_) = records(pair.pool, PROMPTS["hit"])
    layers, heads, size = 4, 4, 32
    assert payload_nbytes(record) == layers * 2 * heads * size * BLOCK_TOKENS, "one byte an element"
    answer = ask(pair.second, PROMPTS["hit"])
    assert answer["pool_tokens"] == full(len(PROMPTS["hit"]) - 1)
    assert answer["tokens"] == pair.reference["hit"]["tokens"]


def test_other_bytes_in_an_fp8_cache_change_the_output(pair: Pair) -> None:
    """The control: without it, identical outputs would prove nothing."""
    for record in records(pair.pool, PROMPTS["corrupted"]):
        corrupt(record, keep_checksum=False)
    answer = ask(pair.second, PROMPTS["corrupted"])
    assert answer["pool_tokens"] > 0
    assert answer["tokens"] != pair.reference["corrupted"]["tokens"]


def test_wrong_drafts_are_not_in_the_pool(pair: Pair) -> None:
    """A model with random weights says nothing twice, so all are wrong; right ones are in ``test_lifecycle``."""
    guessed = pair.drafted["vllm:spec_decode_num_draft_tokens_total"]
    assert guessed > 30
    assert guessed - pair.drafted["vllm:spec_decode_num_accepted_tokens_total"] > 30
    said = [*GUESSED, *pair.reference["drafted"]["tokens"]]
    assert len(records(pair.pool, said)) == len(said) // BLOCK_TOKENS > len(GUESSED) // BLOCK_TOKENS
    answer = ask(pair.second, pair.conversation)
    assert answer["pool_tokens"] == full(len(said))
    assert pair.reference["conversation"]["cached_tokens"] == full(len(said))
    assert answer["tokens"] == pair.reference["conversation"]["tokens"]


def test_a_salt_keeps_prompts_apart(pair: Pair) -> None:
    tokens = PROMPTS["salted"]
    assert records(pair.pool, tokens) == []
    there = {path.name.split(".")[2] for path in (pair.pool / "blocks").glob("*/*")}
    assert there >= {one.hex() for one in BlockHasher(BLOCK_TOKENS).hashes(tokens, cache_salt="mine")}
    assert ask(pair.second, tokens, "of another")["cached_tokens"] == 0
    assert ask(pair.second, tokens)["cached_tokens"] == 0
    answer = ask(pair.second, tokens, "mine")
    assert answer["pool_tokens"] == full(len(tokens) - 1)
    assert answer["tokens"] == pair.reference["salted"]["tokens"]
