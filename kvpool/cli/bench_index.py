"""``kvpool bench index``: the prefix index beside a plain Python dictionary, and a lookup over gRPC beside an echo.

The table is filled with prompts of 8,192 blocks. In the shape ``sessions`` a prompt is held by 1 to 8 workers,
one of them to its end and the others to some block on the way; in the shape ``everybody`` all workers hold all of
it. Prompts are asked in rotation, so that the table, not a cache, answers. The dictionary maps a block's hash to a
bit mask of workers, and is given events that are decoded already.
"""

from __future__ import annotations

import importlib.util
import json
import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpool.cli.bench_events import MOST_HOLDERS, PROMPT_BLOCKS, payloads
from kvpool.cli.bench_restart import RestartRow, measure_restart
from kvpool.cli.bench_rpc import RpcRow, measure_rpc
from kvpool.index import PrefixIndex

SEED = 5
SHORT_BLOCKS = 64


@dataclass(frozen=True)
class Row:
    """One table: M pairs/s are 10^6 (block, holder) pairs a second, from one thread."""

    shape: str
    workers: int
    blocks: int
    pairs: int
    ingest_mpairs_per_s: float  # payloads without tokens
    ingest_tokens_mpairs_per_s: float  # the same, with 16 tokens a block
    dict_ingest_mpairs_per_s: float
    short_us_p50: float
    short_us_p99: float
    dict_short_us_p50: float
    long_us_p50: float
    long_us_p99: float
    dict_long_us_p50: float
    block_nbytes: float
    block_nbytes_most: float  # while the table grew, from 65,536 blocks on
    remove_worker_us: float


def run_bench_index(*, blocks: int, workers: Sequence[int], rounds: int, as_json: bool) -> None:
    """Measure, and print a table or JSON. Blocking: about a minute, and 1 GB of memory, for a million blocks."""
    shapes = [("sessions", count) for count in workers]
    shapes.append(("everybody", min(8, max(workers))))  # a pair for each worker and block: keep it small
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("filling and asking", total=len(shapes))
        for shape, count in shapes:
            rows.append(_measure(shape, count, max(1, blocks // PROMPT_BLOCKS), rounds))
            progress.advance(task)
        rpc_rows: list[RpcRow] = []
        restart: RestartRow | None = None
        if importlib.util.find_spec("grpc") is not None:
            progress.update(task, description="asking over gRPC")
            rpc_rows = measure_rpc(blocks, max(workers), rounds)
            progress.update(task, description="killing and starting again")
            restart = measure_restart(blocks, max(workers))
    index = PrefixIndex()
    call_us = _percentile(_times(lambda _: index.match(b""), 2000, 1), 0.5)
    if as_json:
        print(json.dumps({"call_us": call_us, "rows": [asdict(row) for row in rows],
                          "rpc": [asdict(row) for row in rpc_rows],
                          "restart": restart and asdict(restart)}))  # fmt: skip
        return
    _print(rows, call_us)
    _print_rpc(rpc_rows, max(workers))
    if restart is not None:
        _print_restart(restart)


def _measure(shape: str, workers: int, prompts: int, rounds: int) -> Row:
    draw = random.Random(SEED)
    index, tokens_index, peer = PrefixIndex(), PrefixIndex(), _Dictionary()
    texts = [draw.randbytes(8 * PROMPT_BLOCKS) for _ in range(prompts)]
    pairs, seconds, tokens_s, peer_s, most_nbytes = 0, 0.0, 0.0, 0.0, 0.0
    for number, text in enumerate(texts):
        hashes = struct.unpack(f"<{PROMPT_BLOCKS}Q", text)
        holders: Sequence[int] = range(workers)
        if shape == "sessions":
            holders = draw.sample(range(workers), draw.randint(1, min(MOST_HOLDERS, workers)))
        for place, worker in enumerate(holders):
            part: Sequence[int] = hashes
            if shape == "sessions" and place > 0:
                part = hashes[: draw.randint(1, PROMPT_BLOCKS)]
            seconds += _clock(index, f"worker-{worker}", payloads(part, tokens=False))
            peer_s += peer.store(part, 1 << worker)
            pairs += len(part)
        if len(index) >= 1 << 16:
            most_nbytes = max(most_nbytes, index.memory_nbytes / len(index))
        if number % 8 == 0:  # tokens are slow to make: a part is enough
            tokens_s += _clock(tokens_index, "worker", payloads(hashes, tokens=True))
    with_tokens = len(texts[::8]) * PROMPT_BLOCKS
    block_nbytes = index.memory_nbytes / len(index)
    short = [text[: 8 * SHORT_BLOCKS] for text in texts]
    ours_short = _times(lambda i: index.match(short[i]), prompts, 10 * rounds)
    ours_long = _times(lambda i: index.match(texts[i]), prompts, rounds)
    split = [struct.unpack(f"<{PROMPT_BLOCKS}Q", text) for text in texts[:16]]
    peer_short = _times(lambda i: peer.match(split[i][:SHORT_BLOCKS]), len(split), rounds)
    peer_long = _times(lambda i: peer.match(split[i]), len(split), 2)
    for text, prompt in zip(texts[:16], split, strict=True):
        ours = {int(row.worker[7:]): row.device_blocks for row in index.match(text)}
        assert ours == peer.match(prompt), "the index and the dictionary must agree"
    started = time.perf_counter()
    index.remove_worker("worker-0")
    removal_s = time.perf_counter() - started
    return Row(
        shape=shape,
        workers=workers,
        blocks=prompts * PROMPT_BLOCKS,
        pairs=pairs,
        ingest_mpairs_per_s=pairs / seconds / 1e6,
        ingest_tokens_mpairs_per_s=with_tokens / tokens_s / 1e6,
        dict_ingest_mpairs_per_s=pairs / peer_s / 1e6,
        short_us_p50=_percentile(ours_short, 0.5),
        short_us_p99=_percentile(ours_short, 0.99),
        dict_short_us_p50=_percentile(peer_short, 0.5),
        long_us_p50=_percentile(ours_long, 0.5),
        long_us_p99=_percentile(ours_long, 0.99),
        dict_long_us_p50=_percentile(peer_long, 0.5),
        block_nbytes=block_nbytes,
        block_nbytes_most=max(most_nbytes, block_nbytes),
        remove_worker_us=removal_s * 1e6,
    )


class _Dictionary:
    """The peer: block hash -> bit mask of workers."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def store(self, hashes: Sequence[int], worker: int) -> float:
        """Seconds that it took."""
        masks = self._masks
        started = time.perf_counter()
        for block in hashes:
            masks[block] = masks.get(block, 0) | worker
        return time.perf_counter() - started

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        """Leading blocks by worker; who holds none is left out."""
        found: dict[int, int] = {}
        masks = self._masks
        running = masks.get(hashes[0], 0)
        for count, block in enumerate(hashes):
            now = running & masks.get(block, 0)
            if now != running:
                _end(found, running & ~now, count)
                running = now
            if not running:
                return found
        _end(found, running, len(hashes))
        return found


def _end(found: dict[int, int], workers: int, count: int) -> None:
    while workers:
        worker = workers & -workers
        found[worker.bit_length() - 1] = count
        workers ^= worker


def _clock(index: PrefixIndex, worker: str, payloads: Sequence[bytes]) -> float:
    started = time.perf_counter()
    for payload in payloads:
        index.apply(worker, payload)
    return time.perf_counter() - started


def _times(ask: Callable[[int], object], prompts: int, rounds: int) -> list[float]:
    """Microseconds of every call, prompt after prompt; the first round only warms up."""
    times = []
    for turn in range(rounds + 1):
        for number in range(prompts):
            started = time.perf_counter()
            ask(number)
            if turn:
                times.append((time.perf_counter() - started) * 1e6)
    return sorted(times)


def _percentile(sorted_values: Sequence[float], part: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(part * len(sorted_values)))]


def _print(rows: Sequence[Row], call_us: float) -> None:
    table = Table(
        title=f"{rows[0].blocks:,} blocks, one thread. Ingest: million pairs/s, from payloads and with their "
        f"tokens. Lookups: p50 and p99 in us; an empty call takes {call_us:.2f}. Memory: bytes a block, and the "
        "most while the table grew."
    )
    names = ("held by", "in", "ingest", "tokens", "64", "p99", "8,192", "p99", "B", "most")
    for name in names:
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for row in rows:
        table.add_row(
            f"{row.workers} {row.shape}",
            "kvpool",
            f"{row.ingest_mpairs_per_s:.1f}",
            f"{row.ingest_tokens_mpairs_per_s:.1f}",
            f"{row.short_us_p50:.2f}",
            f"{row.short_us_p99:.2f}",
            f"{row.long_us_p50:.0f}",
            f"{row.long_us_p99:.0f}",
            f"{row.block_nbytes:.1f}",
            f"{row.block_nbytes_most:.1f}",
        )
        dictionary = (f"{row.dict_short_us_p50:.2f}", "", f"{row.dict_long_us_p50:.0f}")
        table.add_row("", "dict", f"{row.dict_ingest_mpairs_per_s:.1f}", "", *dictionary, end_section=True)
    Console().print(table)


def _print_rpc(rows: Sequence[RpcRow], workers: int) -> None:
    console = Console()
    if not rows:
        console.print("Lookups over gRPC were not measured: pip install 'kvpool[index]'", highlight=False)
        return
    table = Table(
        title=f"Lookups of {PROMPT_BLOCKS:,} blocks over gRPC, {workers} workers, in us, beside an echo of as many "
        "bytes in the same server. ratio: of the medians."
    )
    names = ("call", "callers", "p50", "p99", "echo p50", "echo p99", "ratio")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        times = (row.p50_us, row.p99_us, row.echo_p50_us, row.echo_p99_us)
        table.add_row(
            row.kind, f"{row.callers}", *(f"{each:.0f}" for each in times), f"{row.p50_over_echo:.2f}"
        )
    console.print(table)


def _print_restart(row: RestartRow) -> None:
    table = Table(
        title=f"A restart with {row.blocks:,} blocks at {row.workers} workers: bytes a block in the file; ms for which "
        "batches wait; seconds to pack and write, and to read and take over. Killed with one worker of as many blocks: "
        "seconds until it listens, and until it answers as before."
    )
    for name in ("B", "copy, ms", "write, s", "restore, s", "listens, s", "answers, s"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{row.block_nbytes:.1f}", f"{row.copy_ms:.1f}", f"{row.write_s:.2f}", f"{row.restore_s:.2f}",
        f"{row.killed_listens_s:.2f}", f"{row.killed_answers_s:.2f}",
    )  # fmt: skip
    Console().print(table)
