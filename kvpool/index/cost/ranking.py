"""``Ranking``: the index's picks for a request, best first. Immutable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvpool.index.answer import Row
from kvpool.index.cost.load import LOAD_SOURCES, LoadSource
from kvpool.index.request_stats import Placed

if TYPE_CHECKING:
    from kvpool import _native
    from kvpool.index.fleet.partition import Answer

Trust = Literal["exact", "degraded", "fallback"]
TRUSTS: dict[int, Trust] = {1: "exact", 2: "degraded", 3: "fallback"}  # by the native core's number


class Pick(NamedTuple):
    """One data-parallel rank of one worker, and the cost of a prompt there, in tokens to compute.

    ``cost`` is the sum of ``prefill_cost`` (tokens in no tier), ``fetch_cost`` (tokens in the worker's other
    tiers or the pool), ``queue_cost`` (earlier work) and ``move_cost`` (what a session's blocks displace). Of the
    queue: ``running`` and ``waiting`` requests, ``queued_tokens`` (0 also if unknown), ``kv_usage_permille`` and
    ``reserved_cost``; ``load_source`` and ``load_age_ms`` are their origin.

    ``trust``: ``exact``: blocks are known; ``degraded``: stale, device and local blocks count as 0; ``fallback``:
    nothing is known. ``asleep``: its engine serves no requests now. ``unreachable``: stale and silent.
    """

    row: Row
    trust: Trust
    cost: int
    prefill_cost: int
    fetch_cost: int
    queue_cost: int
    running: int
    waiting: int
    queued_tokens: int
    kv_usage_permille: int
    reserved_cost: int
    load_source: LoadSource
    load_age_ms: int
    asleep: bool
    unreachable: bool
    move_cost: int = 0

    @property
    def worker(self) -> str:
        return self.row.worker

    @property
    def dp_rank(self) -> int:
        return self.row.dp_rank

    @property
    def address(self) -> str:
        """Where it serves requests; empty: unknown."""
        return self.row.address


def named_pick(packed: Sequence[Any]) -> Pick:
    """Of values in ``Pick``'s order, with numbers for trust and source. Errors: ``LookupError`` for unnamed ones."""
    row, trust, *costs, source, age_ms, asleep, unreachable, move_cost = packed
    named = (TRUSTS[trust], *costs, LOAD_SOURCES[source])
    return Pick._make((Row._make(row), *named, age_ms, asleep, unreachable, move_cost))


@dataclass(frozen=True)
class Ranking:
    """``picks``: the best first; empty: the model has no worker. ``reservation``: for ``release``; empty: none."""

    picks: tuple[Pick, ...] = ()
    reservation: str = ""


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
