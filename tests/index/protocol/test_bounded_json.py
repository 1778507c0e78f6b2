"""JSON of others is counted before it is built."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ConfigError, _native
from kvpool.index.front.inference_request import read_request
from kvpool.index.protocol import bounded_json


def test_values() -> None:
    value = {"a": [1, -2.5, None, True, "ü", {"b": []}], "c": 1 << 64}
    assert bounded_json.decode(json.dumps(value)) == value
    assert bounded_json.decode(b'"\xc3\xbc"') == "ü"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" + b"1," * bounded_json.MAX_VALUES + b"1,1]", "more than"),
        (b"[" + b"[]," * bounded_json.MAX_CONTAINERS + b"1]", "lists and objects"),
        (b"[" * 100_000 + b"]" * 100_000, "recursion|nested|depth"),
        (b"{", "truncated|ended"),
        (b"\xff", "malformed|invalid"),
        (b"NaN", "invalid|malformed"),
        (b"", "truncated|ended"),
    ],
)
def test_what_is_not_built(raw: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){says}"):
        bounded_json.decode(raw)


def test_halves_of_surrogate_pairs_are_no_text() -> None:
    with pytest.raises(ConfigError):
        bounded_json.decode('"\ud800"')


def test_bodies_of_strangers_are_counted() -> None:
    bomb = b'{"model": "m", "messages": [' + b"{}," * bounded_json.MAX_CONTAINERS + b"{}]}"
    with pytest.raises(ConfigError, match="lists and objects"):
        read_request("/v1/chat/completions", bomb)


def test_a_prompt_of_a_million_tokens_is_read() -> None:
    body = json.dumps({"model": "m", "prompt": [7] * (1 << 19)}).encode()
    prompt = read_request("/v1/completions", body).prompt
    assert prompt is not None
    assert prompt.nbytes == 4 << 19


@given(
    st.lists(
        st.sampled_from([b",", b"[", b"{", b"]", b"}", b"[{,", b"\xff\x00;|", b"," * 300, b"[" * 241])
    ).map(b"".join)
)
def test_what_may_become_objects_is_counted(text: bytes) -> None:
    assert _native.json_size(text) == (text.count(b","), text.count(b"[") + text.count(b"{"))
    assert _native.json_size(bytearray(text)) == _native.json_size(text)
