"""Engines are slow to start: the models are written once, and the engines of a module are shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_forks import forking, write_model


@pytest.fixture(scope="session", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with forking(tmp_path_factory.mktemp("modules")):
        yield


def model(name: str, **options: Any) -> Any:
    """A fixture: the folder of a model, written once."""

    @pytest.fixture(scope="session", name=name)
    def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_model(tmp_path_factory.mktemp(name) / "model", width=256, **options)

    return written


llama = model("llama", kind="llama", layers=4)
gemma = model("gemma", kind="gemma3", layers=12, window=512)
deepseek = model("deepseek", kind="deepseek", layers=2)
gpt_oss = model("gpt_oss", kind="gpt_oss", layers=4, window=512)
llama4 = model("llama4", kind="llama4", layers=4, window=512)
llava = model("llava", kind="llava", layers=4)
qwen2_vl = model("qwen2_vl", kind="qwen2_vl", layers=2)
qwen2_audio = model("qwen2_audio", kind="qwen2_audio", layers=2)
