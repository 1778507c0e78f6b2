"""Counts kvpool's calls that make the host wait for the device, in a trace of torch's profiler."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure.arena import Arena
from benchmarks.measure.caches import CACHES
from benchmarks.measure.copies import Copies
from kvpool.errors import ConfigError, KVPoolError
from kvpool.metrics import Counters
from kvpool.store import open_store
from kvpool.transfer.job import Finished
from kvpool.transfer.kv_cache import KVCacheMover

OURS = "kvpool: "  # prefix of our calls in the trace
RUNTIME = {"cuda_runtime", "cuda_driver"}  # categories of a trace, for ROCm too
# Names may end in a version (_v3020), or the kind of default stream (_ptsz).
SYNCHRONIZING = re.compile(
    r"(cuda|cu|hip)((Device|Stream|Event|Ctx|Thread|Context)Synchronize|Memcpy(?!\w*Async)\w*)(_\w+)?"
)
# CUDA may wait for the device here. Torch keeps its memory, so none is expected after a warm-up.
ALLOCATING = re.compile(r"(cuda|cu|hip)(Mem)?(Host)?(Malloc|Alloc|Free|Register|Unregister)(?!\w*Async)\w*")
CACHE, BLOCK_TOKENS, BLOCKS, HOST_BLOCKS = CACHES[0], 16, 64, 4
DEADLINE_S = 60.0
PAUSE_S = 0.001


@dataclass(frozen=True)
class CallsMeasured:
    """Runtime calls of the device inside a mover's stores, loads and polls, counted by name.

    ``synchronizing`` and ``allocating`` are subsets of ``runtime``; None: none seen, as on the CPU.
    """

    blocks: int
    runtime: dict[str, int]
    synchronizing: int | None
    allocating: int | None
    bytes_equal: bool


def measure_calls(arena: Arena, *, blocks: int | None, trace: Path | None) -> CallsMeasured:
    """Store and load blocks through a pool in a directory under the profiler; ``trace``: file of the trace.

    Blocks for seconds. Errors: ``ConfigError`` without memory, or when ``trace`` is unwritable.
    """
    most = BLOCKS if arena.accelerator else HOST_BLOCKS
    copies = Copies(arena, CACHE, BLOCK_TOKENS, min(blocks or most, most))
    activities = [ProfilerActivity.CPU]
    if arena.accelerator == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        recorded = Path(folder) / "trace.json"
        with open_store(f"file://{folder}/pool?capacity={2 * copies.nbytes + (1 << 20)}") as store:
            mover = KVCacheMover(
                store,
                copies.copiers,
                staging_nbytes=copies.staging_nbytes,
                max_store_nbytes_per_s=0,
                counters=Counters(),
                device=arena.device,
            )
            try:
                _round_trip(mover, copies)  # a warm-up
                arena.wait()
                with profile(activities=activities, acc_events=True) as profiler:
                    equal = copies.bytes_equal(lambda: _round_trip(mover, copies))
            finally:
                mover.close()
        profiler.export_chrome_trace(str(recorded))
        runtime = count_calls(json.loads(recorded.read_bytes())["traceEvents"])
        if trace is not None:
            try:
                shutil.copyfile(recorded, trace)
            except OSError as error:
                raise ConfigError(
                    f"--trace {trace}: {error.strerror}; name a file that can be written"
                ) from error
    synchronizing, allocating = (of_kind(kind, runtime) for kind in (SYNCHRONIZING, ALLOCATING))
    return CallsMeasured(copies.blocks, runtime, synchronizing, allocating, equal)


def of_kind(kind: re.Pattern[str], runtime: dict[str, int]) -> int | None:
    """Number of calls with a matching name; None without any calls."""
    return sum(count for name, count in runtime.items() if kind.fullmatch(name)) if runtime else None


def count_calls(events: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Runtime calls in a Chrome trace that began within one of our calls, in the same thread, by name."""
    ours: list[tuple[Any, float, float]] = []
    calls: list[dict[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation" and str(event.get("name")).startswith(OURS):
            ours.append((event["tid"], event["ts"], event["ts"] + event["dur"]))
        elif category in RUNTIME:
            calls.append(event)
    return dict(
        Counter(
            str(call["name"])
            for call in calls
            if any(tid == call["tid"] and start <= call["ts"] <= end for tid, start, end in ours)
        )
    )


def _round_trip(mover: KVCacheMover, copies: Copies) -> None:
    with record_function(OURS + "stage"):
        mover.stage(copies.stored, list(range(copies.blocks)))
    _finish(mover)
    with record_function(OURS + "load"):
        mover.load("load", copies.loaded, timeout_s=DEADLINE_S, max_s=DEADLINE_S)
    _finish(mover)


def _finish(mover: KVCacheMover) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while mover.busy:
        with record_function(OURS + "poll"):
            finished: Finished = mover.poll()
        failed = [moved.cause for moved in (*finished.loads, *finished.stores) if not moved.ok]
        if failed or time.monotonic() > deadline:
            raise KVPoolError(f"blocks were not moved ({', '.join(failed) or 'too slow'}): lower --blocks")
        time.sleep(PAUSE_S)
