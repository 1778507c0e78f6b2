"""``StoreQueue``: records on their way to the pool. Each is sent to the workers, waits, or is given up.

A record waits while the workers' staging is full, or when a worker has dropped it. The engine may use its blocks
meanwhile; then it is given up. With full attention a record is of use only behind all that come before it in its
prompt. So with ``write_through`` it is sent when the one before it is in the pool or on its way, waits while that one
waits, and is given up when that one was. A record that was given up comes back with the next request that holds it and
whose lookup misses it.

``HeldBlocks``: references to blocks of the engine's memory, so that they keep their bytes until they are copied. The
engine may free a block in the very step that stores it: when its request ends, is preempted, or its window moves.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.block_pool import BlockPool

from kvpool import metrics
from kvpool.metrics import Counters
from kvpool.vllm import internals
from kvpool.vllm.plan import BlockRef, Group, PoolMetadata, PoolWorkerMetadata

# Under way and waiting, about 1 KB each; and as many that are known to have been given up.
MAX_RECORDS = 1 << 16
MAX_VISITS = 4096  # of waiting records, in one step
# After workers have dropped something, until waiting records are tried; doubles while nothing is kept.
PAUSE_S = 0.05
MAX_PAUSE_S = 5.0


class Wanted(NamedTuple):
    """A record that is to be in the pool."""

    block: BlockRef
    parent: tuple[bytes, int] | None  # what has to be there before it
    contents: tuple[bytes | None, ...]  # by block: the engine's own key of what is in it now
    priority: int
    event: BlockStored | None
    cache_key: bytes = b""  # with write-back: its key in the engine's own cache

    @property
    def key(self) -> tuple[bytes, int]:
        return self.block.block_hash, self.block.group


@dataclass
class _Pending:
    wanted: Wanted
    ranks: int  # that have not said yet whether it is in the pool
    unstaged: int  # ranks for which the blocks are held, as they may still read them
    ok: bool = True
    left: bool = False  # it goes to a namespace that the engine has left


class StoreQueue:
    """The records of one engine of ``ranks`` ranks.

    With ``write_through`` the blocks of what is sent are ``held`` until they are copied. With write-back nothing is
    held: the workers copy before the engine computes again.
    """

    def __init__(
        self,
        held: HeldBlocks,
        groups: Sequence[Group],
        *,
        ranks: int,
        write_through: bool,
        counters: Counters,
    ) -> None:
        self._held, self._ranks, self._holds, self._counters = held, ranks, write_through, counters
        # By group: whether a record needs those before it. Not with write-back, which evicts a prompt from its end.
        self.in_order = [write_through and group.window is None for group in groups]
        # A record is in one of these at most, by hash and group.
        self._waiting: OrderedDict[tuple[bytes, int], Wanted] = OrderedDict()  # each behind its parent
        self._given_up: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # oldest first
        self._pending: dict[int, _Pending] = {}  # by tag
        self._under_way: dict[tuple[bytes, int], int] = {}  # tags of it
        self._room = MAX_RECORDS  # records that the workers take at a time, as they say
        self._pause_s, self._paused_until = PAUSE_S, 0.0
        self._next_tag = 0
        self._events: list[BlockStored] = []

    @property
    def is_empty(self) -> bool:
        return not self._pending and not self._waiting

    def is_under_way(self, key: tuple[bytes, int]) -> bool:
        return key in self._under_way

    @property
    def gave_up(self) -> bool:
        """Whether some record was given up, so that ``found`` is of use."""
        return bool(self._given_up)

    def found(self, key: tuple[bytes, int]) -> None:
        """The pool has said that it holds this record."""
        self._given_up.pop(key, None)

    def offer(self, step: PoolMetadata, wanted: Wanted) -> None:
        """Send a record with this step, or keep it for a later one."""
        if wanted.parent in self._given_up:
            self._give_up(wanted, "behind_gap")
        elif wanted.parent in self._waiting or len(self._pending) >= self._room:
            self._wait(wanted)
        else:
            self._send(step, wanted)

    def send_waiting(self, step: PoolMetadata) -> None:
        """Send waiting records, oldest first, as far as there is room and the engine still has them."""
        if not self._waiting or time.monotonic() < self._paused_until:
            return
        for _ in range(min(MAX_VISITS, len(self._waiting))):
            if len(self._pending) >= self._room:
                return
            key, wanted = self._waiting.popitem(last=False)
            if wanted.parent in self._given_up:
                self._give_up(wanted, "behind_gap")
            elif wanted.parent in self._waiting:
                self._waiting[key] = wanted  # behind it
            elif internals.block_contents(self._held.pool, wanted.block.block_ids) == wanted.contents:
                self._send(step, wanted)
            else:
                self._give_up(wanted, "evicted")

    def lost(self, key: tuple[bytes, int]) -> None:
        """The engine does not keep this record, so it cannot be stored now."""
        if self.in_order[key[1]]:
            self._given_up[key] = None
            if len(self._given_up) > MAX_RECORDS:
                self._given_up.popitem(last=False)

    def update(self, report: PoolWorkerMetadata) -> bool:
        """Take in what the workers report of a step; whether a record has come into the pool."""
        if report.store_slots:
            self._room = report.store_slots
        self._release(report.staged)
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
            self._pause_s, self._paused_until = PAUSE_S, min(self._paused_until, now + PAUSE_S)
        if dropped:
            self._paused_until = now + self._pause_s
            if not kept:
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return kept

    def take_events(self) -> list[BlockStored]:
        """What has come into the pool since the last call."""
        events, self._events = self._events, []
        return events

    def forget(self) -> None:
        """Drop what waits, and what is known to have been given up; what is under way goes on."""
        self._waiting.clear()
        self._given_up.clear()

    def leave(self) -> None:
        """The engine goes on in another namespace; what is under way goes to the old one, without events or retry."""
        self.forget()
        for pending in self._pending.values():
            pending.left = True
        self._under_way.clear()  # of the namespace that it is in now

    def _wait(self, wanted: Wanted) -> None:
        if (
            None in wanted.contents
        ):  # without the engine's key nobody can tell later whether it is still there
            self._give_up(wanted, "staging_full")
        elif wanted.key not in self._waiting and len(self._waiting) + len(self._pending) >= MAX_RECORDS:
            self._give_up(wanted, "queue_full")
        else:
            self._given_up.pop(wanted.key, None)
            self._waiting[wanted.key] = wanted

    def _wait_first(self, wanted: Wanted) -> None:
        """Workers have dropped and counted it. Waiting records may stand behind it in a prompt, so it goes first."""
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
            self._held.hold(wanted.block.block_ids)
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._pending[tag] = _Pending(wanted, self._ranks, self._ranks if self._holds else 0)
        self._under_way[wanted.key] = self._under_way.get(wanted.key, 0) + 1
        step.stores.append(wanted.block)
        step.tags.append(tag)

    def _release(self, staged: Mapping[int, int]) -> None:
        """Give blocks back to the engine that no rank reads any more."""
        free: list[int] = []
        for tag in sorted(staged):
            if (pending := self._pending.get(tag)) is not None and pending.unstaged:
                pending.unstaged -= staged[tag]
                if pending.unstaged == 0:
                    free += pending.wanted.block.block_ids
        self._held.release(free)

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


MAX_HELD_S = 1.0  # how long the engine waits, or steps, for held blocks; a copy takes milliseconds


class HeldBlocks:
    """Counts the references that we add to blocks of one engine."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._references: dict[int, int] = {}  # by block id: ours
        self._waited_since: float | None = None  # the engine waits for one of them
        self._stepped_since: float | None = None  # the engine steps for them alone

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def pool(self) -> BlockPool:
        """The engine's memory."""
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
        """Whether some block has no other holder, so comes back when it is copied.

        The engine then waits instead of preempting a request; after ``MAX_HELD_S`` without one this is false.
        """
        if not any(internals.references(self.pool, one) == ours for one, ours in self._references.items()):
            return False
        now = time.monotonic()
        if self._waited_since is None:
            self._waited_since = now
        return now - self._waited_since < MAX_HELD_S

    def wants_steps(self) -> bool:
        """Whether an engine without requests should step on for them: their copies may be over, and only a step tells.

        While one is held, vLLM does not reset its prefix cache. After ``MAX_HELD_S`` without an end this is false.
        """
        if not self._references:
            return False
        now = time.monotonic()
        if self._stepped_since is None:
            self._stepped_since = now
        return now - self._stepped_since < MAX_HELD_S
