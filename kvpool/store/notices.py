"""Notices of keys that change: the contract between a store and its caller."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Invalidations(NamedTuple):
    """What came since the last call. ``keys``: blocks' keys that were written, evicted, deleted or expired, each once.

    ``emptied``: a database was flushed, perhaps another one. ``missed``: keys may have changed without a notice.
    ``problem``: why some server sends no notices at present; empty: all do.
    """

    keys: list[str]
    emptied: bool
    missed: bool
    problem: str


class Notices(Protocol):
    """A notice is a hint: late, lost or duplicated. Check every key. For one thread."""

    def take(self, timeout_s: float) -> Invalidations:
        """Wait for a notice, for at most ``timeout_s`` seconds and the time that finding the servers takes."""

    def close(self) -> None:
        """Unsubscribe; calling it again does nothing. Blocking, for a second or two."""
