"""The scheduler's half of the connector: plans offers, loads and stores. It never blocks.

A request's lookup starts on arrival (``seen``), and what it found is offered when the engine asks (``matched_tokens``,
by ``load.offers``). Once the engine has allocated blocks (``allocated``), the load goes to the workers with the
next step (``plan``). A failed load (``update``) is not offered to this request again. A request whose call raises
continues without the pool, alone.

``save.stores`` plans the stores.

Over 400 lines because a request is followed here from its arrival to its end.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.clock import REAL, Clock
from kvpool.config import PoolConfig
from kvpool.discovery.announcer import TrafficAnnouncer
from kvpool.discovery.audit_news import MAX_FINDINGS, AuditFinding, AuditNews
from kvpool.discovery.quota_watch import QuotaWatch
from kvpool.errors import StoreClosed
from kvpool.metrics import Counters, Samples
from kvpool.store import Store, StoreURL
from kvpool.tracing import Tracing
from kvpool.vllm.audit.audits import Audited, Audits
from kvpool.vllm.audit.findings import Findings, describe
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.adapters import Adapters
from kvpool.vllm.engine.guard import RequestFaults, guarded
from kvpool.vllm.engine.hints import read_hints
from kvpool.vllm.engine.namespace import EngineNamespace
from kvpool.vllm.engine.proofs import BESIDE_ADAPTERS, OF_EARLIER_WEIGHTS, ON_A_WRONG_HIT, HashProofs
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.load.gate import MIN_STEP_TOKENS, CostGate
from kvpool.vllm.load.loads import Loads
from kvpool.vllm.load.lookups import Lookups, RequestLookup
from kvpool.vllm.load.offers import NO_OFFER, Offer, Offers
from kvpool.vllm.load.prefetch import BlockPrefetches, near_nbytes
from kvpool.vllm.load.seen import SeenRecords
from kvpool.vllm.load.state import RequestState
from kvpool.vllm.plan import BlockRef, LoadPlan, PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.requests import WITHOUT_POOL, Asked, ParamsReader
from kvpool.vllm.save.retention import Prefix, Retention
from kvpool.vllm.save.store_queue import StoreQueue
from kvpool.vllm.save.stores import StorePlanner
from kvpool.vllm.tell.events import TELLS_NEAR, CacheResync, removed_event, stored_event
from kvpool.vllm.tell.metrics import Outcomes
from kvpool.vllm.tell.near import NearBlocks

logger = init_logger("vllm.kvpool")

MIN_LOAD_S = 0.05  # least stall timeout of a load, even after a slow lookup
# Of ``metrics.MISS_REASONS``, by the cause of a failed load; others are faults.
LOAD_REASONS = {
    "missing": "evicted", "too_slow": "too_slow", "store_unavailable": "unavailable", "adapter": "adapter",
}  # fmt: skip


class Roles(NamedTuple):
    """What an engine does with the pool. ``events``: it announces what it stored."""

    loads: bool
    stores: bool
    events: bool


class SchedulerHalf:
    """Plans an engine's loads and stores, over all ranks and stages; the caller closes ``store``.

    ``encoded``: items whose encoders' outputs the engine has, by ``identifier``.
    """

    def __init__(
        self,
        config: PoolConfig,
        store: Store,
        geometry: Geometry,
        *,
        roles: Roles,
        adapter_settings: str = "",
        writer: bytes = b"",
        is_asleep: Callable[[], bool] = lambda: False,
        encoded: Callable[[], Collection[str]] = tuple,
        clock: Clock = REAL,
    ) -> None:
        self._config, self._store, self._geometry = config, store, geometry
        self._loads, self._stores, self._events_wanted = roles
        self._clock = clock
        self._broken = False
        self.counters = Counters()
        self._request_faults = RequestFaults(self.counters)
        self._namespace = EngineNamespace(
            config.tenant, geometry, self.counters, is_asleep=is_asleep, leave=self._leave
        )
        self._requests: dict[str, RequestState] = {}
        self._params = ParamsReader()
        self._adapters = Adapters(geometry.ranks, adapter_settings)
        self._seen = SeenRecords(StoreURL.parse(config.pool).ttl_s, clock.monotonic())
        self._proofs = HashProofs(geometry.hash_algorithm, geometry.hash_block_tokens, self._is_cached)
        self._lookups = Lookups(
            store, geometry, self._proofs, timeout_s=config.lookup_timeout_s, counters=self.counters
        )
        self._traffic = TrafficAnnouncer(store, config.tenant)
        self._retention = Retention(store, config.tenant, share=config.keep_share, counters=self.counters)
        self._part_nbytes: dict[tuple[int, int], int] = {}  # by group and part
        self._outcomes = Outcomes(
            self.counters,
            record_tokens=geometry.first.record_tokens,
            tell=self._traffic.tell,
            clock=clock.monotonic,
            tracing=Tracing.of_process(),
        )
        self._loads_under_way = Loads(geometry, patience_s=config.lookup_timeout_s, clock=clock.monotonic)
        near = StoreURL.parse(config.pool).near
        self._has_near = near is not None
        self._prefetches = BlockPrefetches(
            store,
            geometry,
            self._loads_under_way,
            room_nbytes=int(config.prefetch_share * near_nbytes(store, config.pool)),
            counters=self.counters,
            clock=clock.monotonic,
        )
        self._new_loads: list[LoadPlan] = []
        self._cancelled: list[str] = []
        self._quota = QuotaWatch(store, config.tenant, self.counters, logger)
        queue = StoreQueue(
            geometry,
            write_through=config.store_policy == "write_through",
            over_quota=self._quota.is_over,
            has_changed=self._adapters.has_changed,
            counters=self.counters,
            clock=clock.monotonic,
        )
        self._encoded = encoded
        self._outdated: set[str] = set()  # of them, those that may be of earlier weights
        self._mixes_adapters = internals.mixes_adapters()
        self._store_planner = StorePlanner(
            config,
            geometry,
            queue=queue,
            proofs=self._proofs,
            event=stored_event if roles.events else None,
            counters=self.counters,
        )
        self._gate = CostGate(self.counters, clock.monotonic) if config.cost_gate and roles.loads else None
        self._audits = Audits(
            geometry,
            share=config.audit_share if roles.loads else 0.0,
            writer=writer,
            stores=roles.stores,
            counters=self.counters,
            clock=clock.monotonic,
            random=random.Random().random,
        )
        self._writer = writer
        self._recent: deque[AuditFinding] = deque(maxlen=MAX_FINDINGS)
        self._findings = Findings(writer, clock.monotonic)
        self._put_away: frozenset[bytes] = frozenset()  # by the workers
        # For the workers, with the next step: records to be deleted, and what audits found, by number.
        self._wrong: list[BlockRef] = []
        self._found: dict[int, str] = {}
        self._on_wrong_hits: set[str] = set()  # requests
        self._offers = Offers(
            geometry,
            namespace=self._namespace,
            lookups=self._lookups,
            loads=self._loads_under_way,
            prefetches=self._prefetches if self._has_near else None,
            gate=self._gate,
            audits=self._audits,
            stores=roles.stores,
        )
        self._block_pool: BlockPool | None = None
        self._cache_resync = CacheResync(geometry.groups, clock.monotonic)
        tells_near = near is not None and roles.events and TELLS_NEAR
        self._near_blocks = (
            NearBlocks(near.path, geometry.groups) if near is not None and tells_near else None
        )
        self._resync_asked = False  # in the current step
        self._events: list[KVCacheEvent] = []

    def start(self) -> None:
        """Begin to follow the tenant's quota and the near pool. Does not block."""
        if self._stores:
            self._quota.start()
        if self._near_blocks is not None:
            self._near_blocks.start()

    # A request, from its arrival to its end.

    @guarded(None, request="lookup")
    def seen(self, request: Request) -> None:
        """A request arrived: start its lookup."""
        state = self._state(request)
        if (
            self._may_load(state)
            and not self._is_too_short(request)
            and self._offers.look_up(state, self._clock.monotonic()) is not None
        ):
            self._prefetches.wait(
                request.request_id,
                lambda now_s: self._prefetches.blocks(state, self._namespace.current, now_s),
                first=state.asked.hints.prefetch,
            )

    @guarded(NO_OFFER, request="offer")
    def matched_tokens(self, request: Request, local_tokens: int) -> Offer:
        """(tokens that the pool adds to ``local_tokens``, load is asynchronous); None: ask again later."""
        state = self._state(request)
        if state.asked.adapter is not None and state.asked.has_pool and not self._is_off:
            self._adapters.want(state.asked.adapter)
        self._outcomes.begins(state, local_tokens)
        self._offers.begin(state)
        self._audits.end(request.request_id)
        max_tokens = self._max_tokens(request)
        if local_tokens and self._only_stores(state) and state.found.lookup is None:
            self._offers.look_up(state, self._clock.monotonic())  # the pool may lack the engine's blocks
        if state.refused:
            return NO_OFFER
        if result := self._why_no_lookup(state, local_tokens, max_tokens):
            return self._offers.withhold(state, result, self._why_without(state))
        offer = self._offers.make(state, local_tokens, max_tokens, self._clock.monotonic())
        if state.found.ended is not None:
            self._outcomes.waited(state, state.found.ended)
        return offer

    def _why_no_lookup(self, state: RequestState, local_tokens: int, max_tokens: int) -> str:
        """Of ``metrics.REQUEST_RESULTS``; empty: ask the pool."""
        if self._is_off:
            return "switched_off"
        if not self._may_load(state):
            return "without"
        if self._is_too_short(state.asked.request):
            return "too_short"
        return "engine_cache" if local_tokens >= max(1, max_tokens) else ""

    def _why_without(self, state: RequestState) -> str:
        """Of ``metrics.MISS_REASONS``, for a request that asks for nothing."""
        if not self._loads:
            return "role"
        return "opted_out" if state.asked.opted_out else "adapter"

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine allocated blocks; load into them if it took the offer."""
        blocks, near_only = self._blocks_to_load(request, tables, external_tokens)
        if external_tokens:
            # Workers fail a plan without blocks, which ends the engine's wait.
            state = self._state(request)
            stall_timeout_s = max(MIN_LOAD_S, self._config.lookup_timeout_s - state.found.waited_s)
            self._new_loads.append(
                LoadPlan(
                    request.request_id,
                    blocks,
                    stall_timeout_s,
                    state.asked.params.priority,
                    self._audits.waits_for(request.request_id),
                )
            )
            self._loads_under_way.promised(
                state, external_tokens, near=float(self._has_near), near_only=near_only
            )
            self.counters.add(metrics.OFFERED_TOKENS, external_tokens)

    @guarded(((), False), request="load")
    def _blocks_to_load(
        self, request: Request, tables: Sequence[Sequence[int]], external_tokens: int
    ) -> tuple[Sequence[BlockRef], bool]:
        """The blocks, and whether the near pool has all of them."""
        state = self._state(request)
        hashes = self._geometry.record_hashes(request.block_hashes, self._geometry.first)
        lookup, span = self._offers.take(state)
        if lookup is not None and not state.outcome.counted:
            lacking = lookup.lacking(state.outcome.local_tokens + external_tokens)
            reason = self._seen.why_missed(lacking, lookup.answers(), self._clock.monotonic())
            is_whole = span is not None and 0 < self._max_tokens(request) <= span.found_tokens
            self._offers.missed(state, "audited" if is_whole else reason)
        self._outcomes.admitted(
            state,
            hashes,
            self._namespace.current,
            usable_tokens=self._max_tokens(request),
            loads=external_tokens > 0,
        )
        if lookup is not None and not (self._stores and state.asked.params.store):
            lookup.cancel()
            lookup = None
        self._store_planner.admitted(
            request.request_id,
            None if lookup is None else functools.partial(self._answer_for_stores, state, lookup),
        )
        self._prefetches.leave(request.request_id, used=external_tokens > 0)
        near_only = span is not None and span.near
        if external_tokens == 0:
            return (), near_only
        if span is None or external_tokens != span.hit_tokens - span.local_tokens:
            # The engine counts on other tokens than the lookup found.
            self.counters.add(metrics.OFFER_MISMATCHES)
            return (), near_only
        if (in_pool := state.asked.pool_hash) is None:
            return (), near_only
        blocks = self._loads_under_way.begin(
            request, tables, span.local_tokens, span.hit_tokens, in_pool, state.asked.adapter_weights
        )
        if span.found_tokens:
            self._audits.begin(state.asked, span.found_tokens)
        return blocks, near_only

    def _answer_for_stores(
        self, state: RequestState, lookup: RequestLookup
    ) -> Sequence[Sequence[int]] | None:
        return self._offers.answer_for_stores(state, lookup, self._clock.monotonic())

    def plan(self, output: SchedulerOutput) -> PoolMetadata:
        computes = output.total_num_scheduled_tokens > 0
        step = PoolMetadata(loads=self._new_loads, cancelled=self._cancelled, idle=not computes)
        self._new_loads, self._cancelled = [], []
        self._loads_under_way.scheduled(output.num_scheduled_tokens)
        self._namespace.add_to(step)
        if step.number == 1:
            step.writer = self._writer  # a host makes a name of its own for its ranks
        self._adapters.add_to(step)
        self._prefetch()
        if self._gate is not None:
            step.timed = self._time_step(self._gate, output)
        if self._stores and not (self._is_off or self._namespace.asks):
            self._plan_stores(output, step)
        if not (self._broken or self._namespace.current is None):
            self._plan_audits(output, step)
        if self._on_wrong_hits:
            self._evict_computed(output)
        if self._namespace.current is not None:
            step.wrong, self._wrong = self._wrong, []
        step.found, self._found = self._found, {}
        if (put_away := self._findings.put_away()) != self._put_away:
            step.put_away = self._put_away = put_away
            self._tell_audits()
        return step

    @guarded(None)
    def _plan_stores(self, output: SchedulerOutput, step: PoolMetadata) -> None:
        states = [
            (state.asked, computed_tokens)
            for request_id, computed_tokens in internals.scheduled_tokens(output)
            if (state := self._requests.get(request_id)) is not None
        ]
        beside_adapters = self._mixes_adapters and any(asked.request.lora_request for asked, _ in states)
        if self._outdated:
            self._outdated.intersection_update(self._encoded())
        for asked, computed_tokens in states:
            self._prove(asked.request, computed_tokens)
        for asked, computed_tokens in states:
            before = computed_tokens - output.num_scheduled_tokens[asked.request.request_id]
            self._look_behind(asked.request, before)
            if asked.request.request_id in self._on_wrong_hits and self._proofs.proven_tokens(asked.request):
                self._spoil(
                    asked.request, 0, ON_A_WRONG_HIT
                )  # it had blocks at the finding, or loaded them again
            if beside_adapters and asked.request.lora_request is None:
                self._spoil(asked.request, before, BESIDE_ADAPTERS)
            if self._outdated and (item := internals.first_item(asked.request, self._outdated)) is not None:
                self._spoil(asked.request, item, OF_EARLIER_WEIGHTS)
        # What follows an audited hit waits for the verdict.
        scheduled = [
            (asked, computed_tokens)
            for asked, computed_tokens in states
            if asked.params.store and not self._audits.is_open(asked.request.request_id)
        ]
        self._store_planner.begin(step)
        for asked, computed_tokens in sorted(scheduled, key=lambda each: each[0].params.priority):
            self._plan_request(asked.request, asked, computed_tokens, output, step)
        for request_id, offered in internals.offered_states(output).items():
            if (owner := self._requests.get(request_id)) is None or self._audits.is_open(request_id):
                continue
            if owner.asked.params.store:
                self._plan_states(owner.asked.request, owner.asked, offered, output, step)
        self._store_planner.end(step, output)

    @guarded(None)
    def _plan_audits(self, output: SchedulerOutput, step: PoolMetadata) -> None:
        if not self._audits.waiting:
            return
        for request_id, computed_tokens in internals.scheduled_tokens(output):
            if (state := self._requests.get(request_id)) is not None and self._audits.waits_for(request_id):
                self._prove(state.asked.request, computed_tokens)
                proven_tokens = self._proofs.proven_tokens(state.asked.request)
                self._audits.plan(step, output, state.asked, computed_tokens, proven_tokens)

    @guarded(None, request="store")
    def _prove(self, request: Request, computed_tokens: int) -> None:
        self._proofs.prove(request, computed_tokens)

    @guarded(None, request="store")
    def _look_behind(self, request: Request, before: int) -> None:
        self._proofs.look_behind(request, self._store_planner.held_tokens(request, before))

    @guarded(None, request="store")
    def _spoil(self, request: Request, before: int, why: str) -> None:
        self._proofs.spoil(request, before, why)

    @guarded(None, request="store")
    def _plan_request(
        self,
        request: Request,
        asked: Asked,
        computed: int,
        output: SchedulerOutput,
        step: PoolMetadata,
    ) -> None:
        self._store_planner.plan(
            step, output, request, asked.params.priority, computed, asked.pool_hash, asked.adapter_weights
        )

    @guarded(None, request="store")
    def _plan_states(
        self,
        request: Request,
        asked: Asked,
        offered: Iterable[tuple[int, int, int]],
        output: SchedulerOutput,
        step: PoolMetadata,
    ) -> None:
        self._store_planner.plan_states(
            step, output, request, asked.params.priority, offered, asked.pool_hash, asked.adapter_weights
        )

    @guarded(None)
    def _prefetch(self) -> None:
        if self._namespace.current is not None and not self._broken:
            self._prefetches.step()

    @guarded(0)
    def _time_step(self, gate: CostGate, output: SchedulerOutput) -> int:
        """The number of a timed step; 0: its duration says nothing about prompts."""
        tokens = output.total_num_scheduled_tokens
        if tokens < MIN_STEP_TOKENS or not any(
            (state := self._requests.get(name)) is not None
            and computed_tokens - output.num_scheduled_tokens[name] < state.asked.request.num_prompt_tokens
            for name, computed_tokens in internals.scheduled_tokens(output)
        ):
            return 0
        return gate.step_begins(tokens)

    @guarded(None)
    def update(
        self, report: PoolWorkerMetadata | None, finished_loads: Iterable[str], failed_loads: Iterable[str]
    ) -> None:
        finished, failed = set(finished_loads), set(failed_loads)
        if self._gate is not None:
            self._gate.step_ended(report.timed if report else 0)
        for request_id, load_s in (report.load_s if report else {}).items():
            if (state := self._requests.get(request_id)) is not None:
                self._loads_under_way.lasted(state, load_s)
        for request_id, near in (report.load_near if report else {}).items():
            if (state := self._requests.get(request_id)) is not None:
                self._loads_under_way.came_near(state, near)
        for request_id in finished | failed:
            if (state := self._requests.get(request_id)) is not None:
                ok, load = request_id not in failed, state.load
                cause = report.load_causes.get(request_id, "") if report else ""
                failure = "" if ok else LOAD_REASONS.get(cause, "fault")
                if self._loads_under_way.loaded(state, failure):
                    self._outcomes.loaded(state, ok=ok)
                    if self._gate is not None:
                        near = load.near if ok else float(load.near_only)
                        self._gate.loaded(load.tokens if ok else 0, load.seconds, near)
        if report is None:
            return
        for audited in self._audits.update(report):
            self._note_audit(audited)
            self._tell_audits()
        self._adapters.learn(report.adapters)
        if report.part_nbytes:
            self._sized(report.part_nbytes)
            self._lookups.learn(report.parts)
        self._resync_asked |= report.asked
        for reason in report.broken.values():
            self.switch_off(reason)
        if not self._broken and (reason := self._namespace.learn(report.facts, report.measured)):
            self.switch_off(reason)
        if report.differs:
            self._forget_offers()
            self._namespace.differs()
        self._seen.stored(self._store_planner.update(report), self._clock.monotonic())
        if self._events_wanted:
            self._events += [removed_event(*block) for block in sorted(report.missing)]

    @guarded(None)
    def _note_audit(self, audited: Audited) -> None:
        asked, judged = audited.asked, audited.judged
        first = judged.far[0] if judged.far else ""
        self._outcomes.audited(asked.request, judged.verdict, judged.distance, first, audited.seconds)
        if judged.verdict == "same":
            self._findings.agree(audited.writers)
        if judged.verdict != "differs":
            return
        namespace = self._namespace.current
        what = describe(judged, audited.writers, namespace)
        logger.error("kvpool: %s", what)
        self._found[audited.number] = what
        why = self._findings.add(audited.writers, asked.request.block_hashes[0])
        self._take_back(asked, delete=not why)
        writers = tuple(sorted(writer.hex() for writer in audited.writers if any(writer)))
        of = namespace.hex if namespace is not None else ""
        self._recent.append(AuditFinding(writers, judged.what, first, judged.distance, time.time(), of))
        if why:
            self._forget_offers()
            self._namespace.doubt(why)

    def _tell_audits(self) -> None:
        if self._writer:
            put_away = tuple(sorted(writer.hex() for writer in self._put_away))
            counts, recent = dict(self._audits.counts), tuple(self._recent)
            self._traffic.tell_audits(
                AuditNews(self._writer.hex(), counts, recent, put_away, self._findings.doubts)
            )

    def _take_back(self, asked: Asked, *, delete: bool) -> None:
        """What a request used and computed is wrong: nobody else is to use it. ``delete``: from the pool, too."""
        hashes = asked.request.block_hashes
        self._store_planner.forget()  # what waits may be computed on it
        for state in self._requests.values():
            if state.asked.request.block_hashes[:1] == hashes[:1]:
                # Before it leaves the cache: what comes there under the same hashes later is right.
                self._proofs.spoil(state.asked.request, 0, ON_A_WRONG_HIT)
                self._evict(state.asked.request)
                self._on_wrong_hits.add(state.asked.request.request_id)
        self._evict(asked.request)
        if asked.pool_hash is None or not delete:
            return
        groups = self._geometry.groups
        wrong = [
            BlockRef(asked.pool_hash(one), index, ())
            for index, group in enumerate(groups)
            if not group.scratch
            for one in (hashes if self._geometry.has_tails else self._geometry.record_hashes(hashes, group))
        ]
        self._wrong += wrong
        if self._events_wanted:
            self._events += [removed_event(ref.block_hash, ref.group) for ref in wrong]

    @guarded(None)
    def _evict(self, request: Request) -> None:
        """Take a request's blocks out of the engine's own cache."""
        if self._block_pool is not None:
            groups = range(len(self._geometry.groups))
            keys = (internals.cache_key(one, group) for group in groups for one in request.block_hashes)
            internals.evict(self._block_pool, keys)
            self._proofs.evicted(request.block_hashes)

    @guarded(None)
    def _evict_computed(self, output: SchedulerOutput) -> None:
        """Take out of the engine's own cache what came there with this step of requests on wrong hits."""
        if self._block_pool is None:
            return
        begun = {
            new.req_id for new in output.scheduled_new_reqs
        } | output.scheduled_cached_reqs.resumed_req_ids
        for name, computed_tokens in internals.scheduled_tokens(output):
            if name in self._on_wrong_hits and (tables := internals.block_tables(output, name)) is not None:
                before = 0 if name in begun else computed_tokens - output.num_scheduled_tokens[name]
                for group, table in zip(self._geometry.groups, tables, strict=True):
                    # Drafts' tokens are cached once accepted, in a later step.
                    first = max(0, before // group.block_tokens - 1)
                    self._block_pool.evict_blocks(set(table[first:]))

    def _sized(self, part_nbytes: Mapping[tuple[int, int], int]) -> None:
        self._part_nbytes |= part_nbytes
        sizes: dict[int, list[int]] = {}
        for (group, _), nbytes in self._part_nbytes.items():
            sizes.setdefault(group, []).append(nbytes)
        self._prefetches.sized(sizes)

    def finished(self, request: Request) -> None:
        self._retain(request)
        self._prefetches.leave(request.request_id, used=False)
        state = self._requests.pop(request.request_id, None)
        self._store_planner.finished(request.request_id)
        self._audits.end(request.request_id)
        if request.request_id in self._on_wrong_hits:
            self._on_wrong_hits.discard(request.request_id)
            self._evict(request)  # what it computed since
        if state is not None:
            self._loads_under_way.end(request.request_id)
            self._offers.forget(state)
            asked = state.asked
            if asked.adapter is not None:
                self._adapters.end(asked.adapter)
            if asked.adapter is not None and asked.has_pool and not (asked.checked and asked.identified):
                self.counters.add(metrics.ADAPTER_REQUESTS, 1, asked.adapter.cause)
            if state.load.under_way:
                self._cancelled.append(request.request_id)

    @guarded(None, request="hint")
    def _retain(self, request: Request) -> None:
        """Do what a request hinted at, for all of its records in the pool."""
        state, namespace = self._requests.get(request.request_id), self._namespace.current
        if state is None or namespace is None:
            return
        keep_s, done = state.asked.hints.keep_s, state.asked.hints.done
        if not (keep_s or done or self._retention.keeps):
            return
        hashes = self._geometry.record_hashes(request.block_hashes, self._geometry.first)
        tag = state.asked.tag
        if not (keep_s or done) or tag is None:
            self._retention.used(hashes)
            return
        records, _ = self._lookups.records(request, tag)
        nbytes = sum(
            one.records * self._part_nbytes.get((one.group, part), 0)
            for one in records
            for part in range(one.ranks)
        )
        prefix = Prefix(namespace, records, hashes, nbytes)
        if done:
            self._retention.let_go(prefix)
        else:
            self._retention.keep(prefix, keep_s)

    # Helpers for the steps of a request.

    def _without_pool(self, request: Request) -> None:
        nothing = Asked(request, WITHOUT_POOL)
        state = self._requests.setdefault(request.request_id, RequestState(nothing))
        state.asked = replace(state.asked, params=WITHOUT_POOL)
        self._offers.refuse(state, "fault")

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            given = getattr(request, "kv_transfer_params", None)
            params = self._params.read(given)
            hints = read_hints(params.hints, given, getattr(request, "kv_hints", None), self.counters)
            if hints.priority != params.priority:
                params = params.model_copy(update={"priority": hints.priority})
            if request.skip_reading_prefix_cache:  # some versions of vLLM ask all the same
                params = params.model_copy(update={"load": False})
            opted_out = not params.load
            if internals.adapter_changed_in_place(request):
                params = WITHOUT_POOL
                self.counters.add(metrics.ADAPTER_REQUESTS, 1, "in_place")
                self._adapters.say_in_place(request.lora_request)
            adapter = None
            if request.lora_request is not None:
                adapter = self._adapters.check(request.lora_request)
            state = RequestState(Asked(request, params, hints, adapter, opted_out))
            self._requests[request.request_id] = state
        return state

    @property
    def _is_off(self) -> bool:
        return self._broken or self._namespace.is_off

    def _may_load(self, state: RequestState) -> bool:
        if not self._loads or self._is_off or not state.asked.params.load:
            return False
        return state.asked.identified or not state.asked.checked

    def _is_cached(self, block_hash: bytes) -> bool:
        """Whether the engine's own cache has a block under a hash, or does not show what it has."""
        cached = None if self._block_pool is None else internals.cached_blocks(self._block_pool)
        keys = (internals.cache_key(block_hash, group) for group in range(len(self._geometry.groups)))
        return cached is None or any(key in cached for key in keys)

    def _only_stores(self, state: RequestState) -> bool:
        return self._stores and not self._loads and not self._broken and state.asked.params.store

    def _max_tokens(self, request: Request) -> int:
        """The longest usable prefix: at least one token is left to compute, and hashes say what it is."""
        return self._geometry.aligned(min(request.num_tokens - 1, internals.covered_tokens(request)))

    def _is_too_short(self, request: Request) -> bool:
        return bool(request.num_tokens <= self._geometry.least_tokens)

    # The engine.

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """Bind the engine's own cache. kvpool only holds references to its blocks while workers copy them."""
        self._block_pool = block_pool
        self._loads_under_way.bind(block_pool)
        self._cache_resync.bind(block_pool)
        self._store_planner.bind(block_pool)
        self._audits.bind(block_pool)

    def take_events(self) -> list[KVCacheEvent]:
        """New events of the pools since the last call; on an index's request, also the whole cache."""
        events, self._events = [*self._store_planner.take_events(), *self._events], []
        asked, self._resync_asked = self._resync_asked, False
        if asked and self._events_wanted:
            events += self._resync()
        if self._near_blocks is not None:
            if asked:
                self._near_blocks.forget()
            events += self._near_blocks.take(self._namespace.current)
        return events

    @guarded(())
    def _resync(self) -> Sequence[KVCacheEvent]:
        return self._cache_resync.events()

    def wants_steps(self) -> bool:
        """Whether an idle engine should keep stepping, so that its stores end, or its workers say what they hold."""
        return (
            self._store_planner.wants_steps()
            or self._audits.wants_steps()
            or (bool(self._wrong) and self._namespace.current is not None and not self._broken)
            or (self._namespace.wants_step and not self._broken)
        )

    @guarded(False)
    def frees_blocks(self) -> bool:
        """Whether an engine out of blocks should wait a step for blocks in copy."""
        return self._store_planner.frees_blocks()

    @guarded(None)
    def reset(self) -> None:
        """The engine's caches were reset, perhaps for changed weights."""
        self._store_planner.leave()
        self._forget_offers()
        in_use = self._block_pool is not None and internals.is_in_use(self._block_pool)
        if not in_use:
            self._adapters.reset()
        self._namespace.reset(in_use=in_use)
        if self._findings.doubts and not in_use:
            self._forget_findings()

    @guarded(None)
    def called(self, method: str) -> None:
        """Somebody called a method of the workers, which may have changed their weights."""
        if self._namespace.called(method):
            self._forget_offers()

    @guarded(None)
    def named(self, weight_version: str) -> None:
        """Somebody gave the engine's weights a version."""
        self._namespace.named(weight_version)

    def _leave(self) -> None:
        """What is under way is of other weights than what comes next."""
        self._store_planner.leave()
        self._audits.leave()
        self._wrong.clear()  # in what comes next these hashes are other records
        if not self._namespace.is_doubted:
            self._forget_findings()
        self._seen.leave(self._clock.monotonic())
        self._outdated = set(self._encoded())

    def _forget_findings(self) -> None:
        doubted = bool(self._findings.doubts)
        self._findings.forget()
        if doubted:
            self._tell_audits()

    def forget(self) -> None:
        self._store_planner.forget()
        self._forget_offers()

    def _forget_offers(self) -> None:
        for state in self._requests.values():
            self._offers.forget(state)
        self._prefetches.forget()

    def switch_off(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            self._store_planner.forget()
            logger.error("kvpool is off for this engine, which goes on without it: %s", reason)

    def stats(self) -> Samples:
        self._set_gauges()
        return self.counters.take()

    @guarded(None)
    def _set_gauges(self) -> None:
        with contextlib.suppress(StoreClosed):
            self._store.count_health(self.counters)
        self.counters.set(metrics.ENABLED, float(not self._is_off))
        self._outcomes.tell_ratios()

    def close(self) -> None:
        self.forget()
        self._requests.clear()
        self._retention.close()
        self._quota.close()
        if self._near_blocks is not None:
            self._near_blocks.close()
        self._traffic.close()
