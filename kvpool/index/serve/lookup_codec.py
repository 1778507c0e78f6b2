"""``LookupRequest`` and ``LookupResponse`` as bytes: their usual form is read and written without protobuf. Pure.

The id of either is its last field in the order of field numbers, and fixed in size. So a request is a message
before its id as well, which the native core reads, and a packed reply gets its id by appending it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError

from kvpool._native import read_lookup_request
from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError
from kvpool.index.prompt import Prompt, PromptFields
from kvpool.index.serve.fields import FIXED32, FIXED64, SIZED, VARINT, check_fields, varint_at
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_FIELDS = 20_000  # of a request that the native core does not read: 16,384 candidates, and more

_FIXED_NBYTES = {FIXED64: 8, FIXED32: 4}
_REQUESTS_FIELD = 7
_ID_TAG = 15 << 3 | FIXED64  # of both
_REQUESTS_TAG, _RESPONSES_TAG = _REQUESTS_FIELD << 3 | SIZED, 13 << 3 | SIZED
_ID = struct.Struct("<BQ")


class Asked(NamedTuple):
    """A request. ``prompt``: a ``Prompt``, or the ``LookupRequest`` that holds one; None: ``requests``, packed."""

    id: int
    prompt: Any
    requests: Sequence[Buffer] = ()


def read_lookup(packed: bytes | memoryview) -> Asked:
    """What a packed ``LookupRequest`` asks. Errors: ``DecodeError`` of protobuf, ``ConfigError``."""
    view = memoryview(packed)
    # What looks like an id and is none lies within another field; then the bytes before it are no message.
    if (
        len(view) > _ID.size
        and view[-_ID.size] == _ID_TAG
        and (prompt := _read_prompt(view[: -_ID.size])) is not None
    ):
        return Asked(_ID.unpack(view[-_ID.size :])[1], prompt)
    if (prompt := _read_prompt(view)) is not None:
        return Asked(0, prompt)
    fields = _walk(view)
    if not fields.requests:
        check_fields(view, pb.LookupRequest.DESCRIPTOR)
        return Asked(fields.id, pb.LookupRequest.FromString(view))
    if fields.has_prompt:
        raise ConfigError("a request holds a prompt, or requests, and not both")
    return Asked(fields.id, None, fields.requests)


def _read_prompt(view: memoryview) -> Prompt | None:
    """In its usual form, by the native core; None: it is another one, or none."""
    found = read_lookup_request(view)
    if found is None:
        return None
    model, tenant, workers, in_tokens, begin, end = found
    fields: PromptFields = {"tenant": tenant or DEFAULT_TENANT, "workers": workers or None}
    if in_tokens:
        fields["token_ids"] = view[begin:end].cast("I")
    else:
        fields["hashes64"] = view[begin:end]
    return Prompt(model, **fields)


def id_of(packed: bytes | memoryview) -> int:
    """The id of a request that was refused, also of one that protobuf does not read; 0: it has none."""
    try:
        return _walk(memoryview(packed)).id
    except (ConfigError, DecodeError):
        return 0


class _Fields(NamedTuple):
    id: int
    requests: list[Buffer]
    has_prompt: bool  # or a scope, or workers


def _walk(view: memoryview) -> _Fields:
    """What is in a packed ``LookupRequest``. No part of it is parsed.

    So one of many requests that is malformed is refused by itself, and millions of empty ones never become messages:
    protobuf takes 40 times their bytes. Errors: ``DecodeError``, ``ConfigError``.
    """
    number, at, has_prompt = 0, 0, False
    requests: list[Buffer] = []
    for _ in range(MAX_FIELDS):
        if at == len(view):
            return _Fields(number, requests, has_prompt)
        tag, at = varint_at(view, at)
        wire_type = tag & 7
        if wire_type == SIZED:
            nbytes, at = varint_at(view, at)
        elif wire_type == VARINT:
            nbytes, at = 0, varint_at(view, at)[1]
        elif wire_type in _FIXED_NBYTES:
            nbytes = _FIXED_NBYTES[wire_type]
        else:
            raise DecodeError("it has a group")
        begin, at = at, at + nbytes
        if at > len(view):
            raise DecodeError("it ends within a field")
        if tag == _ID_TAG:
            number = int.from_bytes(view[begin:at], "little")
        elif tag == _REQUESTS_TAG:
            requests.append(view[begin:at])
        elif wire_type == SIZED and tag >> 3 < _REQUESTS_FIELD:
            has_prompt = True
    raise ConfigError(f"a request has at most {MAX_FIELDS} fields, candidates and requests among them")


def with_id(reply: bytes, number: int) -> bytes:
    """The packed ``LookupResponse`` to the request of this id."""
    return reply + _ID.pack(_ID_TAG, number) if number else reply


def refused(number: int, code: int, message: str) -> bytes:
    """The packed ``LookupResponse`` to a request of this id that is refused."""
    reply: bytes = pb.LookupResponse(
        id=number, status=pb.Status(code=code, message=message)
    ).SerializeToString()
    return reply


def packed_responses(replies: Sequence[bytes]) -> bytes:
    """The packed ``LookupResponse`` of a request with requests."""
    parts = []
    for reply in replies:
        parts += [bytes([_RESPONSES_TAG]), _varint(len(reply)), reply]
    return b"".join(parts)


def _varint(number: int) -> bytes:
    packed = bytearray()
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)
