"""``decode``: JSON whose size as objects is bounded before it is built. Pure.

Building holds the interpreter's lock: 50 ms for a million numbers, 0.4 us per object. A few bytes of text can
be an object. Separators are counted first, strings included.
"""

from __future__ import annotations

from typing import Any

from kvpool import _native
from kvpool.errors import ConfigError

MAX_VALUES = (1 << 20) + 1024
MAX_CONTAINERS = 1 << 18


def check(
    packed: bytes | bytearray, most_values: int = MAX_VALUES, most_containers: int = MAX_CONTAINERS
) -> None:
    """Errors: ``ConfigError`` for JSON that would take too long to build."""
    if len(packed) <= 2 * most_containers:  # each has at least two bytes
        return
    commas, containers = _native.json_size(packed)
    if commas > most_values:
        raise ConfigError(f"it has more than {most_values} values")
    if containers > most_containers:
        raise ConfigError(f"it has more than {most_containers} lists and objects")


def decode(raw: bytes | str, most_values: int = MAX_VALUES, most_containers: int = MAX_CONTAINERS) -> Any:
    """Errors: ``ConfigError``."""
    import msgspec  # of the index alone: a client, with kvpool[client], encodes only

    packed = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    check(packed, most_values, most_containers)
    try:
        return msgspec.json.decode(packed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(reason(error)) from error


def reason(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else "it is no text"
