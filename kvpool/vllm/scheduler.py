"""The scheduler's half of the connector: what to offer, what to load, what to store. It never blocks.

A request's way: its lookup starts when it is first seen; once answered, the longest usable prefix is
offered, unless the cost gate expects that computing it is faster; when the engine has allocated blocks, the load goes
to the workers; a load that fails is remembered, so that it is not offered to this request again. A request whose call
raises goes on without the pool, alone.

What is stored, and when, is ``store_planner``'s.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.config import PoolConfig
from kvpool.errors import StoreClosed, StoreUnavailable
from kvpool.key.key import Fact, Namespace
from kvpool.metrics import Counters
from kvpool.store import Store
from kvpool.vllm import internals
from kvpool.vllm.adapters import AdapterCheck, Adapters, pool_hash, pool_hashes
from kvpool.vllm.cache_resync import CacheResync
from kvpool.vllm.events import removed_event
from kvpool.vllm.gate import MIN_STEP_TOKENS, CostGate
from kvpool.vllm.guard import Guard, RequestGuard
from kvpool.vllm.lookups import RequestLookup, groups_to_ask
from kvpool.vllm.plan import (
    BlockRef,
    Group,
    LoadPlan,
    PoolMetadata,
    PoolWorkerMetadata,
    blocks_lacking,
    longest_hit,
    records_to_load,
)
from kvpool.vllm.request_params import WITHOUT_POOL, ParamsReader, RequestParams
from kvpool.vllm.stages import facts_of_engine, facts_of_epoch, why_ranks_differ
from kvpool.vllm.store_planner import StorePlanner

logger = init_logger("vllm.kvpool")

MIN_LOAD_S = 0.05  # what a load is given even when the lookup has used up the budget
_CAUSES = {
    "reset": "the caches were reset, perhaps for other weights",
    "reload": "the weights were loaded anew",
}
NO_OFFER: tuple[int | None, bool] = (0, False)
WARN_EVERY_S = 60.0  # a pool that comes and goes is not told more often
STEPS_IN_FLIGHT = 4  # whose time is taken; of more, the oldest will not be reported any more

_T = TypeVar("_T")


@dataclass
class _RequestState:
    request: Request
    params: RequestParams
    adapter: AdapterCheck | None = None
    lookup: RequestLookup | None = None  # the latest one
    waiting_since: float | None = None  # when the engine was first told to ask again later
    waited_s: float = 0.0
    offered: tuple[int, int] | None = None  # (local tokens, tokens with the pool)
    loading: bool = False
    admitted: bool = False  # the cost gate lets it load what its lookup has found
    load_tokens: int = 0  # of the load under way
    load_s: float = 0.0
    refused: bool = False  # a load failed, its lookup did, or it does not pay: not offered again

    @property
    def checked(self) -> bool:
        """Whether it is known of which adapter it is, or that this cannot be known."""
        return self.adapter is None or self.adapter.done

    @property
    def identified(self) -> bool:
        """Whether it is known under which hashes its blocks are in the pool."""
        return self.adapter is None or self.adapter.tag is not None

    @property
    def pool_hash(self) -> Callable[[bytes], bytes] | None:
        """Makes the hash in a key of that of one of its blocks. None: it is not known how."""
        if self.adapter is None:
            return bytes
        tag = self.adapter.tag if self.adapter.done else None  # which another thread may take away
        return None if tag is None else functools.partial(pool_hash, tag=tag)


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
        adapter_settings: str = "",
    ) -> None:
        self._config, self._store, self._groups = config, store, list(groups)
        self._ranks, self._stages, self._hash_block_tokens = ranks, stages, hash_block_tokens
        # Where the engine can go on, and records of every group end.
        self._align_tokens = math.lcm(align_tokens, *(group.record_tokens for group in self._groups))
        self._loads, self._stores, self._events_wanted = loads, stores, events
        self._namespace: Namespace | None = None  # from the workers' first step
        self._heard: dict[int, dict[str, Fact]] = {}  # by rank
        self._facts: dict[str, Fact] = {}  # of all ranks together
        self._to_tell: dict[str, Fact] = {}  # to the workers, with the next step
        self._epoch = ""  # of the weights; empty: those that the engine started with
        self._epoch_to_tell = ""
        self._steps_planned = 0
        self._computed_since = 0  # the first step with tokens since the last reset; 0: there was none
        self._awaits_reset = False  # its cache holds blocks of other weights
        self._broken = False
        self.counters = Counters()
        self._guard, self._request_guard = Guard(self._break), RequestGuard(self.counters)
        self._requests: dict[str, _RequestState] = {}
        self._new_loads: list[LoadPlan] = []
        self._cancelled: list[str] = []
        self._events: list[KVCacheEvent] = []
        self._cache_resync = CacheResync(self._groups)
        self._asked = False  # for the whole state, in the step that is ending
        self._params = ParamsReader()
        self._adapters = Adapters(adapter_settings)
        self._block_pool: BlockPool | None = None
        self._store_planner = StorePlanner(
            config,
            self._groups,
            ranks=ranks,
            step_tokens=step_tokens,
            hash_block_tokens=hash_block_tokens,
            events=events,
            counters=self.counters,
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
        """A request has arrived: start its lookup."""
        self._run_for(request, "lookup", lambda: self._seen(request), None)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """(tokens that the pool adds to ``local_tokens``, load is asynchronous); None: ask again later."""
        return self._run_for(request, "offer", lambda: self._matched_tokens(request, local_tokens), NO_OFFER)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine has allocated blocks; load into them if it took the offer."""
        no_blocks: list[BlockRef] = []
        blocks = self._run_for(
            request, "load", lambda: self._blocks_to_load(request, tables, external_tokens), no_blocks
        )
        if external_tokens:
            # A plan without blocks is reported as failed by the workers, which is what ends the engine's wait.
            state = self._state(request)
            left_s = max(MIN_LOAD_S, self._config.lookup_timeout_s - state.waited_s)
            self._new_loads.append(LoadPlan(request.request_id, blocks, left_s, state.params.priority))
            state.loading, state.load_tokens, state.load_s = True, external_tokens, 0.0
            self.counters.add(metrics.OFFERED_TOKENS, external_tokens)

    def plan(self, output: SchedulerOutput) -> PoolMetadata:
        """The step's loads and stores, each handed over once."""
        self._steps_planned += 1
        step = PoolMetadata(
            loads=self._new_loads,
            cancelled=self._cancelled,
            idle=not output.total_num_scheduled_tokens,
            facts=self._to_tell,
            number=self._steps_planned,
            epoch=self._epoch_to_tell,
        )
        self._new_loads, self._cancelled, self._to_tell, self._epoch_to_tell = [], [], {}, ""
        if output.total_num_scheduled_tokens and not self._computed_since:
            self._computed_since = self._steps_planned
        if self._gate is not None:
            step.timed = self._guard.run(lambda: self._step_begins(output), 0)
        if self._stores and not self._broken and not self._awaits_reset:
            self._guard.run(lambda: self._plan_stores(output, step), None)
        return step

    def _seen(self, request: Request) -> None:
        state = self._state(request)
        if self._may_load(state) and self._max_tokens(request) > 0:
            self._ask(state)

    def _matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        state = self._state(request)
        state.offered = None
        max_tokens = self._max_tokens(request)
        if local_tokens and self._only_stores(state) and state.lookup is None:
            self._ask(state)  # what the engine has may be missing from the pool
        if not self._may_load(state) or state.refused or local_tokens >= max_tokens:
            return NO_OFFER
        now = time.monotonic()
        if self._namespace is None or not state.checked:
            return self._later(state, now) if self._may_wait(state, now) else NO_OFFER
        lookup = state.lookup
        if lookup is None or lookup.is_stale(now):
            lookup = self._ask(state)
        if lookup is None:
            return NO_OFFER
        if not lookup.ended(now):
            return self._later(state, now)
        if lookup.present is None:
            self._lookup_failed(state, lookup.failure)
            return NO_OFFER
        self._answered()
        if state.waiting_since is not None:
            state.waited_s, state.waiting_since = now - state.waiting_since, None
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
        lookup, state.lookup = state.lookup, None
        if lookup is not None and not (self._stores and state.params.store):
            lookup.cancel()
            lookup = None
        self._store_planner.admitted(
            request.request_id, None if lookup is None else functools.partial(self._told, state, lookup)
        )
        offered, state.offered = state.offered, None
        if external_tokens == 0:
            return []
        if offered is None or external_tokens != offered[1] - offered[0]:
            # Whatever the engine counts on then, it is not what was looked up.
            self.counters.add(metrics.OFFER_MISMATCHES)
            return []
        blocks: list[BlockRef] = []
        local_tokens, _ = offered
        if (in_pool := state.pool_hash) is None:
            return []
        for index, group in enumerate(self._groups):
            hashes = internals.record_hashes(request, self._hash_block_tokens, group)
            for i in records_to_load(group, local_tokens, local_tokens + external_tokens):
                ids = blocks_lacking(group, tables[index], i, local_tokens)
                if any(ids):
                    blocks.append(BlockRef(in_pool(hashes[i]), index, ids))
        return blocks

    def _plan_stores(self, output: SchedulerOutput, step: PoolMetadata) -> None:
        scheduled = []
        for request_id, computed_tokens in internals.scheduled_tokens(output):
            if (state := self._requests.get(request_id)) is not None and state.params.store:
                scheduled.append((state, computed_tokens))
        self._store_planner.begin(step)
        for state, computed_tokens in sorted(scheduled, key=lambda each: each[0].params.priority):
            plan = functools.partial(
                self._store_planner.plan,
                step,
                output,
                state.request,
                state.params.priority,
                computed_tokens,
                state.pool_hash,
            )
            self._run_for(state.request, "store", plan, None)
        self._store_planner.end(step, output)

    def finished(self, request: Request) -> None:
        """A request has ended, or was aborted: nothing of it stays."""
        state = self._requests.pop(request.request_id, None)
        self._store_planner.finished(request.request_id)
        if state is not None:
            if state.lookup is not None:
                state.lookup.cancel()
            if state.adapter is not None and not (state.checked and state.identified):
                self.counters.add(metrics.ADAPTER_REQUESTS, 1, state.adapter.cause)
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
        self._asked |= report.asked
        for reason in report.broken.values():
            self._break(reason)
        self._hear(report)
        if report.reloaded:
            self._weights_reloaded(report.reloaded)
        self._store_planner.update(report)
        if self._events_wanted:
            self._events += [removed_event(*block) for block in sorted(report.missing)]

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """The engine's own cache. Of it we only hold blocks, by their reference count, while workers copy them."""
        self._block_pool = block_pool
        self._cache_resync.bind(block_pool)
        self._store_planner.bind(block_pool)

    def take_events(self) -> list[KVCacheEvent]:
        """What became true of the pool since the last call; and, when an index asks, all that the engine holds."""
        events, self._events = [*self._store_planner.take_events(), *self._events], []
        asked, self._asked = self._asked, False
        if asked and self._events_wanted:
            nothing: list[KVCacheEvent] = []
            events += self._guard.run(self._cache_resync.events, nothing)
        return events

    def wants_steps(self) -> bool:
        """Whether an engine without requests should go on stepping, to hear of its stores."""
        return self._store_planner.wants_steps()

    def frees_blocks(self) -> bool:
        """Whether an engine that has no block left should wait a step for those that are copied to staging."""
        return self._guard.run(self._store_planner.frees_blocks, False)

    def reset(self) -> None:
        """The engine's caches are reset, perhaps because its weights have changed, or will before it goes on."""
        self.forget()
        self._guard.run(self._reset, None)

    def _reset(self) -> None:
        if self._config.weights_never_change:
            logger.info(
                "kvpool: the caches were reset; the pool is used as before, for weights_never_change is set"
            )
            return
        # vLLM leaves its own cache as it is, and answers False to the caller, while somebody holds blocks of it.
        self._awaits_reset = self._block_pool is not None and internals.is_in_use(self._block_pool)
        if not self._awaits_reset:
            self._computed_since = 0
        self._begin_epoch("reset")
        if self._awaits_reset:
            logger.warning(
                "kvpool: the engine holds blocks of before the reset: it goes without the pool until it is "
                "reset again, and answers True"
            )

    def forget(self) -> None:
        """Drop every answer about what the pool holds."""
        self._store_planner.forget()
        for state in self._requests.values():
            if state.lookup is not None:
                state.lookup.cancel()
            state.lookup = state.offered = None

    def close(self) -> None:
        """Cancel what is in flight."""
        for state in self._requests.values():
            if state.lookup is not None:
                state.lookup.cancel()
        self._requests.clear()
        self._adapters.close()

    # The cost gate.

    def _step_begins(self, output: SchedulerOutput) -> int:
        """The number under which the end of a step is to be reported; 0: it says nothing of the rate of prompts."""
        tokens = output.total_num_scheduled_tokens
        if tokens < MIN_STEP_TOKENS or not any(
            (state := self._requests.get(name)) is not None
            and computed_tokens - output.num_scheduled_tokens[name] < state.request.num_prompt_tokens
            for name, computed_tokens in internals.scheduled_tokens(output)
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

    # Lookups.

    def _state(self, request: Request) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            params = self._params.read(getattr(request, "kv_transfer_params", None))
            if internals.adapter_changed_in_place(request):
                params = WITHOUT_POOL
            state = self._requests[request.request_id] = _RequestState(request, params)
            if request.lora_request is not None and (params.load or params.store):
                state.adapter = self._adapters.check(request.lora_request)
        return state

    def _may_load(self, state: _RequestState) -> bool:
        if not self._loads or self._broken or self._awaits_reset or not state.params.load:
            return False
        return state.identified or not state.checked

    def _only_stores(self, state: _RequestState) -> bool:
        return self._stores and not self._loads and not self._broken and state.params.store

    def _max_tokens(self, request: Request) -> int:
        """The longest prefix that may be taken: at least one token is left to compute."""
        return int((request.num_tokens - 1) // self._align_tokens * self._align_tokens)

    def _may_wait(self, state: _RequestState, now: float) -> bool:
        return state.waiting_since is None or now - state.waiting_since < self._config.lookup_timeout_s

    @staticmethod
    def _later(state: _RequestState, now: float) -> tuple[None, bool]:
        if state.waiting_since is None:
            state.waiting_since = now
        return None, False

    def _ask(self, state: _RequestState) -> RequestLookup | None:
        """Start the lookup of a request; None when there is no pool to ask."""
        tag = state.adapter.tag if state.adapter is not None else b""  # which another thread may take away
        if self._namespace is None or tag is None:
            return None
        if state.lookup is not None:
            state.lookup.cancel()
        state.lookup, state.admitted = None, False
        hashes = [
            internals.record_hashes(state.request, self._hash_block_tokens, group) for group in self._groups
        ]
        asked = groups_to_ask(self._groups, hashes, self._ranks)
        if tag:
            asked = [one._replace(hashes=pool_hashes(one.hashes, one.hash_nbytes, tag)) for one in asked]
        lookup_timeout_s = self._config.lookup_timeout_s
        try:
            lookup = self._store.submit_lookup(self._namespace, asked, timeout_s=lookup_timeout_s)
        except StoreUnavailable:
            self._lookup_failed(state, "store_unavailable")
            return None
        state.lookup = RequestLookup(lookup, time.monotonic(), lookup_timeout_s)
        self.counters.add(metrics.LOOKUP_REQUESTS)
        self.counters.add(metrics.LOOKUP_BLOCKS, sum(group.records * group.ranks for group in asked))
        return state.lookup

    def _answered(self) -> None:
        if self._said_away:
            self._said_away = False
            logger.info("kvpool: the pool answers again")

    def _told(self, state: _RequestState, lookup: RequestLookup) -> Sequence[Sequence[int]] | None:
        """What the pool has said to a lookup, for the store planner: nothing waits for it."""
        if not lookup.ended(time.monotonic()):
            return None
        if lookup.present is None:
            self._lookup_failed(state, lookup.failure)
            return ()
        self._answered()
        return lookup.present

    def _lookup_failed(self, state: _RequestState, cause: str) -> None:
        state.refused = True
        self.counters.add(metrics.LOOKUP_FAILURES, 1, cause)
        now = time.monotonic()
        if not self._said_away and now - self._warned_at >= WARN_EVERY_S:
            self._said_away, self._warned_at = True, now
            logger.warning(
                "kvpool: the pool gives no answer (%s), so prompts are computed; see kvpool_lookup_failures_total",
                cause,
            )

    def _run_for(self, request: Request, where: str, call: Callable[[], _T], instead: _T) -> _T:
        """The result of ``call``, or ``instead`` when it raises: then this request goes on without the pool."""
        result, well = self._request_guard.run(where, call, instead)
        if not well:
            state = self._requests.setdefault(request.request_id, _RequestState(request, WITHOUT_POOL))
            state.params, state.refused = WITHOUT_POOL, True
        return result

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
            self._facts = facts
            self._namespace = Namespace(self._config.tenant, facts_of_epoch(facts, self._epoch))
            if self._stages > 1:
                self._to_tell = facts  # a rank knows those of its own stage only

    # Weights that change.

    def _begin_epoch(self, cause: str) -> None:
        """Go on in a namespace that no other engine has and this one never had, from the next step on.

        What was planned before goes to the pool under the earlier one, and is not told of any more: of the pool's
        blocks an index believes that they are in the namespace which this engine has now.
        """
        self._epoch = self._epoch_to_tell = secrets.token_hex(8)
        self.counters.add(metrics.EPOCHS, 1, cause)
        self._store_planner.leave()
        if self._facts:
            self._namespace = Namespace(self._config.tenant, facts_of_epoch(self._facts, self._epoch))
        logger.warning(
            "kvpool: %s: until this engine restarts it goes on in a namespace of its own, %s, and shares with no "
            "other one; where its weights never change in place, set weights_never_change to true",
            _CAUSES[cause],
            self._namespace.hex[:8] if self._namespace else "not known yet",
        )

    def _weights_reloaded(self, step: int) -> None:
        """The workers had other weights in ``step`` than in the one before, and move nothing until an epoch begins."""
        self.forget()
        if not self._computed_since or self._computed_since >= step:
            self._begin_epoch("reload")
        elif not self._awaits_reset:
            self._awaits_reset = True
            self._store_planner.leave()
            self.counters.add(metrics.EPOCHS, 1, "reload")
            logger.error(
                "kvpool: the weights of this engine were loaded anew while its cache holds blocks of the earlier ones: "
                "it goes without the pool until its caches are reset (reset_prefix_cache with reset_connector=True)"
            )

    def _break(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            self._store_planner.forget()
            logger.error("kvpool is off for this engine, which goes on without it: %s", reason)

    def stats(self) -> dict[str, float]:
        """Samples since the last call."""
        with contextlib.suppress(StoreClosed):
            self.counters.add_growth(metrics.REFUSED_KEYS, self._store.counters().get("refused", 0))
        return self.counters.take()
