"""``Prefetches`` copies a request's records from the far pool near, while the request waits for its turn.

vLLM asks for a prefix when it has room for its request. What the near pool lacks of one that it has not asked for
comes near meanwhile, natively, by a lookup that copies (``LookupGroup.prefetch_nbytes``). Requests whose prefix another
one loads bring nothing. Prefetched records fit a share of the near pool; those that no load used keep their part of it
for ``UNUSED_S``, so that requests which are queued and given up displace little.

Threads: the engine's scheduler thread only. Nothing here waits.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool import _native, metrics
from kvpool.errors import StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.metrics import Counters
from kvpool.store import LookupBatch, LookupGroup, Store, StoreURL
from kvpool.store.near_far import NearFarStore
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.load.loads import Loads
from kvpool.vllm.load.state import RequestState

COPIES_S = 60.0  # the copies of one request, at most
UNUSED_S = 300.0


@dataclass(slots=True)
class _Copies:
    """Of one request. ``nbytes``: at most, and once they ended what was copied."""

    batch: LookupBatch
    groups: Sequence[LookupGroup]
    nbytes: int
    ended: bool = False


class Wanted(NamedTuple):
    """What a request would load, in one namespace; without one, nothing."""

    namespace: Namespace | None
    groups: Sequence[LookupGroup]


NOTHING = Wanted(None, ())


@dataclass(slots=True)
class _Waiting:
    """A request. ``wanted``: at that time; None: not known yet. ``first``: it asked to come before others."""

    wanted: Callable[[float], Wanted | None]
    first: bool


class Prefetches:
    """``room_nbytes``: of prefetched records in the near pool."""

    def __init__(
        self,
        store: Store,
        *,
        room_nbytes: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._room_nbytes, self._counters, self._clock = store, room_nbytes, counters, clock
        self._queue: OrderedDict[str, _Waiting] = OrderedDict()
        self._answered = ""  # the request whose lookup had ended in an earlier step
        self._copies: dict[str, _Copies] = {}
        self._left: list[
            tuple[_Copies, bool]
        ] = []  # of requests that wait no longer; whether a load used them
        self._unused: deque[tuple[float, int]] = deque()  # until when these bytes count

    def wait(self, request_id: str, wanted: Callable[[float], Wanted | None], *, first: bool) -> None:
        """A request arrived, and its lookup is under way. ``wanted``: None until that has ended."""
        if not self._room_nbytes:
            return
        self._queue[request_id] = _Waiting(wanted, first)
        if first:
            self._queue.move_to_end(request_id, last=False)

    def waits(self, request_id: str) -> bool:
        """Whether a request has not left."""
        return request_id in self._queue or request_id in self._copies

    def leave(self, request_id: str, *, used: bool) -> None:
        """The request waits no longer. ``used``: it loads its prefix. Idempotent."""
        self._queue.pop(request_id, None)
        if (copies := self._copies.pop(request_id, None)) is not None:
            copies.batch.cancel()
            self._left.append((copies, used))

    def brought(self, request_id: str) -> bool:
        """Whether all that it copies for the request is near now."""
        copies = self._copies.get(request_id)
        try:
            return copies is not None and copies.batch.done() and all(copies.batch.wait())
        except StoreUnavailable:
            return False

    def forget(self) -> None:
        """The engine's blocks have other names now."""
        for request_id in [*self._queue, *self._copies]:
            self.leave(request_id, used=False)

    def step(self) -> None:
        """Begin the copies of the first request that vLLM has not asked for since its lookup ended."""
        now_s = self._clock()
        self._settle(now_s)
        while self._queue:
            request_id, waiting = next(iter(self._queue.items()))
            wanted = waiting.wanted(now_s)
            if wanted is None:
                return
            if wanted.groups and not waiting.first and self._answered != request_id:
                self._answered = request_id
                return  # vLLM may ask for it in its next step
            nbytes = _nbytes(wanted.groups, [group.records for group in wanted.groups])
            fits = 0 < nbytes <= self._room_nbytes
            if fits and nbytes > self._room_nbytes - self._taken_nbytes():
                return
            del self._queue[request_id]
            if fits and wanted.namespace is not None:
                self._begin(request_id, wanted.namespace, wanted.groups, nbytes)

    def _begin(
        self, request_id: str, namespace: Namespace, groups: Sequence[LookupGroup], nbytes: int
    ) -> None:
        try:
            batch = self._store.submit_lookup(namespace, groups, timeout_s=COPIES_S)
        except StoreUnavailable:
            return
        self._copies[request_id] = _Copies(batch, groups, nbytes)

    def _settle(self, now_s: float) -> None:
        for copies in (*self._copies.values(), *(one for one, _ in self._left)):
            if not copies.ended and copies.batch.done():
                copies.ended, copies.nbytes = True, _nbytes(copies.groups, copies.batch.prefetched())
        for copies, used in [one for one in self._left if one[0].ended]:
            self._left.remove((copies, used))
            self._counters.add(metrics.PREFETCHED_NBYTES, copies.nbytes, "used" if used else "unused")
            if not used:
                self._unused.append((now_s + UNUSED_S, copies.nbytes))
        while self._unused and self._unused[0][0] <= now_s:
            self._unused.popleft()

    def _taken_nbytes(self) -> int:
        return (
            sum(copies.nbytes for copies in self._copies.values())
            + sum(copies.nbytes for copies, used in self._left if not used)
            + sum(nbytes for _, nbytes in self._unused)
        )


class BlockPrefetches(Prefetches):
    """Of the blocks of prefixes. ``loads``: those under way."""

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        loads: Loads,
        *,
        room_nbytes: int,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, room_nbytes=room_nbytes, counters=counters, clock=clock)
        self._geometry, self._loads = geometry, loads
        self._sizes: Mapping[int, Sequence[int]] = {}

    def sized(self, sizes: Mapping[int, Sequence[int]]) -> None:
        """By group, the bytes of each part of a record. Parts of several sizes stay far."""
        self._sizes = sizes

    def blocks(self, state: RequestState, namespace: Namespace | None, now_s: float) -> Wanted | None:
        """The records of the request's hit; none where another request loads them."""
        request, lookup, in_pool = state.asked.request, state.found.lookup, state.asked.pool_hash
        if lookup is not None and not lookup.ended(now_s):
            return None
        if lookup is None or lookup.present is None or in_pool is None:
            return NOTHING
        hit = self._geometry.longest_hit(lookup.present, local_tokens=0, max_tokens=request.num_tokens - 1)
        if not hit or self._loads.bring(request, 0, hit):
            return NOTHING
        groups = []
        for index, group in enumerate(self._geometry.groups):
            hashes = [in_pool(block_hash) for block_hash, _ in self._loads.needed(request, group, 0, hit)]
            sizes = self._sizes.get(index, ())
            if not hashes or len(set(sizes)) != 1:
                continue
            groups.append(
                LookupGroup(
                    hashes=_native.pack_hashes(hashes),
                    hash_nbytes=len(hashes[0]),
                    group=index,
                    ranks=len(sizes),
                    record_tokens=group.record_tokens,
                    sliding_window=not group.needs_all,
                    prefetch_nbytes=sizes[0],
                )
            )
        return Wanted(namespace, groups)


def _nbytes(groups: Sequence[LookupGroup], records: Sequence[int]) -> int:
    return sum(
        count * group.ranks * group.prefetch_nbytes for group, count in zip(groups, records, strict=True)
    )


def near_nbytes(store: Store, pool: str) -> int:
    """The capacity of the near pool of these URLs, which stands in it; 0: there is none."""
    near = StoreURL.parse(pool).near
    if near is None:
        return 0
    said = store.near_capacity_nbytes if isinstance(store, NearFarStore) else None
    return said or near.capacity_nbytes
