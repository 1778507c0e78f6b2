"""``kvpool bench store``: puts, gets and existence in one pool by value size, and a server's memory.

A batch of each size stays in the pool while the size is measured, and each round puts it again and gets it: so memory
is there when it is written to, as in a pool that has been full for long. Medians of the rounds.
``python -m benchmarks store`` (in a checkout) races other clients.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvpool.cli.tables import Column, add_row, console, fitted, show
from kvpool.cli.timed_client import EXISTS_KEYS, VALUE_NBYTES, StoreClient, Values, server_memory
from kvpool.cli.workspace import termination_interrupts
from kvpool.errors import StoreUnavailable
from kvpool.store import StoreURL, open_store
from kvpool.text import format_nbytes, redact


@dataclass(frozen=True)
class Row:
    """10^9 bytes a second. ``server_memory``: the server's bytes for a byte of payload. None: it was not measured."""

    value_nbytes: int
    put_gb_per_s: float
    get_gb_per_s: float
    exists_ms: float | None
    server_memory: float | None


def run_bench_store(*, pool: str | None, rounds: int, batch_nbytes: int, as_json: bool) -> None:
    """Measure, and print a table or JSON. Blocking, for a minute. Memory here: two batches. Errors: ``KVPoolError``."""
    with benched_pool(pool, batch_nbytes) as (url, _), progress_bar() as progress:
        parsed = StoreURL.parse(url)
        with open_store(url) as store, server_memory(parsed, batch_nbytes) as memory_of:
            client = StoreClient("kvpool", store)
            if not progress.console.is_terminal:
                progress.console.print("measuring puts and gets, about a minute")
            task = progress.add_task("moving bytes", total=len(VALUE_NBYTES) * rounds)
            rows = []
            for value_nbytes in VALUE_NBYTES:
                values = Values(value_nbytes, max(1, batch_nbytes // value_nbytes))
                rows.append(_measure(client, values, rounds, memory_of, lambda: progress.advance(task)))
    if as_json:
        report = {
            "pool": redact(url),
            "rounds": rounds,
            "batch_nbytes": batch_nbytes,
            "exists_keys": EXISTS_KEYS,
        }
        print(json.dumps(report | {"rows": [asdict(row) for row in rows]}))
        return
    rows_shown = [
        (
            format_nbytes(row.value_nbytes),
            *(
                "" if one is None else f"{one:.2f}"
                for one in (row.put_gb_per_s, row.get_gb_per_s, row.exists_ms, row.server_memory)
            ),
        )
        for row in rows
    ]
    names = ("value", "put", "get", f"{EXISTS_KEYS:,} exist, ms", "server's memory")
    columns = [Column(name) for name in names]
    for cells in rows_shown:
        add_row(columns, *cells)
    out = console()
    show(out, f"{redact(url)}: GB/s, median of {rounds}; batches of {format_nbytes(batch_nbytes)}")
    show(out, fitted(columns, out.width)[0])


def _measure(
    client: StoreClient,
    values: Values,
    rounds: int,
    memory_of: Callable[[str], int] | None,
    tick: Callable[[], None],
) -> Row:
    puts, gets, exists = [], [], []
    try:
        client.fill(values)
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
    return Row(
        value_nbytes=values.nbytes,
        put_gb_per_s=nbytes / statistics.median(puts) / 1e9,
        get_gb_per_s=nbytes / statistics.median(gets) / 1e9,
        exists_ms=statistics.median(exists) * 1e3 if exists else None,
        server_memory=memory,
    )


@contextlib.contextmanager
def benched_pool(pool: str | None, batch_nbytes: int) -> Iterator[tuple[str, Path]]:
    """The URL of the pool, and a temporary folder; without ``pool`` the pool is a directory in it, in shared memory.

    The folder goes away at the end, on Ctrl-C and on SIGTERM too. The process's main thread only. Errors: a
    ``RuntimeError`` inside becomes ``StoreUnavailable``.
    """
    # Shared memory where there is some, so that a disk's speed does not hide ours.
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


def progress_bar() -> Progress:
    """On standard error, and on a terminal only."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
