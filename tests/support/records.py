"""The record: a payload and a header of 80 bytes behind it, which proves that the bytes belong to the key.

The header names the whole key except the tenant, whose keyspace the server's access rules protect. Native I/O
threads pack and verify; here the format is told once more, for tests.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool import _native
from kvpool.errors import ConfigError
from kvpool.key.key import is_key, parse_key

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"KVPR"
VERSION = 2  # fixes the checksum, too: XXH3-64
HEADER_NBYTES = 80
HASH_PREFIX_NBYTES = 20

_HEADER = struct.Struct(
    "<"  # little-endian, packed
    "4s"  # magic: "KVPR"
    "H"  # version: 2
    "H"  # flags: 0
    "Q"  # payload_nbytes: bytes before the header
    "16s"  # fingerprint: of the namespace
    "20s"  # hash_prefix: first 20 bytes of the block hash, padded with zeros
    "H"  # group
    "H"  # rank
    "16s"  # writer: zeros
    "Q"  # checksum: XXH3-64 over the payload, then the header with this field zero
)
assert _HEADER.size == HEADER_NBYTES == _native.RECORD_HEADER_NBYTES


class Header(NamedTuple):
    magic: bytes
    version: int
    flags: int
    payload_nbytes: int
    fingerprint: bytes
    hash_prefix: bytes
    group: int
    rank: int
    writer: bytes
    checksum: int


def parse_header(header: bytes) -> Header:
    """Parse a header's 80 bytes, unverified. Errors: ``ConfigError`` for another length."""
    if len(header) != HEADER_NBYTES:
        raise ConfigError(f"a record's header has {HEADER_NBYTES} bytes, not {len(header)}")
    return Header._make(_HEADER.unpack(header))


def pack_header(key: str, payload: Buffer, writer: bytes = b"") -> bytes:
    """The header of ``payload`` (contiguous, not empty). Errors: ``ConfigError`` for an invalid key."""
    parse_key(key)
    return _native.pack_header(key, payload, writer)


def verify(key: str, header: bytes, payload: Buffer) -> str | None:
    """None for a record of ``key``, else the first fault in words. Errors: ``ConfigError`` for a wrong key."""
    parse_key(key)
    return _native.verify_record(key, header, payload)


def fields_of(key: str, payload: bytes, header: bytes | None = None) -> dict[bytes, bytes]:
    """What a server holds of a record, in the order of its bytes; ``header``: in place of the right one."""
    record = payload + (pack_header(key, payload) if header is None else header)
    fields, begin = {}, 0
    for name, nbytes in _native.cut_record(len(payload)):
        fields[name.encode()] = record[begin : begin + nbytes]
        begin += nbytes
    fields[b"h"] += record[begin:]
    return fields


def records_on(client: Any) -> int:
    """How many blocks a server has, asked by redis-py; announcements are keys, too."""
    return sum(is_key(key.decode()) for key in client.scan_iter(count=1000))
