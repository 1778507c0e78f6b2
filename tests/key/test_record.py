from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool import _native
from kvpool.errors import ConfigError
from kvpool.key.key import Namespace, parse_key
from tests.support import records as record

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN: list[dict[str, Any]] = json.loads((FOLDER / "records.json").read_text())
CUTS: list[dict[str, Any]] = json.loads((FOLDER / "cuts.json").read_text())
KEY = Namespace("t", {"model": "tiny"}).key(bytes(range(32)), 5, 6)


@pytest.mark.parametrize("row", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_records(row: dict[str, Any]) -> None:
    payload, header = bytes.fromhex(row["payload"]), bytes.fromhex(row["header"])
    assert record.pack_header(row["key"], payload, bytes.fromhex(row["writer"])) == header
    assert record.verify(row["key"], header, payload) is None
    fields, key = record.parse_header(header), parse_key(row["key"])
    assert fields == record.Header(
        magic=b"KVPR",
        version=2,
        flags=0,
        payload_nbytes=len(payload),
        fingerprint=key.fingerprint,
        hash_prefix=key.hash[:20].ljust(20, b"\0"),
        group=key.group,
        rank=key.rank,
        writer=bytes.fromhex(row["writer"]),
        checksum=int(row["checksum"], 16),
    )


@pytest.mark.parametrize("row", CUTS, ids=lambda row: row["payload_nbytes"])
def test_golden_cuts(row: dict[str, Any]) -> None:
    assert _native.cut_record(row["payload_nbytes"]) == [tuple(field) for field in row["fields"]]


@given(st.integers(0, 1 << 40))
def test_a_cut_has_all_bytes_and_wastes_little(payload_nbytes: int) -> None:
    fields = _native.cut_record(payload_nbytes)
    assert [name for name, _ in fields] in (["h"], ["b", "h"], ["b", "c", "h"])
    assert sum(nbytes for _, nbytes in fields) == payload_nbytes
    assert all(nbytes for _, nbytes in fields[:-1])


@given(st.binary(min_size=1, max_size=3000))
def test_the_checksum_is_xxh3_64_of_payload_and_header(payload: bytes) -> None:
    header = record.pack_header(KEY, payload)
    assert len(header) == 80
    assert header[72:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(payload + header[:72] + bytes(8)))


@pytest.mark.parametrize("payload_nbytes", [240, 241, 262144 - 80, 262144, 262145, 3_000_000])
def test_the_checksum_of_large_payloads(payload_nbytes: int) -> None:
    payload = bytes(range(251)) * (payload_nbytes // 251 + 1)
    payload = payload[:payload_nbytes]
    header = record.pack_header(KEY, payload)
    assert record.parse_header(header).checksum == xxhash.xxh3_64_intdigest(payload + header[:72] + bytes(8))


def test_every_bit_of_a_header_counts() -> None:
    payload = b"payload"
    header = record.pack_header(KEY, payload)
    for bit in range(80 * 8):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert record.verify(KEY, bytes(flipped), payload) is not None, bit


def test_another_payload_or_key_is_a_fault() -> None:
    header = record.pack_header(KEY, b"payload")
    assert record.verify(KEY, header, b"paYload") == "checksum"
    assert record.verify(KEY, header, b"payloa") == "length"
    assert record.verify(KEY, header, b"payload!") == "length"
    assert record.verify(KEY, header[:79], b"payload") == "truncated"
    assert record.verify(KEY.replace(":5:6", ":6:6"), header, b"payload") == "group"
    assert record.verify(KEY.replace(":5:6", ":5:5"), header, b"payload") == "rank"
    assert (
        record.verify(Namespace("t", {"model": "x"}).key(bytes(range(32)), 5, 6), header, b"payload")
        == "fingerprint"
    )


def test_arguments() -> None:
    for length in (0, 79, 81):
        with pytest.raises(ConfigError, match=f"has 80 bytes, not {length}"):
            record.parse_header(bytes(length))
    with pytest.raises(ConfigError, match="is not a kvpool key"):
        record.pack_header("nonsense", b"x")
    with pytest.raises(ConfigError, match="is not a kvpool key"):
        record.verify("nonsense", bytes(80), b"x")
