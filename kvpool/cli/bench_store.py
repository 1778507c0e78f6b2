"""``kvpool bench store``: puts and gets by value size, idle and beside a busy interpreter.

The peer is a plain Python loop in the same run, without checksums: over files (``write``, ``readinto``), or, for
a pool on a server, redis-py with one SET or GET a value, as plain strings, on the same server. A busy
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpool.keys import Namespace
from kvpool.stores import Store, open_store
from kvpool.stores.server_announcements import connect
from kvpool.stores.url import SERVER_SCHEMES, StoreURL
from kvpool.wording import format_nbytes, redact

if TYPE_CHECKING:
    import redis

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


class _Peer(Protocol):
    """What a Python program would do without kvpool; value ``i`` has a place of its own."""

    name: str

    def put(self, sources: Sequence[memoryview]) -> None: ...
    def get(self, targets: Sequence[memoryview]) -> None: ...
    def delete(self, count: int) -> None: ...


class _PythonFiles:
    name = "python files"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def put(self, sources: Sequence[memoryview]) -> None:
        for index, source in enumerate(sources):
            (self._folder / f"{index}").write_bytes(source)

    def get(self, targets: Sequence[memoryview]) -> None:
        for index, target in enumerate(targets):
            with (self._folder / f"{index}").open("rb", buffering=0) as file:
                assert file.readinto(target) == len(target)

    def delete(self, count: int) -> None:
        for index in range(count):
            (self._folder / f"{index}").unlink()


class _RedisPy:
    name = "redis-py"

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def put(self, sources: Sequence[memoryview]) -> None:
        for index, source in enumerate(sources):
            self._client.set(f"kvpool:bench:peer:{index}", source, ex=3600)

    def get(self, targets: Sequence[memoryview]) -> None:
        for index, target in enumerate(targets):
            value = self._client.get(f"kvpool:bench:peer:{index}")
            assert isinstance(value, bytes), "a value was evicted under us"
            target[:] = value

    def delete(self, count: int) -> None:
        self._client.unlink(*(f"kvpool:bench:peer:{index}" for index in range(count)))


@contextlib.contextmanager
def _peer(url: str, folder: Path) -> Iterator[_Peer]:
    parsed = StoreURL.parse(url)
    if parsed.scheme not in SERVER_SCHEMES:
        yield _PythonFiles(folder / "peer")
        return
    with connect(parsed, timeout_s=TIMEOUT_S) as client:
        yield _RedisPy(client)


def run_bench_store(*, pool: str | None, rounds: int, batch: int, as_json: bool) -> None:
    """Measure, and print a table or JSON. Blocking, for about a minute. Errors: ``KVPoolError``."""
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir=_fast_folder()))
    try:
        url = pool or f"file://{folder}/pool?capacity=2GiB"
        with (
            open_store(url) as store,
            _peer(url, folder) as peer,
            Progress(console=Console(stderr=True), transient=True) as progress,
        ):
            task = progress.add_task("moving bytes", total=len(VALUE_NBYTES) * 2 * rounds)
            cells = []
            for value_nbytes in VALUE_NBYTES:
                cells += _measure(store, peer, value_nbytes, batch, rounds, lambda: progress.advance(task))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print(cells, url, rounds, as_json)


def _measure(
    store: Store, peer: _Peer, value_nbytes: int, most: int, rounds: int, tick: Callable[[], None]
) -> list[Cell]:
    count = max(1, min(most, BATCH_NBYTES // value_nbytes))
    namespace = Namespace("bench", {"bench": "store", "value_nbytes": value_nbytes})
    keys = namespace.keys([index.to_bytes(32, "big") for index in range(count)], 0, 0)
    sources = [memoryview(os.urandom(value_nbytes)) for _ in range(count)]
    targets = [memoryview(bytearray(value_nbytes)) for _ in range(count)]

    def put() -> None:
        assert all(store.put_many(keys, sources, timeout_s=TIMEOUT_S)), "the pool is smaller than one batch"

    def get() -> None:
        assert all(store.get_many_into(keys, targets, timeout_s=TIMEOUT_S)), "a value was evicted under us"

    works = {("kvpool", "put"): put, ("kvpool", "get"): get}
    works |= {(peer.name, "put"): lambda: peer.put(sources), (peer.name, "get"): lambda: peer.get(targets)}
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
    peer.delete(count)
    speed = {key: count * value_nbytes / statistics.median(values) / 1e9 for key, values in times.items()}
    return [
        Cell(
            client,
            value_nbytes,
            count,
            *(speed[client, verb, mood] for verb in ("put", "get") for mood in ("idle", "busy")),
        )
        for client in ("kvpool", peer.name)
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
