"""``StorePlanner``: which records are to be in the pool, and when they are offered to the queue (``store_queue``).

A request computes a record, or holds it while its lookup has said that the pool does not. The record is wanted if the
request allows it and the settings do (prompts only, the number of requests that have had it). It is offered at once;
with ``write_back``, when it is among the blocks that the engine will use next.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
from kvpool.vllm.store_queue import HeldBlocks, StoreQueue, Wanted

MAX_LATE = 256  # lookups whose answer is waited for, for what is held; of more, the oldest is not used
STEPS_AHEAD = 2  # write-back looks at the blocks that so many full steps could use
KEEP_STEPPING_S = 5.0  # how long an engine without requests steps on, so that stores end and are announced

PoolHash = Callable[[bytes], bytes]
"""Makes the hash in a key of that of a request's block: of one with an adapter they differ (``adapters``)."""
Answer = Callable[[], Sequence[Sequence[int]] | None]
"""What the pool has said to a lookup, by group and record; empty: there is no answer; None: not yet."""


@dataclass
class _Progress:
    """Of one request."""

    answer: Answer | None = None  # to the lookup with which the engine has admitted it
    present: Sequence[Sequence[int]] = ()  # the answer, if it came before the first step
    planned: list[int] | None = None  # by group: leading records that need not be looked at any more
    held: list[int] = field(default_factory=list)  # by group: leading records that it did not compute
    counted: list[int] = field(default_factory=list)  # by group: leading records in which it was counted


class _Source(NamedTuple):
    """Whose records are to be stored, and how their hashes are made."""

    request: Request
    priority: int
    pool_hash: PoolHash


class _LateAnswer(NamedTuple):
    """Records that a request held when it began, and an answer that is still to come."""

    source: _Source
    answer: Answer
    tables: list[list[int]]  # by group, of what it held


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
        self._config, self._groups = config, list(groups)
        self._hash_block_tokens, self._events_wanted, self._counters = hash_block_tokens, events, counters
        self._held = HeldBlocks()
        write_through = config.store_policy == "write_through"
        self._queue = StoreQueue(
            self._held, self._groups, ranks=ranks, write_through=write_through, counters=counters
        )
        self._progress: dict[str, _Progress] = {}
        self._late_answers: deque[_LateAnswer] = deque()
        self._requests = RequestCounter() if config.min_requests_to_store > 1 else None
        self._write_back: dict[int, Wanted] = {}  # by block id, of which the engine has so many
        self._blocks_ahead = sum(
            -(-STEPS_AHEAD * step_tokens // group.block_tokens) for group in self._groups
        )
        # When a step that computes stored something, or something has come into the pool.
        self._active_at = 0.0

    def bind(self, block_pool: BlockPool) -> None:
        """The engine's own cache. Of it we only hold blocks, by their reference count, while workers copy them."""
        self._held.bind(block_pool)

    def admitted(self, request_id: str, answer: Answer | None) -> None:
        """The engine has given a request blocks. ``answer``: to its lookup, if it had one.

        Called again when its load has ended.
        """
        progress = self._progress.setdefault(request_id, _Progress())
        progress.planned = None
        progress.answer = answer or progress.answer

    def finished(self, request_id: str) -> None:
        """A request has ended."""
        self._progress.pop(request_id, None)

    def begin(self, step: PoolMetadata) -> None:
        """Begin a step: add what waited."""
        self._queue.send_waiting(step)
        self._read_late_answers(step)

    def end(self, step: PoolMetadata, output: SchedulerOutput) -> None:
        """End a step, of which every request has been planned."""
        if self._write_back and output.total_num_scheduled_tokens:
            self._plan_write_back(step)
        if step.stores and output.total_num_scheduled_tokens:
            self._active_at = time.monotonic()

    def update(self, report: PoolWorkerMetadata) -> None:
        """Take in what the workers report of a step."""
        if self._queue.update(report):
            self._active_at = time.monotonic()

    def take_events(self) -> list[BlockStored]:
        """What has come into the pool since the last call."""
        return self._queue.take_events()

    def wants_steps(self) -> bool:
        """Whether an engine without requests should go on stepping: stores are in flight, or wait.

        Not for long when nothing comes of it: a pool that is away must not keep an idle engine busy.
        """
        if self._queue.is_empty and not self._late_answers:
            return False
        # Behind a pause of the engine it is long since anything was offered, and no step has told of copies meanwhile.
        return time.monotonic() - self._active_at < KEEP_STEPPING_S or self._held.wants_steps()

    def frees_blocks(self) -> bool:
        """Whether the engine gets a block back when one that only we hold is copied."""
        return self._held.frees_soon()

    def forget(self) -> None:
        """Drop every answer about what the pool holds, and what waits; what is under way goes on."""
        for progress in self._progress.values():
            progress.answer = None
        self._late_answers.clear()
        self._queue.forget()

    def leave(self) -> None:
        """The engine goes on in another namespace; what is under way goes to the old one, without events or retry."""
        self.forget()
        self._write_back.clear()
        self._queue.leave()

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
        begins = progress.planned is None
        if progress.planned is None:
            progress.held = [before // group.record_tokens for group in self._groups]
            progress.planned = self._first_to_plan(request, progress, pool_hash)
        if pool_hash is None:
            progress.present, progress.answer = (), None
            return
        source = _Source(request, priority, pool_hash)
        tables: tuple[list[int], ...] | None = None
        for index, group in enumerate(self._groups):
            if computed_tokens // group.record_tokens <= progress.planned[index]:
                continue
            hashes = internals.record_hashes(request, self._hash_block_tokens, group)
            new = records_to_store(group.record_tokens, progress.planned[index], computed_tokens, len(hashes))
            progress.planned[index] = new.stop
            tables = internals.block_tables(output, request.request_id) if tables is None else tables
            if tables is None:
                break
            for i in self._wanted_records(progress, index, hashes, new):
                if i >= progress.held[index] or not self._queue.is_under_way((pool_hash(hashes[i]), index)):
                    self._store(step, source, index, hashes, i, tables[index])
        if begins:
            progress.present = ()
            if progress.answer is not None and any(progress.held):
                tables = tables or internals.block_tables(output, request.request_id)
                self._await_answer(source, progress.answer, progress.held, tables)
            progress.answer = None

    def _first_to_plan(self, request: Request, progress: _Progress, pool_hash: PoolHash | None) -> list[int]:
        """By group, the first record to look at: the pool may lack what is held, or it may have come too rarely."""
        present = progress.answer() if progress.answer is not None else None
        if present is not None:
            progress.present, progress.answer = present, None
        if progress.present and self._queue.gave_up and pool_hash is not None:
            for index, group in enumerate(self._groups):
                hashes = internals.record_hashes(request, self._hash_block_tokens, group)
                for block_hash in compress(hashes, progress.present[index]):
                    self._queue.found((pool_hash(block_hash), index))
        if self._requests is not None:
            return [0] * len(self._groups)
        if not progress.present:
            # As far as is known it is in the pool, or was stored by the request that computed it.
            return list(progress.held)
        return [first_missing(*each) for each in zip(progress.present, progress.held, strict=True)]

    def _wanted_records(
        self, progress: _Progress, group: int, hashes: Sequence[bytes], records: range
    ) -> Iterable[int]:
        """Those of a request's records that the settings want; counts the request, once for each record."""
        held = progress.held[group]
        present = progress.present[group] if progress.present else ()
        if self._requests is None:
            return [i for i in records if i >= held or (i < len(present) and not present[i])]
        assert records.step == 1
        if not progress.counted:
            progress.counted = [0] * len(self._groups)
        first = progress.counted[group]  # beyond 0 already, when the request was preempted
        progress.counted[group] = max(first, records.stop)
        enough = self._config.min_requests_to_store
        wanted = []
        for i in records:
            if i >= first:
                count = self._requests.add(hashes[i], group)
            else:
                count = self._requests.count(hashes[i], group)
            if i >= held or (i < len(present) and not present[i]):
                if count >= enough:
                    wanted.append(i)
            elif count == enough and i >= first:
                # The engine had it already: the request that reaches the threshold stores it, and no later one.
                wanted.append(i)
        return wanted

    # What was held when the request began, and an answer that came later.

    def _await_answer(
        self, source: _Source, answer: Answer, held: Sequence[int], tables: Sequence[Sequence[int]] | None
    ) -> None:
        """Store what is held and missing when the answer has come; the request does not wait for it."""
        if tables is None:
            return
        of_held = [
            list(table[: records * group.blocks_per_record])
            for group, table, records in zip(self._groups, tables, held, strict=True)
        ]
        self._late_answers.append(_LateAnswer(source, answer, of_held))
        if len(self._late_answers) > MAX_LATE:
            self._late_answers.popleft()
        self._active_at = time.monotonic()

    def _read_late_answers(self, step: PoolMetadata) -> None:
        for _ in range(len(self._late_answers)):
            late = self._late_answers.popleft()
            present = late.answer()
            if present is None:
                self._late_answers.append(late)
                continue
            for index, there in enumerate(present):
                self._store_missing(step, late, index, there)

    def _store_missing(
        self, step: PoolMetadata, late: _LateAnswer, index: int, present: Sequence[int]
    ) -> None:
        group, (request, _, pool_hash), table = self._groups[index], late.source, late.tables[index]
        stop = len(table) // group.blocks_per_record
        if not self._config.store_decode:
            stop = min(stop, request.num_prompt_tokens // group.record_tokens)
        if (first := first_missing(present, stop)) == stop:
            return
        hashes = internals.record_hashes(request, self._hash_block_tokens, group)
        for i in range(first, min(stop, len(present))):
            ids = blocks_held(group, table, i)
            if present[i] or ids is None or self._queue.is_under_way((pool_hash(hashes[i]), index)):
                continue
            if self._requests is not None and (
                self._requests.count(hashes[i], index) < self._config.min_requests_to_store
            ):
                continue
            # The request may have ended meanwhile.
            keys = internals.cache_keys(request, self._hash_block_tokens, index, group, i)
            if internals.block_contents(self._held.pool, ids) == tuple(keys):
                self._store(step, late.source, index, hashes, i, table)

    def _store(
        self,
        step: PoolMetadata,
        source: _Source,
        index: int,
        hashes: Sequence[bytes],
        record: int,
        table: Sequence[int],
    ) -> None:
        """A record is to be in the pool: now, or when it is evicted."""
        group, key = self._groups[index], (source.pool_hash(hashes[record]), index)
        ids = blocks_held(group, table, record)
        if ids is None:
            self._queue.lost(key)
            return
        needs_parent = record and self._queue.in_order[index]
        wanted = Wanted(
            BlockRef(*key, ids),
            (source.pool_hash(hashes[record - 1]), index) if needs_parent else None,
            internals.block_contents(self._held.pool, ids),
            source.priority,
            stored_event(source.request, index, group, record, hashes) if self._events_wanted else None,
        )
        if self._config.store_policy == "write_back":
            self._keep_for_later(wanted._replace(cache_key=internals.cache_key(hashes[record], index)))
        else:
            self._queue.offer(step, wanted)

    # Write-back.

    def _keep_for_later(self, wanted: Wanted) -> None:
        (block_id,) = wanted.block.block_ids  # as the settings have it
        earlier = self._write_back.pop(block_id, None)
        if earlier is not None and earlier.block != wanted.block:
            self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "evicted")
        self._write_back[block_id] = wanted

    def _plan_write_back(self, step: PoolMetadata) -> None:
        """Store what the engine may evict in its next steps: those blocks stay as they are until this one is over."""
        due = []
        for block_id, key in internals.next_evicted(self._held.pool, self._blocks_ahead):
            if (wanted := self._write_back.pop(block_id, None)) is None:
                continue
            if key == wanted.cache_key:
                due.append(wanted._replace(contents=(key,)))
            else:
                self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "evicted")
        for wanted in sorted(due, key=lambda each: each.priority):
            self._queue.offer(step, wanted)


MAX_BLOCKS = 1 << 18  # about 40 MB of the scheduler's process, when all are in use


class RequestCounter:
    """Counts by block hash and group. The block that was seen longest ago is forgotten beyond ``max_blocks``."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._counts: dict[tuple[bytes, int], int] = {}  # oldest first

    def add(self, block_hash: bytes, group: int) -> int:
        """Count one more request, and return how many there were with it."""
        key = (block_hash[-8:], group)  # a collision only stores a block a little early
        count = self._counts.pop(key, 0) + 1
        if len(self._counts) >= self._max_blocks:
            del self._counts[next(iter(self._counts))]
        self._counts[key] = count
        return count

    def count(self, block_hash: bytes, group: int) -> int:
        """How many requests there were."""
        return self._counts.get((block_hash[-8:], group), 0)
