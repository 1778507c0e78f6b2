"""The command line as a user runs it, and the one line with which it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def kvpool(*arguments: str, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the console script of this environment."""
    command = [str(Path(sys.executable).parent / "kvpool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


def refused(*arguments: str, **options: Any) -> str:
    """Run a command that must fail; the one line that it prints."""
    return refusal(kvpool(*arguments, **options))


def refusal(ended: subprocess.CompletedProcess[str], program: str = "kvpool") -> str:
    """The one line that a command prints when it fails, on standard error; with --json in an object on the other."""
    assert ended.returncode in (1, 2), ended
    if ended.stdout.startswith('{"error": '):  # with --json
        error = json.loads(ended.stdout)["error"]
        assert (ended.stderr, error["exit_code"]) == ("", ended.returncode)
        return f"{program}: {error['message']}"
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith(f"{program}: ")
    assert ended.stdout == ""
    return lines[0]
