"""``python -m benchmarks`` as a developer runs it, and environments of peers that are made up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.command_line import refusal

ROOT = Path(__file__).parents[2]
PROGRAM = "python -m benchmarks"


def benchmark(*arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT)


def environment(folder: Path, name: str) -> None:
    """An environment of a peer under ``folder`` with this interpreter, and so without the peer."""
    program = folder / name / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)


def refused(*arguments: str) -> str:
    """Run a benchmark that must fail; the one line that it prints."""
    return refusal(benchmark(*arguments), PROGRAM)
