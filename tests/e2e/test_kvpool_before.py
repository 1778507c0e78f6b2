"""Workers of an earlier kvpool and of this one on one pool share, or keep apart, and are never wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess
from tests.support.engine_forks import ONE_THREAD, ROOT
from tests.support.engines import BLOCK_TOKENS, GENERATED_TOKENS, engine_options, namespaces, prompt
from tests.support.soak import LONG_SOAK

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(1800), LONG_SOAK]

BEFORE = "92dcaa89"  # of November 2026: without states, drafts with layers and sparse latents
PROMPTS = {"before": prompt(1, 2500), "now": prompt(2, 2500)}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an interpreter whose kvpool is the earlier one."""
    folder = tmp_path_factory.mktemp("before")
    archive = folder / "kvpool.tar"
    command = ["git", "archive", "--output", str(archive), BEFORE]
    if subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip(f"this clone has no commit {BEFORE}")
    source, site = folder / "source", folder / "site"
    source.mkdir()
    subprocess.run(["tar", "-xf", str(archive), "-C", str(source)], check=True)
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(site), str(source)]
    subprocess.run(install, check=True, timeout=900)
    (site / "_editable_skbc_kvpool.py").touch()  # else this one's would go first
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_two_kvpools_on_one_pool_are_never_wrong(
    model: str, before: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    options = engine_options(request.getfixturevalue(model), f"file://{tmp_path}/pool")

    def answers(name: str) -> dict[str, dict[str, Any]]:
        environment = {**ONE_THREAD, **(before if name == "before" else {})}
        with EngineProcess(name, tmp_path, options, environment) as engine:
            engine.wait_ready()
            return {of: engine.generate(tokens, GENERATED_TOKENS) for of, tokens in PROMPTS.items()}

    cold = answers("before")
    assert [one["pool_tokens"] for one in cold.values()] == [0, 0]
    now, then = answers("now"), answers("before")
    shares = len(namespaces(tmp_path / "pool")) == 1
    whole = (len(PROMPTS["now"]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [one["pool_tokens"] for one in now.values()] == [whole if shares else 0] * 2
    assert [one["pool_tokens"] for one in then.values()] == [whole] * 2
    for of in PROMPTS:
        assert now[of]["tokens"] == then[of]["tokens"] == cold[of]["tokens"]
