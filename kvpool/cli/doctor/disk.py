"""The disk below a pool's directory: does it read past the page cache, and how fast."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvpool.cli.doctor.subjects import Disk
from kvpool.store.file_system import FileSystem
from kvpool.text import format_size

MOST_READ_NBYTES = 256 << 20
LONGEST_READ_S = 0.5
LEAST_READ_NBYTES = 4 << 20  # to speak of a speed
MOST_RECORDS = 1000
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # of O_DIRECT


def look_at_disk(pool: Path, system: FileSystem) -> Disk:
    """Read some records, as a load does, one at a time. Blocks for a second at most where the disk answers."""
    read_nbytes, records, took_s, direct = 0, 0, 0.0, True
    buffer = mmap.mmap(-1, 4 << 20)  # begins with a page
    for record in islice(_records(pool), MOST_RECORDS):
        if read_nbytes >= MOST_READ_NBYTES or took_s >= LONGEST_READ_S:
            break
        started = time.perf_counter()
        try:
            read_nbytes += _read(record, buffer)
            records += 1
        except OSError as error:
            if error.errno in _REFUSALS:
                direct = False
                break
            # The record was evicted, or nobody can read it: loads count that.
        took_s += time.perf_counter() - started
    is_told = read_nbytes >= LEAST_READ_NBYTES
    if not is_told:
        return Disk(system.place, system.kind, direct, None)
    return Disk(
        system.place, system.kind, direct, read_nbytes / took_s / 1e9, format_size(read_nbytes / records)
    )


def _records(pool: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for bucket in (pool / "blocks").iterdir():
            with contextlib.suppress(OSError):
                yield from bucket.iterdir()


def _read(record: Path, buffer: mmap.mmap) -> int:
    file = os.open(record, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        at = 0
        while n := os.preadv(file, [buffer], at):
            at += n
            if n < len(buffer):
                break
        return at
    finally:
        os.close(file)
