"""Engines are slow to start: the models are written once, and the engines of a module are shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_forks import forking, write_model


@pytest.fixture(scope="session", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with forking(tmp_path_factory.mktemp("modules")):
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", kind="llama", width=256, layers=4)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma") / "model"
    return write_model(folder, kind="gemma3", width=256, layers=12, window=512)


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("deepseek") / "model", kind="deepseek", width=256, layers=2)


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss") / "model"
    return write_model(folder, kind="gpt_oss", width=256, layers=4, window=512)


@pytest.fixture(scope="session")
def llama4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama4") / "model"
    return write_model(folder, kind="llama4", width=256, layers=4, window=512)
