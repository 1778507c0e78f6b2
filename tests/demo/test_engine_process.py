"""An engine's process: what it leaves behind when it is killed, what its log says, whether it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo import engine_process
from demo.engine_process import EngineProcess, first_error, ran_s
from tests.support.deadlines import eventually

DEAF = """#!{python}
import signal, time
from multiprocessing.shared_memory import SharedMemory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""


def test_an_engine_that_is_killed_by_force_leaves_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(DEAF.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(engine_process, "TERMINATE_TIMEOUT_S", 2.0)
    with EngineProcess("deaf", tmp_path, {}) as engine:
        assert eventually(lambda: engine.log.read_text().endswith("\n"))
        memory = Path("/dev/shm") / engine.log.read_text().strip()
        assert memory.exists()
        engine.kill()
        assert not memory.exists()
        assert not Path(f"/proc/{engine.process_id}").exists()


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (["all is well", "(Worker pid=7) WARNING ValueError: no tokenizer"], None),
        (["INFO x", "RuntimeError: No supported cpu connector found.", "KeyError: 1"], "No supported cpu"),
        (["ERROR RuntimeError: initialization failed", "ValueError: block size"], "ValueError: block size"),
        (["OSError: x", "ERROR kvpool refuses to start: say y"], "kvpool refuses to start: say y"),
    ],
)
def test_first_error_of_a_log(log: list[str], found: str | None) -> None:
    error = first_error(log)
    assert error is None if found is None else found in (error or "")


def test_a_session_that_waits_does_not_run() -> None:
    """A grandchild spins until its input ends, and the child waits for it: the session's time is that of both."""
    spin = "import os, select\nwhile not select.select([0], [], [], 0)[0]: pass\n"
    wait = (
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {spin!r}])\n"
        "print(1, flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", wait],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        started_s = ran_s(child.pid)
        assert eventually(lambda: ran_s(child.pid) > started_s + 0.5)
        child.stdin.close()
        assert child.stdout.read(1) == b"1"
        resting_s = ran_s(child.pid)
        assert not eventually(lambda: ran_s(child.pid) > resting_s + 0.1, within_s=0.5)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
