"""``python -m benchmarks gpu``: KV cache -> pool -> KV cache, through the mover and the stores of a worker.

Blocks of a KV cache on the accelerator (else in main memory) are stored in a local pool. Then they are loaded
into other blocks, and compared. Each row has its own pool and servers, by shards, io-threads, record size and
native client threads. The first round warms up; figures are medians of the others.
"""

from __future__ import annotations

import itertools
import random
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu_report import Report, Row, Way, say, show
from benchmarks.measure import accelerator
from benchmarks.valkey_shards import ValkeyShards, find_server
from kvpool.cli.bench_store import benched_pool
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.metrics import Counters
from kvpool.store import Store, open_store
from kvpool.transfer import Block, BlockCopier, KVCacheMover
from kvpool.transfer.device import device_of
from kvpool.transfer.memory import LOAD_RESERVE, Staging

# A tensor-parallel rank (of four) of Llama-3-8B: 32 layers, K and V, 16 tokens, 2 of 8 heads of 128,
# bfloat16. So 1 to 8 blocks a record are 512 KiB to 4 MiB.
LAYERS, LAYER_BLOCK = 32, (2, 16, 2, 128)
BLOCK_NBYTES = 512 << 10
BATCH_NBYTES, ROUNDS = 1 << 30, 3
SMALL_BATCH_NBYTES, SMALL_ROUNDS = 32 << 20, 1
BATCH_TIMEOUT_S = 30.0  # per batch one way; a row has two per round
SEED = 3


@dataclass(frozen=True)
class Case:
    """``shards`` 0: the file store, in shared memory. ``near``: that one before the servers. ``threads``: native
    client threads.
    """

    shards: int
    io_threads: int
    blocks_per_record: int
    threads: int
    near: bool = False

    def row(self) -> Row:
        record_nbytes = self.blocks_per_record * BLOCK_NBYTES
        return Row(
            self.shards, self.io_threads, record_nbytes, self.blocks_per_record, self.threads, self.near
        )


def cases() -> Iterator[Case]:
    """Shards by io-threads; then, at 8 shards and in files, record sizes and client threads; then files before 8."""
    for shards, io_threads in itertools.product((1, 2, 4, 8), (1, 4, 8)):
        yield Case(shards, io_threads, 4, 4)
    for shards in (8, 0):
        middle = Case(shards, 1 if shards else 0, 4, 4)
        if not shards:
            yield middle
        yield from (replace(middle, blocks_per_record=blocks) for blocks in (1, 2, 8))
        yield from (replace(middle, threads=threads) for threads in (1, 2, 8, 16))
    yield Case(8, 1, 4, 4, near=True)


def small_cases() -> Iterator[Case]:
    yield from (Case(1, 1, 1, 2), Case(2, 4, 4, 2), Case(0, 0, 4, 2), Case(1, 1, 4, 2, near=True))


def run_gpu(*, server: Path | None, small: bool, max_s: float, as_json: bool) -> bool:
    """Measure and print; whether every row was measured and every byte returned.

    Blocks for minutes; no row begins after ``max_s``. Memory: on the device two batches, twice that while
    comparing; pinned 1.4 batches; on the servers one. Errors: ``KVPoolError``.
    """
    program, started = find_server(server), time.monotonic()
    batch_nbytes, rounds = (SMALL_BATCH_NBYTES, SMALL_ROUNDS) if small else (BATCH_NBYTES, ROUNDS)
    cache = _Cache(batch_nbytes // BLOCK_NBYTES)
    plain = cache.plain_copies()
    say(f"plain copies: {plain['store']:.1f} GB/s to host memory, {plain['load']:.1f} GB/s from there")
    rows = []
    for case in small_cases() if small else cases():
        if time.monotonic() - started > max_s:
            row = replace(case.row(), fault=f"not begun within {max_s:.0f} s (--max-seconds)")
        else:
            row = _measured(case, cache, program, rounds)
        say(row.line())
        rows.append(row)
    device = cache.tensor.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    show(Report(name, batch_nbytes, rounds, plain, rows), as_json)
    return all(row.fault is None for row in rows)


class _Cache:
    """A KV cache of ``2 * blocks`` blocks and vLLM's null block: one half is stored, the other loaded."""

    def __init__(self, blocks: int) -> None:
        place = torch.device(accelerator() or "cpu")
        self.device = device_of(place)
        self.nbytes = blocks * BLOCK_NBYTES
        shape = (LAYERS, 2 * blocks + 1, *LAYER_BLOCK)
        self.tensor = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=place)
        order = random.Random(SEED).sample(range(1, 2 * blocks + 1), 2 * blocks)
        self.source, self.target = order[:blocks], order[blocks:]

    def layers(self) -> list[torch.Tensor]:
        return list(self.tensor.view(torch.bfloat16))

    def clear_target(self) -> None:
        self.tensor[:, self.target] = 0
        self.wait()

    def came_back(self) -> bool:
        return torch.equal(self.tensor[:, self.source], self.tensor[:, self.target])

    def wait(self) -> None:
        if self.device.pinned:
            torch.accelerator.synchronize()

    def plain_copies(self) -> dict[str, float]:
        """GB/s of one contiguous copy of a batch to and from pinned memory: the upper bound of every row."""
        host = Staging(self.nbytes, 1, self.device.pinned).tensor[: self.nbytes]
        ours = self.tensor.view(-1).view(torch.uint8)[: self.nbytes]

        def gb_per_s(copy: Callable[[], object]) -> float:
            times = []
            for _ in range(ROUNDS + 1):
                self.wait()
                started = time.perf_counter()
                copy()
                self.wait()
                times.append(time.perf_counter() - started)
            return self.nbytes / statistics.median(times[1:]) / 1e9

        return {
            "store": gb_per_s(lambda: host.copy_(ours, non_blocking=True)),
            "load": gb_per_s(lambda: ours.copy_(host, non_blocking=True)),
        }


def _measured(case: Case, cache: _Cache, program: str, rounds: int) -> Row:
    """The row of a case; it records a failure."""
    try:
        with _pool(case, cache.nbytes, program) as pool:
            return _Bench(case, cache, pool).run(rounds)
    except (KVPoolError, RuntimeError, OSError) as error:
        lines = str(error).splitlines() or [""]
        return replace(case.row(), fault=f"{type(error).__name__}: {lines[0]}"[:200])


class _Pool:
    """An open store, and its servers' figures; files have no servers."""

    def __init__(self, store: Store, shards: ValkeyShards | None) -> None:
        self.store, self._shards = store, shards

    def ran_s(self) -> float:
        return self._shards.ran_s() if self._shards else 0.0

    def settle(self) -> None:
        """Wait until the far pool has what the near one has. Blocking. Errors: ``StoreUnavailable``."""
        ends_s = time.monotonic() + BATCH_TIMEOUT_S
        while self.store.counters().get("behind_waiting"):
            if time.monotonic() > ends_s:
                raise StoreUnavailable(f"the far pool did not have all within {BATCH_TIMEOUT_S:g} s")
            time.sleep(0.01)


@contextmanager
def _pool(case: Case, batch_nbytes: int, program: str) -> Iterator[_Pool]:
    if not case.shards:
        with benched_pool(None, batch_nbytes) as (url, _), open_store(url, threads=case.threads) as store:
            yield _Pool(store, None)
        return
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-"))
    try:
        with ExitStack() as opened:
            shards = opened.enter_context(
                ValkeyShards(program, folder, shards=case.shards, io_threads=case.io_threads)
            )
            urls = [opened.enter_context(benched_pool(None, batch_nbytes))[0]] if case.near else []
            store = opened.enter_context(open_store([*urls, shards.url], threads=case.threads))
            yield _Pool(store, shards)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Bench:
    """One row: the batch is one stage of a step, and one load of a prompt."""

    def __init__(self, case: Case, cache: _Cache, pool: _Pool) -> None:
        self._case, self._cache, self._pool = case, cache, pool
        copier = BlockCopier(cache.layers(), case.blocks_per_record)
        self._records = cache.nbytes // copier.payload_nbytes
        namespace = Namespace("bench", {"run": secrets.token_hex(16)})
        self._keys = [namespace.key(at.to_bytes(32, "big"), 0, 0) for at in range(self._records)]
        slots = int(self._records / (1 - LOAD_RESERVE)) + 2
        self._mover = KVCacheMover(
            pool.store,
            [copier],
            staging_nbytes=slots * copier.payload_nbytes,
            max_store_nbytes_per_s=0,
            counters=Counters(),
        )

    def run(self, rounds: int) -> Row:
        stores, loads = [], []
        try:
            for _ in range(rounds + 1):
                # So that the server's memory is allocated, as in a pool that has long been full.
                self._pool.store.delete_many(self._keys, timeout_s=BATCH_TIMEOUT_S)
                stores.append(self._timed(self._store))
                self._pool.settle()
                self._cache.clear_target()
                loads.append(self._timed(self._load))
                if not self._cache.came_back():
                    return replace(self._case.row(), fault="other bytes came back")
        finally:
            self._mover.close()
        return replace(self._case.row(), store=_median(stores[1:]), load=_median(loads[1:]))

    def _timed(self, move: Callable[[], None]) -> Way:
        gigabytes = self._cache.nbytes / 1e9
        server_s, client_s = self._pool.ran_s(), time.process_time()
        started = time.perf_counter()
        move()
        taken_s = time.perf_counter() - started
        client_s, server_s = time.process_time() - client_s, self._pool.ran_s() - server_s
        return Way(gigabytes / taken_s, client_s / gigabytes, server_s / gigabytes)

    def _store(self) -> None:
        self._mover.stage(self._blocks(self._cache.source), list(range(self._records)))
        self._drain()
        stored = self._mover.poll().stores
        if causes := sorted({moved.cause for moved in stored if moved.cause}):
            raise RuntimeError(f"a store failed: {', '.join(causes)}")

    def _load(self) -> None:
        blocks = self._blocks(self._cache.target)
        self._mover.load("load", blocks, timeout_s=BATCH_TIMEOUT_S, max_s=BATCH_TIMEOUT_S)
        self._drain()
        (loaded,) = self._mover.poll().loads
        if loaded.cause:
            raise RuntimeError(f"a load failed: {loaded.cause}: {loaded.error}")

    def _drain(self) -> None:
        if not self._mover.drain(BATCH_TIMEOUT_S):
            raise RuntimeError(f"a batch was not over within {BATCH_TIMEOUT_S:g} s")

    def _blocks(self, places: list[int]) -> list[Block]:
        wide = self._case.blocks_per_record
        return [
            Block(key, 0, tuple(places[at * wide : (at + 1) * wide])) for at, key in enumerate(self._keys)
        ]


def _median(ways: list[Way]) -> Way:
    return Way(*(statistics.median(each) for each in zip(*ways, strict=True)))
