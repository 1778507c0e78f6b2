"""``ToolArguments``: the arguments of tool calls. Each request of a session repeats the earlier calls, as text in JSON
that a template mostly writes as JSON again: both are done once.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MIN_CHARS = 256  # of a remembered text: shorter ones are read as fast
MAX_NBYTES = 32 << 20
ENTRY_NBYTES = 512  # of memory beside text and values


class Arguments(dict[str, Any]):
    """Of several requests: a template, in Jinja's immutable sandbox, changes nothing in it.

    ``_room``: bytes of memory for ``_dumped``, its JSON.
    """

    __slots__ = ("_dumped", "_room")
    _dumped: str
    _room: int


def dumping(dumps: Callable[..., str]) -> Callable[..., str]:
    """``dumps``, a template's filter, which writes the same ``Arguments`` once."""

    def dump(value: Any, *args: Any, **options: Any) -> str:
        if type(value) is not Arguments or args or options:
            return dumps(value, *args, **options)
        known: str | None = getattr(value, "_dumped", None)
        if known is not None:
            return known
        dumped = dumps(value)
        if sys.getsizeof(dumped) <= value._room:
            value._dumped = dumped
        return dumped

    return dump


class ToolArguments:
    """Any thread; ``_lock`` guards all fields. Values are immutable to their users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Arguments, int]] = OrderedDict()  # with their bytes of memory
        self._nbytes = 0

    def read(self, text: str) -> Any:
        """What the text is in JSON. Errors: those of ``json.loads``."""
        if len(text) < MIN_CHARS:
            return json.loads(text)
        with self._lock:
            if (known := self._known.get(text)) is not None:
                self._known.move_to_end(text)
                return known[0]
        value = json.loads(text)
        if type(value) is not dict:
            return value
        kept = Arguments(value)
        kept._room = 2 * sys.getsizeof(text)
        nbytes = ENTRY_NBYTES + sys.getsizeof(text) + kept._room + _nbytes(kept)
        with self._lock:
            if text not in self._known:
                self._known[text] = kept, nbytes
                self._nbytes += nbytes
            while self._nbytes > MAX_NBYTES:
                self._nbytes -= self._known.popitem(last=False)[1][1]
        return kept


def _nbytes(value: Any) -> int:
    """Of memory, with all that is in it; what stands there several times counts each time."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            left += (*one, *one.values())
        elif isinstance(one, list):
            left += one
    return total
