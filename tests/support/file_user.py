"""A process of its own that uses a file store: ``python -m tests.support.file_user WHAT DIRECTORY ...``."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

from kvpool import open_store
from kvpool.errors import KVPoolError
from kvpool.store.file import FileStore
from tests.support.conformance import MIB, key, payload
from tests.support.file_record import file_nbytes

VALUE_NBYTES = 300_000
F_OFD_SETLK = 37


SMALL_CAPACITY_NBYTES = 4 * MIB
RECORD_NBYTES = file_nbytes(10_000)
HOT = range(100_000, 100_040)  # a tenth of what the store keeps


def fill(directory: str, first: str) -> None:
    """Put 400 values of its own, and read those that all share after every four; prints what was evicted."""
    hot = [key(number) for number in HOT]
    with FileStore(directory, SMALL_CAPACITY_NBYTES, 2) as store:
        for number in range(int(first), int(first) + 400, 4):
            names = [key(n) for n in range(number, number + 4)]
            assert store.put_many(names, [payload(number, 10_000)] * 4, timeout_s=60) == [True] * 4
            targets = [bytearray(10_000) for _ in hot]
            assert all(store.get_many_into(hot, targets, timeout_s=60)), "what was just used is gone"
        counters = store.counters()
    assert counters["damaged"] == counters["faults"] == counters["no_room"] == 0, counters
    print(counters["evicted"], counters["eviction_passes"])


def fill_own(directory: str, first: str, capacity_nbytes: str) -> None:
    """Put 400 values of its own, as a process whose URL says this capacity."""
    with FileStore(directory, int(capacity_nbytes), 2) as store:
        for number in range(int(first), int(first) + 400, 4):
            names = [key(n) for n in range(number, number + 4)]
            assert store.put_many(names, [payload(number, 30_000)] * 4, timeout_s=60) == [True] * 4


def put_for_ever(pool: str) -> None:
    """Put into the pool of this URL until killed; says so once the first values are in."""
    with open_store(pool) as store:
        version = 0
        while True:
            numbers = range(20)
            store.put_many(
                [key(n) for n in numbers], [bytes([version % 256]) * (8 * MIB // 10) for _ in numbers]
            )
            if version == 0:
                print("begun", flush=True)
            version += 1


def stop_with_lock(directory: str, which: str) -> None:
    """Stop like a frozen container, while it has the lock of the counts: for one change, or for a pass of eviction."""
    with (Path(directory) / "usage").open("rb+") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX if which == "eviction" else fcntl.LOCK_SH)
        if which == "counts":
            fcntl.fcntl(usage, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        print("held", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def _become_nobody() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def unreadable_as_nobody(directory: str) -> None:
    """Meet a record without the right to read it, among others; see that it is replaced."""
    _become_nobody()
    names, values = [key(n) for n in range(3)], [payload(n, 1000) for n in range(3)]
    with FileStore(directory, MIB, 1) as store:
        store.put_many(names, values)
        _, tenant, namespace, hashed, group, rank = names[1].split(":")
        path = Path(directory) / "blocks" / hashed[-3:] / f"{tenant}.{namespace}.{hashed}.{group}.{rank}"
        path.chmod(0)
        assert store.get_many_into(names, [bytearray(1000) for _ in names]) == [True, False, True]
        assert store.contains_many(names) == [True, False, True]
        damaged = store.counters()["damaged"]
        assert store.put_many(names, values) == [True] * 3
        targets = [bytearray(1000) for _ in names]
        assert store.get_many_into(names, targets) == [True] * 3
        assert targets == values
    print(f"miss {damaged} damaged, then right")


def open_as_nobody(directory: str) -> None:
    """Try to open the store as a user who may not write there."""
    _become_nobody()
    try:
        FileStore(directory, MIB, 1).close()
    except KVPoolError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    {
        "fill": fill,
        "fill_own": fill_own,
        "put_for_ever": put_for_ever,
        "stop_with_lock": stop_with_lock,
        "open_as_nobody": open_as_nobody,
        "unreadable_as_nobody": unreadable_as_nobody,
    }[sys.argv[1]](*sys.argv[2:])


REPOSITORY = Path(__file__).parents[2]


def run_user(what: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.file_user", what, *arguments]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def record_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "blocks").rglob("*") if path.is_file())
