"""A real vLLM engine in its own process, driven over a pipe (``demo/piped_engine.py``).

The process leads its own session, so that stopping it ends every child of vLLM.

Threads: one thread may use an engine; ``stop`` may run in a signal handler's exception path.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from kvpool.errors import KVPoolError

PIPED_ENGINE = Path(__file__).with_name("piped_engine.py")
LOWEST_PORT = 10_000
WRITE_TIMEOUT_S = 600.0  # for a tiny model: seconds, minutes on a busy host
START_TIMEOUT_S = 600.0
ASK_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
TERMINATE_TIMEOUT_S = 10.0
QUIET_TIMEOUT_S = 60.0
QUIET_LOOK_S = 0.25
QUIET_SHARE = 0.1  # of one core: an idle engine takes 0.02, a spinning one 1
MAX_LINE_NBYTES = 16 << 20
REFUSAL = "kvpool refuses to start: "
_ERROR = re.compile(r"\b\w+(?:Error|Exception|Interrupt): .*")
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineFailed(KVPoolError):
    """The engine did not start, or ended midway; the text names the cause and the log."""


def connector_config(pool: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for a pool, with further settings of ``PoolConfig``. No hit is audited."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": pool, "audit_share": 0, **(settings or {})},
    }


def encoder_config(pool: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """vLLM's ``ec_transfer_config`` for a pool, with further settings of ``EncoderConfig``. No output is audited."""
    return {
        "ec_connector": "KVPoolECConnector",
        "ec_connector_module_path": "kvpool.vllm",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"pool": pool, "audit_share": 0, **(settings or {})},
    }


def free_ports(count: int) -> list[int]:
    """Distinct free TCP ports below the ephemeral ones; others may take them first. Errors: ``OSError``."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.SystemRandom().sample(range(LOWEST_PORT, max(first, LOWEST_PORT + 1000)), 1000):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{count} free ports are wanted, and {len(found)} were found")


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child with vLLM or transformers, quiet and offline."""
    return {**os.environ, **QUIET, **(more or {})}


def all_cores() -> str:
    """This process's cores, at most eight, for ``VLLM_CPU_OMP_THREADS_BIND``: vLLM's default is unfair."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:8]))


def small_engine(
    model: Path, *, block_tokens: int, longest_tokens: int, kv_cache_nbytes: int
) -> dict[str, Any]:
    """Options of ``vllm.LLM`` for a small model whose prompts of ``longest_tokens`` fit into one step."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",  # local hits and cold runs agree bit for bit; see docs/explanation/correctness.md
        "enforce_eager": True,
        "block_size": block_tokens,
        "max_model_len": longest_tokens,
        "max_num_batched_tokens": longest_tokens,
        "kv_cache_memory_bytes": kv_cache_nbytes,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": False,
    }


def write_model(folder: Path, **options: Any) -> Path:
    """Run ``tiny_model.py`` in its own process, so that torch stays out of this one. Errors: ``KVPoolError``."""
    try:
        written = subprocess.run(
            [
                sys.executable,
                str(Path(__file__).with_name("tiny_model.py")),
                str(folder),
                json.dumps(options),
            ],
            env=child_environment({"TMPDIR": str(folder.parent)}),
            capture_output=True,
            text=True,
            check=False,
            timeout=WRITE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise KVPoolError(
            f"the model was not written within {WRITE_TIMEOUT_S:g} s: this host is too busy, or its disk too slow; try "
            "again"
        ) from error
    if written.returncode:
        last = written.stderr.strip().splitlines()[-1:] or ["no output"]
        raise KVPoolError(f"cannot write the model: {last[0]}; it takes vLLM (make demo installs it)")
    return folder


def _processes(session: int) -> Iterator[Path]:
    """The ``/proc`` folders of a session's processes, which may end at any time."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(int(process.name)) == session:
                yield process


def ran_s(session: int) -> float:
    ran_ns = 0
    for process in _processes(session):
        with contextlib.suppress(OSError):
            for task in (process / "task").iterdir():
                ran_ns += int((task / "schedstat").read_text().split()[0])
    return ran_ns * 1e-9


def kill_all_but_trackers(session: int) -> None:
    """Kill a session except multiprocessing's resource trackers, which then free shared memory and end."""
    for process in _processes(session):
        with contextlib.suppress(OSError):
            if b"resource_tracker" not in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


class EngineProcess:
    """An engine by ``vllm.LLM``'s ``options``, logged to ``folder``/NAME.log; ``with`` stops all of it."""

    def __init__(
        self,
        name: str,
        folder: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._options = folder / f"{name}.json"
        # vLLM's sockets go there, and their paths are limited to about 100 characters: no deep folder.
        self._scratch = tempfile.mkdtemp(prefix="kvpool-")
        read_fd, write_fd = os.pipe()
        self._answers = os.fdopen(read_fd, "rb", buffering=0)
        self._unread = b""
        try:
            self._options.write_text(json.dumps({**options, "answers_fd": write_fd}))
            with self.log.open("wb") as log:
                own = {
                    "VLLM_CPU_OMP_THREADS_BIND": all_cores(),
                    "TMPDIR": self._scratch,
                    **(environment or {}),
                }
                self._process = self._launch(log, write_fd, child_environment(own))
        except BaseException:
            self._answers.close()
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        finally:
            os.close(write_fd)

    def _launch(
        self, log: BinaryIO, answers_fd: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(PIPED_ENGINE), str(self._options)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[answers_fd],
            start_new_session=True,
            env=environment,
        )

    @property
    def process_id(self) -> int:
        """Of the driver, which leads the engine's session."""
        return self._process.pid

    def wait_ready(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Block until the engine takes commands, calling ``waiting`` at 5 Hz. Errors: ``EngineFailed``."""
        assert self._read(START_TIMEOUT_S, waiting) == {"ready": True}

    def ask(self, command: Mapping[str, Any], timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
        """Send a command and wait for its answer. Errors: ``EngineFailed``."""
        self.send(command)
        return self._read(timeout_s)

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command; ``receive`` takes its answer. Errors: ``EngineFailed``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed() from error

    def receive(self, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
        """The answer to a sent command. Errors: ``EngineFailed``."""
        return self._read(timeout_s)

    def generate(self, tokens: list[int], max_tokens: int = 16) -> dict[str, Any]:
        """Generate greedily; see ``demo/piped_engine.py`` for the answer."""
        return self.ask({"do": "generate", "tokens": tokens, "max_tokens": max_tokens})

    def complaint(self) -> str | None:
        """The fault in the engine's log so far: our own refusal, or the first error."""
        return first_error(self.log.read_text(errors="replace").splitlines())

    def wait_quiet(self) -> bool:
        """Wait until vLLM's workers stop spinning and stores have ended; False after ``QUIET_TIMEOUT_S``."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while time.monotonic() < deadline:
            started, before_s = time.monotonic(), ran_s(self._process.pid)
            time.sleep(QUIET_LOOK_S)
            if ran_s(self._process.pid) - before_s < QUIET_SHARE * (time.monotonic() - started):
                return True
        return False

    def stop(self) -> None:
        """End the engine: politely first, so that stores in flight end, then with its whole session."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b'{"do": "stop"}\n')
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the whole session: by request, then by force, and the trackers of its shared memory last."""
        session = self._process.pid
        for end, patience_s in (
            (lambda: os.killpg(session, signal.SIGTERM), TERMINATE_TIMEOUT_S),
            (lambda: kill_all_but_trackers(session), TERMINATE_TIMEOUT_S),
            (lambda: os.killpg(session, signal.SIGKILL), STOP_TIMEOUT_S),
        ):
            if self._gone(end, patience_s):
                break
        with contextlib.suppress(OSError):
            self._process.stdin and self._process.stdin.close()
        self._answers.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _gone(self, end: Callable[[], None], patience_s: float) -> bool:
        """Call ``end``; whether the whole session ended in time."""
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(ProcessLookupError):
            end()
            while time.monotonic() < deadline:
                self._process.poll()  # else the leader stays as a zombie
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)
            return False
        self._process.wait()
        return True

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _read(self, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if time.monotonic() > deadline:
                raise EngineFailed(
                    f"engine {self.name} gave no answer within {timeout_s:g} s; see {self.log}"
                )
            ready, _, _ = select.select([self._answers], [], [], 0.2)
            waiting()
            if ready:
                received = self._answers.read(1 << 16)
                if not received or len(self._unread) > MAX_LINE_NBYTES:
                    raise self._failed()
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> EngineFailed:
        # Its last words come after its end of the pipe has closed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        return EngineFailed(f"engine {self.name} did not run: {_cause(self.log)}")


def _cause(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    complaint = first_error(lines)
    if complaint and complaint.startswith(REFUSAL):
        return complaint
    return f"{complaint or (lines or ['it wrote nothing'])[-1].strip()} (log: {log})"


def first_error(lines: list[str]) -> str | None:
    """Our own refusal, or the first error, without vLLM's prefix."""
    for line in lines:
        if REFUSAL in line:
            return line[line.index(REFUSAL) :]
    causes = [found[0] for line in lines if "WARNING" not in line and (found := _ERROR.search(line))]
    # The parent's error comes last and only points at its children's.
    causes = [cause for cause in causes if "initialization failed" not in cause] or causes
    return causes[0] if causes else None
