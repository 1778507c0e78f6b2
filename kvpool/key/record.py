"""The record: a 64-byte header in front of every payload, which proves that the bytes are those of the key.

The header names the whole key but for the tenant, whose keyspace the server's own rules protect. Packing and
verifying are native, in the threads that move the bytes; here the form is written down, and read for people.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from kvpool import _native
from kvpool.errors import ConfigError
from kvpool.key.key import parse_key

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"KVPR"
VERSION = 1  # fixes the checksum, too: version 1 is XXH3-64
HEADER_NBYTES = 64
HASH_PREFIX_NBYTES = 20

_HEADER = struct.Struct(
    "<"  # little-endian, packed
    "4s"  # magic: "KVPR"
    "H"  # version: 1
    "H"  # flags: 0
    "Q"  # payload_nbytes: bytes that follow the header
    "16s"  # fingerprint: of the namespace
    "20s"  # hash_prefix: first 20 bytes of the block hash, padded with zeros
    "H"  # group
    "H"  # rank
    "Q"  # checksum: XXH3-64 over the header with this field zero, then the payload
)
assert _HEADER.size == HEADER_NBYTES == _native.RECORD_HEADER_NBYTES


class Header(NamedTuple):
    """The fields of a record's header, in their order; see the format above."""

    magic: bytes
    version: int
    flags: int
    payload_nbytes: int
    fingerprint: bytes
    hash_prefix: bytes
    group: int
    rank: int
    checksum: int


def parse_header(header: bytes) -> Header:
    """Take a header's 64 bytes apart; it judges nothing but their number: ``verify`` does.

    Errors: ``ConfigError`` when there are not 64 of them.
    """
    if len(header) != HEADER_NBYTES:
        raise ConfigError(f"a record's header has {HEADER_NBYTES} bytes, not {len(header)}")
    return Header._make(_HEADER.unpack(header))


def pack_header(key: str, payload: Buffer) -> bytes:
    """The 64-byte header of ``payload`` (contiguous, not empty) under ``key``.

    Native; holds nothing. Errors: ``ConfigError`` for a key that is none.
    """
    parse_key(key)
    return _native.pack_header(key, payload)


def verify(key: str, header: bytes, payload: Buffer) -> str | None:
    """None if ``header`` and ``payload`` are a record of ``key``; else what is wrong, in words, first fault
    first.

    Errors: ``ConfigError`` for a key that is none.
    """
    parse_key(key)
    return _native.verify_record(key, header, payload)
