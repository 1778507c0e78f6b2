"""The command line as a user meets it: answers, one clear line when something is wrong, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "--set", "pol=file:///x"], 'unknown setting "pol"; did you mean "pool"?'),
        (["demo", "--set", "lookup_timeout_s=-1"], '"lookup_timeout_s"'),
        (["demo", "--set", "lookup_timeout_s"], "NAME=VALUE"),
        (["demo", "--pool", "file://relative/path"], "three slashes"),
        (["demo", "--pool", "fiel:///x"], 'did you mean "file"?'),
        (["demo", "--pool", "file:///etc/passwd"], "choose a directory"),
        (["demo", "--pool", "file:///x?capacty=1GiB"], "capacity"),
        (["demo", "--pool", "valkeys://user:secret@127.0.0.1:1?ca=HERE/x.pem"], "HERE/x.pem"),
        (["bench", "store", "--pool", "file:///proc/nowhere"], "file:///proc/nowhere"),
        (["bench", "store", "--rounds", "0"], "--rounds"),
        (["bench", "store", "--batch-bytes", "0"], "--batch-bytes"),
        (["bench", "store", "--batch-bytes", "many"], "not a size"),
        (["bench", "nothing"], "nothing"),
        (["demo", "--colour"], "--colour"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    """HERE: a folder with nothing in it."""
    line = refused(*(one.replace("HERE", str(tmp_path)) for one in arguments))
    assert says.replace("HERE", str(tmp_path)) in line
    assert "secret" not in line


AS_NOBODY = """
import os, sys
import kvpool.cli.demo, kvpool.store.file, kvpool.store.memory  # while the interpreter's files can be read
from kvpool.cli.app import main
if os.getuid() == 0:  # no permission stops root
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
main()
"""


def test_a_folder_without_write_access_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    for folder in tmp_path.parents:
        if folder.name.startswith("pytest-") and folder.stat().st_uid == os.getuid():
            folder.chmod(0o755)
    arguments = ["demo", "--pool", f"file://{tmp_path}/pool"]
    ended = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    (line,) = ended.stderr.strip().splitlines()
    assert "Permission denied" in line
    assert "write access" in line


def test_help_names_every_command() -> None:
    text = kvpool("--help").stdout
    assert all(name in text for name in ("demo", "bench"))
    assert "hash" in kvpool("bench", "--help").stdout
    assert kvpool("--version").stdout.strip().count(".") == 2
