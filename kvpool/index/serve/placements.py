"""``Placements``: the room for bodies and headers of inference requests, while they are placed. One event loop."""

from __future__ import annotations

from collections import Counter

from kvpool.index.buffer_budget import INFERENCE, BufferBudget
from kvpool.index.place.placement import Refusal

MAX_BODY_NBYTES = 16 << 20
HOST_PARTS = 4  # one of them no host gets alone: a proxy that asks for many clients has the other three


class Placements:
    """``budget``: counts bodies. ``held_nbytes``: of bodies and of headers, now; take more with ``hold``."""

    def __init__(self, budget: BufferBudget) -> None:
        self._budget = budget
        self.held_nbytes = 0
        self._held_by: Counter[str] = Counter()

    def hold(self, have_nbytes: int, nbytes: int, host: str) -> None:
        """Take room for so much more of a body of which there are ``have_nbytes``. ``host``: whose part it takes.
        Errors: ``Refusal``."""
        if have_nbytes + nbytes > MAX_BODY_NBYTES:
            raise Refusal(413, f"a request has at most {MAX_BODY_NBYTES} bytes")
        limit_of_host_nbytes = self._budget.limit_of_owner_nbytes * (HOST_PARTS - 1) // HOST_PARTS
        is_over = self._held_by[host] + nbytes > limit_of_host_nbytes
        if is_over or not self._budget.take(nbytes, INFERENCE):
            raise Refusal(503, "too many requests are being read: send it again later")
        self.held_nbytes += nbytes
        self._held_by[host] += nbytes

    def let_go(self, nbytes: int, host: str) -> None:
        """Of what was held for that host."""
        self.held_nbytes -= nbytes
        self._held_by[host] -= nbytes
        if not self._held_by[host]:
            del self._held_by[host]
        if nbytes:
            self._budget.give(nbytes, INFERENCE)
