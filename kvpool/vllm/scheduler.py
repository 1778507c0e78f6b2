"""The scheduler's half of the connector: what to offer, what to load, what to store. It never blocks.

A request's way: its existence batch starts when it is first seen; once answered, the longest usable prefix is
offered, unless the cost gate expects that computing it is faster; when the engine has allocated blocks, the load goes
to the workers; a load that fails is remembered, so that it is not offered to this request again.

A record's way to the pool: when a step fills the last of its blocks, it is wanted if the request allows it and the
settings do (prompts only, the number of requests that have had it). What is wanted goes to the workers at once, or with
``write_back`` when it is among the blocks that the engine will use next; it is copied in that step, before a later one
can write over it.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.config import PoolConfig
from kvpool.errors import StoreClosed, StoreUnavailable
from kvpool.keys import Fact, Namespace
from kvpool.metrics import Counters
from kvpool.stores import Store, Transfer
from kvpool.vllm import compat
from kvpool.vllm.gate import MIN_STEP_TOKENS, CostGate
from kvpool.vllm.guard import Guard
from kvpool.vllm.plan import (
    BlockRef,
    Group,
    LoadPlan,
    PoolMetadata,
    PoolWorkerMetadata,
    blocks_held,
    blocks_lacking,
    longest_hit,
    records_to_load,
    records_to_store,
)
from kvpool.vllm.request_params import WITHOUT_POOL, ParamsReader, RequestParams
from kvpool.vllm.sightings import Sightings
from kvpool.vllm.stages import facts_of_engine, why_ranks_differ
from kvpool.vllm.whole_state import WholeState

logger = init_logger("vllm.kvpool")

FRESH_S = 10.0  # an answer of the existence check that is older is asked again before it is offered
MIN_LOAD_S = 0.05  # what a load is given even when the existence check has used up the budget
LOOKUP_GRACE_S = 0.25  # how long after its own deadline an existence batch may still be stopping
MAX_PENDING_STORES = 1 << 16  # blocks; more are not sent to the workers
NO_OFFER: tuple[int | None, bool] = (0, False)
STEPS_AHEAD = 2  # write-back looks at the blocks that so many full steps could use
WARN_EVERY_S = 60.0  # a pool that comes and goes is not told more often
STEPS_IN_FLIGHT = 4  # whose time is taken; of more, the oldest will not be reported any more
KEEP_STEPPING_S = 5.0  # how long an engine without requests steps on, so that stores end and are announced


@dataclass
class _Lookup:
    """The existence batch of one request: ``blocks[g]`` records of each group, for every rank that stores it."""

    transfer: Transfer
    blocks: list[int]
    started: float
    present: list[list[bool]] | None = None  # by group and record, once answered


@dataclass
class _RequestState:
    request: Request
    params: RequestParams
    lookup: _Lookup | None = None
    waiting_since: float | None = None  # when the engine was first told to ask again later
    waited_s: float = 0.0
    offered: tuple[int, int] | None = None  # (local tokens, tokens with the pool)
    loading: bool = False
    admitted: bool = False  # the cost gate lets it load what its lookup has found
    load_tokens: int = 0  # of the load under way
    load_s: float = 0.0
    refused: bool = False  # a load failed, its existence check did, or it does not pay: not offered again
    handed: list[int] | None = None  # by group: leading records that need not be stored
    held: list[int] = field(default_factory=list)  # by group: leading records that it did not compute
    sighted: list[int] = field(default_factory=list)  # by group: leading records in which it was counted


@dataclass
class _WriteBack:
    """A block that is stored when the engine is about to evict it, if it still holds what ``block`` says."""

    block: BlockRef
    priority: int
    event: BlockStored | None


@dataclass
class _PendingStore:
    ranks: int  # that have not said yet whether it is in the pool
    landing: int  # ranks for which the blocks are held, as they may still read them
    block_ids: tuple[int, ...]
    ok: bool
    event: BlockStored | None


class SchedulerHalf:
    """Plans loads and stores for one engine of ``ranks`` ranks, all pipeline stages together; ``store`` is the caller's
    to close.

    ``step_tokens``: most that the engine computes in a step.
    """

    def __init__(
        self,
        config: PoolConfig,
        store: Store,
        groups: Sequence[Group],
        *,
        ranks: int,
        stages: int = 1,
        align_tokens: int,
        hash_block_tokens: int,
        step_tokens: int,
        loads: bool,
        stores: bool,
        events: bool,
    ) -> None:
        self._config, self._store, self._groups = config, store, list(groups)
        self._ranks, self._stages, self._hash_block_tokens = ranks, stages, hash_block_tokens
        # Where the engine can go on, and records of every group end.
        self._align_tokens = math.lcm(align_tokens, *(group.record_tokens for group in self._groups))
        self._loads, self._stores, self._events_wanted = loads, stores, events
        self._namespace: Namespace | None = None  # from the workers' first step
        self._heard: dict[int, dict[str, Fact]] = {}  # by rank
        self._to_tell: dict[str, Fact] = {}  # to the workers, with the next step
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
        self._params = ParamsReader()
        self._sightings = Sightings() if config.store_after_requests > 1 else None
        self._block_pool: BlockPool | None = None
        self._write_back: dict[int, _WriteBack] = {}  # by block id, of which the engine has so many
        self._blocks_ahead = sum(
            -(-STEPS_AHEAD * step_tokens // group.block_tokens) for group in self._groups
        )
        self._gate = CostGate(self.counters) if config.cost_gate and loads else None
        self._steps: deque[tuple[int, float, int]] = deque(
            maxlen=STEPS_IN_FLIGHT
        )  # (number, planned at, tokens)
        self._next_step = 1
        self._reported_at = 0.0
        self._said_away = False  # and not yet that it answers again
        self._warned_at = -WARN_EVERY_S

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
            self._new_loads.append(LoadPlan(request.request_id, blocks, left_s, state.params.priority))
            state.loading, state.load_tokens, state.load_s = True, external_tokens, 0.0
            self.counters.add(metrics.OFFERED_TOKENS, external_tokens)

    def plan(self, output: SchedulerOutput) -> PoolMetadata:
        """The step's loads and stores, each handed over once."""
        step = PoolMetadata(
            loads=self._new_loads,
            cancelled=self._cancelled,
            idle=not output.total_num_scheduled_tokens,
            facts=self._to_tell,
        )
        self._new_loads, self._cancelled, self._to_tell = [], [], {}
        if self._gate is not None:
            step.timed = self._guard.run(lambda: self._step_begins(output), 0)
        if self._stores and not self._broken:
            self._guard.run(lambda: self._plan_all_stores(output, step), None)
        return step

    def _seen(self, request: Request) -> None:
        state = self._state(request)
        if self._may_load(state) and self._max_tokens(request) > 0:
            self._ask(state)

    def _matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        state = self._state(request)
        state.offered = None
        max_tokens = self._max_tokens(request)
        if not self._may_load(state) or state.refused or local_tokens >= max_tokens:
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
        if self._gate is not None and not state.admitted:
            state.admitted = self._gate.admits()
            if not state.admitted:
                state.refused = True
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
            hashes = compat.record_hashes(request, self._hash_block_tokens, group)
            for i in records_to_load(group, local_tokens, local_tokens + external_tokens):
                ids = blocks_lacking(group, tables[index], i, local_tokens)
                if any(ids):
                    blocks.append(BlockRef(hashes[i], index, ids))
        return blocks

    def _plan_all_stores(self, output: SchedulerOutput, step: PoolMetadata) -> None:
        scheduled = []
        for request_id, computed_tokens in compat.scheduled_tokens(output):
            if (state := self._requests.get(request_id)) is not None and state.params.store:
                scheduled.append((state, computed_tokens))
        for state, computed_tokens in sorted(scheduled, key=lambda each: each[0].params.priority):
            self._plan_stores(state, output, computed_tokens, step)
        if self._write_back and output.total_num_scheduled_tokens:
            self._plan_write_back(step)
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
        if self._gate is not None:
            self._step_ends(report.timed if report else 0)
        for request_id, load_s in (report.load_s if report else {}).items():
            if (state := self._requests.get(request_id)) is not None:
                state.load_s = max(state.load_s, load_s)
        for request_id in finished | failed:
            if (state := self._requests.get(request_id)) is not None:
                if self._gate is not None and state.loading:
                    self._gate.loaded(0 if request_id in failed else state.load_tokens, state.load_s)
                state.loading = False
                state.refused |= request_id in failed
        if report is None:
            return
        self._let_go(report.landed)
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
        """The engine's own cache. Of it we only hold blocks, by their reference count, while workers copy them."""
        self._whole_state.bind(block_pool)
        self._block_pool = block_pool

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

    # The cost gate.

    def _step_begins(self, output: SchedulerOutput) -> int:
        """The number under which the end of a step is to be reported; 0: it says nothing of the rate of prompts."""
        tokens = output.total_num_scheduled_tokens
        if tokens < MIN_STEP_TOKENS or not any(
            (state := self._requests.get(name)) is not None
            and computed_tokens - output.num_scheduled_tokens[name] < state.request.num_prompt_tokens
            for name, computed_tokens in compat.scheduled_tokens(output)
        ):
            return 0
        number, self._next_step = self._next_step, self._next_step + 1
        self._steps.append((number, time.monotonic(), tokens))
        return number

    def _step_ends(self, reported: int) -> None:
        assert self._gate is not None
        now = time.monotonic()
        while self._steps and self._steps[0][0] <= reported:
            number, planned_at, tokens = self._steps.popleft()
            if number == reported:
                # One that was planned ahead has begun when the one before it was over.
                self._gate.computed(tokens, now - max(planned_at, self._reported_at))
        self._reported_at = now

    # Existence.

    def _state(self, request: Request) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            params = self._params.read(getattr(request, "kv_transfer_params", None))
            if compat.adapter_changed_in_place(request):
                params = WITHOUT_POOL
            state = self._requests[request.request_id] = _RequestState(request, params)
        return state

    def _may_load(self, state: _RequestState) -> bool:
        return self._loads and not self._broken and state.params.load

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
        state.admitted = False
        keys: list[str] = []
        blocks = []
        max_tokens = self._max_tokens(state.request)
        for index, group in enumerate(self._groups):
            hashes = compat.record_hashes(state.request, self._hash_block_tokens, group)
            hashes = hashes[: max_tokens // group.record_tokens]
            blocks.append(len(hashes))
            for rank in group.key_ranks(self._ranks):
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
        if self._said_away:
            self._said_away = False
            logger.info("kvpool: the pool answers again")
        lookup.present = []
        start = 0
        for group, count in zip(self._groups, lookup.blocks, strict=True):
            ranks = []
            for _ in group.key_ranks(self._ranks):
                ranks.append(answers[start : start + count])
                start += count
            lookup.present.append([all(parts) for parts in zip(*ranks, strict=True)])
        return True

    def _lookup_failed(self, state: _RequestState, cause: str) -> None:
        state.refused = True
        state.lookup = self._dropped(state.lookup)
        self.counters.add(metrics.LOOKUP_FAILURES, 1, cause)
        now = time.monotonic()
        if not self._said_away and now - self._warned_at >= WARN_EVERY_S:
            self._said_away, self._warned_at = True, now
            logger.warning(
                "kvpool: the pool gives no answer (%s), so prompts are computed; see kvpool_lookup_failures_total",
                cause,
            )

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
        if not self._config.store_decode:
            computed_tokens = min(computed_tokens, request.num_prompt_tokens)
        if state.handed is None:
            state.held = [before // group.record_tokens for group in self._groups]
            # What it did not compute is in the pool, or was stored by who did: unless it had been seen too rarely.
            state.handed = [0] * len(self._groups) if self._sightings else list(state.held)
        tables: tuple[list[int], ...] | None = None
        for index, group in enumerate(self._groups):
            if computed_tokens // group.record_tokens <= state.handed[index]:
                continue
            hashes = compat.record_hashes(request, self._hash_block_tokens, group)
            new = records_to_store(group.record_tokens, state.handed[index], computed_tokens, len(hashes))
            state.handed[index] = new.stop
            tables = compat.block_tables(output, request.request_id) if tables is None else tables
            if tables is None:
                return
            wanted = self._wanted(state, index, hashes, new)
            for i in wanted:
                if (ids := blocks_held(group, tables[index], i)) is not None:
                    block = BlockRef(hashes[i], index, ids)
                    event = (
                        compat.stored_event(request, index, group, i, hashes) if self._events_wanted else None
                    )
                    if self._config.store_policy == "write_back":
                        self._keep_for_later(_WriteBack(block, state.params.priority, event))
                    else:
                        self._plan_store(step, block, event)

    def _wanted(
        self, state: _RequestState, group: int, hashes: Sequence[bytes], blocks: range
    ) -> Iterable[int]:
        """Those of a request's records that enough requests have had; counts this one in, once for each."""
        if self._sightings is None:
            return blocks
        assert blocks.step == 1
        if not state.sighted:
            state.sighted = [0] * len(self._groups)
        first = state.sighted[group]  # beyond 0 already, when the request was preempted
        state.sighted[group] = max(first, blocks.stop)
        enough = self._config.store_after_requests
        wanted = []
        for i in blocks:
            if i >= first:
                count = self._sightings.add(hashes[i], group)
            else:
                count = self._sightings.count(hashes[i], group)
            # A block that the engine had already is stored by the request that makes it enough, and no later one.
            if (count >= enough) if i >= state.held[group] else (count == enough and i >= first):
                wanted.append(i)
        return wanted

    def _keep_for_later(self, kept: _WriteBack) -> None:
        (block_id,) = kept.block.block_ids  # as the settings have it
        earlier = self._write_back.pop(block_id, None)
        if earlier is not None and earlier.block != kept.block:
            self.counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "evicted")
        self._write_back[block_id] = kept

    def _plan_write_back(self, step: PoolMetadata) -> None:
        """Store what the engine may evict in its next steps: those blocks stay as they are until this one is over."""
        assert self._block_pool is not None, "vLLM binds it before the first step"
        due = []
        for block_id, key in compat.next_evicted(self._block_pool, self._blocks_ahead):
            if (kept := self._write_back.pop(block_id, None)) is None:
                continue
            if key == compat.cache_key(kept.block.block_hash, kept.block.group):
                due.append(kept)
            else:
                self.counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "evicted")
        for kept in sorted(due, key=lambda each: each.priority):
            self._plan_store(step, kept.block, kept.event)

    def _plan_store(self, step: PoolMetadata, block: BlockRef, event: BlockStored | None) -> None:
        if len(self._pending) >= MAX_PENDING_STORES:
            self.counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "queue_full")
            return
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        landing = 0
        if self._config.store_policy == "write_through":
            # Held until every rank has copied it: the engine may free it in this very step, when its request ends, is
            # preempted, or its window has gone on. With write-back the workers copy before they compute again.
            assert self._block_pool is not None, "vLLM binds its block pool before the first step"
            self._block_pool.touch([self._block_pool.blocks[block_id] for block_id in block.block_ids])
            landing = self._ranks
        self._pending[tag] = _PendingStore(self._ranks, landing, block.block_ids, True, event)
        step.stores.append(block)
        step.tags.append(tag)

    def _let_go(self, landed: dict[int, int]) -> None:
        """Give blocks back to the engine that no rank reads any more."""
        free: list[int] = []
        for tag in sorted(landed):
            if (pending := self._pending.get(tag)) is not None and pending.landing:
                pending.landing -= landed[tag]
                if pending.landing == 0:
                    free += pending.block_ids
        if free:
            assert self._block_pool is not None
            # As the engine itself does it: the end of a prompt is evicted before its beginning.
            self._block_pool.free_blocks(self._block_pool.blocks[block_id] for block_id in reversed(free))

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
        """Learn the namespace from the facts of all ranks. Those of one stage must agree, or nothing is shared."""
        self._heard |= report.facts
        if self._namespace is None and len(self._heard) == self._ranks and not self._broken:
            ranks = [self._heard[rank] for rank in range(self._ranks)]
            facts = facts_of_engine(ranks, self._stages)
            if facts is None:
                self._break(why_ranks_differ(ranks, self._stages))
                return
            self._namespace = Namespace(self._config.tenant, facts)
            if self._stages > 1:
                self._to_tell = facts  # a rank knows those of its own stage only

    def _break(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            logger.error("kvpool is off for this engine, which goes on without it: %s", reason)

    def stats(self) -> dict[str, float]:
        """Samples since the last call."""
        with contextlib.suppress(StoreClosed):
            self.counters.add_growth(metrics.REFUSED_KEYS, self._store.counters().get("refused", 0))
        return self.counters.take()
