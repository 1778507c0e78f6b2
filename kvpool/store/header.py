"""What a record's header says without its payload: who wrote it."""

from __future__ import annotations

import struct

from kvpool import _native
from kvpool.key.key import parse_key
from kvpool.store.batch import WRITER_NBYTES

NOBODY = bytes(WRITER_NBYTES)  # of a record that names no writer
WRITER = slice(56, 56 + WRITER_NBYTES)  # in a header

_MAGIC = b"KVPR"
_IDENTITY = struct.Struct(
    "<"  # little-endian, packed
    "4s"  # magic
    "H"  # version
    "H"  # flags: 0
    "Q"  # payload_nbytes
    "16s"  # fingerprint: of the namespace
    "20s"  # hash_prefix: of the block, padded with zeros
    "H"  # group
    "H"  # rank
)
assert _IDENTITY.size == WRITER.start
assert WRITER.stop + 8 == _native.RECORD_HEADER_NBYTES  # the checksum


def writer_in(header: bytes, key: str, record_nbytes: int) -> bytes:
    """The writer that ``header`` names; ``NOBODY`` unless it is of ``key`` and of a record of so many bytes.

    The checksum is not read: a record that changed since keeps its writer's name.
    """
    payload_nbytes = record_nbytes - _native.RECORD_HEADER_NBYTES
    if len(header) != _native.RECORD_HEADER_NBYTES or payload_nbytes < 1:
        return NOBODY
    _, fingerprint, block_hash, group, rank = parse_key(key)
    of_key = _IDENTITY.pack(
        _MAGIC, _native.RECORD_VERSION, 0, payload_nbytes, fingerprint, block_hash[:20], group, rank
    )
    return header[WRITER] if header.startswith(of_key) else NOBODY
