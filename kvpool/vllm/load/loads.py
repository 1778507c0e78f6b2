"""An engine's loads, from the allocation of their blocks until their requests are scheduled.

What one load brings, other requests wait for: they find it in the engine's own cache. A load of a model with
sliding windows starts only beside enough free blocks. vLLM (0.30 to 0.33) counts blocks before the window as
memory that such a request holds, and a request behind its load is not preempted: two loads that fill the memory
would wait for each other for ever.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvpool.vllm.engine import internals
from kvpool.vllm.geometry import Geometry, Group, Room
from kvpool.vllm.load.state import RequestState
from kvpool.vllm.plan import AdapterWeights, BlockRef

Record = tuple[int, bytes]  # group, hash


@dataclass(slots=True)
class _UnderWay:
    began_s: float
    room: Room
    records: list[Record]  # that no earlier load brings


class Loads:
    """``patience_s``: longest wait for another request's load."""

    def __init__(self, geometry: Geometry, *, patience_s: float, clock: Callable[[], float]) -> None:
        self._geometry, self._patience_s, self._clock = geometry, patience_s, clock
        self._windowed = any(not (group.needs_all or group.is_ring) for group in geometry.groups)
        self._loads: dict[str, _UnderWay] = {}
        self._by: dict[Record, str] = {}
        self._block_pool: BlockPool | None = None

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def bring(self, request: Request, local_tokens: int, hit_tokens: int) -> bool:
        """Whether other requests load the first record that each group lacks: ask again in a later step."""
        now_s = self._clock()
        return all(
            (owner := self._by.get(record, request.request_id)) != request.request_id
            and now_s - self._loads[owner].began_s < self._patience_s
            for record in self._lacking(request, local_tokens, hit_tokens)
        )

    def _lacking(self, request: Request, local_tokens: int, hit_tokens: int) -> Iterator[Record]:
        for index, group in enumerate(self._geometry.groups):
            for block_hash, _ in self.needed(request, group, local_tokens, hit_tokens):
                yield index, block_hash
                break

    def needed(
        self, request: Request, group: Group, local_tokens: int, hit_tokens: int
    ) -> Iterator[tuple[bytes, int]]:
        """The records that a group lacks: hash and index. The last one may be a tail (``Geometry.match_tokens``)."""
        hashes = self._geometry.record_hashes(request.block_hashes, group)
        for i in group.records_to_load(local_tokens, hit_tokens):
            yield hashes[i], i
        if hit_tokens % group.record_tokens and not group.scratch:
            tail: bytes = request.block_hashes[hit_tokens // self._geometry.hash_block_tokens - 1]
            yield tail, hit_tokens // group.record_tokens

    def leave_room(self, request: Request, hit_tokens: int) -> bool:
        """Whether any load, if it failed, could be computed from nothing beside the others and this one."""
        if self._block_pool is None or not self._windowed:
            return True
        room = self._geometry.room_of_load(hit_tokens, request.num_tokens)
        behind = max(one.behind for one in (room, *(load.room for load in self._loads.values())))
        return room.loaded + behind <= internals.count_free(self._block_pool)

    def under_way(self) -> bool:
        return bool(self._loads)

    def begin(
        self,
        request: Request,
        tables: Sequence[Sequence[int]],
        local_tokens: int,
        hit_tokens: int,
        pool_hash: Callable[[bytes], bytes],
        adapter: AdapterWeights | None = None,
    ) -> list[BlockRef]:
        """The records to load into the blocks of ``tables``; ``adapter``: the request's."""
        name, blocks = request.request_id, []
        self.end(name)
        room = self._geometry.room_of_load(hit_tokens, request.num_tokens)
        load = self._loads[name] = _UnderWay(self._clock(), room, [])
        for index, group in enumerate(self._geometry.groups):
            for block_hash, i in self.needed(request, group, local_tokens, hit_tokens):
                ids = group.blocks_lacking(tables[index], i, local_tokens)
                if any(ids):
                    blocks.append(BlockRef(pool_hash(block_hash), index, ids, adapter))
                    if self._by.setdefault((index, block_hash), name) == name:
                        load.records.append((index, block_hash))
        return blocks

    def promised(self, state: RequestState, tokens: int, *, near: float, near_only: bool) -> None:
        """The engine took an offer of ``tokens`` and waits for them. ``near``: the share that may come from near."""
        load = state.load
        load.tokens, load.seconds, load.near, load.near_only = tokens, 0.0, near, near_only
        load.under_way = True

    def lasted(self, state: RequestState, seconds: float) -> None:
        """On the slowest rank so far."""
        state.load.seconds = max(state.load.seconds, seconds)

    def came_near(self, state: RequestState, share: float) -> None:
        """On the rank with the least so far."""
        state.load.near = min(state.load.near, share)

    def loaded(self, state: RequestState, failure: str) -> bool:
        """A request's load ended; whether one was under way. ``failure``: of ``metrics.MISS_REASONS``; empty: none."""
        load = state.load
        was_under_way, load.under_way = load.under_way, False
        if failure:
            load.failure = failure
            self.fail(state.asked.request.request_id)
        return was_under_way

    def fail(self, request_id: str) -> None:
        """No request waits for this failed load or its records, until its own request is scheduled."""
        if (load := self._loads.get(request_id)) is not None:
            load.began_s, load.room = -math.inf, Room(0, 0)

    def scheduled(self, request_ids: Container[str]) -> None:
        for name in [one for one in self._loads if one in request_ids]:
            self.end(name)

    def end(self, request_id: str) -> None:
        if (load := self._loads.pop(request_id, None)) is not None:
            for record in load.records:
                del self._by[record]
