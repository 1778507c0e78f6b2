"""``make demo``, its refusals, and what it leaves behind when it is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.engine_process import EngineFailed
from tests.support.deadlines import eventually
from tests.support.encoder_engines import VISION, WITH_VISION
from tests.support.engine_forks import ONE_THREAD, ForkedEngine, forking_environment
from tests.support.engines import engine_options

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "demo"]
START_S = 600.0  # of an engine on a busy machine


def _engine_processes(folder: Path) -> set[int]:
    """The drivers whose options lie in a folder, and everything in the sessions that they lead."""
    commands: dict[int, str] = {}
    sessions: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            commands[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace")
            sessions[int(process.name)] = os.getsid(int(process.name))
        except OSError:
            continue
    leaders = {
        sessions.get(pid)
        for pid, command in commands.items()
        if str(folder) in command and "piped_engine" in command
    }
    return {pid for pid, session in sessions.items() if session in leaders}


def _shared_memory(pids: set[int]) -> set[Path]:
    """What these processes have mapped or open of /dev/shm, and what has a name there."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= {
                line.split()[-1]
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
                if "/dev/shm/" in line
            }
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found.add(str(fd.readlink()))
    return {Path(name) for name in found if name.startswith("/dev/shm/") and Path(name).exists()}


@pytest.fixture
def folder() -> Iterator[Path]:
    """vLLM puts sockets there, whose paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


def test_interrupted_demo_leaves_nothing(folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = subprocess.Popen(
        DEMO, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert command.stderr is not None
    said = ""
    for line in command.stderr:
        said += line
        if "model with random weights is written" in line:  # a step has its line when it has ended
            break
    else:
        pytest.fail(f"the demo ended before an engine started: {said}{command.communicate()}")
    # The engine's own children are what a clumsy clean-up would forget: wait for them.
    assert eventually(lambda: len(_engine_processes(folder)) >= 3, within_s=START_S)
    engine = _engine_processes(folder)
    shared: set[Path] = set()
    assert eventually(
        lambda: bool(shared.update(_shared_memory(_engine_processes(folder))) or shared), within_s=START_S
    )
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=300)
    assert command.returncode == 130
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1] == "python -m demo: interrupted"
    assert list(folder.iterdir()) == []
    assert eventually(lambda: not any(path.exists() for path in shared))
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in engine))


@pytest.mark.rare
def test_block_size_that_the_engine_refuses_is_one_line_and_its_log_is_kept(folder: Path) -> None:
    ended = subprocess.run(
        [*DEMO, "--block-size", "16"], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("python -m demo: engine first did not run: ")
    assert "block size" in last.lower() or "block_size" in last
    assert "Traceback" not in ended.stderr
    (kept,) = folder.iterdir()
    assert {item.name for item in kept.iterdir()} == {"first.log", "index.log"}
    assert f"logs are kept: {kept}/first.log {kept}/index.log\n" in ended.stderr


def test_an_engine_that_is_refused_says_why_once_and_without_our_call_stack(
    llama: Path, tmp_path: Path
) -> None:
    options = engine_options(llama, f"file://{tmp_path}/pool", prefix_caching_hash_algo="sha256")
    with (
        ForkedEngine("refused", tmp_path, options, ONE_THREAD) as engine,
        pytest.raises(EngineFailed, match=r"kvpool refuses to start: .*sha256_cbor"),
    ):
        engine.wait_ready()
    log = (tmp_path / "refused.log").read_text()
    assert log.count("kvpool refuses to start") == 1
    assert "connector.py" not in log
    assert json.loads((tmp_path / "refused.json").read_text())["prefix_caching_hash_algo"] == "sha256"


@pytest.mark.rare
@WITH_VISION
def test_a_model_that_sees_has_its_picture_encoded_once(llava: Path, folder: Path) -> None:
    """By ``kvpool vllm``, which adds the encoders' connector by itself."""
    modules = forking_environment()
    ended = subprocess.run(
        [*DEMO[:-1], "demo.real", str(llava), "--json"], cwd=ROOT, capture_output=True, text=True, timeout=1500,
        check=False, env={
            **os.environ, **modules, "TMPDIR": str(folder), "PYTHONPATH": f"{modules['PYTHONPATH']}:{VISION}",
        },
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["wrong"] == []
    first, second = told["pictures"]
    assert (first["runs"], second["runs"]) == (1, 0)
    assert second["loaded_nbytes"] == 64 * 256 * 4
    assert first["answer"]["text"] == second["answer"]["text"] != ""
