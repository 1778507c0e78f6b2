"""``StorePlanner``: chooses records for the pool, and when to offer them to the queue (``store_queue``).

Candidates: records that a request computed, and records it holds that the pool lacks. The request and the settings
(prompts only, number of requests) must allow it, and the record's hash must be that of its tokens (``engine.proofs``).
A record is offered at once; with ``write_back``, when its blocks are next to be evicted.

Over 400 lines because every reason to store a record, or not, stands together.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import math
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
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.proofs import HashProofs
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import AdapterWeights, BlockRef, PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.save.request_counter import RequestCounter
from kvpool.vllm.save.store_queue import StoreQueue, Wanted
from kvpool.vllm.save.write_back import WriteBack

MAX_LATE = 256  # most pending lookups; the oldest is dropped
STEPS_AHEAD = 2  # full steps whose evictions write-back anticipates

PoolHash = Callable[[bytes], bytes]
"""Maps a block's hash to the hash in its key; they differ for adapters (``engine.adapters``)."""
Answer = Callable[[], Sequence[Sequence[int]] | None]
"""The pool's answer to a lookup, by group and record; empty: it failed; None: pending."""


@dataclass
class _Progress:
    answer: Answer | None = None  # of the lookup at its admission
    present: Sequence[Sequence[int]] = ()  # the answer, if it came before the first step
    planned: list[int] | None = None  # by group: leading records that need no further look
    held: list[int] = field(default_factory=list)  # by group: leading records that it did not compute
    counted: list[int] = field(default_factory=list)  # by group: leading records that counted it


class _Source(NamedTuple):
    """The owner of records to store, and the form of their hashes."""

    request: Request
    priority: int
    pool_hash: PoolHash
    adapter: AdapterWeights | None


class _LateAnswer(NamedTuple):
    """A request's initially held records, and their pending answer."""

    source: _Source
    answer: Answer
    tables: list[list[int]]  # by group, of its held records


class StorePlanner:
    """``event``: makes the event of a stored record (``tell.events.stored_event``); None: nothing is announced."""

    def __init__(
        self,
        config: PoolConfig,
        geometry: Geometry,
        *,
        queue: StoreQueue,
        proofs: HashProofs,
        event: Callable[[Request, int, Group, int, Sequence[bytes]], BlockStored] | None,
        counters: Counters,
    ) -> None:
        self._config, self._geometry, self._groups = config, geometry, geometry.groups
        self._event, self._counters = event, counters
        self._queue, self._held, self._proofs = queue, queue.held, proofs
        self._tails = geometry.has_tails and config.store_policy == "write_through"
        self._progress: dict[str, _Progress] = {}
        self._late_answers: deque[_LateAnswer] = deque()
        self._requests = RequestCounter() if config.min_requests_to_store > 1 else None
        ahead = geometry.blocks_of(STEPS_AHEAD * geometry.step_tokens)
        self._write_back = WriteBack(self._queue, blocks_ahead=ahead, counters=counters)

    def bind(self, block_pool: BlockPool) -> None:
        """Bind the engine's own cache. kvpool only holds references to its blocks while workers copy them."""
        self._held.bind(block_pool)

    def admitted(self, request_id: str, answer: Answer | None) -> None:
        """The engine gave a request blocks; repeated after its load. ``answer``: of its lookup, if any."""
        progress = self._progress.setdefault(request_id, _Progress())
        progress.planned = None
        progress.answer = answer or progress.answer
        self._proofs.placed(request_id)

    def finished(self, request_id: str) -> None:
        self._progress.pop(request_id, None)
        self._proofs.finished(request_id)

    def begin(self, step: PoolMetadata) -> None:
        self._queue.send_waiting(step)
        self._read_late_answers(step)

    def end(self, step: PoolMetadata, output: SchedulerOutput) -> None:
        if output.total_num_scheduled_tokens:
            self._write_back.plan(step)
        if step.stores and output.total_num_scheduled_tokens:
            self._queue.stays_active()

    def update(self, report: PoolWorkerMetadata) -> list[tuple[bytes, int]]:
        """Take the workers' report; the records that entered the pool, each by hash and group."""
        return self._queue.update(report)

    def take_events(self) -> list[BlockStored]:
        return self._queue.take_events()

    def wants_steps(self) -> bool:
        """Whether an idle engine should step for its stores."""
        return bool(not self._queue.is_empty or self._late_answers) and self._queue.wants_steps()

    def frees_blocks(self) -> bool:
        """Whether the engine regains a block that only kvpool holds, once copied."""
        return self._held.frees_soon()

    def forget(self) -> None:
        """Drop every answer about the pool, and records that wait or are kept; in-flight ones continue."""
        for progress in self._progress.values():
            progress.answer = None
        self._late_answers.clear()
        self._write_back.clear()
        self._queue.forget()

    def leave(self) -> None:
        """The namespace changed: in-flight records go to the old one, without events or retry."""
        self.forget()
        self._queue.leave()

    def held_tokens(self, request: Request, before: int) -> int:
        """Of how many tokens a request has blocks that it did not compute, at ``before`` tokens in its first step."""
        return internals.tokens_held(request, before, self._geometry.refilled_tokens)

    def plan(
        self,
        step: PoolMetadata,
        output: SchedulerOutput,
        request: Request,
        priority: int,
        computed_tokens: int,
        pool_hash: PoolHash | None = bytes,
        adapter: AdapterWeights | None = None,
    ) -> None:
        """Add the stores of a proven request with ``computed_tokens`` after the step.

        ``pool_hash``: None: unknown. ``adapter``: the request's.
        """
        progress = self._progress.setdefault(request.request_id, _Progress())
        before = computed_tokens - output.num_scheduled_tokens[request.request_id]
        most = math.inf if self._config.store_decode else request.num_prompt_tokens
        begins = progress.planned is None
        if progress.planned is None:
            held = self.held_tokens(request, before)
            progress.held = [held // group.record_tokens for group in self._groups]
            progress.planned = self._first_to_plan(request, progress, pool_hash)
        if pool_hash is None:
            progress.present, progress.answer = (), None
            return
        source, proven_tokens = (
            _Source(request, priority, pool_hash, adapter),
            self._proofs.proven_tokens(request),
        )
        tables: tuple[list[int], ...] | None = None
        for index, group in enumerate(self._groups):
            known_tokens = int(min(computed_tokens - group.reads_ahead, most))
            if group.scratch or known_tokens // group.record_tokens <= progress.planned[index]:
                continue
            hashes = self._geometry.record_hashes(request.block_hashes, group)
            new = group.records_to_store(progress.planned[index], known_tokens, len(hashes))
            progress.planned[index] = new.stop
            if group.state:  # the engine offers what it computed (``plan_states``)
                new = range(new.start, max(new.start, min(new.stop, progress.held[index])))
            stop = max(new.start, min(new.stop, proven_tokens // group.record_tokens))
            self._count_false(new.stop - stop)
            new = range(new.start, stop)
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
                proven = [
                    min(records, proven_tokens // group.record_tokens)
                    for records, group in zip(progress.held, self._groups, strict=True)
                ]
                self._await_answer(source, progress.answer, proven, tables)
            progress.answer = None

    def plan_states(
        self,
        step: PoolMetadata,
        output: SchedulerOutput,
        request: Request,
        priority: int,
        offered: Iterable[tuple[int, int, int]],
        pool_hash: PoolHash | None = bytes,
        adapter: AdapterWeights | None = None,
    ) -> None:
        """Add the stores of states that the engine offers a request: (group, block id, tokens before it).

        A state inside of a block is stored with the other groups' blocks of its tokens (``Geometry.match_tokens``).
        """
        if pool_hash is None:
            return
        source, proven_tokens = (
            _Source(request, priority, pool_hash, adapter),
            self._proofs.proven_tokens(request),
        )
        tails: dict[int, list[tuple[int, int]]] = {}
        for index, block_id, tokens in offered:
            group = self._groups[index]
            record = tokens // group.record_tokens - 1
            hashed = tokens // self._geometry.hash_block_tokens
            if hashed * self._geometry.hash_block_tokens > proven_tokens:
                self._count_false(int(hashed <= len(request.block_hashes)))  # else it is not known yet
                continue
            if tokens % group.record_tokens:
                tails.setdefault(tokens, []).append((index, block_id))
                continue
            if not group.is_resumed_at(tokens, request.num_prompt_tokens, internals.stop_of(request)):
                continue
            if tokens > request.num_prompt_tokens and not self._config.store_decode:
                continue
            hashes = self._geometry.record_hashes(request.block_hashes, group)
            if self._queue.is_under_way((pool_hash(hashes[record]), index)):
                continue
            if self._had_by_enough(hashes[record], index):
                self._store(step, source, index, hashes, record, [0] * record + [block_id])
        tables = internals.block_tables(output, request.request_id) if tails and self._tails else None
        if tables is None:
            return
        for tokens, blocks in tails.items():
            blocks += [
                (index, tables[index][tokens // group.block_tokens])
                for index, group in enumerate(self._groups)
                if not (group.state or group.scratch)
            ]
            for index, block_id in blocks:
                self._store_tail(step, source, index, tokens, block_id)

    def _count_false(self, records: int) -> None:
        if records:
            self._counters.add(metrics.STORE_SKIPPED_BLOCKS, records, "wrong_hash")

    def _store_tail(
        self, step: PoolMetadata, source: _Source, index: int, tokens: int, block_id: int
    ) -> None:
        """Store now, or never: the engine fills the block up."""
        block_hash = source.request.block_hashes[tokens // self._geometry.hash_block_tokens - 1]
        key = (source.pool_hash(block_hash), index)
        if not block_id or self._queue.is_under_way(key) or not self._had_by_enough(block_hash, index):
            return
        parent = None
        if self._queue.in_order[index] and (before := tokens // self._groups[index].record_tokens):
            hashes = self._geometry.record_hashes(source.request.block_hashes, self._groups[index])
            parent = (source.pool_hash(hashes[before - 1]), index)
        self._queue.offer(
            step, Wanted(BlockRef(*key, (block_id,), source.adapter), parent, (None,), source.priority, None)
        )

    def _had_by_enough(self, block_hash: bytes, index: int) -> bool:
        enough = self._config.min_requests_to_store
        return self._requests is None or self._requests.add(block_hash, index) >= enough

    def _first_to_plan(self, request: Request, progress: _Progress, pool_hash: PoolHash | None) -> list[int]:
        """By group, the first record to consider: held ones may be absent or below the threshold."""
        present = progress.answer() if progress.answer is not None else None
        if present is not None:
            progress.present, progress.answer = present, None
        if progress.present and self._queue.gave_up and pool_hash is not None:
            for index, group in enumerate(self._groups):
                hashes = self._geometry.record_hashes(request.block_hashes, group)
                for block_hash in compress(hashes, progress.present[index]):
                    self._queue.found((pool_hash(block_hash), index))
        if self._requests is not None:
            return [0] * len(self._groups)
        if not progress.present:
            # Presumably in the pool, or stored by the request that computed it.
            return list(progress.held)
        return [_first_missing(*each) for each in zip(progress.present, progress.held, strict=True)]

    def _wanted_records(
        self, progress: _Progress, group: int, hashes: Sequence[bytes], records: range
    ) -> Iterable[int]:
        """The records that the settings want; counts the request once per record."""
        held = progress.held[group]
        present = progress.present[group] if progress.present else ()
        if self._requests is None:
            return [i for i in records if i >= held or (i < len(present) and not present[i])]
        assert records.step == 1
        if not progress.counted:
            progress.counted = [0] * len(self._groups)
        first = progress.counted[group]  # above 0 after a preemption
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
                # Already in the engine: only the request that reaches the threshold stores it.
                wanted.append(i)
        return wanted

    # Initially held records with a later answer.

    def _await_answer(
        self, source: _Source, answer: Answer, held: Sequence[int], tables: Sequence[Sequence[int]] | None
    ) -> None:
        """Store held and missing records when the answer arrives; the request does not wait."""
        if tables is None:
            return
        of_held = [
            list(table[: records * group.blocks_per_record])
            for group, table, records in zip(self._groups, tables, held, strict=True)
        ]
        self._late_answers.append(_LateAnswer(source, answer, of_held))
        if len(self._late_answers) > MAX_LATE:
            self._late_answers.popleft()
        self._queue.stays_active()

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
        group, (request, _, pool_hash, _), table = self._groups[index], late.source, late.tables[index]
        stop = len(table) // group.blocks_per_record
        if not self._config.store_decode:
            stop = min(stop, request.num_prompt_tokens // group.record_tokens)
        if (first := _first_missing(present, stop)) == stop:
            return
        hashes = self._geometry.record_hashes(request.block_hashes, group)
        for i in range(first, min(stop, len(present))):
            ids = group.blocks_held(table, i)
            if present[i] or ids is None or self._queue.is_under_way((pool_hash(hashes[i]), index)):
                continue
            if self._proofs.is_false(hashes[i]):  # since then
                self._count_false(1)
                continue
            if self._requests is not None and (
                self._requests.count(hashes[i], index) < self._config.min_requests_to_store
            ):
                continue
            # The request may have ended meanwhile.
            keys = internals.cache_keys(request, self._geometry, index, i)
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
        """Store a record now, or at its eviction; not at all where no hit needs it."""
        of_group = self._geometry.reached[index]
        if not of_group[record % len(of_group)]:
            return
        group, key = self._groups[index], (source.pool_hash(hashes[record]), index)
        ids = group.blocks_held(table, record)
        if ids is None:
            self._queue.lost(key)
            return
        needs_parent = record and self._queue.in_order[index]
        wanted = Wanted(
            BlockRef(*key, ids, source.adapter),
            (source.pool_hash(hashes[record - 1]), index) if needs_parent else None,
            internals.block_contents(self._held.pool, ids),
            source.priority,
            self._event(source.request, index, group, record, hashes) if self._event else None,
        )
        if self._config.store_policy == "write_back":
            self._write_back.keep(wanted._replace(cache_key=internals.cache_key(hashes[record], index)))
        else:
            self._queue.offer(step, wanted)


def _first_missing(present: Sequence[int], count: int) -> int:
    """The first absent of ``count`` leading records, within ``present``; else ``count``."""
    try:
        return present.index(False, 0, count)
    except ValueError:
        return count
