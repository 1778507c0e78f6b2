"""TransferEngine: loads and stores of blocks, asynchronous to the engine's step loop.

A load is a job: it is cut into parts of a few slots, each part is one batch of the store, and what has
arrived and proven itself is scattered when the owner polls. A job succeeds when every block of it did.
A store gathers its blocks; when they have landed in staging, those that the pool does not hold are sent.

Copies run on two lanes, one in each direction, behind what the engine computes: a gather waits for the forward that
it was submitted after, a scatter for the one before its load. So a block may be given to another request when its tag
is in ``Finished.landed``, and a load's blocks when it is in ``Finished.loads``; not earlier.

Threads: everything here belongs to the one thread that calls it (the worker's model thread). Bytes move in
the store's own threads, between staging slots and the pool, and never touch the KV cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvpool import _native, metrics
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.metrics import Counters
from kvpool.store import Store, Transfer
from kvpool.transfer.device import BlockCopier
from kvpool.transfer.lane import Device, Event, Lane, device_of
from kvpool.transfer.staging import LOAD_RESERVE, Staging

PART_NBYTES = 4 << 20  # a part is at least one block; more would delay its scatter, fewer cost more calls
STORE_TIMEOUT_S = 5.0  # nothing waits for a store, so its deadline only bounds how long slots are held
ABANDON_AFTER_S = 0.25  # how long after its own deadline a batch may still be stopping
COPY_PAUSE_S = 5e-5  # between two looks at a copy that is waited for: one of a part takes 0.1 ms at 40 GB/s


class Block(NamedTuple):
    """One record to move: its key, its group, and where its blocks are in the engine's KV cache.

    0 stands where a load is to write nothing.
    """

    key: str
    group: int
    block_ids: tuple[int, ...]


class LoadResult(NamedTuple):
    """How one load ended; ``missing`` are the keys that the store turned out not to hold."""

    job: str
    ok: bool
    missing: list[str]


class Finished(NamedTuple):
    """What ended since the last poll; each tag given to ``store`` comes once in ``landed`` and once in ``stored``.

    ``landed``: these blocks are not read any more. ``stored``: (tag, now in the pool); never before it has landed.
    """

    loads: list[LoadResult]
    landed: list[int]
    stored: list[tuple[int, bool]]


@dataclass
class _Job:
    name: str
    pending: deque[Block]
    blocks: int
    nbytes: int
    timeout_s: float
    started: float
    deadline: float
    after: Event  # its blocks may be written from here on
    priority: int
    parts: int = 0
    cause: str = ""  # why it failed; "" while it has not
    missing: list[str] = field(default_factory=list)


class _Stage(Enum):
    """What a part waits for."""

    GATHER = "blocks are copied to its slots"
    SEND = "the store takes what it does not hold"
    GET = "the store fills its slots"
    SCATTER = "its slots are copied to blocks"

    @property
    def copies(self) -> bool:
        return self in (_Stage.GATHER, _Stage.SCATTER)


@dataclass
class _Part:
    """Some blocks on their way, and the slots that it owns. A store goes GATHER, SEND, a load GET, SCATTER."""

    stage: _Stage
    job: _Job | None  # of a load
    blocks: list[Block]
    slots: list[int]
    tags: list[int]  # of a store
    copy: Event | None = None  # of GATHER and SCATTER
    transfer: Transfer | None = None  # of the others
    deadline: float = 0.0  # of the transfer

    def over(self) -> bool:
        """Whether what it waits for has ended, so that nobody touches its slots."""
        if self.stage.copies:
            assert self.copy is not None
            return self.copy.query()
        assert self.transfer is not None
        return self.transfer.done()

    def cancel(self) -> None:
        """A copy cannot be stopped, and is soon over."""
        if not self.stage.copies:
            assert self.transfer is not None
            self.transfer.cancel()

    def settle(self, timeout_s: float) -> None:
        """Wait until it is over, or for ``timeout_s``."""
        if not self.stage.copies:
            assert self.transfer is not None
            self.transfer.settle(timeout_s)
            return
        until = time.monotonic() + timeout_s
        while not self.over() and (left := until - time.monotonic()) > 0:
            time.sleep(min(COPY_PAUSE_S, left))


class TransferEngine:
    """Owns the staging slots and every transfer in flight; ``copiers[g]`` moves the blocks of group g.

    No call here waits for the store, except ``poll`` for at most ``wait_s`` and ``close``.
    """

    def __init__(
        self,
        store: Store,
        copiers: Sequence[BlockCopier],
        *,
        staging_nbytes: int,
        max_store_nbytes_per_s: int,
        counters: Counters,
        device: Device | None = None,
    ) -> None:
        """``device``: where the copiers' layers lie, when it is not told by their tensors."""
        self._store = store
        self._copiers = copiers
        self._device = device or device_of(copiers[0].device)
        slot_nbytes = max(copier.payload_nbytes for copier in copiers)
        self.staging = Staging(slot_nbytes, max(2, staging_nbytes // slot_nbytes), self._device.pinned)
        scratch_nbytes = max(slot_nbytes, min(self._device.scratch_nbytes, staging_nbytes))
        self._gathers, self._scatters = (self._device.lane(scratch_nbytes) for _ in range(2))
        self._part_blocks = max(1, min(PART_NBYTES // slot_nbytes, self.staging.slots // 2))
        self._reserve = max(1, int(self.staging.slots * LOAD_RESERVE))
        self._counters = counters
        self._jobs: dict[str, _Job] = {}
        self._parts: list[_Part] = []
        self._stopping: list[_Part] = []  # nobody waits for these; they only still own their slots
        self._finished = Finished([], [], [])
        self._store_rate = max_store_nbytes_per_s
        self._store_allowance = float(max_store_nbytes_per_s)
        self._store_allowance_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether a load or a store is under way."""
        return bool(self._jobs or self._parts)

    @property
    def store_slots(self) -> int:
        """How many records stores have in staging at most."""
        return self.staging.slots - self._reserve

    @property
    def slots_in_use(self) -> int:
        """Staging slots that are not free, those of abandoned transfers included."""
        return self.staging.slots - self.staging.free

    def load(
        self, job: str, blocks: Sequence[Block], *, timeout_s: float, max_s: float, priority: int = 0
    ) -> None:
        """Start to load ``blocks``; fails when no block arrives for ``timeout_s``, or after ``max_s`` in all.

        Where slots are short, jobs of a lower ``priority`` get them first, and of one priority the older ones.
        """
        assert blocks
        assert job not in self._jobs, f"load {job} was submitted twice"
        now = time.monotonic()
        nbytes = sum(self._copiers[block.group].payload_nbytes for block in blocks)
        after = self._device.mark()
        self._jobs[job] = _Job(
            job, deque(blocks), len(blocks), nbytes, timeout_s, now, now + max_s, after, priority
        )
        self._start_loads(now)

    def cancel(self, job: str) -> None:
        """End a load early; it is reported by ``poll`` as failed, like any other."""
        if job in self._jobs:
            self._fail(self._jobs[job], "cancelled")

    def store(self, blocks: Sequence[Block], tags: Sequence[int]) -> None:
        """Copy ``blocks``, as the engine's stream leaves them, to staging and send them later.

        Blocks for which there is no slot, or no bandwidth under the cap, are dropped and counted. The caller keeps
        the others as they are until they have landed.
        """
        assert len(blocks) == len(tags)
        self._reap()
        computed = self._device.mark()
        for group, copier in enumerate(self._copiers):
            chosen = [i for i, block in enumerate(blocks) if block.group == group]
            room = max(0, self.staging.free - self._reserve)
            allowed = self._allowed_blocks(copier.payload_nbytes, min(room, len(chosen)))
            if allowed < len(chosen):
                cause = "staging_full" if room < len(chosen) else "bandwidth_cap"
                self._finished.landed.extend(tags[i] for i in chosen[allowed:])
                self._drop([tags[i] for i in chosen[allowed:]], cause)
            chosen = chosen[:allowed]
            at_once = self._gathers.scratch_nbytes // copier.payload_nbytes
            for start in range(0, len(chosen), at_once):
                batch = chosen[start : start + at_once]
                self._gather([blocks[i] for i in batch], [tags[i] for i in batch], copier, computed)

    def store_first(self) -> None:
        """Have what the engine computes from now on come after the copies of all stores until now."""
        self._go_before_engine(self._gathers)

    def poll(self, wait_s: float = 0.0) -> Finished:
        """Advance everything; waits up to ``wait_s`` only for a load or a copy in flight, and if nothing has ended."""
        self._advance()
        if wait_s > 0 and not self._finished.loads and not self._finished.landed:
            awaited = [part for part in self._parts if part.stage.copies or part.job is not None]
            if awaited:
                awaited[0].settle(wait_s)
                self._advance()
        finished, self._finished = self._finished, Finished([], [], [])
        return finished

    def drain(self, timeout_s: float) -> bool:
        """Wait until the stores in flight have ended; True when they did in time."""
        deadline = time.monotonic() + timeout_s
        while self._parts and (left := deadline - time.monotonic()) > 0:
            self._parts[0].settle(left)
            self._advance()
        return not self._parts

    def close(self) -> None:
        """Cancel what is in flight; what the engine computes from now on comes after copies under way.

        Waits at most ``ABANDON_AFTER_S``. The store is the owner's to close.
        """
        for job in list(self._jobs.values()):
            self._fail(job, "cancelled")
        self._stopping += self._parts
        self._parts.clear()
        for part in self._stopping:
            part.cancel()
        for lane in (self._gathers, self._scatters):
            self._go_before_engine(lane)
        until = time.monotonic() + ABANDON_AFTER_S
        for part in self._stopping:
            if (left := until - time.monotonic()) > 0:
                part.settle(left)
        self._reap()

    # Loads.

    def _start_loads(self, now: float) -> None:
        for job in sorted(self._jobs.values(), key=lambda job: job.priority):
            while job.pending and not job.cause and self.staging.free:
                count = min(self._part_blocks, len(job.pending), self.staging.free)
                blocks = [job.pending.popleft() for _ in range(count)]
                slots = self.staging.acquire(count)
                timeout_s = max(1e-3, min(job.timeout_s, job.deadline - now))
                try:
                    transfer = self._store.submit_get(
                        [block.key for block in blocks], self._views(blocks, slots), timeout_s=timeout_s
                    )
                except KVPoolError:
                    self.staging.release(slots)
                    self._fail(job, "store_unavailable")
                    break
                self._parts.append(
                    _Part(_Stage.GET, job, blocks, slots, [], transfer=transfer, deadline=now + timeout_s)
                )
                job.parts += 1

    def _arrived(self, part: _Part) -> bool:
        """The store has filled the slots of a load, or not; whether every block is there and proven."""
        assert part.job is not None
        assert part.transfer is not None
        try:
            found = part.transfer.wait()
        except StoreUnavailable:
            self._fail(part.job, "store_unavailable")
            return False
        if not all(found):
            part.job.missing += [block.key for block, ok in zip(part.blocks, found, strict=True) if not ok]
            self._fail(part.job, "missing")
        return all(found)

    def _scatter(self, parts: list[_Part]) -> None:
        """Copy what has arrived to its blocks, all that came together by as few launches as can be."""
        after = list({id(part.job): part.job.after for part in parts if part.job is not None}.values())
        copy: Event | None = None
        for group, copier in enumerate(self._copiers):
            pairs = [
                (block.block_ids, slot)
                for part in parts
                for block, slot in zip(part.blocks, part.slots, strict=True)
                if block.group == group
            ]
            at_once = self._scatters.scratch_nbytes // copier.payload_nbytes
            for start in range(0, len(pairs), at_once):
                ids, slots = zip(*pairs[start : start + at_once], strict=True)
                flat = [*chain.from_iterable(ids)]
                copy = self._scatters.submit(partial(copier.scatter, flat, self.staging, slots), after)
        for part in parts:
            part.stage, part.copy = _Stage.SCATTER, copy  # the last of them: a lane keeps the order

    def _end_load(self, part: _Part) -> None:
        """Nothing touches the slots of a load any more."""
        assert part.job is not None
        part.job.parts -= 1
        self._release(part)

    def _fail(self, job: _Job, cause: str) -> None:
        if not job.cause:
            job.cause = cause
            job.pending.clear()
            for part in self._parts:
                if part.job is job:
                    part.cancel()

    def _end_jobs(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if (job.parts or job.pending) and now > job.deadline:
                self._fail(job, "too_slow")
            if job.parts or job.pending:
                continue
            del self._jobs[job.name]
            result = job.cause or "ok"
            self._counters.add(metrics.LOAD_REQUESTS, 1, result)
            if result == "ok":
                self._counters.add(metrics.LOADED_BLOCKS, job.blocks)
                self._counters.add(metrics.LOADED_BYTES, job.nbytes)
                self._counters.add(metrics.LOAD_SECONDS, now - job.started)
            self._finished.loads.append(LoadResult(job.name, not job.cause, job.missing))

    # Stores.

    def _gather(self, blocks: list[Block], tags: list[int], copier: BlockCopier, computed: Event) -> None:
        slots = self.staging.acquire(len(blocks))
        ids = [*chain.from_iterable(block.block_ids for block in blocks)]
        copy = self._gathers.submit(partial(copier.gather, ids, self.staging, slots), [computed])
        for start in range(0, len(blocks), self._part_blocks):
            some = slice(start, start + self._part_blocks)
            part = _Part(_Stage.GATHER, None, blocks[some], slots[some], tags[some], copy)
            if not part.over() or self._go_on_storing(part):
                self._parts.append(part)

    def _go_on_storing(self, part: _Part) -> bool:
        """What a store waited for has ended: do what comes next; False when that was all, and its slots are free."""
        try:
            if part.stage is _Stage.GATHER:
                self._send(part)
            else:
                self._end_store(part)
        except KVPoolError:
            self._drop(part.tags, "store_unavailable")
            part.tags = []
        if not part.tags:
            self._release(part)
        return bool(part.tags)

    def _send(self, part: _Part) -> None:
        self._finished.landed.extend(part.tags)
        part.transfer = self._store.submit_put_absent(
            [block.key for block in part.blocks],
            self._views(part.blocks, part.slots),
            timeout_s=STORE_TIMEOUT_S,
        )
        part.stage, part.deadline, part.copy = _Stage.SEND, time.monotonic() + STORE_TIMEOUT_S, None

    def _end_store(self, part: _Part) -> None:
        assert part.transfer is not None
        for block, tag, result in zip(part.blocks, part.tags, part.transfer.results(), strict=True):
            if result == _native.OK:
                self._counters.add(metrics.STORED_BLOCKS)
                self._counters.add(metrics.STORED_BYTES, self._copiers[block.group].payload_nbytes)
                self._finished.stored.append((tag, True))
            elif result == _native.PRESENT:
                self._counters.add(metrics.STORE_SKIPPED_BLOCKS, 1, "already_there")
                self._finished.stored.append((tag, True))
            else:
                self._drop([tag], "pool_full")
        part.tags = []

    def _drop(self, tags: Sequence[int], cause: str) -> None:
        self._counters.add(metrics.STORE_SKIPPED_BLOCKS, len(tags), cause)
        self._finished.stored.extend((tag, False) for tag in tags)

    def _allowed_blocks(self, payload_nbytes: int, wanted: int) -> int:
        """How many of ``wanted`` blocks the cap on store bandwidth lets through now (a token bucket of 1 s)."""
        if not self._store_rate:
            return wanted
        now = time.monotonic()
        refill = (now - self._store_allowance_at) * self._store_rate
        self._store_allowance = min(self._store_rate, self._store_allowance + refill)
        self._store_allowance_at = now
        allowed = min(wanted, int(self._store_allowance // payload_nbytes))
        self._store_allowance -= allowed * payload_nbytes
        return allowed

    # Both.

    def _go_before_engine(self, lane: Lane) -> None:
        # Behind all that the lane was given, a copy that failed half-way included.
        self._device.follow(lane.submit(lambda scratch: None, []))

    def _release(self, part: _Part) -> None:
        slots, part.slots = part.slots, []
        self.staging.release(slots)

    def _views(self, blocks: Sequence[Block], slots: Sequence[int]) -> list[memoryview]:
        return [
            self.staging.view(slot, self._copiers[block.group].payload_nbytes)
            for block, slot in zip(blocks, slots, strict=True)
        ]

    def _advance(self) -> None:
        self._reap()
        now = time.monotonic()
        going_on: list[_Part] = []
        arrived: list[_Part] = []
        for part in self._parts:
            if not part.over():
                if part.stage.copies or now <= part.deadline + ABANDON_AFTER_S:
                    going_on.append(part)
                else:
                    self._abandon(part)
            elif part.stage is _Stage.GET and self._arrived(part):
                arrived.append(part)
            elif part.job is not None:
                self._end_load(part)
            elif self._go_on_storing(part):
                going_on.append(part)
        wanted = [part for part in arrived if part.job is not None and not part.job.cause]
        self._scatter(wanted)
        for part in arrived:
            if part.over():
                self._end_load(part)
            else:
                going_on.append(part)
        self._parts = going_on
        self._start_loads(now)
        self._end_jobs(now)

    def _abandon(self, part: _Part) -> None:
        """A batch that does not even stop at its deadline (a kernel stuck in I/O): go on without it."""
        part.cancel()
        self._stopping.append(part)
        if part.job is not None:
            part.job.parts -= 1
            self._fail(part.job, "store_unavailable")
        else:
            self._drop(part.tags, "store_unavailable")

    def _reap(self) -> None:
        still = []
        for part in self._stopping:
            if part.over():
                self._release(part)
            else:
                still.append(part)
        self._stopping = still
