"""One connection to a server through some client: the seam between a store's threads and redis-py or GLIDE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Command = tuple[bytes | memoryview, ...]


class LinkFault(Exception):
    """No connection can be made, or the present one can no longer be used; says why."""


class LinkSilent(LinkFault):
    """No answer in time: the next call to the same server would wait as long."""


class LinkRefused(LinkFault):
    """The server refuses us: user, password, database or rights."""


class Refusal(str):
    """An error reply in the server's words, its first word first; the connection can still be used."""

    __slots__ = ()


class Link(Protocol):
    """Used by one thread; every call is bounded by its ``timeout_s``."""

    def dial(self, timeout_s: float) -> None:
        """Make sure that the server answers, over the present connection or a new one. Errors: ``LinkFault``."""

    def is_stale(self) -> bool:
        """Whether the connection ended, or received an unexpected reply, since the last one."""

    def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """Send all, and return one reply each: bytes, int, list, None or ``Refusal``. Errors: ``LinkFault``."""

    def drop(self) -> None:
        """Close the connection; ``dial`` makes the next one."""

    def close(self) -> None:
        """Give everything back."""
