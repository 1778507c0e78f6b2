"""``kvpool index``, ``kvpool router``: a process of its own on free ports."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from kvpool import IndexClient, UnknownModel
from tests.support.wire import packed64

START_TIMEOUT_S = 240.0  # a busy machine reads packages slowly


class Index:
    """A running ``kvpool index``. ``log``: a file for its standard error, where that would fill a pipe."""

    command = "index"

    def __init__(self, *arguments: str, log: Path | None = None, **environment: str) -> None:
        program = str(Path(sys.executable).parent / "kvpool")
        command = [program, self.command, "--listen", "127.0.0.1:0", "--drain", "0", *arguments]
        with log.open("wb") if log else nullcontext(subprocess.PIPE) as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **environment}
            )
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], START_TIMEOUT_S)[0]:
            self.stop(signal.SIGKILL)
            raise AssertionError("not ready in time")
        self.ready = self.process.stdout.readline().decode().strip()
        found = re.match(self.command + r" listens on (127\.0\.0\.1:[0-9]+), ", self.ready)
        assert found is not None, self.ready or self.stop()
        self.target = found[1]

    def port(self, door: str) -> int:
        """Where it listens for ``metrics``, ``HTTP``, ``gRPC`` or ``ext_proc``."""
        found = re.search(rf"{door} on port ([0-9]+)", self.ready)
        assert found is not None, self.ready
        return int(found[1])

    @property
    def http_port(self) -> int:
        return self.port("HTTP")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, list[str]]:
        """Exit code and the lines on standard error, without their time."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        lines = errors.decode().splitlines()
        assert all(line.count(" ") > 1 for line in lines), errors.decode()
        return self.process.returncode, [line.split(" ", 2)[2] for line in lines]


class RouterProcess(Index):
    """A running ``kvpool router``."""

    command = "router"

    @property
    def url(self) -> str:
        return f"http://{self.target}"


@contextmanager
def running(
    *arguments: str, kind: type[Index] = Index, log: Path | None = None, **environment: str
) -> Iterator[Index]:
    index = kind(*arguments, log=log, **environment)
    try:
        yield index
    finally:
        if index.process.poll() is None:
            index.process.kill()
            index.process.communicate(timeout=60)


def held_blocks(
    client: IndexClient, hashes: list[int], tenant: str = "default"
) -> list[tuple[int, int, bool]]:
    """Of each rank of model m the blocks on its device and in the pool, and whether it is stale; empty: no worker."""
    try:
        rows = client.lookup("m", hashes64=packed64(hashes), tenant=tenant)
    except UnknownModel:
        return []
    return [(row.device_blocks, row.pool_blocks, row.stale) for row in rows]


def peak_nbytes(index: Index) -> int:
    """The most memory that the process has had."""
    status = Path(f"/proc/{index.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
