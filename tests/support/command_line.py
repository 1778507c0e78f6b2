"""``kvpool``, in the tests' process or in one of its own, and ``python -m benchmarks``."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvpool.cli.app import main


def kvpool(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which takes a twentieth of one's own: it may start nothing that stays.

    ``env`` replaces the environment, of which what was read at an import stays.
    """
    command = ["kvpool", *arguments]
    out, errors = io.StringIO(), io.StringIO()
    with (
        _as_before(),
        mock.patch.dict(os.environ, env or {}, clear=env is not None),
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return subprocess.CompletedProcess(command, code or 0, out.getvalue(), errors.getvalue())


def kvpool_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the console script of this environment."""
    command = [str(Path(sys.executable).parent / "kvpool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def refused(*arguments: str, **options: Any) -> str:
    """Run a command that must fail, as ``kvpool``; the one line that it prints."""
    return refusal(kvpool(*arguments, **options))


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Undo what ``kvpool index`` sets for its whole process."""
    logger, interval_s = logging.getLogger("kvpool"), sys.getswitchinterval()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    level, handlers, propagates = logger.level, logger.handlers, logger.propagate
    try:
        with mock.patch.object(gc, "freeze"):  # what ended would never be let go
            yield
    finally:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagates
        sys.setswitchinterval(interval_s)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


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


def benchmark_refused(*arguments: str) -> str:
    """Run a benchmark that must fail; the one line that it prints."""
    return refusal(benchmark(*arguments), PROGRAM)
