"""``check_fields``: how much protobuf would make of a packed message, before it does. Pure.

An empty element of a repeated field has two bytes, and protobuf takes 40 times as much for it: 33 MiB of them became
1.3 GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_FIELDS = 1 << 17  # of a message: 65,536 multimodal items, 32,768 loads, 16,384 candidates, and more

VARINT, FIXED64, SIZED, FIXED32 = 0, 1, 2, 5  # wire types


def check_fields(packed: Buffer, descriptor: Any) -> None:
    """Takes up to 0.1 s, with the interpreter's lock held; for most messages, of few fields, some microseconds.

    Errors: ``ConfigError`` for a message of more than ``MAX_FIELDS``; ``DecodeError`` for what is no message.
    """
    view = memoryview(packed)
    if len(view) > 2 * MAX_FIELDS:  # a field has two bytes at least
        _count(view, 0, len(view), descriptor, 0)


def _count(view: memoryview, at: int, end: int, descriptor: Any, count: int) -> int:
    """``count``, and the fields from ``at`` to ``end``; those of messages within it only where they can be many."""
    within = _within(descriptor)
    while at < end:
        count += 1
        if count > MAX_FIELDS:
            raise ConfigError(f"a request has at most {MAX_FIELDS} fields")
        tag, at = varint_at(view, at)
        wire_type = tag & 7
        if wire_type == SIZED:
            nbytes, at = varint_at(view, at)
            begin, at = at, at + nbytes
            if at <= end and (inner := within.get(tag >> 3)) is not None:
                count = _count(view, begin, at, inner, count)
        elif wire_type == VARINT:
            _, at = varint_at(view, at)
        elif wire_type == FIXED64:
            at += 8
        elif wire_type == FIXED32:
            at += 4
        else:
            raise DecodeError("it has a group")
        if at > end:
            raise DecodeError("it ends within a field")
    return count


@cache
def _within(descriptor: Any) -> Mapping[int, Any]:
    """By number, the fields that are messages with messages or lists of their own.

    Not those of its own kind: requests within a request are read one by one.
    """
    return {
        field.number: field.message_type
        for field in descriptor.fields
        if field.message_type is not None
        and field.message_type is not descriptor
        and any(one.message_type is not None or one.is_repeated for one in field.message_type.fields)
    }


def varint_at(view: memoryview, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends. Errors: ``DecodeError``."""
    if at < len(view) and view[at] < 0x80:  # as most are
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
