from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.key.key import Namespace, parse_key
from tests.support import records as record

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "records.json").read_text())
KEY = Namespace("t", {"model": "tiny"}).key(bytes(range(32)), 5, 6)


@pytest.mark.parametrize("row", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_records(row: dict[str, Any]) -> None:
    payload, header = bytes.fromhex(row["payload"]), bytes.fromhex(row["header"])
    assert record.pack_header(row["key"], payload) == header
    assert record.verify(row["key"], header, payload) is None
    fields, key = record.parse_header(header), parse_key(row["key"])
    assert fields == record.Header(
        magic=b"KVPR",
        version=1,
        flags=0,
        payload_nbytes=len(payload),
        fingerprint=key.fingerprint,
        hash_prefix=key.hash[:20].ljust(20, b"\0"),
        group=key.group,
        rank=key.rank,
        checksum=int(row["checksum"], 16),
    )


@given(st.binary(min_size=1, max_size=3000))
def test_the_checksum_is_xxh3_64_of_header_and_payload(payload: bytes) -> None:
    header = record.pack_header(KEY, payload)
    assert len(header) == 64
    assert header[56:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(header[:56] + bytes(8) + payload))


@pytest.mark.parametrize("payload_nbytes", [240, 241, 262144 - 64, 262144, 262145, 3_000_000])
def test_the_checksum_of_large_payloads(payload_nbytes: int) -> None:
    payload = bytes(range(251)) * (payload_nbytes // 251 + 1)
    payload = payload[:payload_nbytes]
    header = record.pack_header(KEY, payload)
    assert record.parse_header(header).checksum == xxhash.xxh3_64_intdigest(header[:56] + bytes(8) + payload)


def test_every_bit_of_a_header_counts() -> None:
    payload = b"payload"
    header = record.pack_header(KEY, payload)
    for bit in range(64 * 8):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert record.verify(KEY, bytes(flipped), payload) is not None, bit


def test_another_payload_or_key_is_a_fault() -> None:
    header = record.pack_header(KEY, b"payload")
    assert record.verify(KEY, header, b"paYload") == "checksum"
    assert record.verify(KEY, header, b"payloa") == "length"
    assert record.verify(KEY, header, b"payload!") == "length"
    assert record.verify(KEY, header[:63], b"payload") == "truncated"
    assert record.verify(KEY.replace(":5:6", ":6:6"), header, b"payload") == "group"
    assert record.verify(KEY.replace(":5:6", ":5:5"), header, b"payload") == "rank"
    assert (
        record.verify(Namespace("t", {"model": "x"}).key(bytes(range(32)), 5, 6), header, b"payload")
        == "fingerprint"
    )


def test_arguments() -> None:
    for length in (0, 63, 65):
        with pytest.raises(ConfigError, match=f"has 64 bytes, not {length}"):
            record.parse_header(bytes(length))
    with pytest.raises(ConfigError, match="is not a kvpool key"):
        record.pack_header("nonsense", b"x")
    with pytest.raises(ConfigError, match="is not a kvpool key"):
        record.verify("nonsense", bytes(64), b"x")
