"""``kvpool bench store``: puts and gets by value size, idle and beside a busy interpreter, and a server's memory.

The clients take turns in one run (see ``kvpool.cli.bench_clients``); in its turn each puts one batch, gets it, and
deletes it. A batch has the same number of bytes for every size of a value, as the load of a long prompt has. A busy
interpreter is a pure-Python thread that spins in this process, which is what a vLLM worker looks like to a thread in
the background.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpool.cli.bench_clients import OWN, TIMEOUT_S, Client, clients
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.stores import StoreURL, open_store
from kvpool.stores.server_announcements import connect
from kvpool.stores.url import SERVER_SCHEMES
from kvpool.wording import format_nbytes, redact

VALUE_NBYTES = (64 << 10, 512 << 10, 2 << 20, 4 << 20)
CELLS = ("put_idle", "put_busy", "get_idle", "get_busy")
ROOM = 1.5  # of a batch: what a server must have free, so that it evicts nobody's values for ours


@dataclass(frozen=True)
class Row:
    """One client at one size: medians in GB/s (10^9 bytes). ``server_memory``: server's bytes for a payload byte."""

    client: str
    value_nbytes: int
    values: int
    put_idle: float
    put_busy: float
    get_idle: float
    get_busy: float
    server_memory: float | None  # of kvpool's records on a server

    def busy_over_idle(self, verb: str) -> float:
        return float(getattr(self, f"{verb}_busy") / getattr(self, f"{verb}_idle"))


def run_bench_store(*, pool: str | None, rounds: int, batch_nbytes: int, as_json: bool) -> None:
    """Measure, and print a table or JSON.

    Blocking, for some minutes. Memory: two batches here, 1.5 in the pool. Errors: ``KVPoolError``.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir=_fast_folder()))
    url = pool or f"file://{folder}/pool?capacity={max(1 << 21, 2 * batch_nbytes)}"
    parsed = StoreURL.parse(url)
    try:
        with (
            open_store(replace(parsed, client="native")) as store,
            _used_memory(parsed, batch_nbytes) as used_nbytes,
            clients(store, parsed, folder / "peer") as measured,
            _progress() as progress,
        ):
            task = progress.add_task("moving bytes", total=len(VALUE_NBYTES) * len(measured) * 2 * rounds)
            rows: list[Row] = []
            for value_nbytes in VALUE_NBYTES:
                progress.update(task, description=f"moving values of {format_nbytes(value_nbytes)}")
                values = max(1, batch_nbytes // value_nbytes)
                rows += _measure(
                    measured, value_nbytes, values, rounds, used_nbytes, lambda: progress.advance(task)
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _print(rows, redact(url), rounds, batch_nbytes, as_json)


def _measure(
    measured: list[Client],
    value_nbytes: int,
    values: int,
    rounds: int,
    used_nbytes: Callable[[], int] | None,
    tick: Callable[[], None],
) -> list[Row]:
    sources = [memoryview(os.urandom(value_nbytes)) for _ in range(values)]
    targets = [memoryview(bytearray(value_nbytes)) for _ in range(values)]
    times: dict[tuple[str, str], list[float]] = {}
    memory: list[float] = []
    for _, mood in itertools.product(range(rounds), ("idle", "busy")):
        with _busy_interpreter() if mood == "busy" else contextlib.nullcontext():
            for client in measured:
                weigh = used_nbytes if client is measured[0] and mood == "idle" else None
                before_nbytes = weigh() if weigh else 0
                try:
                    times.setdefault((client.name, f"put_{mood}"), []).append(_timed(client.put, sources))
                    if weigh:
                        memory.append((weigh() - before_nbytes) / (values * value_nbytes))
                    for target in targets:
                        target[:] = bytes(value_nbytes)
                    times.setdefault((client.name, f"get_{mood}"), []).append(_timed(client.get, targets))
                finally:
                    client.delete(values)
                assert targets == sources, f"{client.name} gave other bytes than it took"
                tick()
    speed = {name: values * value_nbytes / statistics.median(each) / 1e9 for name, each in times.items()}
    return [
        Row(
            client=client.name,
            value_nbytes=value_nbytes,
            values=values,
            put_idle=speed[client.name, "put_idle"],
            put_busy=speed[client.name, "put_busy"],
            get_idle=speed[client.name, "get_idle"],
            get_busy=speed[client.name, "get_busy"],
            server_memory=statistics.median(memory) if memory and client is measured[0] else None,
        )
        for client in measured
    ]


def _timed(work: Callable[[list[memoryview]], None], views: list[memoryview]) -> float:
    started = time.perf_counter()
    work(views)
    return time.perf_counter() - started


@contextlib.contextmanager
def _used_memory(url: StoreURL, batch_nbytes: int) -> Iterator[Callable[[], int] | None]:
    """Asks a server how much memory it uses; refuses one that would evict for us. None where there is no server."""
    if url.scheme not in SERVER_SCHEMES:
        yield None
        return
    import redis

    with connect(url, timeout_s=TIMEOUT_S) as server:
        try:
            memory = server.info("memory")
        except redis.RedisError as error:
            raise StoreUnavailable(
                f"the server does not answer INFO memory: {error}; use a user that may +info"
            ) from error
        room_nbytes = memory["maxmemory"] - memory["used_memory"]
        if memory["maxmemory"] and room_nbytes < ROOM * max(batch_nbytes, max(VALUE_NBYTES)):
            raise ConfigError(
                f"the server has {max(0, room_nbytes) >> 20} MiB before it evicts, and a batch needs "
                f"{int(ROOM * max(batch_nbytes, max(VALUE_NBYTES))) >> 20}: raise maxmemory, or lower --batch-bytes"
            )
        yield lambda: int(server.info("memory")["used_memory"])


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


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _times_the_best_other(rows: list[Row], row: Row) -> dict[str, float]:
    """kvpool's speed in each cell over that of the fastest of the others."""
    others = [
        other for other in rows if other.value_nbytes == row.value_nbytes and other.client != row.client
    ]
    return {cell: getattr(row, cell) / max(getattr(other, cell) for other in others) for cell in CELLS}


def _print(rows: list[Row], pool: str, rounds: int, batch_nbytes: int, as_json: bool) -> None:
    if as_json:
        report = {
            "pool": pool,
            "rounds": rounds,
            "batch_nbytes": batch_nbytes,
            "unit": "GB/s",
            "rows": [asdict(row) | {f"{verb}_busy_over_idle": row.busy_over_idle(verb) for verb in ("put", "get")}
                     for row in rows],
            "times_the_best_other": {
                row.value_nbytes: _times_the_best_other(rows, row) for row in rows if row.client == OWN
            },
        }  # fmt: skip
        print(json.dumps(report))
        return
    table = Table(title=f"{pool}: GB/s, median of {rounds}; batches of {format_nbytes(batch_nbytes)}")
    for name in ("value", "client", "put", "busy", "ratio", "get", "busy", "ratio", "mem"):
        table.add_column(name, justify="left" if name == "client" else "right", no_wrap=name == "client")
    for row in rows:
        if row.client == OWN and row is not rows[0]:
            table.add_section()
        table.add_row(
            format_nbytes(row.value_nbytes),
            row.client,
            *(text for verb in ("put", "get") for text in _shown(row, verb)),
            f"{row.server_memory:.2f}" if row.server_memory is not None else "",
        )
        last = [other for other in rows if other.value_nbytes == row.value_nbytes][-1]
        if row is last:
            own = next(one for one in rows if one.value_nbytes == row.value_nbytes and one.client == OWN)
            times = _times_the_best_other(rows, own)
            put_idle, put_busy, get_idle, get_busy = (f"{times[cell]:.1f}x" for cell in CELLS)
            table.add_row("", "over the best", put_idle, put_busy, "", get_idle, get_busy, "", "")
    console = Console()
    console.print(table)
    console.print(
        "busy: beside a pure-Python thread that spins. ratio: busy over idle. mem: the server's bytes for a byte of "
        "payload. over the best: kvpool over the best of the others.",
        highlight=False,
    )


def _shown(row: Row, verb: str) -> list[str]:
    idle, busy = getattr(row, f"{verb}_idle"), getattr(row, f"{verb}_busy")
    return [f"{idle:.2f}", f"{busy:.2f}", f"{row.busy_over_idle(verb):.2f}"]
