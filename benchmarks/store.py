"""``python -m benchmarks store``: puts and gets by value size, idle and beside a busy interpreter.

All clients (see ``benchmarks.store_clients``) keep a batch in the pool and alternate in every round: put it
again, get it. So memory is already allocated, as in a long full pool, and disturbances hit all clients.
Figures are medians of ratios within a round. A busy interpreter is a spinning pure-Python thread in the
process, as a vLLM worker looks to a background thread.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.store_clients import BARE, OWN, Client, clients
from benchmarks.store_report import Report, Row, draw, show
from benchmarks.valkey_shards import ValkeyShards, find_server
from kvpool.cli.bench_store import (
    EXISTS_KEYS,
    VALUE_NBYTES,
    StoreClient,
    TimedClient,
    Values,
    benched_pool,
    server_memory,
)
from kvpool.cli.tables import progress_bar
from kvpool.store import StoreURL, open_store
from kvpool.text import format_nbytes, redact

VERBS = ("put", "get")
MOODS = ("idle", "busy")
# Time slice of a client that enters Python per value, if a batch would take longer.
TURN_S = 0.1


@dataclass
class _Times:
    counts: dict[str, int] = field(default_factory=dict)
    per_value_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)  # a value; of clients in this process
    exists_s: dict[str, list[float]] = field(default_factory=dict)


def run_store(
    *,
    pool: str | None,
    shards: int | None,
    server: Path | None,
    rounds: int,
    batch_nbytes: int,
    peers: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure and print. Memory: two batches here and per peer, one per client in the pool."""
    program = find_server(server) if shards is not None else ""
    if plot is not None:
        draw([], plot)  # reports unwritable files early
    with contextlib.ExitStack() as opened:
        url, folder = opened.enter_context(benched_pool(pool, batch_nbytes))
        if shards is not None:
            url = opened.enter_context(
                ValkeyShards(program, folder / "servers", shards=shards, io_threads=1)
            ).url
        parsed = StoreURL.parse(url)
        with (
            open_store(replace(parsed, client="native")) as store,
            clients(store, parsed, peers) as measured,
            server_memory(parsed, batch_nbytes * len(measured)) as memory_of,
            progress_bar() as progress,
        ):
            task = progress.add_task("moving bytes", total=len(VALUE_NBYTES) * len(measured) * 2 * rounds)
            rows: list[Row] = []
            for value_nbytes in VALUE_NBYTES:
                progress.update(task, description=f"moving values of {format_nbytes(value_nbytes)}")
                values = Values(value_nbytes, max(1, batch_nbytes // value_nbytes))
                rows += _measure(measured, values, rounds, memory_of, lambda: progress.advance(task))
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
                client.settle()
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
        if mood == "idle" and isinstance(client, TimedClient):
            times.cpu_s.setdefault(verb, []).append(client.cpu_s / moved)
    if count >= EXISTS_KEYS and (taken_s := client.exists(EXISTS_KEYS)) is not None:
        times.exists_s.setdefault(mood, []).append(taken_s)


def _count_for(move: Callable[[int], float], count: int) -> int:
    """Values that a slow client moves within ``TURN_S``; at least a thirty-second of ``count``."""
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
        cpu_s_per_gb={
            verb: statistics.median(each) / values.nbytes * 1e9 for verb, each in own.cpu_s.items()
        },
        server_memory=memory,
        exists_ms={mood: statistics.median(each) * 1e3 for mood, each in own.exists_s.items()},
    )


def _ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(above / below for above, below in zip(numerators, denominators, strict=True))
