"""``RouteFleet``: the scripted workers of ``python -m benchmarks route``, each a process, and ``Started``: a process of
the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.route_traffic import BLOCK_TOKENS, MODEL, Plan
from benchmarks.route_worker import Settings
from demo.engine_process import child_environment, free_ports
from kvpool.errors import KVPoolError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
WORKER = ("benchmarks.route_worker",)
LOOK_S = 0.02
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Started:
    """A process of the benchmark. Output goes to ``log``; ``stop`` ends it and its children."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        told: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                env={**child_environment(), **(environment or {})},
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(told.encode())
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, url: str) -> None:
        """Wait until ``url`` answers 200. Errors: ``KVPoolError``, with the last line of the log."""
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(url):
            if self._process.poll() is not None or time.monotonic() > ends_s:
                said = self.log.read_text(errors="replace").strip().splitlines()[-1:]
                raise KVPoolError(f"{self.log.stem} does not answer at {url}: {' '.join(said)[-300:]}")
            time.sleep(LOOK_S)

    def stop(self, *, kill: bool = False) -> None:
        """Blocks for seconds at most."""
        others = descendants(self.pid)
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


class RouteFleet:
    """``count`` workers with caches of ``blocks`` each. Use it with ``with``, in one thread.

    ``token_s``: time of an uncached token. ``tokenizer``: a folder. ``worker``: a worker's module and
    arguments. ``environment``: additions for workers.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        tokenizer: Path,
        *,
        count: int,
        blocks: int,
        token_s: float,
        worker: Sequence[str] = WORKER,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        file = folder / "plan"
        file.write_bytes(plan.pack())
        ports = free_ports(3 * count)
        self.tokenizer = tokenizer
        self.folder = folder
        self._worker, self._environment = worker, environment
        self._settings = [
            Settings(
                f"worker-{number}", (ports[3 * number], ports[3 * number + 1], ports[3 * number + 2]), str(file),
                str(tokenizer), blocks, token_s,
            )
            for number in range(count)
        ]  # fmt: skip
        self._processes: dict[str, Started] = {}

    def __enter__(self) -> RouteFleet:
        try:
            for settings in self._settings:
                self._start(settings)
            for name in self.names:
                self._wait_ready(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes.values():
            process.stop(kill=True)
        self._processes.clear()

    @property
    def names(self) -> list[str]:
        return [one.name for one in self._settings]

    @property
    def targets(self) -> list[str]:
        """``IP:PORT`` of each."""
        return [f"127.0.0.1:{one.ports[0]}" for one in self._settings]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def kvpool_flags(self) -> list[str]:
        return [
            f"--worker={one.name}=tcp://127.0.0.1:{one.ports[1]},replay=tcp://127.0.0.1:{one.ports[2]},"
            f"model={MODEL},block={BLOCK_TOKENS},address=http://127.0.0.1:{one.ports[0]}"
            for one in self._settings
        ]

    def endpoints(self) -> list[tuple[str, str, str]]:
        return [
            (f"http://127.0.0.1:{http}", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
            for http, events, replay in (one.ports for one in self._settings)
        ]

    def kill(self, name: str) -> None:
        """``kill -9``."""
        self._processes.pop(name).stop(kill=True)

    def start_again(self, name: str) -> None:
        """Restart it with an empty cache, at the same ports. Blocks until it serves."""
        self._start(next(one for one in self._settings if one.name == name))
        self._wait_ready(name)

    def _start(self, settings: Settings) -> None:
        self._processes[settings.name] = Started(
            [sys.executable, "-m", *self._worker], self.folder / f"{settings.name}.log",
            told=settings.as_json(), environment=self._environment,
        )  # fmt: skip

    def _wait_ready(self, name: str) -> None:
        port = next(one.ports[0] for one in self._settings if one.name == name)
        self._processes[name].wait_ready(f"http://127.0.0.1:{port}/health")


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            own = [int(one) for one in children.read_text().split()]
        except OSError:
            continue
        found += [each for one in own for each in (one, *descendants(one))]
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of these processes and their children so far."""
    total = 0
    for pid in pids:
        for one in (pid, *descendants(pid)):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total * _TICK_S


def post(url: str, body: bytes, timeout_s: float = 30.0) -> Any:
    """The JSON answer. Errors: ``OSError``."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:  # noqa: S310
        return json.loads(reply.read())


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:  # noqa: S310 - loopback
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False
