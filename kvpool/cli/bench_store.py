"""``kvpool bench store``: puts and gets by value size, idle and beside a busy interpreter.

The peer is a plain Python loop over files (``write``, ``readinto``), without checksums, in the same run. A busy
interpreter is a pure-Python thread that spins in this process, which is what a vLLM worker looks like to a
thread in the background.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpool.keys import Namespace
from kvpool.stores import Store, open_store
from kvpool.wording import format_nbytes, redact

VALUE_NBYTES = (64 << 10, 512 << 10, 2 << 20, 4 << 20)
BATCH_NBYTES = 64 << 20  # a batch is at most this many bytes, so that a run fits in a small machine's memory
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Cell:
    """One line: medians in GB/s (10^9 bytes)."""

    client: str
    value_nbytes: int
    batch: int
    put_idle: float
    put_busy: float
    get_idle: float
    get_busy: float


def run_bench_store(*, pool: str | None, rounds: int, batch: int, as_json: bool) -> None:
    """Measure, and print a table or JSON. Blocking, for about a minute. Errors: ``KVPoolError``."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir=_fast_folder()))
    try:
        url = pool or f"file://{folder}/pool?capacity=2GiB"
        with open_store(url) as store, Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("moving bytes", total=len(VALUE_NBYTES) * 2 * rounds)
            cells = []
            for value_nbytes in VALUE_NBYTES:
                cells += _measure(
                    store, folder / "peer", value_nbytes, batch, rounds, lambda: progress.advance(task)
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print(cells, url, rounds, as_json)


def _measure(
    store: Store, folder: Path, value_nbytes: int, most: int, rounds: int, tick: Callable[[], None]
) -> list[Cell]:
    count = max(1, min(most, BATCH_NBYTES // value_nbytes))
    namespace = Namespace("bench", {"bench": "store", "value_nbytes": value_nbytes})
    keys = namespace.keys([index.to_bytes(32, "big") for index in range(count)], 0, 0)
    sources = [memoryview(os.urandom(value_nbytes)) for _ in range(count)]
    targets = [memoryview(bytearray(value_nbytes)) for _ in range(count)]
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{index}" for index in range(count)]

    def put() -> None:
        assert all(store.put_many(keys, sources, timeout_s=TIMEOUT_S)), "the pool is smaller than one batch"

    def get() -> None:
        assert all(store.get_many_into(keys, targets, timeout_s=TIMEOUT_S)), "a value was evicted under us"

    def peer_put() -> None:
        for path, source in zip(paths, sources, strict=True):
            path.write_bytes(source)

    def peer_get() -> None:
        for path, target in zip(paths, targets, strict=True):
            with path.open("rb", buffering=0) as file:
                assert file.readinto(target) == value_nbytes

    works = {("kvpool", "put"): put, ("kvpool", "get"): get}
    works |= {("python files", "put"): peer_put, ("python files", "get"): peer_get}
    times: dict[tuple[str, str, str], list[float]] = {}
    for mood in ("idle", "busy"):
        with _busy_interpreter() if mood == "busy" else contextlib.nullcontext():
            for _ in range(rounds):
                for (client, verb), work in works.items():
                    started = time.perf_counter()
                    work()
                    times.setdefault((client, verb, mood), []).append(time.perf_counter() - started)
                tick()
    assert all(source == target for source, target in zip(sources, targets, strict=True))
    store.delete_many(keys)
    shutil.rmtree(folder)
    speed = {key: count * value_nbytes / statistics.median(values) / 1e9 for key, values in times.items()}
    return [
        Cell(
            client,
            value_nbytes,
            count,
            *(speed[client, verb, mood] for verb in ("put", "get") for mood in ("idle", "busy")),
        )
        for client in ("kvpool", "python files")
    ]


@contextlib.contextmanager
def _busy_interpreter() -> Iterator[None]:
    """A pure-Python thread that never lets go of the interpreter by itself."""
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            for _ in range(10_000):
                count += 1

    thread = threading.Thread(target=spin, name="kvpool-bench-spin")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _fast_folder() -> str | None:
    """Shared memory where there is some, so that a disk's speed does not hide ours."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108


def _print(cells: list[Cell], url: str, rounds: int, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps(
                {"pool": redact(url), "rounds": rounds, "unit": "GB/s", "rows": [asdict(c) for c in cells]}
            )
        )
        return
    table = Table(
        title=f"{redact(url)}: GB/s, median of {rounds}; ratio: beside a busy interpreter over idle"
    )
    for name in ("value", "client", "put", "put busy", "ratio", "get", "get busy", "ratio"):
        table.add_column(name, justify="left" if name == "client" else "right")
    for index, cell in enumerate(cells):
        table.add_row(
            format_nbytes(cell.value_nbytes),
            cell.client,
            f"{cell.put_idle:.2f}",
            f"{cell.put_busy:.2f}",
            f"{cell.put_busy / cell.put_idle:.2f}",
            f"{cell.get_idle:.2f}",
            f"{cell.get_busy:.2f}",
            f"{cell.get_busy / cell.get_idle:.2f}",
            end_section=index % 2 == 1,
        )
    Console().print(table)
