"""What a put into a full file store costs, by how many records it holds:

    python -m tests.store.evicting /dev/shm/kvpool-evicting 5000000

The records that fill it are sparse (no payload is ever read), so that five million of them take 6 GiB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import time
from pathlib import Path

from kvpool.key.key import Namespace
from kvpool.store.file import FileStore

VALUE_NBYTES = 1024
RECORD_NBYTES = VALUE_NBYTES + 64
TIMEOUT_S = 5.0
COUNTING_PUTS = 4000  # until all is counted again: opening counts for a tenth of a second only


def fill(root: Path, namespace: Namespace, count: int) -> None:
    """Records number 0 to ``count``, the lower the longer unused, by an hour in all."""
    for bucket in range(4096):
        (root / "blocks" / f"{bucket:03x}").mkdir()
    start_ns = time.time_ns() - 3600 * 10**9
    step_ns = 3600 * 10**9 // count
    for number in range(count):
        name = namespace.key(hashlib.md5(b"%d" % number).digest(), 0, 0)[7:].replace(":", ".")
        block_hash = name.split(".")[2]
        file = os.open(f"{root}/blocks/{block_hash[-3:]}/{name}", os.O_CREAT | os.O_WRONLY, 0o600)
        os.ftruncate(file, RECORD_NBYTES)
        os.utime(file, ns=(start_ns + number * step_ns,) * 2)
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="is made, and removed at the end")
    parser.add_argument("records", type=int)
    parser.add_argument("--puts", type=int, default=20_000)
    arguments = parser.parse_args()
    root, count = arguments.directory, arguments.records
    namespace = Namespace("bench", {"bench": "evicting"})
    capacity_nbytes = count * RECORD_NBYTES
    FileStore(str(root), capacity_nbytes, 1).close()
    try:
        (root / "usage").unlink()
        fill(root, namespace, count)
        began = time.perf_counter()
        store = FileStore(str(root), capacity_nbytes, 1)
        opened_ms = (time.perf_counter() - began) * 1e3
        with store:
            value = os.urandom(VALUE_NBYTES)
            took_us: list[float] = []
            failed, cpu_s = 0, 0.0
            for number in range(COUNTING_PUTS + arguments.puts):
                if number == COUNTING_PUTS:
                    cpu_s = time.process_time()
                key = namespace.key(hashlib.md5(b"new %d" % number).digest(), 0, 0)
                began = time.perf_counter()
                failed += not store.put_many([key], [value], timeout_s=TIMEOUT_S)[0]
                took_us.append((time.perf_counter() - began) * 1e6)
            cpu_s = time.process_time() - cpu_s
            counters = store.counters()
        counting_us, steady_us = sorted(took_us[:COUNTING_PUTS]), sorted(took_us[COUNTING_PUTS:])
        mean_us, cpu_us = sum(steady_us) / len(steady_us), cpu_s * 1e6 / len(steady_us)
        p50_us, p99_us = (steady_us[int(len(steady_us) * part)] for part in (0.5, 0.99))
        print(f"{count} records: opened in {opened_ms:.0f} ms")
        print(
            f"{COUNTING_PUTS} puts that count, too: {sum(counting_us) / 1e3:.0f} ms, max {counting_us[-1]:.0f} us"
        )
        print(
            f"{len(steady_us)} puts: mean {mean_us:.0f} us (processor {cpu_us:.0f}), p50 {p50_us:.0f}, "
            f"p99 {p99_us:.0f}, max {steady_us[-1]:.0f}; failed {failed}, evicted {counters['evicted']} "
            f"in {counters['eviction_passes']} passes"
        )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
