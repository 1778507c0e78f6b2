"""What goes to the pool, and when: planned by content, so that nothing is stored where nobody can use it.

A record's way: a request computes it, or holds it while its lookup has said that the pool does not. It is wanted if the
request allows it and the settings do (prompts only, the number of requests that have had it). It is sent to the workers
at once; with ``write_back`` when it is among the blocks that the engine will use next. It waits while the workers'
staging is full, or when they have dropped it; the engine may use its blocks meanwhile, and then it is given up.

With full attention a record is of use only behind all that come before it in its prompt. So with ``write_through`` it
is sent when the one before it is in the pool or on its way, waits while that one waits, and is given up when that one
was. What is given up comes back with the next request that holds it and whose lookup misses it.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool import metrics
from kvpool.config import PoolConfig
from kvpool.metrics import Counters
from kvpool.vllm import internals
from kvpool.vllm.events import stored_event
from kvpool.vllm.plan import (
    BlockRef,
    Group,
    PoolMetadata,
    PoolWorkerMetadata,
    blocks_held,
    first_missing,
    records_to_store,
)
from kvpool.vllm.request_counter import Sightings

# Under way and waiting, about 1 KB each; and as many of which is known that they were given up.
MAX_RECORDS = 1 << 16
MAX_LATE = 256  # lookups that are waited for, for what is held; of more, the oldest is not used
MAX_VISITS = 4096  # of what waits, in one step
STEPS_AHEAD = 2  # write-back looks at the blocks that so many full steps could use
KEEP_STEPPING_S = 5.0  # how long an engine without requests steps on, so that stores end and are announced
# After workers have dropped something, until what waits is tried; doubles while nothing is kept.
PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
MAX_HELD_S = 1.0  # how long the engine waits for blocks of ours before it preempts after all; a copy takes milliseconds

PoolHash = Callable[[bytes], bytes]
"""Makes the hash in a key of that of a request's block: of one with an adapter they differ (``adapters``)."""
Told = Callable[[], Sequence[Sequence[int]] | None]
"""What the pool has said to a lookup, by group and record; empty: it will not say; None: not yet."""


class _Wanted(NamedTuple):
    """A record that is to be in the pool."""

    block: BlockRef
    parent: tuple[bytes, int] | None  # what has to be there before it
    contents: tuple[bytes | None, ...]  # by block: the engine's own key of what is in it now
    priority: int
    event: BlockStored | None
    cache_key: bytes = b""  # with write-back: under which the engine's own cache has it

    @property
    def key(self) -> tuple[bytes, int]:
        return self.block.block_hash, self.block.group


@dataclass
class _Progress:
    """Of one request."""

    told: Told | None = None  # by the lookup with which the engine has admitted it
    present: Sequence[Sequence[int]] = ()  # what it said, if it did before the first step
    handed: list[int] | None = None  # by group: leading records that need not be looked at any more
    held: list[int] = field(default_factory=list)  # by group: leading records that it did not compute
    sighted: list[int] = field(default_factory=list)  # by group: leading records in which it was counted


@dataclass
class _Late:
    """Records that a request held when it began, and an answer that is still to come."""

    request: Request
    priority: int
    told: Told
    tables: list[list[int]]  # by group, of what it held
    pool_hash: PoolHash


@dataclass
class _Pending:
    wanted: _Wanted
    ranks: int  # that have not said yet whether it is in the pool
    landing: int  # ranks for which the blocks are held, as they may still read them
    ok: bool = True
    left: bool = False  # it goes to a namespace that the engine has left


class StorePlanner:
    """Plans the stores of one engine of ``ranks`` ranks. ``step_tokens``: most that the engine computes in a step."""

    def __init__(
        self,
        config: PoolConfig,
        groups: Sequence[Group],
        *,
        ranks: int,
        step_tokens: int,
        hash_block_tokens: int,
        events: bool,
        counters: Counters,
    ) -> None:
        self._config, self._groups, self._ranks = config, list(groups), ranks
        self._hash_block_tokens, self._events_wanted, self._counters = hash_block_tokens, events, counters
        self._block_pool: BlockPool | None = None
        self._progress: dict[str, _Progress] = {}
        self._late: deque[_Late] = deque()
        self._sightings = Sightings() if config.min_requests_to_store > 1 else None
        # A record is in one of these at most, by hash and group.
        self._waiting: OrderedDict[tuple[bytes, int], _Wanted] = OrderedDict()  # each behind its parent
        self._given_up: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # oldest first
        self._pending: dict[int, _Pending] = {}  # by tag
        self._under_way: dict[tuple[bytes, int], int] = {}  # tags of it
        self._held: dict[int, int] = {}  # by block id: references of ours
        self._waited_for: float | None = None  # since when the engine waits for one of them
        self._room = MAX_RECORDS  # records that the workers take at a time, as they say
        self._pause_s, self._paused_until = PAUSE_S, 0.0
        self._write_back: dict[int, _Wanted] = {}  # by block id, of which the engine has so many
        self._blocks_ahead = sum(
            -(-STEPS_AHEAD * step_tokens // group.block_tokens) for group in self._groups
        )
        self._next_tag = 0
        # When a step that computes stored something, or something has come into the pool.
        self._active_at = 0.0
        self._events: list[BlockStored] = []

    def bind(self, block_pool: BlockPool) -> None:
        """The engine's own cache. Of it we only hold blocks, by their reference count, while workers copy them."""
        self._block_pool = block_pool

    def admitted(self, request_id: str, told: Told | None) -> None:
        """The engine has given a request blocks: it starts from what it holds. ``told``: by its lookup, if it had one.

        Called again when the blocks are there that it has loaded.
        """
        progress = self._progress.setdefault(request_id, _Progress())
        progress.handed = None
        progress.told = told or progress.told

    def finished(self, request_id: str) -> None:
        """A request has ended."""
        self._progress.pop(request_id, None)

    def begin(self, step: PoolMetadata) -> None:
        """Begin a step: add what waited."""
        self._send_waiting(step)
        self._read_late(step)

    def end(self, step: PoolMetadata, output: SchedulerOutput) -> None:
        """End a step, of which every request has been planned."""
        if self._write_back and output.total_num_scheduled_tokens:
            self._plan_write_back(step)
        if step.stores and output.total_num_scheduled_tokens:
            self._active_at = time.monotonic()

    def update(self, report: PoolWorkerMetadata) -> None:
        """Take in what the workers report of a step."""
        if report.store_slots:
            self._room = report.store_slots
        self._let_go(report.landed)
        kept, dropped = False, []
        for counts, ok in ((report.stored, True), (report.dropped, False)):
            for tag, ranks in counts.items():
                if (pending := self._pending.get(tag)) is None:
                    continue
                pending.ranks -= ranks
                pending.ok &= ok
                if pending.ranks <= 0:
                    self._end(tag, pending)
                    kept |= pending.ok
                    if not pending.ok and not pending.left:
                        dropped.append((tag, pending.wanted))
        for _, wanted in sorted(dropped, key=lambda each: each[0], reverse=True):
            self._wait_first(wanted)
        now = time.monotonic()
        if kept:
            self._active_at = now
            self._pause_s, self._paused_until = PAUSE_S, min(self._paused_until, now + PAUSE_S)
        if dropped:
            self._paused_until = now + self._pause_s
            if not kept:
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def take_events(self) -> list[BlockStored]:
        """What has come into the pool since the last call."""
        events, self._events = self._events, []
        return events

    def wants_steps(self) -> bool:
        """Whether an engine without requests should go on stepping: stores are in flight, or wait.

        Not for long when nothing comes of it: a pool that is away must not keep an idle engine busy.
        """
        left = self._pending or self._waiting or self._late
        return bool(left) and time.monotonic() - self._active_at < KEEP_STEPPING_S

    def frees_blocks(self) -> bool:
        """Whether blocks that only we hold come back when they are copied; for ``MAX_HELD_S`` without one, at most."""
        if not self._held:
            return False
        assert self._block_pool is not None
        pool = self._block_pool
        if not any(internals.references(pool, block_id) == held for block_id, held in self._held.items()):
            return False
        now = time.monotonic()
        if self._waited_for is None:
            self._waited_for = now
        return now - self._waited_for < MAX_HELD_S

    def forget(self) -> None:
        """Drop every answer about what the pool holds, and what waits; what is under way goes on."""
        for progress in self._progress.values():
            progress.told = None
        self._late.clear()
        self._waiting.clear()
        self._given_up.clear()

    def leave(self) -> None:
        """The engine goes on in another namespace; what is under way goes to this one, untold, and once."""
        self.forget()
        self._write_back.clear()
        for pending in self._pending.values():
            pending.left = True
        self._under_way.clear()  # of the namespace that it is in now

    # What a request computes, and what it held.

    def plan(
        self,
        step: PoolMetadata,
        output: SchedulerOutput,
        request: Request,
        priority: int,
        computed_tokens: int,
        pool_hash: PoolHash | None = bytes,
    ) -> None:
        """Add the stores of one request, of whose tokens so many are computed when the step is over.

        ``pool_hash``: None: it is not known under which hashes they go.
        """
        progress = self._progress.setdefault(request.request_id, _Progress())
        before = computed_tokens - output.num_scheduled_tokens[request.request_id]
        if not self._config.store_decode:
            computed_tokens = min(computed_tokens, request.num_prompt_tokens)
        begins = progress.handed is None
        if progress.handed is None:
            progress.held = [before // group.record_tokens for group in self._groups]
            progress.handed = self._begin(request, progress, pool_hash)
        if pool_hash is None:
            progress.present, progress.told = (), None
            return
        tables: tuple[list[int], ...] | None = None
        for index, group in enumerate(self._groups):
            if computed_tokens // group.record_tokens <= progress.handed[index]:
                continue
            hashes = internals.record_hashes(request, self._hash_block_tokens, group)
            new = records_to_store(group.record_tokens, progress.handed[index], computed_tokens, len(hashes))
            progress.handed[index] = new.stop
            tables = internals.block_tables(output, request.request_id) if tables is None else tables
            if tables is None:
                break
            for i in self._wanted_of(progress, index, hashes, new):
                if i >= progress.held[index] or (pool_hash(hashes[i]), index) not in self._under_way:
                    self._want(step, request, priority, index, hashes, i, tables[index], pool_hash)
        if begins:
            progress.present = ()
            if progress.told is not None and any(progress.held):
                tables = tables or internals.block_tables(output, request.request_id)
                self._listen(request, priority, progress, tables, pool_hash)
            progress.told = None

    def _begin(self, request: Request, progress: _Progress, pool_hash: PoolHash | None) -> list[int]:
        """By group, the first record to look at: the pool may lack what is held, or it may have come too rarely."""
        told = progress.told() if progress.told is not None else None
        if told is not None:
            progress.present, progress.told = told, None
        if progress.present and self._given_up and pool_hash is not None:
            for index, group in enumerate(self._groups):
                hashes = internals.record_hashes(request, self._hash_block_tokens, group)
                for block_hash in compress(hashes, progress.present[index]):
                    self._given_up.pop((pool_hash(block_hash), index), None)
        if self._sightings is not None:
            return [0] * len(self._groups)
        if not progress.present:
            # As far as is known it is in the pool, or was stored by the request that computed it.
            return list(progress.held)
        return [first_missing(*each) for each in zip(progress.present, progress.held, strict=True)]

    def _wanted_of(
        self, progress: _Progress, group: int, hashes: Sequence[bytes], records: range
    ) -> Iterable[int]:
        """Those of a request's records that the settings want; counts this request in, once for each record."""
        held = progress.held[group]
        present = progress.present[group] if progress.present else ()
        if self._sightings is None:
            return [i for i in records if i >= held or (i < len(present) and not present[i])]
        assert records.step == 1
        if not progress.sighted:
            progress.sighted = [0] * len(self._groups)
        first = progress.sighted[group]  # beyond 0 already, when the request was preempted
        progress.sighted[group] = max(first, records.stop)
        enough = self._config.min_requests_to_store
        wanted = []
        for i in records:
            if i >= first:
                count = self._sightings.add(hashes[i], group)
            else:
                count = self._sightings.count(hashes[i], group)
            if i >= held or (i < len(present) and not present[i]):
                if count >= enough:
                    wanted.append(i)
            elif count == enough and i >= first:
                # The engine had it already: the request that makes it enough stores it, and no later one.
                wanted.append(i)
        return wanted

    def _listen(
        self,
        request: Request,
        priority: int,
        progress: _Progress,
        tables: Sequence[Sequence[int]] | None,
        pool_hash: PoolHash,
    ) -> None:
        """Store what is held and missing when the pool has said what that is; the request does not wait for it."""
        if tables is None or progress.told is None:
            return
        held = [
            list(table[: records * group.blocks_per_record])
            for group, table, records in zip(self._groups, tables, progress.held, strict=True)
        ]
        self._late.append(_Late(request, priority, progress.told, held, pool_hash))
        if len(self._late) > MAX_LATE:
            self._late.popleft()
        self._active_at = time.monotonic()

    def _read_late(self, step: PoolMetadata) -> None:
        for _ in range(len(self._late)):
            late = self._late.popleft()
            present = late.told()
            if present is None:
                self._late.append(late)
                continue
            for index, there in enumerate(present):
                self._want_missed(step, late, index, there)

    def _want_missed(self, step: PoolMetadata, late: _Late, index: int, present: Sequence[int]) -> None:
        assert self._block_pool is not None
        group, request, table = self._groups[index], late.request, late.tables[index]
        stop = len(table) // group.blocks_per_record
        if not self._config.store_decode:
            stop = min(stop, request.num_prompt_tokens // group.record_tokens)
        if (first := first_missing(present, stop)) == stop:
            return
        hashes = internals.record_hashes(request, self._hash_block_tokens, group)
        for i in range(first, min(stop, len(present))):
            ids = blocks_held(group, table, i)
            if present[i] or ids is None or (late.pool_hash(hashes[i]), index) in self._under_way:
                continue
            if self._sightings is not None and (
                self._sightings.count(hashes[i], index) < self._config.min_requests_to_store
            ):
                continue
            # The request may have ended meanwhile.
            keys = internals.cache_keys(request, self._hash_block_tokens, index, group, i)
            if internals.block_contents(self._block_pool, ids) == tuple(keys):
                self._want(step, request, late.priority, index, hashes, i, table, late.pool_hash)

    def _want(
        self,
        step: PoolMetadata,
        request: Request,
        priority: int,
        index: int,
        hashes: Sequence[bytes],
        record: int,
        table: Sequence[int],
        pool_hash: PoolHash,
    ) -> None:
        """A record is to be in the pool: now, or when it is evicted."""
        assert self._block_pool is not None, "vLLM binds its block pool before the first step"
        group = self._groups[index]
        in_order = self._is_in_order(index)
        ids = blocks_held(group, table, record)
        if ids is None:
            if in_order:
                self._remember_given_up((pool_hash(hashes[record]), index))
            return
        wanted = _Wanted(
            BlockRef(pool_hash(hashes[record]), index, ids),
            (pool_hash(hashes[record - 1]), index) if in_order and record else None,
            internals.block_contents(self._block_pool, ids),
            priority,
            stored_event(request, index, group, record, hashes) if self._events_wanted else None,
        )
        if self._config.store_policy == "write_back":
            self._keep_for_later(wanted._replace(cache_key=internals.cache_key(hashes[record], index)))
        else:
            self._offer(step, wanted)

    # What is sent, waits, or is given up.

    def _offer(self, step: PoolMetadata, wanted: _Wanted) -> None:
        if wanted.parent in self._given_up:
            self._give_up(wanted, "behind_gap")
        elif wanted.parent in self._waiting or len(self._pending) >= self._room:
            self._wait(wanted)
        else:
            self._send(step, wanted)

    def _wait(self, wanted: _Wanted) -> None:
        if None in wanted.contents:  # the engine does not say what is in it, so there is no telling later
            self._give_up(wanted, "staging_full")
        elif wanted.key not in self._waiting and len(self._waiting) + len(self._pending) >= MAX_RECORDS:
            self._give_up(wanted, "queue_full")
        else:
            self._given_up.pop(wanted.key, None)
            self._waiting[wanted.key] = wanted

    def _wait_first(self, wanted: _Wanted) -> None:
        """Workers have dropped it, and said why: what waits already may stand behind it in a prompt."""
        if wanted.key in self._under_way:
            return
        if None not in wanted.contents:
            self._waiting.setdefault(wanted.key, wanted)
            self._waiting.move_to_end(wanted.key, last=False)
        elif self._is_in_order(wanted.block.group):
            self._remember_given_up(wanted.key)

    def _send_waiting(self, step: PoolMetadata) -> None:
        """Send what waits, oldest first, as far as there is room and the engine still has it."""
        if not self._waiting or time.monotonic() < self._paused_until:
            return
        assert self._block_pool is not None
        for _ in range(min(MAX_VISITS, len(self._waiting))):
            if len(self._pending) >= self._room:
                return
            key, wanted = self._waiting.popitem(last=False)
            if wanted.parent in self._given_up:
                self._give_up(wanted, "behind_gap")
            elif wanted.parent in self._waiting:
                self._waiting[key] = wanted  # behind it
            elif internals.block_contents(self._block_pool, wanted.block.block_ids) == wanted.contents:
                self._send(step, wanted)
            else:
                self._give_up(wanted, "evicted")

    def _give_up(self, wanted: _Wanted, cause: str) -> None:
        self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, cause)
        if self._is_in_order(wanted.block.group):
            self._remember_given_up(wanted.key)

    def _is_in_order(self, group: int) -> bool:
        """Whether a record of this group is of use only behind those before it. A prompt is evicted from its end."""
        return self._config.store_policy == "write_through" and self._groups[group].window is None

    def _remember_given_up(self, key: tuple[bytes, int]) -> None:
        self._given_up[key] = None
        if len(self._given_up) > MAX_RECORDS:
            self._given_up.popitem(last=False)

    def _send(self, step: PoolMetadata, wanted: _Wanted) -> None:
        assert self._block_pool is not None
        self._waiting.pop(wanted.key, None)
        self._given_up.pop(wanted.key, None)
        landing, ids = 0, wanted.block.block_ids
        if self._config.store_policy == "write_through":
            # Held until every rank has copied it: the engine may free it in this very step, when its request ends, is
            # preempted, or its window has gone on. With write-back the workers copy before they compute again.
            internals.hold(self._block_pool, ids)
            for block_id in ids:
                self._held[block_id] = self._held.get(block_id, 0) + 1
            landing = self._ranks
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._pending[tag] = _Pending(wanted, self._ranks, landing)
        self._under_way[wanted.key] = self._under_way.get(wanted.key, 0) + 1
        step.stores.append(wanted.block)
        step.tags.append(tag)

    def _let_go(self, landed: Mapping[int, int]) -> None:
        """Give blocks back to the engine that no rank reads any more."""
        free: list[int] = []
        for tag in sorted(landed):
            if (pending := self._pending.get(tag)) is not None and pending.landing:
                pending.landing -= landed[tag]
                if pending.landing == 0:
                    free += pending.wanted.block.block_ids
        for block_id in free:
            self._held[block_id] -= 1
            if not self._held[block_id]:
                del self._held[block_id]
        if free:
            assert self._block_pool is not None
            self._waited_for = None
            internals.release(self._block_pool, free)

    def _end(self, tag: int, pending: _Pending) -> None:
        """Every rank has said what became of a record."""
        del self._pending[tag]
        if pending.left:
            return
        key = pending.wanted.key
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]
        if pending.ok and pending.wanted.event is not None:
            self._events.append(pending.wanted.event)

    # Write-back.

    def _keep_for_later(self, wanted: _Wanted) -> None:
        (block_id,) = wanted.block.block_ids  # as the settings have it
        earlier = self._write_back.pop(block_id, None)
        if earlier is not None and earlier.block != wanted.block:
            self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "evicted")
        self._write_back[block_id] = wanted

    def _plan_write_back(self, step: PoolMetadata) -> None:
        """Store what the engine may evict in its next steps: those blocks stay as they are until this one is over."""
        assert self._block_pool is not None, "vLLM binds it before the first step"
        due = []
        for block_id, key in internals.next_evicted(self._block_pool, self._blocks_ahead):
            if (wanted := self._write_back.pop(block_id, None)) is None:
                continue
            if key == wanted.cache_key:
                due.append(wanted._replace(contents=(key,)))
            else:
                self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "evicted")
        for wanted in sorted(due, key=lambda each: each.priority):
            self._offer(step, wanted)
