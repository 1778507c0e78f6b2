"""Messages of the index as bytes: counts their fields, and reads lookups without protobuf. Pure.

An empty element of a repeated field has two bytes, and protobuf takes 40 times as much: 33 MiB became 1.3
GiB. So fields are counted before a message is parsed.

The id of ``LookupRequest`` and ``LookupResponse`` is the last field by number, and fixed in size. A request
without its id is still a message, which the native core reads; a packed reply gets its id by appending.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError

from kvpool._native import read_lookup_request
from kvpool.discovery.worker import DEFAULT_TENANT
from kvpool.errors import ConfigError
from kvpool.index.prompt import Prompt, PromptFields
from kvpool.v1 import index_pb2 as pb

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_FIELDS = 1 << 17  # of a message: 65,536 multimodal items, 32,768 loads, 16,384 candidates, and more
MAX_LOOKUP_FIELDS = 20_000  # of a lookup that the native core does not read: 16,384 candidates, and more

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5  # wire types
_REQUESTS_FIELD = 7
_ID_TAG = 15 << 3 | _FIXED64  # of both
_REQUESTS_TAG, _RESPONSES_TAG = _REQUESTS_FIELD << 3 | _SIZED, 13 << 3 | _SIZED
_ID = struct.Struct("<BQ")


def check_fields(packed: Buffer, descriptor: Any) -> None:
    """Takes up to 0.1 s, with the interpreter's lock held; microseconds for most messages.

    Errors: ``ConfigError`` above ``MAX_FIELDS``; ``DecodeError`` for malformed bytes.
    """
    view = memoryview(packed)
    if len(view) > 2 * MAX_FIELDS:  # a field has two bytes at least
        _count(view, descriptor, 0)


def _count(view: memoryview, descriptor: Any, count: int) -> int:
    """``count`` plus the fields of ``view``; nested messages only where they can be many."""
    within = _within(descriptor)
    for tag, value in _fields(view):
        count += 1
        if count > MAX_FIELDS:
            raise ConfigError(f"a request has at most {MAX_FIELDS} fields")
        if tag & 7 == _SIZED and (inner := within.get(tag >> 3)) is not None:
            count = _count(value, inner, count)
    return count


@cache
def _within(descriptor: Any) -> Mapping[int, Any]:
    """By number, the fields that are messages with messages or lists of their own.

    Without fields of the same kind: requests within a request are read by themselves.
    """
    return {
        field.number: field.message_type
        for field in descriptor.fields
        if field.message_type is not None
        and field.message_type is not descriptor
        and any(one.message_type is not None or one.is_repeated for one in field.message_type.fields)
    }


def _fields(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The tag and the bytes of each field; no bytes for a varint. Errors: ``DecodeError``."""
    at = 0
    while at < len(view):
        tag, at = _varint_at(view, at)
        wire_type = tag & 7
        if wire_type == _SIZED:
            nbytes, at = _varint_at(view, at)
        elif wire_type == _VARINT:
            nbytes, at = 0, _varint_at(view, at)[1]
        elif wire_type == _FIXED64:
            nbytes = 8
        elif wire_type == _FIXED32:
            nbytes = 4
        else:
            raise DecodeError("it has a group")
        if at + nbytes > len(view):
            raise DecodeError("it ends within a field")
        yield tag, view[at : at + nbytes]
        at += nbytes


def _varint_at(view: memoryview, at: int) -> tuple[int, int]:
    """The varint at ``at``, and its end. Errors: ``DecodeError``."""
    if at < len(view) and view[at] < 0x80:  # the usual case
        return view[at], at + 1
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            raise DecodeError("it ends within a number")
        number |= (view[at] & 0x7F) << shift
        at += 1
        if view[at - 1] < 0x80:
            return number, at
    raise DecodeError("a number of more than ten bytes")


# ---- lookups


class PackedLookup(NamedTuple):
    """A ``LookupRequest``. ``prompt``: a ``Prompt``, or the message that holds it; None: ``requests``, packed."""

    id: int
    prompt: Any
    requests: Sequence[Buffer] = ()


def read_lookup(packed: bytes | memoryview) -> PackedLookup:
    """Errors: ``DecodeError`` of protobuf, ``ConfigError``."""
    view = memoryview(packed)
    # A false id lies within another field; then the bytes before it are malformed.
    if (
        len(view) > _ID.size
        and view[-_ID.size] == _ID_TAG
        and (prompt := _read_prompt(view[: -_ID.size])) is not None
    ):
        return PackedLookup(_ID.unpack(view[-_ID.size :])[1], prompt)
    if (prompt := _read_prompt(view)) is not None:
        return PackedLookup(0, prompt)
    fields = _walk(view)
    if not fields.requests:
        check_fields(view, pb.LookupRequest.DESCRIPTOR)
        return PackedLookup(fields.id, pb.LookupRequest.FromString(view))
    if fields.has_prompt:
        raise ConfigError("a request holds a prompt, or requests, and not both")
    return PackedLookup(fields.id, None, fields.requests)


def _read_prompt(view: memoryview) -> Prompt | None:
    """By the native core; None: an unusual or malformed form."""
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
    """The id of a refused request, even one that protobuf cannot read; 0: none."""
    try:
        return _walk(memoryview(packed)).id
    except (ConfigError, DecodeError):
        return 0


class _Fields(NamedTuple):
    id: int
    requests: list[Buffer]
    has_prompt: bool  # or a scope, or workers


def _walk(view: memoryview) -> _Fields:
    """The fields of a packed ``LookupRequest``, unparsed.

    A malformed request is refused alone; empty ones never become messages. Errors: ``DecodeError``, ``ConfigError``.
    """
    number, has_prompt = 0, False
    requests: list[Buffer] = []
    for count, (tag, value) in enumerate(_fields(view), start=1):
        if count > MAX_LOOKUP_FIELDS:
            raise ConfigError(
                f"a request has at most {MAX_LOOKUP_FIELDS} fields, candidates and requests among them"
            )
        if tag == _ID_TAG:
            number = int.from_bytes(value, "little")
        elif tag == _REQUESTS_TAG:
            requests.append(value)
        elif tag & 7 == _SIZED and tag >> 3 < _REQUESTS_FIELD:
            has_prompt = True
    return _Fields(number, requests, has_prompt)


def with_id(reply: bytes, number: int) -> bytes:
    return reply + _ID.pack(_ID_TAG, number) if number else reply


def pack_pool_media(held: Sequence[int]) -> bytes:
    """The column of a ``LookupResponse``, to be put behind its others."""
    column: bytes = pb.LookupResponse(pool_media=held).SerializeToString()
    return column


def refused_response(number: int, code: int, message: str) -> bytes:
    reply: bytes = pb.LookupResponse(
        id=number, status=pb.Status(code=code, message=message)
    ).SerializeToString()
    return reply


def pack_responses(replies: Sequence[bytes]) -> bytes:
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
