"""A real vLLM configuration of a tiny model, without starting an engine."""

from __future__ import annotations

import copy
import fcntl
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from demo.engine_process import connector_config
from kvpool.store import Store, open_store

if TYPE_CHECKING:
    from tests.support.lifecycle import Configured, ScriptedEngine, Shape, World


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"file://{tmp_path}/pool") as store:
        yield store


@pytest.fixture(scope="session")
def engine_config(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str) -> Any:
    """A function that makes a ``VllmConfig`` from options of ``EngineArgs``, with kvpool as its connector.

    The first process of a run writes the model, and vLLM inspects it in one more. The others wait, and find both.
    """
    from vllm.engine.arg_utils import EngineArgs

    from demo.engine_process import write_model

    model = tmp_path_factory.getbasetemp().parent / f"config-{testrun_uid}"

    def make(**options: Any) -> Any:
        transfer = {**connector_config("file:///unused"), **options.pop("transfer", {})}
        return EngineArgs(
            **{
                "model": str(model),
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "enforce_eager": True,
                "block_size": 128,
                "max_model_len": 2048,
                "prefix_caching_hash_algo": "sha256_cbor",
                "kv_transfer_config": transfer,
                **options,
            }
        ).create_engine_config()

    with model.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not model.exists():
            write_model(model, kind="llama", width=256, layers=2)
            make()
    return make


@pytest.fixture(scope="module")
def configured(engine_config: Callable[..., Any]) -> Configured:
    """vLLM's configuration for engines of a shape, made once and copied."""
    from tests.support.lifecycle import configuration, prepare

    made: dict[int, Any] = {}

    def make(shape: Shape) -> Any:
        if shape.drafts not in made:
            made[shape.drafts] = configuration(engine_config, shape.drafts)
        return prepare(copy.deepcopy(made[shape.drafts]), shape)

    return make


@pytest.fixture
def world() -> Iterator[World]:
    """A pool for scripted engines."""
    from tests.support.lifecycle import World

    world = World(1, 1 << 20)
    yield world
    world.close()


@pytest.fixture
def engine(world: World, configured: Configured) -> Iterator[Callable[..., ScriptedEngine]]:
    """A function that starts an engine on the world's pool; in the end each is at rest, and is shut down."""
    from tests.support.lifecycle import ScriptedEngine, Shape

    started: list[ScriptedEngine] = []

    def start(shape: Shape | None = None, **more: Any) -> ScriptedEngine:
        shape = shape or Shape(slots=24)
        started.append(ScriptedEngine(world, configured(shape), shape, **more))
        return started[-1]

    yield start
    for one in started:
        one.rest()
        one.shut_down()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Engines start by the hundred, and each says so at length; what goes wrong is told by what is checked."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
