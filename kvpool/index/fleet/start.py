"""``Start``: one start of a worker. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Start(NamedTuple):
    """What it made, and what was found of it, is not true of another one.

    ``life``: differs at each start that is known to be one, and at each address. ``lapses``: times that it could not
    be reached since then: each may have been one more, for a worker that was named by a flag has no incarnation.
    """

    worker_id: str
    life: str = ""
    lapses: int = 0

    def is_same(self, other: Start) -> bool:
        """Whether no start is known between both."""
        return self[:2] == other[:2]
