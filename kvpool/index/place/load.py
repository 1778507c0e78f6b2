"""``Load``: how busy a worker's rank is; ``LoadBoard``: the last of each, with its ``Reservations``.

``_lock`` guards who is in ``_ranks``; any thread may call anything, nothing blocks.
"""

from __future__ import annotations

import heapq
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvpool import _native
from kvpool.errors import ConfigError

LoadSource = Literal["none", "reported", "scraped"]
LOAD_SOURCES: tuple[LoadSource, ...] = ("none", "reported", "scraped")  # by the native core's number

KEEP_S = 10.0  # of a load, after which it is unknown
KEEP_FAILED_S = 30.0  # that a page could not be read; it is asked for again within 12 s
MAX_KEPT = 65536  # ranks
MAX_RESERVATIONS = 65536
_MOST = (1 << 32) - 1
_MOST_TOKENS = (1 << 53) - 1


@dataclass(frozen=True)
class Load:
    """What one data-parallel rank of one worker has to do.

    ``running``, ``waiting``: requests. ``queued_tokens``: prompt tokens that wait to be computed; None: not known.
    ``kv_usage``: from 0 to 1 (the KV cache is full). Errors: ``ConfigError``.
    """

    worker: str
    dp_rank: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int | None = None
    kv_usage: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (
            ("dp_rank", _MOST), ("running", _MOST), ("waiting", _MOST), ("queued_tokens", _MOST_TOKENS),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (value is None and name == "queued_tokens") and (
                type(value) is not int or not 0 <= value <= most
            ):
                raise ConfigError(f"load of {self.worker:.80}: {name} is a whole number, not {value!r:.40}")
        if isinstance(self.kv_usage, bool) or not 0 <= self.kv_usage <= 1:
            raise ConfigError(
                f"load of {self.worker:.80}: kv_usage is from 0 to 1, not {self.kv_usage!r:.40}"
            )


class Known(NamedTuple):
    """The last load of a rank, ``age_s`` seconds ago. ``asleep``: its engine serves no requests now."""

    load: Load
    source: LoadSource
    age_s: float
    asleep: bool


RankKey = tuple[str, int]  # worker's id, rank


class LoadBoard:
    """The last load of each rank, for ``KEEP_S`` seconds, reported by a router or scraped.

    ``clock``: seconds that only go up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._ranks: dict[RankKey, _native.RankLoad] = {}

    # A load of a rank beyond MAX_KEPT is not kept.

    def report(self, worker_id: str, load: Load) -> None:
        self._at(worker_id, load.dp_rank).report(
            self.clock(), load.running, load.waiting, load.queued_tokens, load.kv_usage
        )

    def scrape(self, worker_id: str, load: Load, *, asleep: bool) -> None:
        self._at(worker_id, load.dp_rank).scrape(
            self.clock(), load.running, load.waiting, load.queued_tokens, load.kv_usage, asleep
        )

    def measure(self, worker_id: str, dp_rank: int, pool_cost: float) -> None:
        """The cost of a token from the pool, in tokens to compute; kept for as long as the rank is."""
        self._at(worker_id, dp_rank).pool_cost = pool_cost

    def fail(self, worker_id: str, dp_rank: int) -> None:
        """The worker did not answer with its metrics."""
        self._at(worker_id, dp_rank).fail(self.clock())

    def reserve(self, worker_id: str, dp_rank: int, cost: int) -> None:
        self._at(worker_id, dp_rank).reserved_cost = cost

    def pick(self, worker_id: str, dp_rank: int, number: int, cost: float) -> None:
        """A rank was the best of a choice of this number, for a request of this cost; numbers go up."""
        self._at(worker_id, dp_rank).pick(number, cost)

    def get(self, worker_id: str, dp_rank: int) -> Known | None:
        """None: no load came for ``KEEP_S`` seconds."""
        rank = self._ranks.get((worker_id, dp_rank))
        known = None if rank is None else rank.known(self.clock(), KEEP_S)
        if known is None:
            return None
        load, source, age_s, asleep = known
        return Known(Load(worker_id.partition("/")[2], dp_rank, *load), LOAD_SOURCES[source], age_s, asleep)

    def of(self, keys: Iterable[RankKey]) -> list[_native.RankLoad | None]:
        """None: no load ever came."""
        return list(map(self._ranks.get, keys))

    def _at(self, worker_id: str, dp_rank: int) -> _native.RankLoad:
        key = (worker_id, dp_rank)
        with self._lock:
            rank = self._ranks.get(key)
            if rank is None:
                if len(self._ranks) >= MAX_KEPT:
                    now_s = self.clock()
                    for other, old in list(self._ranks.items()):
                        if not old.reserved_cost and old.known(now_s, KEEP_S) is None:
                            del self._ranks[other]
                rank = _native.RankLoad()
                if len(self._ranks) < MAX_KEPT:
                    self._ranks[key] = rank
            return rank


class Reservations:
    """Costs by rank, each until it is released or its time is over.

    Sums are written to ``loads``; for ends, in the next call. ``tenant_share``: the part of ``MAX_RESERVATIONS`` that
    one tenant may have. One thread at a time.
    """

    def __init__(self, clock: Callable[[], float], loads: LoadBoard, tenant_share: float = 1.0) -> None:
        self._clock, self._loads, self._tenant_share = clock, loads, tenant_share
        self._of: Counter[str] = Counter()  # how many, by tenant
        self._held: dict[str, tuple[str, RankKey, int]] = {}  # tenant, rank, cost
        self._ends: list[tuple[float, str]] = []  # a heap; may name released ones
        self._costs: Counter[RankKey] = Counter()
        self._done_s: dict[RankKey, float] = {}  # when a rank should have done its work

    def __len__(self) -> int:
        self.expire()
        return len(self._held)

    def add(
        self, tenant: str, worker_id: str, dp_rank: int, cost: int, keep_s: float, each_s: float | None = None
    ) -> str:
        """Hold ``cost`` against a rank for ``keep_s`` seconds. Returns its name; "" when there are too many.

        ``each_s``: seconds in which the rank does a unit of cost; it is held until this work should be done, behind
        earlier work.
        """
        self.expire()
        if len(self._held) >= MAX_RESERVATIONS or self._of[tenant] >= MAX_RESERVATIONS * self._tenant_share:
            return ""
        name = secrets.token_hex(8)
        self._held[name] = (tenant, (worker_id, dp_rank), cost)
        self._of[tenant] += 1
        self._costs[worker_id, dp_rank] += cost
        self._loads.reserve(worker_id, dp_rank, self._costs[worker_id, dp_rank])
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
        self._loads.reserve(*key, self._costs[key])
        if not self._costs[key]:
            del self._costs[key]
            self._done_s.pop(key, None)
