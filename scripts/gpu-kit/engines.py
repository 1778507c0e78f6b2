"""Shared by the checks with real engines: sequential engines, a pool, and a line per case."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.valkey_shards import ValkeyShards, find_server
from demo.engine_process import EngineProcess
from tests.support.engines import prompt

LOG_LINES = 25
# vLLM assumes FlashInfer's sampler on this kind of GPU.
WITHOUT_FLASHINFER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def tell(case: str, ok: bool, **figures: Any) -> None:
    print(json.dumps({"case": case, "ok": ok, **figures}), flush=True)


@contextlib.contextmanager
def started(name: str, folder: Path, options: Mapping[str, Any]) -> Iterator[tuple[EngineProcess, float]]:
    """A ready engine, and the seconds of its start. Its log is in ``folder``."""
    environment = {} if importlib.util.find_spec("flashinfer") else WITHOUT_FLASHINFER
    began = time.monotonic()
    with EngineProcess(name, folder, options, environment) as engine:
        engine.wait_ready()
        yield engine, round(time.monotonic() - began, 1)


@contextlib.contextmanager
def valkey(folder: Path, shards: int) -> Iterator[str]:
    with ValkeyShards(find_server(None), folder, shards=shards, io_threads=1) as servers:
        yield servers.url


def stores_ended(engine: EngineProcess, within_s: float) -> float:
    """The number of stored blocks once it stands still for a second, all of them far; 0 if it does not in time."""
    deadline, before = time.monotonic() + within_s, -1.0
    while time.monotonic() < deadline:
        engine.generate(prompt(8, 3), 1)  # only steps count ended stores
        counts = engine.ask({"do": "metrics"})
        count = float(counts.get("kvpool_stored_blocks_total", 0.0))
        if count and count == before and not counts.get("kvpool_behind_waiting", 0.0):
            return count
        before = count
        time.sleep(1.0)
    return 0.0


class Cases:
    """Runs cases until ``max_s``, and reports failures. ``good``: whether all passed."""

    def __init__(self, folder: Path, max_s: float) -> None:
        self._folder, self._until, self._max_s = folder, time.monotonic() + max_s, max_s
        self.good = True

    def run(self, name: str, case: Callable[[], tuple[bool, dict[str, Any]]]) -> None:
        if time.monotonic() > self._until:
            ok, figures = False, {"error": f"not begun within {self._max_s:.0f} s"}
        else:
            try:
                ok, figures = case()
            except Exception as error:
                ok, figures = False, {"error": f"{type(error).__name__}: {error}"[:400]}
                for log in sorted(self._folder.glob(f"{name}*.log")):
                    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                    print(f"== {log.name}", *lines, sep="\n", file=sys.stderr, flush=True)
        tell(name, ok, **figures)
        self.good &= ok
