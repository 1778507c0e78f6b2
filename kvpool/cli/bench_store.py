"""``kvpool bench store``: puts, gets and existence in one pool by value size, and a server's memory, of models' too.

A batch of each size stays in the pool during its rounds, each of which puts and gets it again: so memory is
allocated before writes, as in a long-full pool. Medians of the rounds. ``python -m benchmarks store`` (in a
checkout) races other clients.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.cli.tables import (
    Column,
    add_row,
    console,
    fitted,
    progress_bar,
    show,
    termination_interrupts,
)
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.store import Store, StoreURL, open_store
from kvpool.store.server.connection import connect
from kvpool.store.url import SERVER_SCHEMES
from kvpool.text import format_nbytes, redact

VALUE_NBYTES = (64 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
# What a server takes for a value is no constant: allocators have few sizes. Records of vLLM's blocks, 16-bit KV, of 16
# tokens where nothing else is said; of Qwen3-Next on one rank, what vLLM chooses.
MODEL_NBYTES = {
    "Qwen2.5-7B": 917_504,
    "DeepSeek-V3": 1_124_352,
    "Gemma-2-9B, 1 of 4 ranks": 1_376_256,
    "Llama-3-8B": 2_097_152,
    "DeepSeek-V3, 64 tokens": 4_497_408,
    "Llama-3-70B": 5_242_880,
    "Qwen3-Next-80B, KV": 25_952_256,
    "Qwen3-Next-80B, states": 77_266_944,
}
EXISTS_KEYS = 1024
TENANT = "bench"
TIMEOUT_S = 120.0  # of one batch
ROOM = 1.3  # free memory of a server per byte put, so that nothing is evicted

Views = list[memoryview]


@dataclass(frozen=True)
class Measured:
    """10^9 bytes a second. ``server_memory``: the server's bytes per byte of payload. None: not measured."""

    value_nbytes: int
    put_gb_per_s: float
    get_gb_per_s: float
    exists_ms: float | None
    server_memory: float | None


def run_bench_store(*, pool: str | None, rounds: int, batch_nbytes: int, as_json: bool) -> None:
    """Print a table or JSON. Blocking, for a minute. Takes two batches of memory. Errors: ``KVPoolError``."""
    with benched_pool(pool, batch_nbytes) as (url, _), progress_bar() as progress:
        parsed = StoreURL.parse(url)
        with open_store(url) as store, server_memory(parsed, batch_nbytes) as memory_of:
            client = StoreClient("kvpool", store)
            if progress.disable:
                progress.console.print("measuring puts and gets, about a minute")
            task = progress.add_task("moving bytes", total=len(VALUE_NBYTES) * rounds)
            rows = []
            for value_nbytes in VALUE_NBYTES:
                values = Values(value_nbytes, max(1, batch_nbytes // value_nbytes))
                rows.append(_measure(client, values, rounds, memory_of, lambda: progress.advance(task)))
            models = _memory_of_models(client, memory_of, batch_nbytes) if memory_of else {}
    if as_json:
        report = {
            "pool": redact(url),
            "rounds": rounds,
            "batch_nbytes": batch_nbytes,
            "exists_keys": EXISTS_KEYS,
        }
        print(json.dumps(report | {"rows": [asdict(row) for row in rows], "models": models}))
        return
    names = ("value", "put", "get", f"{EXISTS_KEYS:,} exist, ms", "server's memory")
    columns = [Column(name) for name in names]
    for row in rows:
        figures = (row.put_gb_per_s, row.get_gb_per_s, row.exists_ms, row.server_memory)
        shown = ("" if one is None else f"{one:.2f}" for one in figures)
        add_row(columns, format_nbytes(row.value_nbytes), *shown)
    out = console()
    show(out, f"{redact(url)}: GB/s, median of {rounds}; batches of {format_nbytes(batch_nbytes)}")
    show(out, *fitted(columns, out.width))
    if models:
        columns = [Column("a record of", left=True), Column("bytes"), Column("server's memory")]
        for name, memory in models.items():
            add_row(columns, name, f"{MODEL_NBYTES[name]:,}", f"{memory:.3f}")
        show(out, *fitted(columns, out.width))


def _memory_of_models(
    client: StoreClient, memory_of: Callable[[str], int], most_nbytes: int
) -> dict[str, float]:
    """The server's bytes for each byte of a record, of those up to ``most_nbytes``."""
    found = {}
    for name, nbytes in MODEL_NBYTES.items():
        if nbytes > most_nbytes:
            continue
        try:
            client.fill(Values(nbytes, 1))
            client.settle()
            found[name] = memory_of(client.keys(1)[0]) / nbytes
        finally:
            client.empty()
    return found


def _measure(
    client: StoreClient,
    values: Values,
    rounds: int,
    memory_of: Callable[[str], int] | None,
    tick: Callable[[], None],
) -> Measured:
    puts, gets, exists = [], [], []
    try:
        client.fill(values)
        client.settle()
        memory = memory_of(client.keys(1)[0]) / values.nbytes if memory_of else None
        for _ in range(rounds):
            puts.append(client.put(values.count))
            gets.append(client.get(values.count))
            if values.count >= EXISTS_KEYS:
                exists.append(client.exists(EXISTS_KEYS))
            tick()
    finally:
        client.empty()
    nbytes = values.nbytes * values.count
    return Measured(
        value_nbytes=values.nbytes,
        put_gb_per_s=nbytes / statistics.median(puts) / 1e9,
        get_gb_per_s=nbytes / statistics.median(gets) / 1e9,
        exists_ms=statistics.median(exists) * 1e3 if exists else None,
        server_memory=memory,
    )


@contextlib.contextmanager
def benched_pool(pool: str | None, batch_nbytes: int) -> Iterator[tuple[str, Path]]:
    """The URL of the pool, and a temporary folder; without ``pool``, a directory in it, in shared memory.

    The folder goes away at the end, on Ctrl-C and on SIGTERM too. Main thread only. Errors: a
    ``RuntimeError`` inside becomes ``StoreUnavailable``.
    """
    # Shared memory where available, so that a disk's speed does not hide ours.
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir=fast))
    url = pool or f"file://{folder}/pool?capacity={max(1 << 21, 2 * batch_nbytes)}"
    try:
        with termination_interrupts():
            yield url, folder
    except RuntimeError as error:
        raise StoreUnavailable(f"{redact(url)}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Values:
    """A batch of values of one size: sources and destinations, each from a page on, as a worker's staging."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count = nbytes, count
        self.sources, self.targets = _pages(nbytes, count), _pages(nbytes, count)
        for source in self.sources:
            source[:] = os.urandom(nbytes)


def _pages(nbytes: int, count: int) -> Views:
    if not nbytes * count:
        return []
    step = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = memoryview(mmap.mmap(-1, step * count))
    return [memory[begin : begin + nbytes] for begin in range(0, step * count, step)]


class TimedClient(ABC):
    """A client in this process. Gets are compared with puts outside of the measured time.

    Every call blocks; times are seconds. ``cpu_s``: what all threads of the process took of processors in the last put
    or get. Errors: ``KVPoolError``, ``RuntimeError``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cpu_s = 0.0
        self._values = Values(0, 0)

    def fill(self, values: Values) -> None:
        """Put all of ``values``, each under a key of its own, for the calls below."""
        self._values = values
        self._put(values.sources)

    def put(self, count: int) -> float:
        return self._timed(lambda: self._put(self._values.sources[:count]))

    def get(self, count: int) -> float:
        targets = self._values.targets[:count]
        nothing = bytes(self._values.nbytes)
        for target in targets:
            target[:] = nothing
        taken_s = self._timed(lambda: self._get(targets))
        if targets != self._values.sources[:count]:
            raise RuntimeError(f"{self.name} gave other bytes than it took")
        return taken_s

    def _timed(self, call: Callable[[], None]) -> float:
        before_s = time.process_time()
        taken_s = timed(call)
        self.cpu_s = time.process_time() - before_s
        return taken_s

    @abstractmethod
    def empty(self) -> None:
        """Delete what ``fill`` put."""

    @abstractmethod
    def _put(self, sources: Views) -> None: ...

    @abstractmethod
    def _get(self, targets: Views) -> None: ...


class StoreClient(TimedClient):
    """A store of kvpool: one batch, one return into Python."""

    def __init__(self, name: str, store: Store) -> None:
        super().__init__(name)
        self._store = store
        self._namespace = Namespace(TENANT, {"bench": name, "run": secrets.token_hex(16)})

    def exists(self, count: int) -> float:
        """Seconds of an existence query for the first ``count`` keys."""
        keys = self.keys(count)
        return timed(lambda: check_all(self._store.contains_many(keys, timeout_s=TIMEOUT_S)))

    def settle(self) -> None:
        """Wait until what was put is in the far pool, too, where there is one. Errors: ``StoreUnavailable``."""
        until_s = time.monotonic() + TIMEOUT_S
        while self._store.counters().get("behind_waiting", 0):
            if time.monotonic() >= until_s:
                raise StoreUnavailable("the far pool takes nothing: kvpool doctor says why")
            time.sleep(0.01)

    def empty(self) -> None:
        self._store.delete_many(self.keys(self._values.count), timeout_s=TIMEOUT_S)

    def keys(self, count: int) -> list[str]:
        return [self._namespace.key(index.to_bytes(32, "big"), 0, 0) for index in range(count)]

    def _put(self, sources: Views) -> None:
        check_all(self._store.put_many(self.keys(len(sources)), sources, timeout_s=TIMEOUT_S))

    def _get(self, targets: Views) -> None:
        check_all(self._store.get_many_into(self.keys(len(targets)), targets, timeout_s=TIMEOUT_S))


def check_all(found: Sequence[bool]) -> None:
    """Errors: ``ConfigError`` for an absent key."""
    if not all(found):
        raise ConfigError(
            "the pool did not keep a whole batch: raise its capacity, make room on its disk, or lower --batch-bytes"
        )


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def server_memory(url: StoreURL, wanted_nbytes: int) -> Iterator[Callable[[str], int] | None]:
    """Reads a key's memory at a server; refuses a server that would evict. None: several servers, or none.

    Not the difference of its memory in use, which has its clients' buffers and lazy frees. ``wanted_nbytes``:
    put at a time. Errors: ``KVPoolError``.
    """
    if url.scheme not in SERVER_SCHEMES or url.nodes:
        yield None
        return
    with connect(url, timeout_s=TIMEOUT_S, role="bench") as server:
        memory = _answer(lambda: server.info("memory"), "+info")
        room_nbytes = memory["maxmemory"] - memory["used_memory"]
        needed_nbytes = ROOM * max(wanted_nbytes, max(VALUE_NBYTES))
        if memory["maxmemory"] and room_nbytes < needed_nbytes:
            raise ConfigError(
                f"the server has {max(0, room_nbytes) >> 20} MiB before it evicts, and the clients' batches need "
                f"{int(needed_nbytes) >> 20} MiB: raise maxmemory, or lower --batch-bytes"
            )
        yield lambda key: _kept(_answer(lambda: server.memory_usage(key), "+memory|usage"))


def _kept(nbytes: int | None) -> int:
    if nbytes is None:
        raise ConfigError("the server did not keep what was put: raise maxmemory, or lower --batch-bytes")
    return nbytes


def _answer(ask: Callable[[], Any], needed: str) -> Any:
    import redis

    try:
        return ask()
    except redis.RedisError as error:
        raise StoreUnavailable(
            f"the server does not tell of its memory: {error}; use a user that may {needed}"
        ) from error
