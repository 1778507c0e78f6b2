"""Which engines share, by their weights and by what was built of them. What comes from no pool is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineFailed
from tests.support.engine_forks import write_model
from tests.support.engines import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    engine_options,
    namespaces,
    passing,
    prompt,
    started,
)
from tests.support.hub import Hub, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROMPT = prompt(1, 500)
SHARED_TOKENS = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
SHORT_TOKENS = 512  # what the LongRoPE model was trained with first
NAME = "kvpool/tiny"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights alone."""
    folder = tmp_path_factory.mktemp("identity")
    one, other = (
        write_model(folder / f"weights-{seed}", kind="llama", width=256, layers=2, seed=seed)
        for seed in (1, 2)
    )
    return one, other


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


def _small(model: Path | str, pool: str, **more: Any) -> dict[str, Any]:
    return {**engine_options(Path(model), pool, **more), "model": str(model), "max_model_len": 1024}


def _answer(name: str, folder: Path, options: dict[str, Any], **environment: str) -> dict[str, Any]:
    """What a fresh engine says to the prompt, once it is stored."""
    with passing(name, folder, options, **environment) as engine:
        answer = engine.generate(PROMPT, GENERATED_TOKENS)
        engine.generate(prompt(2, 20), 2)  # another step, in which what was stored is reported
        assert engine.wait_quiet()
    return answer


@pytest.mark.rare
def test_a_model_by_its_hub_id_shares_by_commit(hub: Hub, models: tuple[Path, Path], tmp_path: Path) -> None:
    """The branch moves between two starts; a cache of another host has the later commit alone."""
    pool = f"file://{tmp_path}/pool"
    options = _small(NAME, pool)
    hub.push(NAME, models[0])
    host = hub.environment(tmp_path / "cache")
    first = _answer("first", tmp_path, options, **host)
    hub.push(NAME, models[1])
    moved = _answer("moved", tmp_path, options, **host)
    offline = _answer("offline", tmp_path, options, **host | {"HF_HUB_OFFLINE": "1"})
    pool_tokens = [answer["pool_tokens"] for answer in (first, moved, offline)]
    assert pool_tokens == [0, 0, SHARED_TOKENS]
    assert first["tokens"] != moved["tokens"] == offline["tokens"]
    assert len(namespaces(tmp_path / "pool")) == 2
    log = (tmp_path / "moved.log").read_text()
    assert f'of model "{NAME}" holds blocks that this worker cannot share' in log
    assert "revision is " in log


def test_weights_are_known_wherever_they_lie(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Under two paths and at two lengths, and overwritten at one path."""
    pool = f"file://{tmp_path}/pool"
    here, there = tmp_path / "here" / "m", tmp_path / "there" / "n"
    for folder in (here, there):
        shutil.copytree(models[0], folder)
    first = _answer("here", tmp_path, _small(here, pool))
    second = _answer("there", tmp_path, {**_small(there, pool), "max_model_len": 4096})
    assert (first["pool_tokens"], second["pool_tokens"]) == (0, SHARED_TOKENS)
    shutil.copy(models[1] / "model.safetensors", there / "model.safetensors")
    overwritten = _answer("overwritten", tmp_path, _small(there, pool))
    assert overwritten["pool_tokens"] == 0
    assert first["tokens"] == second["tokens"] != overwritten["tokens"]
    assert len(namespaces(tmp_path / "pool")) == 2


@pytest.mark.rare
def test_random_weights_are_named_and_share_nothing_with_those_of_files(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool"
    _answer("files", tmp_path, _small(models[0], pool))
    dummy = {**_small(models[0], pool), "load_format": "dummy"}
    with pytest.raises(EngineFailed, match=r"--load-format dummy fills .*; set model_id to a name"):
        started("refused", tmp_path, dummy).kill()
    dummy["kv_transfer_config"]["kv_connector_extra_config"]["model_id"] = "random"
    assert _answer("dummy", tmp_path, dummy)["pool_tokens"] == 0
    assert len(namespaces(tmp_path / "pool")) == 2


@pytest.mark.rare
def test_a_length_that_selects_other_rope_factors_keeps_engines_apart(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """LongRoPE, as Phi-3 has it: above the length of its first training it turns all keys otherwise."""
    model = shutil.copytree(models[0], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    half = config["head_dim"] // 2
    for name in ("rope_parameters", "rope_scaling"):
        config.pop(name, None)
    config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT_TOKENS,
        "short_factor": [1.0] * half, "long_factor": [1.0 + index / 2 for index in range(half)],
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    options = _small(model, f"file://{tmp_path}/pool")
    short = {**options, "max_model_len": len(PROMPT) + GENERATED_TOKENS}
    assert short["max_model_len"] == SHORT_TOKENS
    answers = [_answer(name, tmp_path, one) for name, one in (("short", short), ("long", options))]
    assert [one["pool_tokens"] for one in answers] == [0, 0]
    assert answers[0]["tokens"] != answers[1]["tokens"], "else the test would see nothing"
    assert "rope is " in (tmp_path / "long.log").read_text()
