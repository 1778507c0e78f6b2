"""The records in a pool's directory: where they lie, their sizes, and their headers. Errors: ``OSError``.

A file has whole blocks and, as a hole, what pads the last one once more: ``kvpool/_native/store/record_file.h``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from kvpool._native import RECORD_HEADER_NBYTES
from kvpool.key.key import found_key
from kvpool.store.header import writer_in
from kvpool.store.store import StoredBlock, WrittenBlock

FILE_BLOCK = 4096
READERS = 16
RECORDS_AT_ONCE = 64  # of a reader
_NO_FILES = (errno.ENOENT, errno.ELOOP, errno.ENXIO)  # gone; a link; a socket


def stored_blocks(root: Path, prefix: str) -> Iterator[StoredBlock]:
    """Those below ``root`` whose keys start with ``prefix``."""
    for key, path in _records(root, prefix):
        if (status := _status(path)) is not None:
            yield StoredBlock(key, _record_nbytes(status))


def written_blocks(root: Path, prefix: str) -> Iterator[WrittenBlock]:
    """As ``stored_blocks``; of each record it reads the header, in threads: a disk finds many as soon as one."""
    records = _records(root, prefix)
    with ThreadPoolExecutor(READERS, "kvpool-headers") as readers:
        while step := list(islice(records, READERS * RECORDS_AT_ONCE)):
            parts = [step[at : at + RECORDS_AT_ONCE] for at in range(0, len(step), RECORDS_AT_ONCE)]
            for found in readers.map(_written, parts):
                yield from found


def _written(records: Sequence[tuple[str, Path]]) -> list[WrittenBlock]:
    found = []
    for key, path in records:
        if (status := _status(path)) is not None:
            nbytes = _record_nbytes(status)
            found.append(WrittenBlock(key, nbytes, writer_in(_header(path), key, nbytes)))
    return found


def _records(root: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    """{last three digits of the hash}/{tenant}.{namespace}.{hash}.{group}.{rank} below ``root``."""
    for bucket in _entries(root):
        for file in _entries(root / bucket):
            parts = file.split(".")
            key = found_key(*parts) if len(parts) == 5 else None
            if key is not None and key.startswith(prefix) and parts[2][-3:] == bucket:
                yield key, root / bucket / file


def _entries(folder: Path) -> list[str]:
    """Empty if it is gone or no folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)  # noqa: PTH208
    return []


def _status(path: Path) -> os.stat_result | None:
    """None if it is gone, or a folder, which is never a record."""
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return None if stat.S_ISDIR(status.st_mode) else status
    return None


def _record_nbytes(status: os.stat_result) -> int:
    """Header and payload; 0: it was cut."""
    return max(0, status.st_size - 2 * (status.st_size % FILE_BLOCK))


def _header(path: Path) -> bytes:
    """The bytes where a header stands; less, or none, of what is no record."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_FILES:
            return b""
        raise
    try:
        status = os.fstat(file)
        at = status.st_size - status.st_size % FILE_BLOCK - RECORD_HEADER_NBYTES
        return os.pread(file, RECORD_HEADER_NBYTES, at) if stat.S_ISREG(status.st_mode) and at > 0 else b""
    finally:
        os.close(file)
