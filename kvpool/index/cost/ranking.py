"""``NativeRanking``: a ``Ranking`` as the native core made it. Immutable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvpool.index.answer import Ranking, named_pick
from kvpool.index.request_stats import Placed

if TYPE_CHECKING:
    from kvpool import _native
    from kvpool.index.fleet.partition import Answer


class NativeRanking(NamedTuple):
    """A ``Ranking`` as the native core sorted it, not unpacked. ``placed``: of a session's request."""

    native: _native.Ranking
    reservation: str
    answers: Sequence[Answer]
    placed: Placed | None = None

    def matched(self) -> tuple[int, int, int, int]:
        """Blocks of the prompt, and the most of any candidate on its device, locally and in the pool."""
        most = (0, 0, 0, 0)
        for answer in self.answers:  # one, unless workers of the model hash differently
            prompt, device, local, pool = map(max, most, answer.rows.most())
            most = (prompt, device, local, pool)
        return most

    def pack(self) -> bytes:
        return self.native.pack(self.reservation)

    def unpack(self) -> Ranking:
        return Ranking(tuple(map(named_pick, self.native.picks())), self.reservation)
