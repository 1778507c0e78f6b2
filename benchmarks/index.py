"""``python -m benchmarks index``: the prefix index beside a plain Python dictionary and Dynamo's.

In this process, over gRPC, and fed over ZMQ. ``benchmarks.contest`` has the questions. The dictionary maps a
block's hash to a bit mask of workers, and receives decoded events.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.contest import (
    PROMPT_BLOCKS,
    Asked,
    Result,
    Scores,
    contest,
    holdings,
    percentile,
    timed,
    unpacked,
)
from benchmarks.dynamo_process import ask_dynamo, dynamo_python
from benchmarks.events import payloads, removals
from benchmarks.feed import FeedReport, measure_feed
from benchmarks.restart import RestartRow, measure_restart
from benchmarks.rpc import RpcRow, measure_rpc
from kvpool.index import PrefixIndex
from kvpool.text import with_extra

OWN, DICTIONARY, DYNAMO = "kvpool", "dict", "Dynamo"
SETTLED_BLOCKS = 1 << 16  # below, a map's first segments dominate its memory


@dataclass(frozen=True)
class Row:
    """One shape: a result by contestant. ``tokens_mpairs_per_s``: kvpool's ingest of payloads with 16 tokens
    a block. ``block_nbytes_most``: while its table grew, from 65,536 blocks on.
    """

    shape: str
    workers: int
    blocks: int
    results: dict[str, Result]
    tokens_mpairs_per_s: float
    block_nbytes_most: float


def run_index(*, blocks: int, workers: Sequence[int], rounds: int, peers: Path | None, as_json: bool) -> None:
    """Measure for minutes, with 1 GB per million blocks. ``peers``: their folder. Errors: ``KVPoolError``."""
    python = dynamo_python(peers) if peers is not None else None
    shapes = [("sessions", count) for count in workers]
    shapes.append(("everybody", min(8, max(workers))))  # a pair per worker and block: keep it small
    rows = []
    rpc_rows: list[RpcRow] = []
    feed: FeedReport | None = None
    restart: RestartRow | None = None
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("filling and asking", total=len(shapes) + 3)
        for shape, count in shapes:
            rows.append(_measure(shape, count, max(1, blocks // PROMPT_BLOCKS), rounds, python))
            progress.advance(task)
        if importlib.util.find_spec("grpc") is not None:
            progress.update(task, description="asking over gRPC")
            rpc_rows = measure_rpc(blocks, max(workers), rounds)
            progress.update(task, description="publishing over ZMQ", advance=1)
            feed = measure_feed(blocks, rounds, python)
            progress.update(task, description="killing and starting again", advance=1)
            restart = measure_restart(blocks, max(workers))
    index = PrefixIndex()
    call_us = percentile(timed(lambda _: index.match(b""), 2000, 1), 0.5)
    if as_json:
        print(json.dumps({"call_us": call_us, "rows": [asdict(row) for row in rows],
                          "rpc": [asdict(row) for row in rpc_rows],
                          "feed": None if feed is None else asdict(feed),
                          "restart": None if restart is None else asdict(restart)}))  # fmt: skip
        return
    show = Console()
    for row in rows:
        show.print(_table(row, call_us))
    if feed is None or restart is None:
        show.print(f"gRPC and ZMQ were not measured: {with_extra('index')}", highlight=False)
        return
    show.print(_rpc_table(rpc_rows, max(workers)))
    for table in _feed_tables(feed):
        show.print(table)
    show.print(_restart_table(restart))


def _measure(shape: str, workers: int, prompts: int, rounds: int, python: Path | None) -> Row:
    own = _Own()
    results = {
        OWN: contest(own, shape, workers, prompts, rounds),
        DICTIONARY: contest(Dictionary(), shape, workers, prompts, rounds),
    }
    if python is not None:
        results[DYNAMO] = _of_dynamo(python, shape, workers, prompts, rounds)
    assert not any(asked.wrong for asked in results[OWN].asked), "the index must not be wrong"
    return Row(
        shape=shape,
        workers=workers,
        blocks=prompts * PROMPT_BLOCKS,
        results=results,
        tokens_mpairs_per_s=_ingest_with_tokens(max(1, prompts // 8)),
        block_nbytes_most=own.most_nbytes or results[OWN].block_nbytes,
    )


def _ingest_with_tokens(prompts: int) -> float:
    """Of a few prompts, because tokens are slow to make."""
    own, taken_s = _Own(), 0.0
    for packed, _ in holdings("sessions", 1, prompts):
        taken_s += own.apply(0, payloads(unpacked(packed), tokens=True))
    return prompts * PROMPT_BLOCKS / taken_s / 1e6


def _of_dynamo(python: Path, shape: str, workers: int, prompts: int, rounds: int) -> Result:
    asked = {"do": "contest", "shape": shape, "workers": workers, "prompts": prompts, "rounds": rounds}
    answer = ask_dynamo(python, asked)
    return Result(**{**answer, "asked": [Asked(**one) for one in answer["asked"]]})


class _Own:
    is_slow = False

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self.most_nbytes = 0.0

    def store(self, worker: int, hashes: Sequence[int]) -> float:
        taken_s = self.apply(worker, payloads(hashes, tokens=False))
        if len(self._index) >= SETTLED_BLOCKS:
            self.most_nbytes = max(self.most_nbytes, self._index.memory_nbytes / len(self._index))
        return taken_s

    def take_away(self, worker: int, hashes: Sequence[int]) -> None:
        self.apply(worker, removals(hashes))

    def apply(self, worker: int, batches: Sequence[bytes]) -> float:
        name = f"{worker}"
        started = time.perf_counter()
        for batch in batches:
            self._index.apply(name, batch)
        return time.perf_counter() - started

    def question(self, packed: bytes) -> bytes:
        return packed

    def ask(self, question: bytes) -> Any:
        return self._index.match(question)

    def scores(self, answer: Any) -> Scores:
        return {int(row.worker): row.device_blocks for row in answer}

    def remove_worker(self, worker: int) -> float:
        started = time.perf_counter()
        self._index.remove_worker(f"{worker}")
        return time.perf_counter() - started

    def nbytes(self) -> int:
        return self._index.memory_nbytes


class Dictionary:
    """Block hash -> bit mask of workers."""

    is_slow = True

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def store(self, worker: int, hashes: Sequence[int]) -> float:
        masks, bit = self._masks, 1 << worker
        started = time.perf_counter()
        for block in hashes:
            masks[block] = masks.get(block, 0) | bit
        return time.perf_counter() - started

    def take_away(self, worker: int, hashes: Sequence[int]) -> None:
        for block in hashes:
            self._masks[block] &= ~(1 << worker)

    def question(self, packed: bytes) -> tuple[int, ...]:
        return unpacked(packed)

    def ask(self, question: tuple[int, ...]) -> Scores:
        found: Scores = {}
        masks = self._masks
        running = masks.get(question[0], 0)
        for count, block in enumerate(question):
            now = running & masks.get(block, 0)
            if now != running:
                _end(found, running & ~now, count)
                running = now
            if not running:
                return found
        _end(found, running, len(question))
        return found

    def scores(self, answer: Scores) -> Scores:
        return answer

    def remove_worker(self, worker: int) -> float:
        kept, masks = ~(1 << worker), self._masks
        started = time.perf_counter()
        for block, mask in masks.items():
            masks[block] = mask & kept
        return time.perf_counter() - started

    def nbytes(self) -> int:
        """The dictionary's own table and keys; masks are mostly shared, and not counted."""
        return self._masks.__sizeof__() + len(self._masks) * (1 << 62).__sizeof__()


def _end(found: Scores, workers: int, count: int) -> None:
    while workers:
        worker = workers & -workers
        found[worker.bit_length() - 1] = count
        workers ^= worker


def _table(row: Row, call_us: float) -> Table:
    table = _empty_table(
        f"{row.workers} workers, {row.shape}; {row.blocks:,} blocks, one thread. Lookups of so many blocks: p50 / p99 "
        f"in us; an empty call takes {call_us:.2f}. With tokens it takes {row.tokens_mpairs_per_s:.1f} M pairs/s; it "
        f"took at most {row.block_nbytes_most:.1f} B a block while it grew. x: times as fast, or as small.",
        "",
        *itertools.chain(*([name] if name == OWN else [name, "x"] for name in row.results)),
    )
    names = list(row.results)

    def add(what: str, shown: dict[str, str], times: dict[str, float]) -> None:
        cells = []
        for name in names:
            cells += [shown[name]] if name == OWN else [shown[name], f"{times[name]:.1f}"]
        table.add_row(what, *cells)

    results = row.results
    own = results[OWN]
    add(
        "ingest, M pairs/s",
        {name: f"{one.ingest_mpairs_per_s:.1f}" for name, one in results.items()},
        {name: own.ingest_mpairs_per_s / one.ingest_mpairs_per_s for name, one in results.items()},
    )
    add(
        "memory, B",
        {name: f"{one.block_nbytes:.1f}" for name, one in results.items()},
        {name: one.block_nbytes / own.block_nbytes for name, one in results.items()},
    )
    for place, asked in enumerate(own.asked):
        theirs = {name: one.asked[place] for name, one in results.items()}
        add(
            f"{asked.blocks:,} {asked.kind}",
            {name: _times_shown(one) for name, one in theirs.items()},
            {name: one.p50_us / asked.p50_us for name, one in theirs.items()},
        )
    add(
        "a worker goes, us",
        {name: f"{one.remove_worker_us:.0f}" for name, one in results.items()},
        {name: one.remove_worker_us / own.remove_worker_us for name, one in results.items()},
    )
    return table


def _times_shown(asked: Asked) -> str:
    digits = 0 if asked.p50_us >= 100 else 1
    wrong = f", {asked.wrong} wrong" if asked.wrong else ""
    return f"{asked.p50_us:.{digits}f} / {asked.p99_us:.{digits}f}{wrong}"


def _rpc_table(rows: Sequence[RpcRow], workers: int) -> Table:
    table = _empty_table(
        f"Lookups of {PROMPT_BLOCKS:,} blocks over gRPC, {workers} workers, in us, beside an echo of as many bytes "
        "in the same server. ratio: of the medians.",
        "call", "callers", "p50", "p99", "echo p50", "echo p99", "ratio",
    )  # fmt: skip
    for row in rows:
        times = (row.p50_us, row.p99_us, row.echo_p50_us, row.echo_p99_us)
        table.add_row(
            row.kind, f"{row.callers}", *(f"{each:.0f}" for each in times), f"{row.p50_over_echo:.2f}"
        )
    return table


def _feed_tables(feed: FeedReport) -> list[Table]:
    ingest = _empty_table(
        f"From a publisher's process over ZMQ into an index's, {feed.publishers} workers, events of 16 blocks with "
        "their tokens.",
        "index", "events a batch", "M blocks/s",
    )  # fmt: skip
    for row in feed.ingest:
        ingest.add_row(row.index, f"{row.batch_events}", f"{row.mblocks_per_s:.2f}")
    beside = _empty_table(
        f"Lookups of one caller over gRPC, in us, idle and while batches of {feed.beside_batch_events} events come as "
        "fast as it took them above. ratio: of the p99.",
        "blocks", "idle p50", "p99", "ingest p50", "p99", "ratio", "M blocks/s",
    )  # fmt: skip
    for one in feed.beside:
        times = (one.idle_p50_us, one.idle_p99_us, one.busy_p50_us, one.busy_p99_us)
        beside.add_row(
            f"{one.blocks:,}", *(f"{each:.0f}" for each in times), f"{one.p99_ratio:.2f}", f"{one.mblocks_per_s:.2f}"
        )  # fmt: skip
    if feed.peer_query_p50_us is None:
        return [ingest, beside]
    peer = _empty_table(
        f"Dynamo's HTTP indexer, asked for {PROMPT_BLOCKS:,} hashes, in us.", "", "p50", "p99"
    )
    peer.add_row("/query_by_hash", f"{feed.peer_query_p50_us:.0f}", f"{feed.peer_query_p99_us:.0f}")
    return [ingest, beside, peer]


def _restart_table(row: RestartRow) -> Table:
    table = _empty_table(
        f"A restart with {row.blocks:,} blocks at {row.workers} workers: bytes a block in the file; ms for which "
        "batches wait; seconds to pack and write, and to read and take over. Killed with one worker of as many blocks: "
        "seconds until it listens, and until it answers as before.",
        "B", "copy, ms", "write, s", "restore, s", "listens, s", "answers, s",
    )  # fmt: skip
    table.add_row(
        f"{row.block_nbytes:.1f}", f"{row.copy_ms:.1f}", f"{row.write_s:.2f}", f"{row.restore_s:.2f}",
        f"{row.killed_listens_s:.2f}", f"{row.killed_answers_s:.2f}",
    )  # fmt: skip
    return table


def _empty_table(title: str, first: str, *names: str) -> Table:
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table
