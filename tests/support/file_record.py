"""The record in a file of a pool: payload, zeros to whole blocks, and the header at the end of the last one."""

from __future__ import annotations

import os
from pathlib import Path

from kvpool.store.file_records import FILE_BLOCK
from tests.support.records import HEADER_NBYTES


def file_nbytes(payload_nbytes: int) -> int:
    """What a record takes of a pool's capacity."""
    return -(-(payload_nbytes + HEADER_NBYTES) // FILE_BLOCK) * FILE_BLOCK


def held_nbytes(path: Path) -> int:
    """What a file takes of a pool's capacity."""
    size = path.stat().st_size
    return size if size < FILE_BLOCK else size - size % FILE_BLOCK


def payload_nbytes(path: Path) -> int:
    size = path.stat().st_size
    return size - 2 * (size % FILE_BLOCK) - HEADER_NBYTES


def read_record(path: Path) -> bytes:
    """The payload, and the header behind it."""
    content = path.read_bytes()[: held_nbytes(path)]
    return content[: payload_nbytes(path)] + content[-HEADER_NBYTES:]


def write_record(path: Path, record: bytes) -> None:
    """In place of the one there, of whatever length."""
    payload, header = record[:-HEADER_NBYTES], record[-HEADER_NBYTES:]
    nbytes = file_nbytes(len(payload))
    padding = nbytes - len(record)
    path.write_bytes(payload + bytes(padding) + header)
    os.truncate(path, nbytes + padding)
