"""``kvpool bench store``: puts and gets by value size, idle and beside a busy interpreter, and a server's memory.

All clients (see ``kvpool.cli.bench_clients``) keep a batch of values in the pool and take turns in every round: put it
again, get it. So memory is there when it is written to, as in a pool that has been full for long, and what disturbs one
disturbs its neighbours. Ratios are taken within a round; the median of the rounds counts. A busy interpreter is a
pure-Python thread that spins in the process, which is what a vLLM worker looks like to a thread in the background.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvpool.cli.bench_clients import BARE, OWN, TIMEOUT_S, Client, StoreClient, Values, clients
from kvpool.cli.bench_report import Report, Row, draw, show
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store import StoreURL, open_store
from kvpool.store.server.connection import connect
from kvpool.store.url import SERVER_SCHEMES
from kvpool.text import format_nbytes, redact

VALUE_NBYTES = (64 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
VERBS = ("put", "get")
MOODS = ("idle", "busy")
EXISTS_KEYS = 1024
# What a client that returns into Python for each value is given, of a batch that would take longer.
TURN_S = 0.1
ROOM = 1.3  # of what is put: a server must have it free, so that it evicts nobody's values for ours


@dataclass
class _Times:
    """Of one client at one size: seconds a value, by cell and round."""

    counts: dict[str, int] = field(default_factory=dict)
    per_value_s: dict[str, list[float]] = field(default_factory=dict)
    exists_s: dict[str, list[float]] = field(default_factory=dict)


def run_bench_store(
    *, pool: str | None, rounds: int, batch_nbytes: int, peers: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Measure, and print a table or JSON; ``plot`` is written as a PNG.

    Blocking, for minutes. Memory here: two batches, and two for each of ``peers``; in the pool: one for each client.
    Errors: ``KVPoolError``.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir=_fast_folder()))
    url = pool or f"file://{folder}/pool?capacity={max(1 << 21, 2 * batch_nbytes)}"
    parsed = StoreURL.parse(url)
    try:
        if plot is not None:
            draw([], plot)  # what cannot be written is told now
        with (
            open_store(replace(parsed, client="native")) as store,
            clients(store, parsed, folder / "beside", peers) as measured,
            _memory_of(parsed, batch_nbytes * len(measured)) as memory_of,
            _progress() as progress,
        ):
            task = progress.add_task("moving bytes", total=len(VALUE_NBYTES) * len(measured) * 2 * rounds)
            rows: list[Row] = []
            for value_nbytes in VALUE_NBYTES:
                progress.update(task, description=f"moving values of {format_nbytes(value_nbytes)}")
                values = Values(value_nbytes, max(1, batch_nbytes // value_nbytes))
                rows += _measure(measured, values, rounds, memory_of, lambda: progress.advance(task))
    except RuntimeError as error:
        raise StoreUnavailable(f"{redact(url)}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if plot is not None:
        draw(rows, plot)
    show(Report(redact(url), rounds, batch_nbytes, EXISTS_KEYS, rows), as_json)


def _measure(
    measured: list[Client],
    values: Values,
    rounds: int,
    memory_of: Callable[[str], int] | None,
    tick: Callable[[], None],
) -> list[Row]:
    times = {client.name: _Times() for client in measured}
    memory: float | None = None
    with contextlib.ExitStack() as filled:
        for client in measured:
            filled.callback(client.empty)
            client.fill(values)
            if memory_of and isinstance(client, StoreClient) and client.name == OWN:
                memory = memory_of(client.keys(1)[0]) / values.nbytes
        for number, mood in itertools.product(range(rounds), MOODS):
            first = number % len(measured)
            for client in measured[first:] + measured[:first]:
                with client.busy() if mood == "busy" else contextlib.nullcontext():
                    _turn(client, values.count, mood, times[client.name])
                tick()
    return [_row(client.name, values, times, memory if client.name == OWN else None) for client in measured]


def _turn(client: Client, count: int, mood: str, times: _Times) -> None:
    for verb in VERBS:
        move = client.put if verb == "put" else client.get
        cell = f"{verb}_{mood}"
        if cell not in times.counts:
            times.counts[cell] = count if client.whole_batches else _count_for(move, count)
        moved = times.counts[cell]
        times.per_value_s.setdefault(cell, []).append(move(moved) / moved)
    if count >= EXISTS_KEYS and (taken_s := client.exists(EXISTS_KEYS)) is not None:
        times.exists_s.setdefault(mood, []).append(taken_s)


def _count_for(move: Callable[[int], float], count: int) -> int:
    """How many values a slow client moves within ``TURN_S``; at least a thirty-second of them."""
    least = max(1, min(count, max(8, count // 32)))
    return max(least, min(count, int(least * TURN_S / move(least))))


def _row(name: str, values: Values, times: dict[str, _Times], memory: float | None) -> Row:
    own = times[name]
    bare = times.get(BARE)
    cells = [f"{verb}_{mood}" for verb, mood in itertools.product(VERBS, MOODS)]
    return Row(
        client=name,
        value_nbytes=values.nbytes,
        values=own.counts,
        gb_per_s={cell: values.nbytes / statistics.median(own.per_value_s[cell]) / 1e9 for cell in cells},
        busy_over_idle={
            verb: _ratio(own.per_value_s[f"{verb}_idle"], own.per_value_s[f"{verb}_busy"]) for verb in VERBS
        },
        over_bare={cell: _ratio(bare.per_value_s[cell], own.per_value_s[cell]) for cell in cells}
        if bare
        else {},
        server_memory=memory,
        exists_ms={mood: statistics.median(each) * 1e3 for mood, each in own.exists_s.items()},
    )


def _ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median over the rounds of how the two compare in a round."""
    return statistics.median(above / below for above, below in zip(numerators, denominators, strict=True))


@contextlib.contextmanager
def _memory_of(url: StoreURL, wanted_nbytes: int) -> Iterator[Callable[[str], int] | None]:
    """Asks a server how much memory a key has there; refuses one that would evict for us. None where there is not one.

    Not the difference of its memory in use: that has its clients' buffers in it, and what it frees in the background.
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
                f"{int(needed_nbytes) >> 20}: raise maxmemory, or lower --batch-bytes"
            )
        yield lambda key: int(_answer(lambda: server.memory_usage(key), "+memory|usage"))


def _answer(ask: Callable[[], Any], needed: str) -> Any:
    import redis

    try:
        return ask()
    except redis.RedisError as error:
        raise StoreUnavailable(
            f"the server does not tell of its memory: {error}; use a user that may {needed}"
        ) from error


def _fast_folder() -> str | None:
    """Shared memory where there is some, so that a disk's speed does not hide ours."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
