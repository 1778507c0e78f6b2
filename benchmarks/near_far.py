"""``python -m benchmarks near-far``: what a far pool costs a near one, dead or alive, and what both cost a put.

- A batch of 400 gets near: the far server alive, then dead, with keys that wait for it.
- Records far of the living shards: all three alive, then one dead.
- CPU of a put: near alone, far alone, through both; until far has it. In turns, the median.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.valkey_shards import ValkeyShards, find_server
from kvpool.errors import StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.store import Store, open_store

GETS = 400
BATCHES = 5  # a round
NBYTES = 64 << 10
RECORDS = 1200
PUT_NBYTES = 1 << 20
PUTS = 128
PART = 8  # puts of a batch
TIMEOUT_S = 120.0
NAMESPACE = Namespace("bench", {"of": "near and far"})


def run_near_far(*, waiting: int, rounds: int, server: Path | None, as_json: bool) -> None:
    """Measure and print. Blocks for a minute or two."""
    program = find_server(server)
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="kvpool-bench-", dir=fast))
    try:
        alive_ms, dead_ms = _gets(program, folder / "gets", waiting, rounds)
        all_s, one_dead_s = (_shards(program, folder / f"shards-{dead}", dead) for dead in (False, True))
        near_s, far_s, both_s = _puts(program, folder / "puts", rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = {
        "gets_near_ms": {"far_alive": alive_ms, "far_dead": dead_ms, "ratio": dead_ms / alive_ms},
        "records_far_s": {"all_alive": all_s, "one_of_three_dead": one_dead_s, "ratio": one_dead_s / all_s},
        "put_cpu_s_per_gb": {
            "near": near_s, "far": far_s, "both": both_s, "ratio": both_s / (near_s + far_s),
        },
    }  # fmt: skip
    if as_json:
        print(json.dumps(report | {"waiting": waiting, "rounds": rounds}))
        return
    print(
        f"{GETS} gets near, ms: far alive {alive_ms:.1f}, dead beside {waiting:,} waiting keys {dead_ms:.1f}"
    )
    print(
        f"records of two of three shards, far after: all alive {all_s:.2f} s, the third dead {one_dead_s:.2f} s"
    )
    print(
        f"CPU of a put, s/GB: near {near_s:.2f}, far {far_s:.2f}, both {both_s:.2f}, "
        f"{both_s / (near_s + far_s):.2f} of their sum"
    )


def _key(number: int) -> str:
    return NAMESPACE.key(number.to_bytes(32, "big"), 0, 0)


@contextlib.contextmanager
def _pool(program: str, folder: Path, shards: int) -> Iterator[tuple[ValkeyShards, str, str]]:
    """Servers, the near URL and the far one."""
    folder.mkdir()
    with ValkeyShards(program, folder, shards=shards, io_threads=1) as servers:
        yield servers, f"file://{folder}/near?capacity=4GiB", servers.url


def _until(condition: Callable[[], bool], what: str) -> float:
    began_s = time.perf_counter()
    while not condition():
        if time.perf_counter() - began_s > TIMEOUT_S:
            raise StoreUnavailable(f"{what}: not within {TIMEOUT_S:g} s")
        time.sleep(0.002)
    return time.perf_counter() - began_s


def _put(store: Store, numbers: Sequence[int], value: bytes) -> None:
    for start in range(0, len(numbers), 1024):
        names = [_key(number) for number in numbers[start : start + 1024]]
        store.submit_put_absent(names, [value] * len(names), timeout_s=TIMEOUT_S).wait()


def _gets(program: str, folder: Path, waiting: int, rounds: int) -> tuple[float, float]:
    with _pool(program, folder, 1) as (servers, near, far), open_store([near, far]) as store:
        names, targets = [_key(number) for number in range(GETS)], [bytearray(NBYTES) for _ in range(GETS)]
        _put(store, range(GETS), os.urandom(NBYTES))
        _until(lambda: store.counters()["behind_waiting"] == 0, "copies to a living far pool")

        def one_ms() -> float:
            began_s = time.perf_counter()
            store.get_many_into(names, targets, timeout_s=TIMEOUT_S)
            return (time.perf_counter() - began_s) * 1e3

        # The mean: what stalls may stall some of them.
        alive_ms = statistics.mean(one_ms() for _ in range(BATCHES * rounds))
        servers.kill(0)
        _put(store, range(GETS, GETS + waiting), os.urandom(64))
        dead_ms = statistics.mean(one_ms() for _ in range(BATCHES * rounds))
    return alive_ms, dead_ms


def _shards(program: str, folder: Path, dead: bool) -> float:
    with _pool(program, folder, 3) as (servers, near, far), open_store([near, far]) as store:
        _put(store, range(3), bytes(64))  # connections stand
        _until(lambda: store.counters()["behind_waiting"] == 0, "copies to living shards")
        if dead:
            servers.kill(2)
        wanted = sum(servers.shard_of(_key(number)) != 2 for number in range(10, 10 + RECORDS))
        before = servers.keys(0) + servers.keys(1)
        began_s = time.perf_counter()
        _put(store, range(10, 10 + RECORDS), os.urandom(NBYTES))
        _until(lambda: servers.keys(0) + servers.keys(1) - before >= wanted, "records of living shards")
        return time.perf_counter() - began_s


def _puts(program: str, folder: Path, rounds: int) -> tuple[float, float, float]:
    values = [os.urandom(PUT_NBYTES) for _ in range(PUTS)]
    with _pool(program, folder, 1) as (_, near, far):
        used: dict[int, list[float]] = {0: [], 1: [], 2: []}
        for _round in range(rounds):
            for place, url in enumerate(([near], [far], [near, far])):
                with open_store(url) as store:
                    used[place].append(_cpu_s(store, values) / (PUTS * PUT_NBYTES / 1e9))
                with open_store([near, far]) as store:
                    store.delete_many([_key(number) for number in range(PUTS)], timeout_s=TIMEOUT_S)
        near_s, far_s, both_s = (statistics.median(each) for each in used.values())
    return near_s, far_s, both_s


def _cpu_s(store: Store, values: Sequence[bytes]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    for start in range(0, PUTS, PART):
        names = [_key(number) for number in range(start, start + PART)]
        store.submit_put_absent(names, values[start : start + PART], timeout_s=TIMEOUT_S).wait()
    while store.counters().get("behind_waiting"):
        time.sleep(0.002)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
