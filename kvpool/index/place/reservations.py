"""``Reservations``: work that was promised to ranks and that their load does not show yet. One thread at a time."""

from __future__ import annotations

import heapq
import secrets
from collections import Counter
from collections.abc import Callable

MAX_RESERVATIONS = 65536

_Key = tuple[str, int]  # worker's id, rank


class Reservations:
    """Costs by rank, each until it is released or its time is over.

    ``clock``: seconds that only go up. ``changed`` is called with a rank and the sum of its costs whenever that
    changes; for ends, in the next call. ``tenant_share``: the part of ``MAX_RESERVATIONS`` that one tenant may have.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        changed: Callable[[str, int, int], None],
        tenant_share: float = 1.0,
    ) -> None:
        self._clock, self._changed, self._tenant_share = clock, changed, tenant_share
        self._of: Counter[str] = Counter()  # how many, by tenant
        self._held: dict[str, tuple[str, _Key, int]] = {}  # tenant, rank, cost
        self._ends: list[tuple[float, str]] = []  # a heap; may name what was released
        self._costs: Counter[_Key] = Counter()
        self._done_s: dict[_Key, float] = {}  # when a rank should have done what it was given

    def __len__(self) -> int:
        self.expire()
        return len(self._held)

    def add(
        self, tenant: str, worker_id: str, dp_rank: int, cost: int, keep_s: float, each_s: float | None = None
    ) -> str:
        """Hold ``cost`` against a rank for ``keep_s`` seconds. Returns its name; "" when there are too many.

        ``each_s``: seconds in which the rank does one unit of cost; it is held no longer than until this work should be
        done, behind what the rank was given before.
        """
        self.expire()
        if len(self._held) >= MAX_RESERVATIONS or self._of[tenant] >= MAX_RESERVATIONS * self._tenant_share:
            return ""
        name = secrets.token_hex(8)
        self._held[name] = (tenant, (worker_id, dp_rank), cost)
        self._of[tenant] += 1
        self._costs[worker_id, dp_rank] += cost
        self._changed(worker_id, dp_rank, self._costs[worker_id, dp_rank])
        ends_s = self._clock() + keep_s
        if each_s is not None:
            key = (worker_id, dp_rank)
            self._done_s[key] = max(self._clock(), self._done_s.get(key, 0.0)) + cost * each_s
            ends_s = min(ends_s, self._done_s[key])
        heapq.heappush(self._ends, (ends_s, name))
        if len(self._ends) > 2 * MAX_RESERVATIONS:
            self._ends = [end for end in self._ends if end[1] in self._held]
            heapq.heapify(self._ends)
        return name

    def release(self, tenant: str, name: str) -> bool:
        """End one of this tenant; False if there is none."""
        self.expire()
        if name not in self._held or self._held[name][0] != tenant:
            return False
        self._end(name)
        return True

    def expire(self) -> None:
        """End those whose time is over."""
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            _, name = heapq.heappop(self._ends)
            if name in self._held:
                self._end(name)

    def _end(self, name: str) -> None:
        tenant, key, cost = self._held.pop(name)
        self._of[tenant] -= 1
        if not self._of[tenant]:
            del self._of[tenant]
        self._costs[key] -= cost
        self._changed(*key, self._costs[key])
        if not self._costs[key]:
            del self._costs[key]
            self._done_s.pop(key, None)
