"""``read``: a message from its fields in JSON, by protobuf's mapping: one without maps, enums and floats. Pure.

protobuf's own parser finds a wrong type where it works with the value ("can only concatenate list"), and looks for
halves of characters in each text, with the interpreter's lock held: for half a second of 4 MiB.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from kvpool.errors import ConfigError

MAX_DEPTH = 8
_PACKED = {"block_hashes": "8 bytes a block", "token_ids": "4 bytes a token"}  # little-endian
_NUMBER = re.compile("-?[0-9]+")


def read(fields: Mapping[str, Any], message: Any, within: str = "", depth: int = MAX_DEPTH) -> None:
    """Into ``message``. ``fields``: by the names of the definition or of the mapping, as decoded from UTF-8; None: not
    given. Errors: ``ConfigError`` that names the field.
    """
    if not depth:
        raise ConfigError(f"{within[:-1]:.200} is nested too deeply")
    kind = message.DESCRIPTOR
    for name, value in fields.items():
        place = f"{within}{name:.80}"
        field = kind.fields_by_name.get(name) or kind.fields_by_camelcase_name.get(name)
        if field is None:
            raise ConfigError(f"{place} is no field of {kind.name}")
        if value is None:
            continue
        one_of = field.containing_oneof
        if one_of is not None and (other := message.WhichOneof(one_of.name)):
            raise ConfigError(f"{place} is given beside {within}{other}: one of them is enough")
        if not _repeats(field):
            _set(message, field, value, place, depth)
        elif isinstance(value, list):
            for at, one in enumerate(value):
                _add(getattr(message, field.name), field, one, f"{place}[{at}]", depth)
        else:
            raise ConfigError(f"{place} is a list, not {_kind(value)}")


def _set(message: Any, field: FieldDescriptor, value: Any, place: str, depth: int) -> None:
    if field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        read(_object(value, place), inner, f"{place}.", depth - 1)
        return
    scalar = _scalar(value, field, place)
    try:
        setattr(message, field.name, scalar)
    except ValueError:
        raise ConfigError(f"{place} is out of range") from None


def _add(values: Any, field: FieldDescriptor, value: Any, place: str, depth: int) -> None:
    if field.message_type is not None:
        read(_object(value, place), values.add(), f"{place}.", depth - 1)
        return
    scalar = _scalar(value, field, place)
    try:
        values.append(scalar)
    except ValueError:
        raise ConfigError(f"{place} is out of range") from None


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is an object, not {_kind(value)}")
    return value


def _scalar(value: Any, field: FieldDescriptor, place: str) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        of = f" of {_PACKED[field.name]}, little-endian" if field.name in _PACKED else ""
        if not isinstance(value, str):
            raise ConfigError(f"{place} is base64{of}, not {_kind(value)}")
        try:
            return base64.urlsafe_b64decode(value.encode() + b"=" * (4 - len(value) % 4))
        except binascii.Error:
            raise ConfigError(f"{place} is base64{of}, and this is none") from None
    if field.type == FieldDescriptor.TYPE_STRING:
        if not isinstance(value, str):
            raise ConfigError(f"{place} is text, not {_kind(value)}")
        return value
    if field.type == FieldDescriptor.TYPE_BOOL:
        if not isinstance(value, bool):
            raise ConfigError(f"{place} is true or false, not {_kind(value)}")
        return value
    if isinstance(value, str) and _NUMBER.fullmatch(value[:32]):
        value = int(value[:32])
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{place} is a whole number, not {_kind(value)}")
    if isinstance(value, float) and not value.is_integer():
        raise ConfigError(f"{place} is a whole number, not {value:g}")
    return int(value)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _repeats(field: FieldDescriptor) -> bool:
    """``label`` is deprecated; earlier versions have no ``is_repeated``."""
    repeats = getattr(field, "is_repeated", None)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED if repeats is None else repeats)
