"""Engines whose driver is forked from a process that has imported vLLM, which takes most of an engine's start; and
models that another fork of it writes.

As ``tests.support.cpu_platform``, whose engines fork their further processes: what runs in them is the same. One whose
environment says something that is read while vLLM is imported gets an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from demo.engine_process import EngineProcess, child_environment

FORK_TIMEOUT_S = 600.0  # the import of vLLM is a part of it, once, and a busy machine takes minutes
MESSAGE_NBYTES = 1 << 16
# What engines may have of their own; vLLM looks at these when it starts an engine.
READ_LATE = {
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_PP_LAYER_PARTITION",
    "TMPDIR",
    "PYTEST_CURRENT_TEST",
    "TESTS_MODULES",
}
# Several threads of an engine spin at each barrier while another engine has their core.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).parents[2]


class ForkedEngine(EngineProcess):
    """One engine on ``cpu_platform``; else as ``EngineProcess``. Within ``forking``."""

    def _launch(self, log: BinaryIO, answers_fd: int, environment: Mapping[str, str]) -> Any:
        assert _forks is not None
        environment = {**environment, "PYTHONPATH": _forks.environment["PYTHONPATH"]}
        differing = {name for name, _ in environment.items() ^ _forks.environment.items()}
        # What this process has changed since in its own environment, as imports of vLLM do, nobody asks for.
        own = {name for name in differing if environment.get(name) != os.environ.get(name)}
        if own <= READ_LATE:
            return _forks.start(self._options, log, answers_fd, environment)
        if modules := environment.get("TESTS_MODULES"):
            environment["PYTHONPATH"] = os.pathsep.join((environment["PYTHONPATH"], modules))
        return super()._launch(log, answers_fd, environment)


@contextlib.contextmanager
def forking(folder: Path) -> Iterator[None]:
    """Engines may be forked until the end of the block. vLLM finds their platform in ``folder``."""
    global _forks
    _write_plugin(folder, "tests", "platform", "tests.support.cpu_platform:platform")
    modules = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    _forks = _Forks(child_environment({"PYTHONPATH": modules, **ONE_THREAD}))
    try:
        yield
    finally:
        _forks.close()
        _forks = None


@contextlib.contextmanager
def watching(folder: Path, name: str) -> Iterator[None]:
    """As ``forking``, of engines in which ``benchmarks.NAME_watch`` writes to the log."""
    modules = folder / "modules"
    _write_plugin(modules, name, "general", f"benchmarks.{name}_watch:watch")
    with forking(modules):
        yield


def _write_plugin(folder: Path, name: str, kind: str, function: str) -> None:
    """A plugin of vLLM's, of this kind, for whoever has ``folder`` on the path."""
    about = folder / f"kvpool_{name}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpool-{name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[vllm.{kind}_plugins]\nkvpool_{name} = {function}\n")


def write_model(folder: Path, **options: Any) -> Path:
    """As ``demo.engine_process.write_model``, without an import of torch. Within ``forking``."""
    assert _forks is not None
    _forks.fork(["write", str(folder), options], []).wait(FORK_TIMEOUT_S)
    assert (folder / "tokenizer_config.json").exists(), "the last file that it writes"
    return folder


def forking_environment() -> dict[str, str]:
    """Of a vLLM that is not forked itself: its further processes are, and it has one thread. Within ``forking``."""
    assert _forks is not None
    return {**ONE_THREAD, "PYTHONPATH": _forks.environment["PYTHONPATH"]}


class _Forked:
    """A process that is another one's child; as ``subprocess.Popen``, of which ``EngineProcess`` needs this much.

    How it ended stays unknown: ``returncode`` is 0 then.
    """

    def __init__(self, process_id: int, stdin: BinaryIO | None = None) -> None:
        self.pid, self.stdin = process_id, stdin
        self.returncode: int | None = None
        try:
            self._ended_fd = os.pidfd_open(process_id)
        except ProcessLookupError:
            self.returncode = 0

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0)
        return 0

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended_fd], [], [], timeout_s)[0]:
            os.close(self._ended_fd)
            self.returncode = 0
        return self.returncode


class _Forks:
    """The process that forks."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._asks, asked = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with asked:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.engine_forks", str(asked.fileno())],
                pass_fds=[asked.fileno()],
                env=environment,
            )
        self._asks.settimeout(FORK_TIMEOUT_S)

    def close(self) -> None:
        self._asks.close()
        self._process.wait(FORK_TIMEOUT_S)

    def start(self, options: Path, log: BinaryIO, answers_fd: int, environment: Mapping[str, str]) -> _Forked:
        read_fd, write_fd = os.pipe()
        stdin = os.fdopen(write_fd, "wb", buffering=0)
        try:
            asked = ["drive", str(options), answers_fd, dict(environment)]
            forked = self.fork(asked, [read_fd, log.fileno(), answers_fd])
        except BaseException:
            stdin.close()
            raise
        finally:
            os.close(read_fd)
        forked.stdin = stdin
        return forked

    def fork(self, asked: list[Any], fds: list[int]) -> _Forked:
        message = json.dumps(asked).encode()
        assert len(message) < MESSAGE_NBYTES
        socket.send_fds(self._asks, [message], fds)
        return _Forked(int(self._asks.recv(64)))


_forks: _Forks | None = None


def _serve(asked: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    while True:
        message, fds, _, _ = socket.recv_fds(asked, MESSAGE_NBYTES, 3)
        if not message:
            return
        _import_engine()
        if (process_id := os.fork()) == 0:
            _become(asked, fds, *json.loads(message))
        for fd in fds:
            os.close(fd)
        asked.sendall(str(process_id).encode())


@functools.cache
def _import_engine() -> None:
    """What each of an engine's processes would import; their searches for garbage leave it out, too."""
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.collect()
    gc.freeze()


def _become(asked: socket.socket, fds: list[int], what: str, *arguments: Any) -> None:
    """What the fork is for. Never returns."""
    try:
        if what == "write":
            from demo.tiny_model import write_tiny_model

            folder, options = arguments
            write_tiny_model(Path(folder), **options)
        else:
            _drive(asked, fds, *arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _drive(
    asked: socket.socket, fds: list[int], options: str, answers_fd: int, environment: dict[str, str]
) -> None:
    """What ``python demo/piped_engine.py`` does."""
    asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for fd, at in zip(fds, (0, 1, answers_fd), strict=True):
        os.dup2(fd, at)
    os.dup2(1, 2)
    for fd in {*fds} - {answers_fd}:
        os.close(fd)
    # The rest stays where it is: it is there that what gives processes their names looks for room.
    os.environ.update({name: environment[name] for name in READ_LATE & environment.keys()})
    tempfile.tempdir = None  # of another environment
    # Of this engine alone. vLLM looks at a model in a process of its own.
    if modules := os.environ.get("TESTS_MODULES"):
        sys.path.append(modules)
        os.environ["PYTHONPATH"] = os.pathsep.join((os.environ["PYTHONPATH"], modules))
    sys.argv = ["piped_engine.py", options]
    from demo import piped_engine

    piped_engine.main()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
