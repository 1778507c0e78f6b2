"""TransferEngine: loads and stores of blocks, asynchronous to the engine's step loop.

A load is a job: it is cut into parts of a few slots, each part is one batch of the store, and what has
arrived and proven itself is scattered when the owner polls. A job succeeds when every block of it did.
A store gathers its blocks at once, asks the store which keys are new, and sends only those.

Threads: everything here belongs to the one thread that calls it (the worker's model thread). Bytes move in
the store's own threads, between staging slots and the pool, and never touch the KV cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool import metrics
from kvpool.errors import StoreUnavailable
from kvpool.metrics import Counters
from kvpool.stores import Store, Transfer
from kvpool.transfer.device import BlockCopier
from kvpool.transfer.staging import Staging

PART_NBYTES = 4 << 20  # a part is at least one block; more would delay its scatter, fewer cost more calls
STORE_TIMEOUT_S = 5.0  # nothing waits for a store, so its deadline only bounds how long slots are held
LOAD_RESERVE = 0.25  # the share of slots that stores leave to loads
ABANDON_AFTER_S = 0.25  # how long after its own deadline a batch may still be stopping


class Block(NamedTuple):
    """One block to move: the key of its record, its group, and its place in the engine's KV cache."""

    key: str
    group: int
    block_id: int


class LoadResult(NamedTuple):
    """How one load ended; ``missing`` are the keys that the store turned out not to hold."""

    job: str
    ok: bool
    missing: list[str]


class Finished(NamedTuple):
    """What ended since the last poll. ``stored``: (tag, now in the pool) for each block given to ``store``."""

    loads: list[LoadResult]
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
    parts: int = 0
    cause: str = ""  # why it failed; "" while it has not
    missing: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Part:
    """One batch of the store and the slots that it owns. ``tags`` is None for a load."""

    job: _Job | None
    blocks: list[Block]
    slots: list[int]
    transfer: Transfer
    deadline: float
    tags: list[int]
    asking: bool = False  # a store whose existence check is under way


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
    ) -> None:
        self._store = store
        self._copiers = copiers
        slot_nbytes = max(copier.payload_nbytes for copier in copiers)
        self.staging = Staging(slot_nbytes, max(2, staging_nbytes // slot_nbytes))
        self._part_blocks = max(1, min(PART_NBYTES // slot_nbytes, self.staging.slots // 2))
        self._reserve = max(1, int(self.staging.slots * LOAD_RESERVE))
        self._counters = counters
        self._jobs: dict[str, _Job] = {}
        self._parts: list[_Part] = []
        self._stopping: list[_Part] = []  # nobody waits for these; they only still own their slots
        self._finished = Finished([], [])
        self._store_rate = max_store_nbytes_per_s
        self._store_allowance = float(max_store_nbytes_per_s)
        self._store_allowance_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether a load or a store is under way."""
        return bool(self._jobs or self._parts)

    @property
    def slots_in_use(self) -> int:
        """Staging slots that are not free, those of abandoned transfers included."""
        return self.staging.slots - self.staging.free

    def load(self, job: str, blocks: Sequence[Block], *, timeout_s: float, max_s: float) -> None:
        """Start to load ``blocks``; fails when no block arrives for ``timeout_s``, or after ``max_s`` in all."""
        assert blocks
        assert job not in self._jobs, f"load {job} was submitted twice"
        now = time.monotonic()
        nbytes = sum(self._copiers[block.group].payload_nbytes for block in blocks)
        self._jobs[job] = _Job(job, deque(blocks), len(blocks), nbytes, timeout_s, now, now + max_s)
        self._start_loads(now)

    def cancel(self, job: str) -> None:
        """End a load early; it is reported by ``poll`` as failed, like any other."""
        if job in self._jobs:
            self._fail(self._jobs[job], "cancelled")

    def store(self, blocks: Sequence[Block], tags: Sequence[int]) -> None:
        """Copy ``blocks`` to staging now and send them later; each tag comes back once in ``Finished.stored``.

        Blocks for which there is no slot, or no bandwidth under the cap, are dropped and counted.
        """
        assert len(blocks) == len(tags)
        self._reap()
        for group, copier in enumerate(self._copiers):
            chosen = [i for i, block in enumerate(blocks) if block.group == group]
            room = max(0, self.staging.free - self._reserve)
            allowed = self._allowed_blocks(copier.payload_nbytes, min(room, len(chosen)))
            if allowed < len(chosen):
                cause = "staging_full" if room < len(chosen) else "bandwidth_cap"
                self._drop([tags[i] for i in chosen[allowed:]], cause)
            chosen = chosen[:allowed]
            for start in range(0, len(chosen), self._part_blocks):
                part = chosen[start : start + self._part_blocks]
                self._start_store([blocks[i] for i in part], [tags[i] for i in part], copier)

    def poll(self, wait_s: float = 0.0) -> Finished:
        """Advance everything; waits up to ``wait_s`` only if a load is in flight and nothing has ended."""
        self._advance()
        if wait_s > 0 and not self._finished.loads and self._jobs and self._parts:
            self._parts[0].transfer.settle(wait_s)
            self._advance()
        finished, self._finished = self._finished, Finished([], [])
        return finished

    def drain(self, timeout_s: float) -> bool:
        """Wait until the stores in flight have ended; True when they did in time."""
        deadline = time.monotonic() + timeout_s
        while self._parts and (left := deadline - time.monotonic()) > 0:
            self._parts[0].transfer.settle(left)
            self._advance()
        return not self._parts

    def close(self) -> None:
        """Cancel what is in flight. The store is the owner's to close."""
        for job in list(self._jobs.values()):
            self._fail(job, "cancelled")
        for part in self._parts + self._stopping:
            part.transfer.cancel()
        for part in self._parts + self._stopping:
            part.transfer.settle(ABANDON_AFTER_S)
        self._stopping += self._parts
        self._parts.clear()
        self._reap()

    # Loads.

    def _start_loads(self, now: float) -> None:
        for job in self._jobs.values():
            while job.pending and not job.cause and self.staging.free:
                count = min(self._part_blocks, len(job.pending), self.staging.free)
                blocks = [job.pending.popleft() for _ in range(count)]
                slots = self.staging.acquire(count)
                timeout_s = max(1e-3, min(job.timeout_s, job.deadline - now))
                try:
                    transfer = self._store.submit_get(
                        [block.key for block in blocks], self._views(blocks, slots), timeout_s=timeout_s
                    )
                except StoreUnavailable:
                    self.staging.release(slots)
                    self._fail(job, "store_unavailable")
                    break
                self._parts.append(_Part(job, blocks, slots, transfer, now + timeout_s, []))
                job.parts += 1

    def _end_load(self, part: _Part) -> None:
        job = part.job
        assert job is not None
        job.parts -= 1
        try:
            found = part.transfer.wait()
        except StoreUnavailable:
            self._fail(job, "store_unavailable")
            return
        if not all(found):
            job.missing += [block.key for block, ok in zip(part.blocks, found, strict=True) if not ok]
            self._fail(job, "missing")
        if job.cause:
            return
        for group, copier in enumerate(self._copiers):
            chosen = [i for i, block in enumerate(part.blocks) if block.group == group]
            if chosen:
                copier.scatter(
                    [part.blocks[i].block_id for i in chosen], self.staging, [part.slots[i] for i in chosen]
                )

    def _fail(self, job: _Job, cause: str) -> None:
        if not job.cause:
            job.cause = cause
            job.pending.clear()
            for part in self._parts:
                if part.job is job:
                    part.transfer.cancel()

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

    def _start_store(self, blocks: list[Block], tags: list[int], copier: BlockCopier) -> None:
        slots = self.staging.acquire(len(blocks))
        copier.gather([block.block_id for block in blocks], self.staging, slots)
        try:
            transfer = self._store.submit_contains([block.key for block in blocks], timeout_s=STORE_TIMEOUT_S)
        except StoreUnavailable:
            self.staging.release(slots)
            self._drop(tags, "store_unavailable")
            return
        deadline = time.monotonic() + STORE_TIMEOUT_S
        self._parts.append(_Part(None, blocks, slots, transfer, deadline, tags, asking=True))

    def _send_new(self, part: _Part) -> _Part | None:
        """The existence check of a store has ended: send what is new; None when nothing is."""
        present = part.transfer.wait()
        self._finished.stored.extend(
            (tag, True) for tag, there in zip(part.tags, present, strict=True) if there
        )
        self._counters.add(metrics.STORE_SKIPPED_BLOCKS, sum(present), "already_there")
        new = [i for i, there in enumerate(present) if not there]
        self.staging.release([part.slots[i] for i, there in enumerate(present) if there])
        # From here on the part owns only what it sends, also when the submission below fails.
        part.blocks, part.tags = [part.blocks[i] for i in new], [part.tags[i] for i in new]
        part.slots = [part.slots[i] for i in new]
        if not new:
            return None
        part.transfer = self._store.submit_put(
            [block.key for block in part.blocks],
            self._views(part.blocks, part.slots),
            timeout_s=STORE_TIMEOUT_S,
        )
        part.deadline, part.asking = time.monotonic() + STORE_TIMEOUT_S, False
        return part

    def _end_store(self, part: _Part) -> _Part | None:
        """Advance a store whose batch has ended; the part that goes on, or None."""
        try:
            if part.asking:
                return self._send_new(part)
            stored = part.transfer.wait()
        except StoreUnavailable:
            self._drop(part.tags, "store_unavailable")
            return None
        for block, tag, ok in zip(part.blocks, part.tags, stored, strict=True):
            if ok:
                self._counters.add(metrics.STORED_BLOCKS)
                self._counters.add(metrics.STORED_BYTES, self._copiers[block.group].payload_nbytes)
                self._finished.stored.append((tag, True))
            else:
                self._drop([tag], "pool_full")
        return None

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

    def _views(self, blocks: Sequence[Block], slots: Sequence[int]) -> list[memoryview]:
        return [
            self.staging.view(slot, self._copiers[block.group].payload_nbytes)
            for block, slot in zip(blocks, slots, strict=True)
        ]

    def _advance(self) -> None:
        self._reap()
        now = time.monotonic()
        for part in list(self._parts):
            if part.transfer.done():
                # Out of the list first: whatever fails below, its slots are released once.
                self._parts.remove(part)
                if part.job is not None:
                    self._end_load(part)
                    self.staging.release(part.slots)
                elif (rest := self._end_store(part)) is not None:
                    self._parts.append(rest)
                else:
                    self.staging.release(part.slots)
            elif now > part.deadline + ABANDON_AFTER_S:
                self._parts.remove(part)
                self._abandon(part)
        self._start_loads(now)
        self._end_jobs(now)

    def _abandon(self, part: _Part) -> None:
        """A batch that does not even stop at its deadline (a kernel stuck in I/O): go on without it."""
        part.transfer.cancel()
        self._stopping.append(part)
        if part.job is not None:
            part.job.parts -= 1
            self._fail(part.job, "store_unavailable")
        else:
            self._drop(part.tags, "store_unavailable")

    def _reap(self) -> None:
        still = []
        for part in self._stopping:
            if part.transfer.done():
                self.staging.release(part.slots)
            else:
                still.append(part)
        self._stopping = still
