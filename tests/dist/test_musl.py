"""The core compiles for musl, as on Alpine: what glibc's headers bring along is included by name."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.environments import ROOT, TOOLS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]
CORE = ROOT / "kvpool" / "_native"


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """OpenSSL's and xxHash's alone: those of glibc lie beside them."""
    folder = tmp_path_factory.mktemp("include")
    for found in Path("/usr/include").glob("openssl"):
        shutil.copytree(found, folder / "openssl")
    for found in Path("/usr/include").glob("*-linux-gnu/openssl"):
        shutil.copytree(found, folder / "openssl", dirs_exist_ok=True)
    shutil.copy("/usr/include/xxhash.h", folder)
    yield folder


@pytest.mark.parametrize(
    "source", [str(one.relative_to(CORE)) for one in sorted(CORE.glob("store/*.cpp"))], ids=str
)
def test_a_source_that_asks_the_system_compiles_for_musl(source: str, headers: Path, tmp_path: Path) -> None:
    compiler = [TOOLS / "python", "-m", "ziglang", "c++", "-target", "x86_64-linux-musl"]
    command = [
        *compiler,
        "-std=c++20",
        "-O0",
        "-Werror",
        "-I",
        CORE,
        "-isystem",
        headers,
        "-c",
        CORE / source,
    ]
    ended = subprocess.run(
        [*command, "-o", tmp_path / "object.o"], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
