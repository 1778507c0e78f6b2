"""``Route``: where to send a request, as the index answers it. Everything here is immutable; nothing blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvpool.index.answer import Row
from kvpool.index.place.load import LoadSource

Trust = Literal["exact", "degraded", "fallback"]
TRUSTS: dict[int, Trust] = {1: "exact", 2: "degraded", 3: "fallback"}  # by the native core's number


class Pick(NamedTuple):
    """One data-parallel rank of one worker, what a prompt would cost there, and why.

    Costs are in tokens: what computing so many tokens of a prompt costs. ``cost`` is the sum of ``prefill_cost``
    (tokens that no tier holds), ``fetch_cost`` (tokens that other tiers of the worker, or the pool, hold) and
    ``queue_cost`` (what is there before this request). What the last was made of follows: ``running`` and ``waiting``
    requests, ``queued_tokens`` (0 also where not known), ``kv_usage_permille``, ``reserved_cost`` of reservations;
    ``load_source`` and ``load_age_ms`` say where that is from.

    ``trust``: ``exact``, what it holds is known; ``degraded``, it is not to be trusted now, so device and local blocks
    count as none; ``fallback``, nothing is known. ``asleep``: its engine serves no requests now. ``unreachable``: it is
    stale, and the index has no word of it from anywhere: place nothing there.
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

    @property
    def worker(self) -> str:
        """Its name."""
        return self.row.worker

    @property
    def dp_rank(self) -> int:
        """Of the worker."""
        return self.row.dp_rank

    @property
    def address(self) -> str:
        """Where it serves requests; empty: not known."""
        return self.row.address


@dataclass(frozen=True)
class Route:
    """``picks``: the best first; none where no worker is there. ``reservation``: for ``release``; empty: none."""

    picks: tuple[Pick, ...] = ()
    reservation: str = ""
