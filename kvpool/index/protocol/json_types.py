"""``check``: the values of a message in JSON have the types of its fields. Pure.

protobuf's own parser finds a wrong type where it works with the value: "can only concatenate list".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvpool.errors import ConfigError

_PACKED = {"block_hashes": "8 bytes a block", "token_ids": "4 bytes a token"}  # little-endian
_NUMBER = re.compile("-?[0-9]+")
_INTEGERS = frozenset(
    (
        FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    )
)  # fmt: skip


def check(fields: Mapping[str, Any], message: Descriptor, within: str = "") -> None:
    """Of a message without maps, enums and floats. Fields that it does not have are the parser's business.

    Errors: ``ConfigError`` that names the field.
    """
    for name, value in fields.items():
        field = message.fields_by_name.get(name) or message.fields_by_camelcase_name.get(name)
        if field is None or value is None:
            continue
        place = f"{within}{name}"
        if not _repeats(field):
            _check_one(value, field, place)
        elif isinstance(value, list):
            for at, one in enumerate(value):
                _check_one(one, field, f"{place}[{at}]")
        else:
            raise ConfigError(f"{place} is a list, not {_kind(value)}")


def _check_one(value: Any, field: FieldDescriptor, place: str) -> None:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        if not isinstance(value, dict):
            raise ConfigError(f"{place} is an object, not {_kind(value)}")
        check(value, field.message_type, f"{place}.")
    elif field.type == FieldDescriptor.TYPE_BYTES:
        if not isinstance(value, str):
            of = f" of {_PACKED[field.name]}, little-endian" if field.name in _PACKED else ""
            raise ConfigError(f"{place} is base64{of}, not {_kind(value)}")
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        if not isinstance(value, str):
            raise ConfigError(f"{place} is text, not {_kind(value)}")
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise ConfigError(f"{place} is true or false, not {_kind(value)}")
    elif kind in _INTEGERS:
        is_number = type(value) in (int, float) or (isinstance(value, str) and _NUMBER.fullmatch(value))
        if not is_number:
            raise ConfigError(f"{place} is a whole number, not {_kind(value)}")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _repeats(field: FieldDescriptor) -> bool:
    """``label`` is deprecated; earlier versions have no ``is_repeated``."""
    repeats = getattr(field, "is_repeated", None)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED if repeats is None else repeats)
