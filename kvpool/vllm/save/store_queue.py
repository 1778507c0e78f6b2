"""``StoreQueue``: records on their way to the pool. Each is sent to the workers, waits, or is given up.

A record waits while the workers' staging is full, or after a worker dropped it. If the engine reuses its
blocks meanwhile, it is given up. One that the store refused for itself is given up at once: it would be refused again,
and others would wait for it. Under full attention a record is useful only after its whole prefix. So with
``write_through`` it follows its predecessor: it is sent once that is in the pool or in flight, else waits or
is given up with it. A given up record returns with the next request that holds it and whose lookup misses it.

``HeldBlocks``: references to the engine's blocks, which keep their bytes until copied. The engine may free a
block in the very step that stores it: its request ends, is preempted, or its window moves.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.block_pool import BlockPool

from kvpool import metrics
from kvpool.metrics import Counters
from kvpool.vllm.engine import internals
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.plan import BlockRef, PoolMetadata, PoolWorkerMetadata

# In flight and waiting, about 1 KB each; and as many given up.
MAX_RECORDS = 1 << 16
MAX_VISITS = 4096  # waiting records per step
# Pause after workers dropped records, for no fault of theirs; doubles while nothing is kept.
PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
KEEP_STEPPING_S = 5.0  # longest stepping of an idle engine, so that stores end and are announced


class Wanted(NamedTuple):
    block: BlockRef
    parent: tuple[bytes, int] | None  # must be in the pool first
    contents: tuple[bytes | None, ...]  # by block: the engine's present key
    priority: int
    event: BlockStored | None
    cache_key: bytes = b""  # with write-back: its key in the engine's own cache

    @property
    def key(self) -> tuple[bytes, int]:
        return self.block.block_hash, self.block.group


@dataclass
class _Sent:
    wanted: Wanted
    ranks: int  # that have not reported its result
    unstaged: int  # ranks that may still read its blocks
    ok: bool = True
    refused: bool = False  # for itself, by a rank's store
    left: bool = False  # it goes to a former namespace of the engine


class StoreQueue:
    """``over_quota``: whether to give up what is to be sent. ``has_changed``: the same of an adapter's, by
    ``AdapterWeights.key``.

    With ``write_through`` sent blocks are ``held`` until copied. With write-back nothing is held: the workers
    copy before the engine computes again.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        write_through: bool,
        over_quota: Callable[[], bool],
        has_changed: Callable[[tuple[str, str]], bool],
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.held = HeldBlocks(clock)
        self._clock = clock
        self._ranks, self._holds, self._counters = geometry.ranks, write_through, counters
        self._over_quota, self._has_changed = over_quota, has_changed
        # By group: whether a record needs its predecessors. Write-back evicts a prompt from its end instead.
        self.in_order = [write_through and group.needs_all for group in geometry.groups]
        # By hash and group; a record is in at most one of these.
        self._waiting: OrderedDict[tuple[bytes, int], Wanted] = OrderedDict()  # each after its parent
        self._given_up: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # oldest first
        self._pending: dict[int, _Sent] = {}  # by tag
        self._under_way: dict[tuple[bytes, int], int] = {}  # tags of it
        self._room = MAX_RECORDS  # records that the workers can take at a time
        self._pause_s, self._paused_until = PAUSE_S, 0.0
        self._active_at = 0.0  # last store of a computing step, or arrival in the pool
        self._next_tag = 0
        self._events: list[BlockStored] = []

    @property
    def is_empty(self) -> bool:
        return not self._pending and not self._waiting

    def stays_active(self) -> None:
        """A computing step stores, or a record has arrived in the pool."""
        self._active_at = self._clock()

    def wants_steps(self) -> bool:
        """Whether an idle engine should still step for stores: not for ever, since the pool may be absent."""
        # After a pause of the engine the last offer is long ago, and no step has reported copies.
        return self._clock() - self._active_at < KEEP_STEPPING_S or self.held.wants_steps()

    def is_under_way(self, key: tuple[bytes, int]) -> bool:
        return key in self._under_way

    @property
    def gave_up(self) -> bool:
        """Whether any record was given up, so that ``found`` is useful."""
        return bool(self._given_up)

    def found(self, key: tuple[bytes, int]) -> None:
        self._given_up.pop(key, None)

    def _why_refused(self, wanted: Wanted) -> str:
        """A cause of ``metrics.STORE_SKIPPED_BLOCKS``; empty: it may be sent."""
        if wanted.block.adapter is not None and self._has_changed(wanted.block.adapter.key):
            return "adapter"
        if self._over_quota():
            return "quota"
        return "behind_gap" if wanted.parent in self._given_up else ""

    def offer(self, step: PoolMetadata, wanted: Wanted) -> None:
        """Send a record with this step, or keep it for a later one."""
        if why := self._why_refused(wanted):
            self._give_up(wanted, why)
        elif wanted.parent in self._waiting or len(self._pending) >= self._room:
            self._wait(wanted)
        else:
            self._send(step, wanted)

    def send_waiting(self, step: PoolMetadata) -> None:
        """Send waiting records, oldest first, while room lasts and the engine still has them."""
        if not self._waiting or self._clock() < self._paused_until:
            return
        for _ in range(min(MAX_VISITS, len(self._waiting))):
            if len(self._pending) >= self._room:
                return
            key, wanted = self._waiting.popitem(last=False)
            if why := self._why_refused(wanted):
                self._give_up(wanted, why)
            elif wanted.parent in self._waiting:
                self._waiting[key] = wanted  # after it
            elif internals.block_contents(self.held.pool, wanted.block.block_ids) == wanted.contents:
                self._send(step, wanted)
            else:
                self._give_up(wanted, "evicted")

    def lost(self, key: tuple[bytes, int]) -> None:
        """The engine dropped this record, or the store refused it: it cannot be stored now."""
        if self.in_order[key[1]]:
            self._given_up[key] = None
            if len(self._given_up) > MAX_RECORDS:
                self._given_up.popitem(last=False)

    def update(self, report: PoolWorkerMetadata) -> list[tuple[bytes, int]]:
        """Take the workers' report; the records that entered the pool, each by hash and group."""
        if report.store_slots:
            self._room = report.store_slots
        self._release(report.staged)
        kept: list[tuple[bytes, int]] = []
        dropped = []
        for tag in report.refused:
            if (pending := self._pending.get(tag)) is not None:
                pending.refused = True
        for counts, ok in ((report.stored, True), (report.dropped, False)):
            for tag, ranks in counts.items():
                if (pending := self._pending.get(tag)) is None:
                    continue
                pending.ranks -= ranks
                pending.ok &= ok
                if pending.ranks <= 0:
                    self._end(tag, pending)
                    if pending.ok and not pending.left:
                        kept.append(pending.wanted.key)
                    elif not pending.left and pending.refused:
                        self.lost(pending.wanted.key)
                    elif not pending.left:
                        dropped.append((tag, pending.wanted))
        for _, wanted in sorted(dropped, key=lambda each: each[0], reverse=True):
            self._wait_first(wanted)
        now = self._clock()
        if kept:
            self._active_at = now
            self._pause_s, self._paused_until = PAUSE_S, min(self._paused_until, now + PAUSE_S)
        if dropped:
            self._paused_until = now + self._pause_s
            if not kept:
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return kept

    def take_events(self) -> list[BlockStored]:
        events, self._events = self._events, []
        return events

    def forget(self) -> None:
        """Drop waiting and given up records; in-flight ones continue."""
        self._waiting.clear()
        self._given_up.clear()

    def leave(self) -> None:
        """The namespace changed: in-flight records go to the old one, without events or retry."""
        self.forget()
        for pending in self._pending.values():
            pending.left = True
        self._under_way.clear()  # of the present namespace

    def _wait(self, wanted: Wanted) -> None:
        if None in wanted.contents:  # without the engine's key its content cannot be checked later
            self._give_up(wanted, "staging_full")
        elif wanted.key not in self._waiting and len(self._waiting) + len(self._pending) >= MAX_RECORDS:
            self._give_up(wanted, "queue_full")
        else:
            self._given_up.pop(wanted.key, None)
            self._waiting[wanted.key] = wanted

    def _wait_first(self, wanted: Wanted) -> None:
        """Requeue a dropped and counted record first: waiting records may be its successors."""
        if wanted.key in self._under_way:
            return
        if None in wanted.contents:
            self.lost(wanted.key)
        else:
            self._waiting.setdefault(wanted.key, wanted)
            self._waiting.move_to_end(wanted.key, last=False)

    def _give_up(self, wanted: Wanted, cause: str) -> None:
        self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, cause)
        self.lost(wanted.key)

    def _send(self, step: PoolMetadata, wanted: Wanted) -> None:
        self._waiting.pop(wanted.key, None)
        self._given_up.pop(wanted.key, None)
        if self._holds:
            self.held.hold(wanted.block.block_ids)
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._pending[tag] = _Sent(wanted, self._ranks, self._ranks if self._holds else 0)
        self._under_way[wanted.key] = self._under_way.get(wanted.key, 0) + 1
        step.stores.append(wanted.block)
        step.tags.append(tag)

    def _release(self, staged: Mapping[int, int]) -> None:
        """Return blocks that no rank reads any more."""
        free: list[int] = []
        for tag in sorted(staged):
            if (pending := self._pending.get(tag)) is not None and pending.unstaged:
                pending.unstaged -= staged[tag]
                if pending.unstaged == 0:
                    free += pending.wanted.block.block_ids
        self.held.release(free)

    def _end(self, tag: int, pending: _Sent) -> None:
        del self._pending[tag]
        if pending.left:
            return
        key = pending.wanted.key
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]
        if pending.ok and pending.wanted.event is not None:
            self._events.append(pending.wanted.event)


MAX_HELD_S = 1.0  # longest wait, or stepping, for held blocks; a copy takes milliseconds


class HeldBlocks:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pool: BlockPool | None = None
        self._references: dict[int, int] = {}  # by block id: ours
        self._waited_since: float | None = None  # start of the engine's wait for them
        self._stepped_since: float | None = None  # start of steps for them alone

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def pool(self) -> BlockPool:
        assert self._pool is not None, "vLLM binds its block pool before the first step"
        return self._pool

    def hold(self, block_ids: Sequence[int]) -> None:
        internals.hold(self.pool, block_ids)
        self._stepped_since = None
        for block_id in block_ids:
            self._references[block_id] = self._references.get(block_id, 0) + 1

    def release(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
        if block_ids:
            self._waited_since = self._stepped_since = None
            internals.release(self.pool, block_ids)

    def frees_soon(self) -> bool:
        """Whether a copy will free a block, instead of a preemption; false after ``MAX_HELD_S`` without one."""
        if not any(internals.references(self.pool, one) == ours for one, ours in self._references.items()):
            return False
        now = self._clock()
        if self._waited_since is None:
            self._waited_since = now
        return now - self._waited_since < MAX_HELD_S

    def wants_steps(self) -> bool:
        """Whether an idle engine should step for them: only a step reports the end of their copies.

        A held block keeps vLLM from resetting its prefix cache. False after ``MAX_HELD_S`` without an end.
        """
        if not self._references:
            return False
        now = self._clock()
        if self._stepped_since is None:
            self._stepped_since = now
        return now - self._stepped_since < MAX_HELD_S
