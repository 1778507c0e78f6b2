"""``Encoding``: the fields of a request over HTTP, and the bytes of its answer, in JSON or msgpack. Pure.

A value is stepped over before it is built, so no count is believed before all that it counts is there, and a request
never becomes more than its numbers and ``MAX_FIELDS`` values of ``MAX_VALUE_NBYTES``. A list of numbers in JSON is read
without the interpreter's lock: with an object for each, a million of them held everything up for 85 ms.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgpack
import msgspec

from kvpool import _native
from kvpool.errors import ConfigError
from kvpool.index import bounded_json
from kvpool.index.client.messages import MAX_U32

MAX_FIELDS = 64
MAX_NAME_NBYTES = 256
MAX_VALUE_NBYTES = 4096
MAX_LISTED = 1 << 20  # numbers; in msgpack built with the interpreter's lock held, 0.1 s
MAX_I32 = (1 << 31) - 1
MAX_U64 = (1 << 64) - 1
TOKENS = "token_ids"
HASHES = ("seq_hashes", "block_hash", "block_hashes")  # Mooncake's, that of its drafts, Dynamo's
_TEXTS = (
    "model", "modelname", "model_name", "tenant_id", "routing_group", "instance_id", "lora_id", "lora_name",
    "lora_path", "cache_salt", "block_size", "type", "endpoint", "replay_endpoint", "dp_rank", "hash_profile",
)  # fmt: skip
_LISTS = {TOKENS: MAX_U32, **dict.fromkeys(HASHES, MAX_U64)}  # of whole numbers, and the largest one
# A field that is not named here is stepped over.
_Fields = msgspec.defstruct(
    "_Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in (*_TEXTS, *_LISTS)], gc=False
)

_BIN = range(0xC4, 0xC7)  # the first byte of bytes
_NO_CONTAINERS = {f"max_{kind}_len": 0 for kind in ("str", "bin", "array", "map", "ext")}


class Encoding(Enum):
    """How a request is written, and so its answer."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"

    @classmethod
    def of(cls, content_type: str | None) -> Encoding:
        """By the request's header: JSON is not always called so."""
        is_msgpack = cls.MSGPACK.value in (content_type or "").lower()
        return cls.MSGPACK if is_msgpack else cls.JSON

    def decode(self, raw: bytes) -> Mapping[str, Any]:
        """The fields of an object. ``token_ids`` and ``HASHES`` become an ``array``. Errors: ``ConfigError``."""
        return _unpacked(raw) if self is Encoding.MSGPACK else _parsed(raw)

    def encode(self, value: Any) -> bytes:
        """The bytes of a value made of objects, lists, text and numbers."""
        if self is Encoding.MSGPACK:
            packed: bytes = msgpack.packb(value)
            return packed
        return msgspec.json.encode(value)


def _parsed(raw: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    try:
        given = msgspec.json.decode(raw, type=_Fields)
        for name, value in zip(_Fields.__struct_fields__, msgspec.structs.astuple(given), strict=True):
            part = memoryview(value)
            if not part.nbytes:
                continue
            if name in _LISTS and bytes(part[:5]) != b"null":
                fields[name] = _listed(name, part)
            elif part.nbytes > MAX_VALUE_NBYTES:
                raise ConfigError(f"{name} has more than {MAX_VALUE_NBYTES} bytes")
            else:
                fields[name] = msgspec.json.decode(part)
    except ConfigError:
        raise
    except msgspec.ValidationError as error:
        raise ConfigError("the request is not a JSON object") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        line = f"the request is not JSON that is read here: {bounded_json.reason(error)}"
        raise ConfigError(line) from error
    return fields


def _listed(name: str, text: memoryview) -> array[int]:
    limit = _LISTS[name]
    numbers = array("Q")
    try:
        # Some languages have no unsigned numbers for hashes.
        numbers.frombytes(_native.json_numbers(text, MAX_LISTED, limit, name in HASHES))
    except OverflowError as error:
        raise ConfigError(f"{name} are whole numbers from 0 to {limit}") from error
    except ValueError as error:
        raise ConfigError(f"{name} {error}") from error
    return numbers


def _unpacked(raw: bytes) -> dict[str, Any]:
    reader = msgpack.Unpacker(max_buffer_size=max(1, len(raw)))
    reader.feed(raw)

    def one() -> bytes:
        begin = reader.tell()
        reader.skip()
        return raw[begin : reader.tell()]

    fields: dict[str, Any] = {}
    try:
        count = reader.read_map_header()
        if count > MAX_FIELDS:
            raise ConfigError(f"the request has {count} fields, and not at most {MAX_FIELDS}")
        for _ in range(count):
            name, value = one(), one()
            field = msgpack.unpackb(name) if len(name) <= MAX_NAME_NBYTES else None
            if not isinstance(field, str):
                raise ConfigError("the request is not a msgpack map of fields by name")
            if field == TOKENS:
                fields[field] = _tokens(value)
            elif len(value) > MAX_VALUE_NBYTES:
                raise ConfigError(f"{field:.40} has more than {MAX_VALUE_NBYTES} bytes")
            else:
                fields[field] = msgpack.unpackb(value)
        if reader.tell() != len(raw):
            raise ConfigError("the request is not a msgpack map: something follows it")
    except ConfigError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        said = " ".join(str(error).split()) or "it ends too early"
        raise ConfigError(f"the request is not a msgpack map: {said:.200}") from error
    return fields


def _tokens(packed: bytes) -> array[int]:
    """Bytes that are little-endian int32, or a list."""
    tokens = array("I")
    try:
        if packed[0] in _BIN:
            tokens.frombytes(msgpack.unpackb(packed))
        else:
            reader = msgpack.Unpacker(max_buffer_size=len(packed), **_NO_CONTAINERS)
            reader.feed(packed)
            if (count := reader.read_array_header()) > MAX_LISTED:
                raise ConfigError(f"a list has at most {MAX_LISTED} tokens, not {count}: send them as bytes")
            tokens.extend(reader)
    except ConfigError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ConfigError(
            f"{TOKENS} are whole numbers from 0 to {MAX_I32}, as a list or as bytes, 4 each and little-endian"
        ) from error
    if not tokens.tobytes()[
        3::4
    ].isascii():  # the highest byte of each is below 128; max() takes 20 times as long
        raise ConfigError(f"{TOKENS} are whole numbers from 0 to {MAX_I32}")
    return tokens
