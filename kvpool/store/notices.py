"""What is said of keys that change: the contract between a store and who listens."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Heard(NamedTuple):
    """What came since the last call. ``keys``: blocks' keys that were written, evicted, deleted, or ran out, each once.

    ``emptied``: a database was flushed, perhaps another one. ``missed``: something may have changed without a word.
    ``deaf``: why some server says nothing at present; empty: all do.
    """

    keys: list[str]
    emptied: bool
    missed: bool
    deaf: str


class Notices(Protocol):
    """Notices are hints, which may be late, lost or double: who hears one looks for itself. For one thread."""

    def take(self, timeout_s: float) -> Heard:
        """Wait for something to be heard, for at most ``timeout_s`` seconds and what asking for the servers takes."""

    def close(self) -> None:
        """Stop listening; again does nothing. Blocking, for a second or two."""
