"""``LoadBoard``: how busy each worker's rank was last. Beside it ``Reservations`` and prompts ``InFlight``.

Any thread; nothing blocks. ``_lock`` guards ``_ranks`` and changes of its members; a ranking reads them without.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import threading
import time
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from kvpool import _native
from kvpool.index.answer import LOAD_SOURCES, LoadSource
from kvpool.index.fleet.rank import Rank, RankKey
from kvpool.index.prompt import Load

if TYPE_CHECKING:
    from kvpool.index.fleet.partition import Answer

KEEP_S = 10.0  # of a load; unknown after
KEEP_FAILED_S = 30.0  # of a failed page; pages are read again within 12 s
MAX_KEPT = 65536  # ranks
MAX_RESERVATIONS = 65536

EJECTED = 1 << 40  # cost of a worker that fails: above all prompts and queues
MAX_ALIKE = 64  # prompts in flight with the same first block
MAX_IN_FLIGHT_NBYTES = 16 << 20
ENTRY_NBYTES = 512  # of a prompt, beside its hashes

logger = logging.getLogger("kvpool.index")


class KnownLoad(NamedTuple):
    """The last load of a rank, ``age_s`` seconds ago. ``asleep``: its engine serves no requests now."""

    load: Load
    source: LoadSource
    age_s: float
    asleep: bool


class LoadBoard:
    """The last load of each rank, for ``KEEP_S`` seconds, reported by a router or scraped.

    ``clock``: monotonic seconds. ``rank``: ``Fleet.rank``: what is told of a rank by its name counts for its present
    start alone; None: nobody starts again. Loads of ranks beyond ``MAX_KEPT`` are dropped.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rank: Callable[[str, int], Rank | None] | None = None,
    ) -> None:
        self.clock = clock
        self._rank = rank or (lambda worker_id, dp_rank: None)
        self._lock = threading.Lock()
        self._ranks: dict[RankKey, _native.RankLoad] = {}

    def report(self, worker_id: str, load: Load) -> None:
        with self._changing(worker_id, load.dp_rank) as rank:
            rank.report(self.clock(), load.running, load.waiting, load.queued_tokens, load.kv_usage)

    def scrape(self, worker_id: str, load: Load, *, asleep: bool) -> None:
        with self._changing(worker_id, load.dp_rank) as rank:
            rank.scrape(self.clock(), load.running, load.waiting, load.queued_tokens, load.kv_usage, asleep)

    def measure(
        self,
        worker_id: str,
        dp_rank: int,
        pool: float | None,
        near: float | None = None,
        speed: float | None = None,
    ) -> None:
        """Cost per token from there, in tokens to compute, and how many it computes in a second; kept as long as the
        rank. None: unknown.
        """
        with self._changing(worker_id, dp_rank) as rank:
            rank.pool_cost, rank.near_cost, rank.speed = pool, near, speed

    def speed(self, key: RankKey) -> float | None:
        """Tokens that it computes in a second, as measured; None: unknown."""
        rank = self._ranks.get(key)
        return None if rank is None else rank.speed

    def place(self, key: RankKey, tokens: int) -> None:
        """A request without a session brings so many tokens."""
        with self._changing_of(key) as rank:
            rank.place(self.clock(), tokens)

    def size(self, worker_id: str, dp_rank: int, capacity_tokens: int) -> None:
        """Tokens that its KV cache holds; kept as long as the rank."""
        with self._changing(worker_id, dp_rank) as rank:
            rank.capacity_tokens = capacity_tokens

    def house(self, key: RankKey, session_tokens: int) -> None:
        """Tokens of all sessions whose home it is."""
        with self._changing_of(key) as rank:
            rank.session_tokens = session_tokens

    def fail(self, worker_id: str, dp_rank: int) -> None:
        with self._changing(worker_id, dp_rank) as rank:
            rank.fail(self.clock())

    def reserve(self, key: RankKey, cost: int) -> None:
        with self._changing_of(key) as rank:
            rank.reserved_cost = cost

    def pick(self, key: RankKey, number: int, cost: float) -> None:
        """A rank was the best of choice ``number``, for a request of this cost; numbers rise."""
        with self._changing_of(key) as rank:
            rank.pick(number, cost)

    def get(self, worker_id: str, dp_rank: int) -> KnownLoad | None:
        """None: no load for ``KEEP_S`` seconds."""
        rank = self._ranks.get(self._key(worker_id, dp_rank))
        known = None if rank is None else rank.known(self.clock(), KEEP_S)
        if known is None:
            return None
        load, source, age_s, asleep = known
        return KnownLoad(
            Load(worker_id.partition("/")[2], dp_rank, *load), LOAD_SOURCES[source], age_s, asleep
        )

    def of(self, keys: Iterable[RankKey]) -> list[_native.RankLoad | None]:
        """None: no load ever came."""
        return list(map(self._ranks.get, keys))

    def _key(self, worker_id: str, dp_rank: int) -> RankKey:
        rank = self._rank(worker_id, dp_rank)
        return RankKey(worker_id, dp_rank, 0) if rank is None else rank.key

    def _changing(self, worker_id: str, dp_rank: int) -> AbstractContextManager[_native.RankLoad]:
        return self._changing_of(self._key(worker_id, dp_rank))

    @contextmanager
    def _changing_of(self, key: RankKey) -> Iterator[_native.RankLoad]:
        """Holds the lock. A full board drops ranks without a reservation or a recent report."""
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
            yield rank


class Reservations:
    """Costs by rank, each until its release or its end.

    Sums are written to ``loads``; ends count from the next call. ``tenant_share``: a tenant's largest share
    of ``MAX_RESERVATIONS``. One thread at a time.
    """

    def __init__(self, clock: Callable[[], float], loads: LoadBoard, tenant_share: float = 1.0) -> None:
        self._clock, self._loads, self._tenant_share = clock, loads, tenant_share
        self._of: Counter[str] = Counter()  # number by tenant
        self._held: dict[str, tuple[str, RankKey, int]] = {}  # tenant, rank, cost
        self._ends: list[tuple[float, str]] = []  # a heap; may name released ones
        self._costs: Counter[RankKey] = Counter()
        self._done_s: dict[RankKey, float] = {}  # expected end of a rank's work

    def __len__(self) -> int:
        self.expire()
        return len(self._held)

    def add(self, tenant: str, key: RankKey, cost: int, keep_s: float, each_s: float | None = None) -> str:
        """Hold ``cost`` against a rank for ``keep_s`` seconds. Returns its name; "": too many.

        ``each_s``: seconds per unit of cost; the reservation ends with the expected work, after earlier work.
        """
        self.expire()
        if len(self._held) >= MAX_RESERVATIONS or self._of[tenant] >= MAX_RESERVATIONS * self._tenant_share:
            return ""
        name = secrets.token_hex(8)
        self._held[name] = (tenant, key, cost)
        self._of[tenant] += 1
        self._costs[key] += cost
        self._loads.reserve(key, self._costs[key])
        ends_s = self._clock() + keep_s
        if each_s is not None:
            self._done_s[key] = max(self._clock(), self._done_s.get(key, 0.0)) + cost * each_s
            ends_s = min(ends_s, self._done_s[key])
        heapq.heappush(self._ends, (ends_s, name))
        if len(self._ends) > 2 * MAX_RESERVATIONS:
            self._ends = [end for end in self._ends if end[1] in self._held]
            heapq.heapify(self._ends)
        return name

    def release(self, tenant: str, name: str) -> bool:
        """False: unknown, or of another tenant."""
        self.expire()
        if name not in self._held or self._held[name][0] != tenant:
            return False
        self._end(name)
        return True

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def cost(self, key: RankKey) -> int:
        return self._costs[key]

    def expire(self) -> None:
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
        self._loads.reserve(key, self._costs[key])
        if not self._costs[key]:
            del self._costs[key]
            self._done_s.pop(key, None)


class InFlight:
    """Prompts that ranks compute now: a request that shares their first blocks will find them there.

    A reservation at a rank costs at least the tokens that it computes, so a shared part is credited against it.
    ``_alike``: by first hash; of each rank and last hash, the hashes and a reservation. One thread at a time.
    """

    def __init__(self, loads: LoadBoard, reservations: Reservations) -> None:
        self._loads, self._reservations = loads, reservations
        self._alike: OrderedDict[bytes, OrderedDict[tuple[RankKey, bytes], tuple[bytes, str]]] = OrderedDict()
        self._nbytes = 0

    def add(self, key: RankKey, hashes: bytes, name: str) -> None:
        """The prompt is computed at a rank while the reservation ``name`` lasts."""
        if not name or not hashes:
            return
        alike = self._alike.setdefault(hashes[:8], OrderedDict())
        self._alike.move_to_end(hashes[:8])
        self._drop(alike.pop((key, hashes[-8:]), None))
        alike[key, hashes[-8:]] = hashes, name
        self._nbytes += len(hashes) + ENTRY_NBYTES
        if len(alike) > MAX_ALIKE:
            self._drop(alike.popitem(last=False)[1])
        while self._nbytes > MAX_IN_FLIGHT_NBYTES:
            for one in self._alike.popitem(last=False)[1].values():
                self._drop(one)

    @contextmanager
    def credited(self, answers: Iterable[Answer]) -> Iterator[dict[RankKey, int]]:
        """Until its end reserved costs are less these credits, in tokens."""
        credit: dict[RankKey, int] = {}
        for answer in answers:
            if shared := self._shared(memoryview(answer.hashes).cast("B")):
                rows = answer.lookup()
                held = zip(answer.members.keys, rows.block_tokens, rows.loadable_blocks, strict=True)
                for key, size, blocks in held:
                    if (tokens := (shared.get(key, 0) - blocks) * size) > 0:
                        credit[key] = min(tokens, self._reservations.cost(key) % EJECTED)
        for key, tokens in credit.items():
            self._loads.reserve(key, self._reservations.cost(key) - tokens)
        try:
            yield credit
        finally:
            for key in credit:
                self._loads.reserve(key, self._reservations.cost(key))

    def _shared(self, hashes: memoryview) -> dict[RankKey, int]:
        """Leading blocks by rank. Each hash covers all blocks before it."""
        alike = self._alike.get(bytes(hashes[:8])) or OrderedDict()
        shared: dict[RankKey, int] = {}
        for at, (others, name) in list(alike.items()):
            if name not in self._reservations:
                self._drop(alike.pop(at))
                continue
            ends = range(8, min(len(hashes), len(others)) + 1, 8)
            count = bisect(ends, False, key=lambda end: hashes[end - 8 : end] != others[end - 8 : end])
            shared[at[0]] = max(shared.get(at[0], 0), count)
        if not alike:
            self._alike.pop(bytes(hashes[:8]), None)
        return shared

    def _drop(self, one: tuple[bytes, str] | None) -> None:
        self._nbytes -= 0 if one is None else len(one[0]) + ENTRY_NBYTES
