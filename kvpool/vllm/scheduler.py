"""The scheduler's half of the connector: what to offer, what to load, what to store. It never blocks.

A request's way: its existence batch starts when it is first seen; once answered, the longest usable prefix is
offered; when the engine has allocated blocks, the load goes to the workers; a load that fails is remembered, so
that it is not offered to this request again.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.config import PoolConfig
from kvpool.errors import StoreClosed, StoreUnavailable
from kvpool.keys import Namespace
from kvpool.metrics import Counters
from kvpool.stores import Store, Transfer
from kvpool.vllm import compat
from kvpool.vllm.guard import Guard
from kvpool.vllm.plan import (
    BlockRef,
    Group,
    LoadPlan,
    PoolMetadata,
    PoolWorkerMetadata,
    blocks_to_load,
    blocks_to_store,
    longest_hit,
)
from kvpool.vllm.whole_state import WholeState

logger = init_logger("vllm.kvpool")

FRESH_S = 10.0  # an answer of the existence check that is older is asked again before it is offered
MIN_LOAD_S = 0.05  # what a load is given even when the existence check has used up the budget
LOOKUP_GRACE_S = 0.25  # how long after its own deadline an existence batch may still be stopping
MAX_PENDING_STORES = 1 << 16  # blocks; more are not sent to the workers
NO_OFFER: tuple[int | None, bool] = (0, False)
KEEP_STEPPING_S = 5.0  # how long an engine without requests steps on, so that stores end and are announced


@dataclass
class _Lookup:
    """The existence batch of one request: ``blocks[g]`` blocks of each group, for every rank."""

    transfer: Transfer
    blocks: list[int]
    started: float
    present: list[list[bool]] | None = None  # by group and block, once answered


@dataclass
class _RequestState:
    request: Request
    lookup: _Lookup | None = None
    waiting_since: float | None = None  # when the engine was first told to ask again later
    waited_s: float = 0.0
    offered: tuple[int, int] | None = None  # (local tokens, tokens with the pool)
    loading: bool = False
    refused: bool = False  # a load of it failed, or its existence check did: not offered again
    handed: list[int] | None = None  # by group: leading blocks that need not be stored


@dataclass
class _PendingStore:
    ranks: int
    ok: bool
    event: BlockStored | None


class SchedulerHalf:
    """Plans loads and stores for one engine of ``ranks`` ranks; ``store`` is the caller's to close."""

    def __init__(
        self,
        config: PoolConfig,
        store: Store,
        groups: Sequence[Group],
        *,
        ranks: int,
        align_tokens: int,
        hash_block_tokens: int,
        loads: bool,
        stores: bool,
        events: bool,
    ) -> None:
        self._config, self._store, self._groups = config, store, list(groups)
        self._ranks, self._align_tokens, self._hash_block_tokens = ranks, align_tokens, hash_block_tokens
        self._loads, self._stores, self._events_wanted = loads, stores, events
        self._namespace: Namespace | None = None  # from the workers' first step
        self._heard: dict[int, Namespace] = {}  # by rank
        self._broken = False
        self._guard = Guard(self._break)
        self._requests: dict[str, _RequestState] = {}
        self._new_loads: list[LoadPlan] = []
        self._cancelled: list[str] = []
        self._pending: dict[int, _PendingStore] = {}
        self._next_tag = 0
        self._last_store = 0.0
        self._events: list[KVCacheEvent] = []
        self._whole_state = WholeState(self._groups)
        self._asked = False  # for the whole state, in the step that is ending
        self.counters = Counters()

    # What the engine asks.

    def seen(self, request: Request) -> None:
        """A request has arrived: start its existence batch."""
        self._guard.run(lambda: self._seen(request), None)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """(tokens that the pool adds to ``local_tokens``, load is asynchronous); None: ask again later."""
        return self._guard.run(lambda: self._matched_tokens(request, local_tokens), NO_OFFER)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine has allocated blocks; load into them if it took the offer."""
        no_blocks: list[BlockRef] = []
        blocks = self._guard.run(lambda: self._blocks_to_load(request, tables, external_tokens), no_blocks)
        if external_tokens:
            # A plan without blocks is reported as failed by the workers, which is what ends the engine's wait.
            state = self._state(request)
            left_s = max(MIN_LOAD_S, self._config.budget_s - state.waited_s)
            self._new_loads.append(LoadPlan(request.request_id, blocks, left_s))
            state.loading = True
            self.counters.add(metrics.OFFERED_TOKENS, external_tokens)

    def plan(self, output: SchedulerOutput) -> PoolMetadata:
        """The step's loads and stores, each handed over once."""
        step = PoolMetadata(
            loads=self._new_loads, cancelled=self._cancelled, idle=not output.total_num_scheduled_tokens
        )
        self._new_loads, self._cancelled = [], []
        if self._stores and not self._broken:
            self._guard.run(lambda: self._plan_all_stores(output, step), None)
        return step

    def _seen(self, request: Request) -> None:
        state = self._state(request)
        if self._loads and not self._broken and self._max_tokens(request) > 0:
            self._ask(state)

    def _matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        state = self._state(request)
        state.offered = None
        max_tokens = self._max_tokens(request)
        if not self._loads or self._broken or state.refused or local_tokens >= max_tokens:
            return NO_OFFER
        now = time.monotonic()
        if self._namespace is None:
            return self._later(state, now) if self._may_wait(state, now) else NO_OFFER
        lookup = state.lookup
        if lookup is None or (lookup.present is not None and now - lookup.started > FRESH_S):
            lookup = self._ask(state)
        if lookup is None:
            return NO_OFFER
        if lookup.present is None:
            if not lookup.transfer.done():
                if now - lookup.started <= self._config.budget_s + LOOKUP_GRACE_S:
                    return self._later(state, now)
                self._lookup_failed(state, "timeout")
                return NO_OFFER
            if not self._answered(state, lookup):
                return NO_OFFER
        if state.waiting_since is not None:
            state.waited_s, state.waiting_since = now - state.waiting_since, None
        assert lookup.present is not None
        hit = longest_hit(
            self._groups,
            lookup.present,
            local_tokens=local_tokens,
            max_tokens=max_tokens,
            align_tokens=self._align_tokens,
        )
        if hit == local_tokens:
            return NO_OFFER
        state.offered = (local_tokens, hit)
        return hit - local_tokens, True

    def _blocks_to_load(
        self, request: Request, tables: Sequence[Sequence[int]], external_tokens: int
    ) -> list[BlockRef]:
        state = self._state(request)
        state.lookup = self._dropped(state.lookup)
        state.handed = None
        offered, state.offered = state.offered, None
        if external_tokens == 0 or offered is None:
            return []
        blocks: list[BlockRef] = []
        local_tokens, _ = offered
        for index, group in enumerate(self._groups):
            hashes = compat.group_hashes(request, self._hash_block_tokens, group.block_tokens)
            needed = blocks_to_load(group, local_tokens, local_tokens + external_tokens)
            # Block 0 stands where the engine keeps nothing (outside a window).
            blocks += [BlockRef(hashes[i], index, tables[index][i]) for i in needed if tables[index][i]]
        return blocks

    def _plan_all_stores(self, output: SchedulerOutput, step: PoolMetadata) -> None:
        for request_id, computed_tokens in compat.scheduled_tokens(output):
            state = self._requests.get(request_id)
            if state is not None:
                self._plan_stores(state, output, computed_tokens, step)
        if step.stores:
            self._last_store = time.monotonic()

    def finished(self, request: Request) -> None:
        """A request has ended, or was aborted: nothing of it stays."""
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._dropped(state.lookup)
            if state.loading:
                self._cancelled.append(request.request_id)

    def update(
        self, report: PoolWorkerMetadata | None, finished_loads: Iterable[str], failed_loads: Iterable[str]
    ) -> None:
        """Take in what the workers report of a step."""
        self._guard.run(lambda: self._update(report, set(finished_loads), set(failed_loads)), None)

    def _update(self, report: PoolWorkerMetadata | None, finished: set[str], failed: set[str]) -> None:
        for request_id in finished | failed:
            if (state := self._requests.get(request_id)) is not None:
                state.loading = False
                state.refused |= request_id in failed
        if report is None:
            return
        self._asked |= report.asked
        for reason in report.broken.values():
            self._break(reason)
        self._hear(report)
        for counts, ok in ((report.stored, True), (report.dropped, False)):
            for tag, ranks in counts.items():
                self._settle(tag, ranks, ok)
        if self._events_wanted:
            self._events += [compat.removed_event(*block) for block in sorted(report.missing)]

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """The engine's own cache, which is the engine's to change."""
        self._whole_state.bind(block_pool)

    def take_events(self) -> list[KVCacheEvent]:
        """What became true of the pool since the last call; and, when an index asks, all that the engine holds."""
        events, self._events = self._events, []
        asked, self._asked = self._asked, False
        if asked and self._events_wanted:
            nothing: list[KVCacheEvent] = []
            events += self._guard.run(self._whole_state.tell, nothing)
        return events

    def wants_steps(self) -> bool:
        """Whether an engine without requests should go on stepping, to hear of the stores in flight."""
        return bool(self._pending) and time.monotonic() - self._last_store < KEEP_STEPPING_S

    def forget(self) -> None:
        """Drop every answer about what the pool holds."""
        for state in self._requests.values():
            state.lookup = self._dropped(state.lookup)
            state.offered = None

    def close(self) -> None:
        """Cancel what is in flight."""
        for state in self._requests.values():
            self._dropped(state.lookup)
        self._requests.clear()

    # Existence.

    def _state(self, request: Request) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _RequestState(request)
        return state

    def _max_tokens(self, request: Request) -> int:
        """The longest prefix that may be taken: at least one token is left to compute."""
        return int((request.num_tokens - 1) // self._align_tokens * self._align_tokens)

    def _may_wait(self, state: _RequestState, now: float) -> bool:
        return state.waiting_since is None or now - state.waiting_since < self._config.budget_s

    @staticmethod
    def _later(state: _RequestState, now: float) -> tuple[None, bool]:
        if state.waiting_since is None:
            state.waiting_since = now
        return None, False

    def _ask(self, state: _RequestState) -> _Lookup | None:
        """Start the existence batch of a request; None when there is no pool to ask."""
        if self._namespace is None:
            return None
        state.lookup = self._dropped(state.lookup)
        keys: list[str] = []
        blocks = []
        max_tokens = self._max_tokens(state.request)
        for index, group in enumerate(self._groups):
            hashes = compat.group_hashes(state.request, self._hash_block_tokens, group.block_tokens)
            hashes = hashes[: max_tokens // group.block_tokens]
            blocks.append(len(hashes))
            for rank in range(self._ranks):
                keys += self._namespace.keys(hashes, index, rank)
        try:
            transfer = self._store.submit_contains(keys, timeout_s=self._config.budget_s)
        except StoreUnavailable:
            self._lookup_failed(state, "store_unavailable")
            return None
        state.lookup = _Lookup(transfer, blocks, time.monotonic())
        self.counters.add(metrics.LOOKUP_REQUESTS)
        self.counters.add(metrics.LOOKUP_BLOCKS, len(keys))
        return state.lookup

    def _answered(self, state: _RequestState, lookup: _Lookup) -> bool:
        """Read the answer of an existence batch that has ended."""
        try:
            answers = lookup.transfer.wait()
        except StoreUnavailable:
            self._lookup_failed(state, "store_unavailable")
            return False
        lookup.present = []
        start = 0
        for count in lookup.blocks:
            ranks = [
                answers[start + rank * count : start + (rank + 1) * count] for rank in range(self._ranks)
            ]
            lookup.present.append([all(parts) for parts in zip(*ranks, strict=True)])
            start += count * self._ranks
        return True

    def _lookup_failed(self, state: _RequestState, cause: str) -> None:
        state.refused = True
        state.lookup = self._dropped(state.lookup)
        self.counters.add(metrics.LOOKUP_FAILURES, 1, cause)

    @staticmethod
    def _dropped(lookup: _Lookup | None) -> None:
        if lookup is not None:
            lookup.transfer.cancel()

    # Stores.

    def _plan_stores(
        self, state: _RequestState, output: SchedulerOutput, computed_tokens: int, step: PoolMetadata
    ) -> None:
        request = state.request
        before = computed_tokens - output.num_scheduled_tokens[request.request_id]
        if state.handed is None:
            state.handed = [before // group.block_tokens for group in self._groups]
        tables: tuple[list[int], ...] | None = None
        for index, group in enumerate(self._groups):
            if computed_tokens // group.block_tokens <= state.handed[index]:
                continue
            hashes = compat.group_hashes(request, self._hash_block_tokens, group.block_tokens)
            new = blocks_to_store(group.block_tokens, state.handed[index], computed_tokens, len(hashes))
            state.handed[index] = new.stop
            tables = compat.block_tables(output, request.request_id) if tables is None else tables
            if tables is None:
                return
            for i in new:
                if i < len(tables[index]) and tables[index][i]:
                    self._plan_store(step, BlockRef(hashes[i], index, tables[index][i]), request, i, hashes)

    def _plan_store(
        self, step: PoolMetadata, block: BlockRef, request: Request, index: int, hashes: Sequence[bytes]
    ) -> None:
        if len(self._pending) >= MAX_PENDING_STORES:
            self.counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "queue_full")
            return
        event = None
        if self._events_wanted:
            group = self._groups[block.group]
            event = compat.stored_event(request, block.group, group, index, hashes)
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._pending[tag] = _PendingStore(self._ranks, True, event)
        step.stores.append(block)
        step.tags.append(tag)

    def _settle(self, tag: int, ranks: int, ok: bool) -> None:
        pending = self._pending.get(tag)
        if pending is None:
            return
        pending.ranks -= ranks
        pending.ok &= ok
        if pending.ranks <= 0:
            del self._pending[tag]
            if pending.ok and pending.event is not None:
                self._events.append(pending.event)

    # Workers.

    def _hear(self, report: PoolWorkerMetadata) -> None:
        """Learn the namespace from the ranks' facts; they must agree, or nothing is shared."""
        for rank, facts in report.facts.items():
            self._heard[rank] = Namespace(self._config.tenant, facts)
        if self._namespace is None and len(self._heard) == self._ranks and not self._broken:
            namespaces = set(self._heard.values())
            if len(namespaces) > 1:
                self._break("its ranks lay out their blocks differently")
            else:
                self._namespace = namespaces.pop()

    def _break(self, reason: str) -> None:
        self._pending.clear()  # who failed may not report them any more
        if not self._broken:
            self._broken = True
            logger.error("kvpool is off for this engine, which goes on without it: %s", reason)

    def stats(self) -> dict[str, float]:
        """Samples since the last call."""
        with contextlib.suppress(StoreClosed):
            self.counters.add_growth(metrics.REFUSED_KEYS, self._store.counters().get("refused", 0))
        return self.counters.take()
