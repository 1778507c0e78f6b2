"""What an engine that has to be killed leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvpool.cli import engine_process
from kvpool.cli.engine_process import EngineProcess
from tests.conftest import eventually

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
        assert eventually(lambda: engine.log.read_text().endswith("\n"), within_s=60)
        memory = Path("/dev/shm") / engine.log.read_text().strip()
        assert memory.exists()
        engine.kill()
        assert not memory.exists()
        assert not Path(f"/proc/{engine.process_id}").exists()
