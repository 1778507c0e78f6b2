"""``kvpool index`` in its own process, on a free port, for the demo and tests."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from demo.engine_process import child_environment
from kvpool.errors import KVPoolError

START_TIMEOUT_S = 600.0  # as for an engine: a busy host reads its packages slowly
STOP_TIMEOUT_S = 60.0
_LISTENS = re.compile(r"listens on (\S+:[0-9]+)")


class IndexFailed(KVPoolError):
    """The index did not start; the text says why."""


class IndexProcess:
    """One index that follows the workers of ``pool``, logged to ``folder``/index.log; ``with`` stops it."""

    def __init__(self, folder: Path, pool: str, options: Sequence[str] = ()) -> None:
        self.log = folder / "index.log"
        self.address = ""
        arguments = ["index", "--listen", "127.0.0.1:0", "--pool", pool, "--drain", "0", *options]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from kvpool.cli import main; main()", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(),
            )

    def __enter__(self) -> IndexProcess:
        try:
            self.address = self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            ended = self._process.poll() is not None
            text = self.log.read_text(errors="replace")
            if (match := _LISTENS.search(text)) is not None:
                return match[1]
            if ended:
                last = text.strip().splitlines()[-1:] or ["it wrote nothing"]
                raise IndexFailed(f"the index did not start: {last[0].removeprefix('kvpool: ')}")
            if time.monotonic() > deadline:
                wrote = (
                    f"see {self.log}" if text.strip() else "it wrote nothing: is the host busy? Run it again"
                )
                raise IndexFailed(f"the index was not ready within {START_TIMEOUT_S:g} s; {wrote}")
            time.sleep(0.05)
