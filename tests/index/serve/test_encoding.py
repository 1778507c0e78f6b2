"""Requests over HTTP: what they say, what is refused in one line, and that nothing grows before it is known."""

from __future__ import annotations

import json
import struct
import tracemalloc
from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ConfigError
from kvpool.index.serve.encoding import HASHES, MAX_FIELDS, MAX_LISTED, MAX_VALUE_NBYTES, TOKENS, Encoding

MANY = 4 << 20
WIDE = b"\xdd" + struct.pack(">I", MANY)  # an array of as many


def decoded(**fields: Any) -> Any:
    return Encoding.MSGPACK.decode(msgpack.packb(fields))


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        (None, Encoding.JSON),
        ("application/x-www-form-urlencoded", Encoding.JSON),
        ("application/json; charset=utf-8", Encoding.JSON),
        ("application/msgpack", Encoding.MSGPACK),
        ("Application/MsgPack; x=y", Encoding.MSGPACK),
    ],
)
def test_the_header_says_how_a_request_is_written(content_type: str | None, encoding: Encoding) -> None:
    assert Encoding.of(content_type) is encoding


@pytest.mark.parametrize("tokens", [[], [0], [1, 70_000, (1 << 31) - 1]])
def test_tokens_are_packed_int32_or_a_list(tokens: list[int]) -> None:
    expected = {"model": "m", "token_ids": array("I", tokens)}
    assert decoded(model="m", token_ids=struct.pack(f"<{len(tokens)}i", *tokens)) == expected
    assert decoded(model="m", token_ids=tokens) == expected


def test_other_fields_are_as_they_were_sent() -> None:
    fields = {"model": "m", "dp_rank": 3, "cache_salt": None, "hash_profile": {"algorithm": "sha256_cbor"}}
    assert decoded(**fields) == fields


@pytest.mark.parametrize(
    "tokens",
    [b"abc", struct.pack("<i", -1), [-1], [1 << 31], [1.5], ["1"], [[1]], [None], {"a": 1}, "12", 7, None],
)
def test_what_are_no_tokens(tokens: Any) -> None:
    with pytest.raises(ConfigError, match=r"^token_ids are whole numbers from 0 to 2147483647"):
        decoded(token_ids=tokens)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not a msgpack map"),
        (b"\xc1", "not a msgpack map"),
        (b"\x93\x01\x02\x03", "not a msgpack map"),
        (b'{"model": "m"}', "not a msgpack map"),
        (b"\x81", "not a msgpack map"),
        (b"\x81\xa1a", "not a msgpack map"),
        (b"\x81\xa1a\xc1", "not a msgpack map"),
        (b"\x81\xa1a\xa1\xff", "not a msgpack map"),
        (b"\x81\xa1a\x01\x01", "something follows it"),
        (b"\x81\x01\x01", "fields by name"),
        (b"\x81\xc4\x01a\x01", "fields by name"),
        (b"\x81\xd9\xff" + b"a" * 255 + b"\x01", "fields by name"),
        (b"\xdf\xff\xff\xff\xff", f"and not at most {MAX_FIELDS}"),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", "not a msgpack map"),
        (b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0", "not a msgpack map"),
        (b"\x81\xa1a" + WIDE + b"\x90" * MANY, f"a has more than {MAX_VALUE_NBYTES} bytes"),
        (b"\x81" + WIDE + b"\x90" * MANY + b"\x01", "fields by name"),
        (b"\x81\xa9token_ids" + WIDE + b"\x05" * MANY, f"a list has at most {MAX_LISTED} tokens"),
        (b"\x81\xa9token_ids\xdc\xff\xff" + b"\x90" * 65535, "token_ids are whole numbers"),
        (b"\x81\xa9token_ids" + b"\xdd\x7f\xff\xff\xff" * 5000, "not a msgpack map"),
    ],
)
def test_what_is_refused_is_one_line_and_never_grows(raw: bytes, says: str) -> None:
    """Many empty lists would be 56 bytes for one; counts that are not true would be lists as long."""
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=says) as caught:
            Encoding.MSGPACK.decode(raw)
        most_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert most_nbytes < 4 * len(raw) + (1 << 20)


def parsed(text: str) -> Any:
    return Encoding.JSON.decode(text.encode())


ODD = ("0", "-0", "00", "1.0", "1e3", "-", "+1", "null", '"1"', "[]", "")
WRITTEN = st.integers(-(1 << 65), 1 << 65).map(str) | st.sampled_from(ODD)
SPACE = st.sampled_from(("", "", " ", "\n", "\t\r", "\v", "\0"))


@given(st.lists(st.tuples(SPACE, WRITTEN, SPACE), max_size=4), st.sampled_from((TOKENS, HASHES[0])))
def test_lists_in_json_are_what_python_reads(items: list[tuple[str, str, str]], field: str) -> None:
    """Whole numbers in range, as an array; all else, also what JSON does not allow, is refused."""
    text = "[" + ",".join("".join(item) for item in items) + "]"
    try:
        wanted = json.loads(text)
    except ValueError:
        wanted = None
    lowest, highest = (0, (1 << 32) - 1) if field == TOKENS else (-(1 << 63), (1 << 64) - 1)
    if wanted is None or not all(type(one) is int and lowest <= one <= highest for one in wanted):
        with pytest.raises(ConfigError):
            parsed(f'{{"{field}": {text}}}')
    else:
        assert parsed(f'{{"{field}": {text}}}') == {field: array("Q", [one % (1 << 64) for one in wanted])}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON that is read here"),
        ("{", "not JSON that is read here"),
        ("[]", "not a JSON object"),
        ("7", "not a JSON object"),
        ('{"model": "m"} x', "not JSON that is read here"),
        ('{"model": "m\xff"}', "not JSON that is read here"),
        ('{"model": "' + "m" * MAX_VALUE_NBYTES + '"}', f"model has more than {MAX_VALUE_NBYTES} bytes"),
        ('{"other": ' + "[" * 100_000 + "}", "not JSON that is read here"),
        ('{"token_ids": {}}', "token_ids is a list of whole numbers"),
        ('{"token_ids": "1"}', "token_ids is a list of whole numbers"),
        ('{"token_ids": [1.5]}', "token_ids is a list of whole numbers"),
        ('{"token_ids": [-1]}', "token_ids are whole numbers from 0 to 4294967295"),
        ('{"token_ids": [' + "1," * MAX_LISTED + "1]}", f"token_ids has more than {MAX_LISTED} numbers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused_of_json_is_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Encoding.JSON.decode(text.encode("latin-1"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_json_has_beside_is_stepped_over() -> None:
    """A million fields, or lists in one that nobody asked for, are no objects."""
    many = ",".join(f'"f{number}":[[]]' for number in range(200_000))
    text = f'{{"model": "m", {many}, "token_ids": null, "hash_profile": {{"a": [1]}}}}'.encode()
    tracemalloc.start()
    try:
        fields = Encoding.JSON.decode(text)
        most_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fields == {"model": "m", "token_ids": None, "hash_profile": {"a": [1]}}
    assert most_nbytes < 1 << 20
