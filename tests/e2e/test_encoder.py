"""Outputs of encoders on real engines: a picture that any of them has seen is encoded by none again, tokens equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess, encoder_config
from demo.tiny_model import SIDE, VOCABULARY
from tests.support.deadlines import eventually
from tests.support.engine_forks import ROOT
from tests.support.engines import (
    GENERATED_TOKENS,
    PATIENT,
    engine_options,
    passing,
    prompt,
    started,
)

VISION = ROOT / ".cache" / "vision"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not VISION.is_dir(), reason="make .cache/vision/.stamp fetches what vLLM's models import"
    ),
]

BLOCK = 32
IMAGE = VOCABULARY  # the token that stands for a picture
IMAGE_TOKENS = 64
MODULES = {"TESTS_MODULES": str(VISION)}
STEP_TOKENS = 512  # and what the engine's own cache of outputs holds: eight pictures


def options_of(model: Path, pool: Path, *, kv: bool = False, **more: Any) -> dict[str, Any]:
    """Of an engine whose pictures are in the pool, and with ``kv`` its blocks, too."""
    settings = more.pop("settings", {})
    options = engine_options(
        model,
        f"file://{pool}",
        skip_tokenizer_init=False,
        block_size=BLOCK,
        max_model_len=2048,
        max_num_batched_tokens=STEP_TOKENS,
        ec_transfer_config=encoder_config(
            f"file://{pool}", {"lookup_timeout_s": PATIENT["lookup_timeout_s"], **settings}
        ),
        **more,
    )
    if not kv:
        del options["kv_transfer_config"]
    return options


def without_pool(model: Path) -> dict[str, Any]:
    options = options_of(model, Path("/unused"))
    del options["ec_transfer_config"]
    return options


@dataclass(frozen=True)
class Asked:
    """A prompt of words and pictures, in order; a picture is its number."""

    parts: tuple[tuple[int, ...] | int, ...]

    @property
    def tokens(self) -> list[int]:
        return [token for part in self.parts for token in ([IMAGE] if isinstance(part, int) else part)]

    @property
    def images(self) -> list[tuple[int, int]]:
        return [(part, SIDE) for part in self.parts if isinstance(part, int)]

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.images) * (IMAGE_TOKENS - 1)


def words(seed: int, count: int) -> tuple[int, ...]:
    return tuple(prompt(seed, count))


def ask(engine: EngineProcess, asked: Asked) -> dict[str, Any]:
    return engine.ask(
        {
            "do": "generate",
            "tokens": asked.tokens,
            "images": asked.images,
            "max_tokens": GENERATED_TOKENS,
        }
    )


def counts(engine: EngineProcess, name: str) -> dict[str, int]:
    """A counter of encoders' outputs by label."""
    start = f"kvpool_encoder_{name}_total"
    found = engine.ask({"do": "metrics"}).items()
    return {key.removeprefix(start).lstrip("/"): int(value) for key, value in found if key.startswith(start)}


def sources(engine: EngineProcess) -> tuple[int, int]:
    """How many outputs came from the pool, and how many were computed."""
    engine.generate(prompt(99, 20), 2)  # brings what is counted
    found = counts(engine, "outputs")
    return found["pool"], found["computed"]


def settle(engine: EngineProcess, stored: int) -> None:
    """Wait until so many outputs are in the pool."""

    def are_stored() -> bool:
        engine.generate(prompt(99, 20), 2)
        return counts(engine, "stored_outputs").get("", 0) >= stored

    assert eventually(are_stored)


def records(pool: Path) -> list[Path]:
    """The files of outputs, all others of the same size left out."""
    nbytes = IMAGE_TOKENS * 256 * 4
    return [
        one for one in sorted((pool / "blocks").glob("*/*")) if nbytes < one.stat().st_size < nbytes + 8192
    ]


ONE = Asked((words(1, 40), 1, words(2, 30)))
MANY = Asked((words(3, 20), 1, 2, words(4, 50), 3, words(5, 5), 1, 4, words(6, 10)))
AGAIN = Asked((words(7, 90), 3, words(8, 40), 5))
ALL = {"one": ONE, "many": MANY, "again": AGAIN}


@pytest.fixture(scope="module")
def reference(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What an engine without a pool answers."""
    with passing("reference", tmp_path_factory.mktemp("reference"), without_pool(llava), **MODULES) as engine:
        return {name: ask(engine, asked)["tokens"] for name, asked in ALL.items()}


@pytest.fixture(scope="module")
def pool(llava: Path, tmp_path_factory: pytest.TempPathFactory, reference: dict[str, list[int]]) -> Path:
    """A pool to which one engine has stored five pictures."""
    folder = tmp_path_factory.mktemp("encoder")
    with passing("first", folder, options_of(llava, folder / "pool"), **MODULES) as first:
        assert {name: ask(first, asked)["tokens"] for name, asked in ALL.items()} == reference
        settle(first, 5)
        assert sources(first) == (0, 5), "an item is encoded once, however often it is asked for"
    return folder / "pool"


@pytest.fixture(scope="module")
def second(llava: Path, pool: Path, reference: dict[str, list[int]]) -> Iterator[EngineProcess]:
    with started("second", pool.parent, options_of(llava, pool), **MODULES) as engine:
        yield engine


def test_a_second_engine_encodes_nothing(second: EngineProcess, reference: dict[str, list[int]]) -> None:
    assert {name: ask(second, asked)["tokens"] for name, asked in ALL.items()} == reference
    assert sources(second) == (5, 0)
    assert counts(second, "loaded_bytes")[""] == 5 * IMAGE_TOKENS * 256 * 4
