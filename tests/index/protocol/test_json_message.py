"""Each field of a request in JSON, with a value of each wrong type: the refusal names it, in words of the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor

from kvpool.errors import ConfigError
from kvpool.index.protocol import json_message
from kvpool.index.serve.http import _pack
from kvpool.v1 import index_pb2 as pb

VALUES = (5, 1.5, True, "a", [], [1, 2, 3], ["a"], [[1]], {}, {"a": 1}, [{}], [None])
OF_PYTHON = re.compile(
    r"concatenate|len\(\)|iterable|bytes-like|int\(\)|operand|unhashable|attribute|NoneType|str'"
)


def bodies(message: Descriptor, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The name of a field, and a body with one of ``VALUES`` there."""
    for field in message.fields:
        for value in VALUES:
            yield field.name, {field.name: value}
        if field.message_type is not None and depth:
            for name, inner in bodies(field.message_type, depth - 1):
                yield name, {field.name: [inner] if json_message._repeats(field) else inner}


@pytest.mark.parametrize("kind", [pb.LookupRequest, pb.RouteRequest])
def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_field(kind: Any) -> None:
    refusals = [(name, body, refusal(kind, body)) for name, body in bodies(kind.DESCRIPTOR)]
    refused = [one for one in refusals if one[2]]
    assert len(refused) > 300
    assert len(refusals) - len(refused) > 20
    assert [one for one in refused if OF_PYTHON.search(one[2]) or "\n" in one[2]] == []
    unnamed = [one for one in refused if one[0] not in one[2] and '"a"' not in one[2]]
    assert unnamed == [], 'but a field "a", which there is not'


def refusal(kind: Any, body: Any) -> str:
    try:
        _pack(kind, json.dumps(body).encode())
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"token_ids": [1, 2, 3]}, "token_ids is base64 of 4 bytes a token, little-endian, not a list"),
        ({"tokenIds": [1]}, "tokenIds is base64 of 4 bytes a token, little-endian, not a list"),
        ({"block_hashes": 5}, "block_hashes is base64 of 8 bytes a block, little-endian, not a number"),
        ({"scope": {"model": 7}}, "scope.model is text, not a number"),
        ({"scope": []}, "scope is an object, not a list"),
        ({"workers": ["a", None]}, r"workers\[1\] is text, not null"),
        ({"chat": {"messages": [{"content": "x"}]}}, r"chat.messages\[0\].content is a list, not text"),
        ({"id": True}, "id is a whole number, not true or false"),
    ],
)
def test_the_refusal_says_what_the_field_is(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _pack(pb.LookupRequest, json.dumps(body).encode())


RIGHT: tuple[dict[str, Any], ...] = (
    {}, {"scope": {}}, {"chat": {}}, {"text": ""}, {"text": "é\U0001f642"}, {"text": None, "tokenIds": "ZQAAAA=="},
    {"scope": {"model": "m", "cacheSalt": None, "multimodal": [{"identifier": "i", "offset": "3", "length": 4.0}]}},
    {"chat": {"messages": [{"role": "user", "content": ["a", "b"]}, {}], "addGenerationPrompt": False}},
    {"id": "18446744073709551615", "workers": ["a"]}, {"id": 7, "blockHashes": "_-8"}, {"block_hashes": "/+8="},
    {"requests": [{"id": 1, "text": "a"}, {"requests": [{"id": 2}]}]},
)  # fmt: skip
WRONG: tuple[dict[str, Any], ...] = (
    {"id": 1 << 64}, {"id": "1" * 40}, {"id": -1}, {"id": 1.5}, {"id": "x"}, {"id": ""},
    {"text": "a", "tokenIds": "ZQ"}, {"tokenIds": "Z"}, {"no_such": 1},
    {"scope": {"multimodal": [{"offset": 1 << 32}]}}, {"requests": [None]},
)  # fmt: skip


@pytest.mark.parametrize("body", RIGHT)
def test_what_protobuf_reads_is_read(body: dict[str, Any]) -> None:
    expected = json_format.ParseDict(body, pb.LookupRequest())
    assert pb.LookupRequest.FromString(_pack(pb.LookupRequest, json.dumps(body).encode())) == expected


@pytest.mark.parametrize("body", WRONG)
def test_what_protobuf_refuses_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises((json_format.ParseError, ValueError)):
        json_format.ParseDict(body, pb.LookupRequest())
    assert refusal(pb.LookupRequest, body)


def test_a_body_is_nested_a_few_times() -> None:
    body: dict[str, Any] = {}
    for _ in range(json_message.MAX_DEPTH + 1):
        body = {"requests": [body]}
    assert "is nested too deeply" in refusal(pb.LookupRequest, body)
