"""Drafts whose layers own a part of each block: what is loaded drafts as well as what was computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_forks import write_model
from tests.support.engines import (
    BLOCK_TOKENS,
    Drafted,
    corrupt,
    drafted,
    engine_options,
    passing,
    prompt,
    records,
    started,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

LAYERS, WIDTH = 4, 256
PROMPTS = [prompt(40 + number, 1400 + 37 * number) for number in range(4)]
LOST, CHANGED = PROMPTS[2], PROMPTS[3]


@dataclass
class Pair:
    pool: Path
    options: dict[str, Any]
    local: list[Drafted]
    second: list[Drafted]


@pytest.fixture(
    scope="module",
    params=["eagle", *(pytest.param(name, marks=pytest.mark.rare) for name in ("draft_model", "eagle3"))],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_model(folder / "model", width=WIDTH, layers=LAYERS, said_words=16)
    drafts = model
    if request.param != "draft_model":
        kind = request.param
        drafts = write_model(folder / "drafts", kind=kind, width=WIDTH, layers=1, seed=1, said_words=16)
    options = engine_options(
        model,
        f"file://{folder}/pool",
        speculative_config={"method": request.param, "model": str(drafts), "num_speculative_tokens": 3},
    )
    with started("first", folder, options) as first:
        for tokens in PROMPTS:
            drafted(first, tokens)
        local = [drafted(first, tokens) for tokens in PROMPTS]
    records(folder / "pool", LOST)[3].unlink()
    layers = LAYERS + (LAYERS if request.param == "draft_model" else 1)
    for record in records(folder / "pool", CHANGED):
        corrupt(record, keep_checksum=False, first_share=LAYERS / layers)
    with passing("second", folder, options) as second:
        yield Pair(folder / "pool", options, local, [drafted(second, tokens) for tokens in PROMPTS])


def test_a_hit_is_as_long_as_a_local_one_and_drafts_as_well(pair: Pair) -> None:
    for local, found in zip(pair.local[:2], pair.second[:2], strict=True):
        assert found.pool == local.cached > 1000
        assert found.tokens == local.tokens
        assert found.accepted == local.accepted > 0


def test_a_lost_record_shortens_the_hit(pair: Pair) -> None:
    assert pair.second[2].pool in (2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    assert pair.second[2].tokens == pair.local[2].tokens


def test_other_bytes_in_the_layers_of_drafts_change_what_is_accepted_and_no_token(pair: Pair) -> None:
    local, changed = pair.local[3], pair.second[3]
    assert changed.pool == local.cached
    assert changed.tokens == local.tokens
    assert changed.accepted != local.accepted


# Without drafts there are fewer layers, and so other facts in any case.
@pytest.mark.parametrize("other", ["count", pytest.param("none", marks=pytest.mark.rare), "weights"])
def test_other_drafts_share_nothing(pair: Pair, other: str, tmp_path: Path) -> None:
    drafts = dict(pair.options["speculative_config"])
    if other == "count":
        drafts["num_speculative_tokens"] = 2
    elif other == "weights":
        kind = "llama" if drafts["method"] == "draft_model" else drafts["method"]
        layers = LAYERS if kind == "llama" else 1
        drafts["model"] = str(write_model(tmp_path / "drafts", kind=kind, width=WIDTH, layers=layers, seed=9))
    options = {**pair.options, "speculative_config": None if other == "none" else drafts}
    with passing(other, tmp_path, options) as engine:
        assert engine.generate(PROMPTS[0], 2)["pool_tokens"] == 0
