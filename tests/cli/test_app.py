"""The command line as a user meets it: answers, one clear line when something is wrong, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import kvpool, refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "store", "--pool", "file:///proc/nowhere"], "file:///proc/nowhere"),
        (["bench", "store", "--pool", "file://relative/path"], "three slashes"),
        (["bench", "store", "--pool", "fiel:///x"], 'did you mean "file"?'),
        (["bench", "store", "--pool", "file:///etc/passwd"], "choose a directory"),
        (["bench", "store", "--pool", "file:///x?capacty=1GiB"], "capacity"),
        (
            ["bench", "store", "--pool", "valkeys://user:secret@127.0.0.1:1?ca=/nowhere/x.pem"],
            "/nowhere/x.pem",
        ),
        (["bench", "store", "--rounds", "0"], "--rounds"),
        (["bench", "store", "--batch-bytes", "0"], "--batch-bytes"),
        (["bench", "store", "--batch-bytes", "many"], "not a size"),
        (["bench", "nothing"], "nothing"),
        (["top", "--colour"], "--colour"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], says: str) -> None:
    line = refused(*arguments)
    assert says in line
    assert "secret" not in line


AS_NOBODY = """
import os, sys
import zoneinfo, kvpool.cli.bench_store, kvpool.store.file  # while the interpreter's files can be read
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
    arguments = ["bench", "store", "--pool", f"file://{tmp_path}/pool"]
    ended = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert "Permission denied" in ended.stderr.strip().splitlines()[-1]
    assert "write access" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_help_names_every_command() -> None:
    text = kvpool("--help").stdout
    assert all(name in text for name in ("doctor", "bench"))
    assert "store" in kvpool("bench", "--help").stdout
    assert kvpool("--version").stdout.strip().count(".") == 2
