"""BlockMover: batches of (key, buffer) to and from a store, for the connector, the tier and SGLang.

A job is cut into parts; each part is one store batch with its own deadline, and their number in flight is
bounded. A load's part is a get. A store's part puts absent values; present ones count as used. Every job,
even a cancelled one, is reported once nothing touches its memory, with a verdict per block. A store's
exception fails only its own job; a value that the store refuses for itself costs only its block.

``Memory`` holds the bytes: the caller's host memory (``HostMemory``), or an engine's KV cache behind staging
slots and streams (``kvpool.transfer.kv_memory``).

Threads: the calling thread only. Bytes move in the store's own threads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from typing import Generic, cast

from kvpool import _native, metrics
from kvpool.clock import REAL, Clock
from kvpool.errors import StoreUnavailable
from kvpool.metrics import Counters
from kvpool.store import Batch, Store
from kvpool.store.batch import BROKEN, FOUND, MAX_TIMEOUT_S
from kvpool.transfer.device import DONE
from kvpool.transfer.job import Finished, Item, Job, Moved, Need, Part, Stage
from kvpool.transfer.memory import Memory

logger = logging.getLogger(__name__)

PART_NBYTES = 4 << 20  # per part, at least one block; more would delay its scatter, fewer cost more calls
STORE_TIMEOUT_S = 5.0  # nothing waits for a store; this bounds how long its memory is held
STUCK_S = 1.0  # grace of a batch after its deadline, before its job fails
SETTLE_STEP_S = 1.0


class BlockMover(Generic[Item]):
    """Owns every transfer in flight between ``memory`` and ``store``; its owner closes the store.

    Only ``poll`` (at most ``wait_s``), ``drain`` and ``close`` wait for the store.
    """

    def __init__(self, store: Store, memory: Memory[Item], counters: Counters, clock: Clock = REAL) -> None:
        self._store = store
        self._memory = memory
        self._counters = counters
        self._clock = clock
        self._jobs: dict[Hashable, Job[Item]] = {}
        self.put_away: frozenset[bytes] = frozenset()  # writers whose records count as missing
        self._not_taken: list[str] = []  # keys of such records
        self._parts: dict[Part[Item], None] = {}  # in starting order
        self._stopping: list[Part[Item]] = []  # cancelled; they only still own their slots
        self._finished = Finished([], [], [])

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def load(
        self,
        job: Hashable,
        items: Sequence[Item],
        *,
        timeout_s: float,
        max_s: float,
        priority: int = 0,
        width: int = 1,
        need: Need = Need.ALL,
        short: bool = False,
    ) -> None:
        """Start to load ``items``; fails when no byte arrives for ``timeout_s``, or after ``max_s`` in all.

        The lowest ``priority`` gets scarce room, then the oldest job. ``short``: more is wanted, but missing.
        """
        now, after = self._clock.monotonic(), self._memory.mark()
        self._submit(Job(job, True, items, timeout_s, now, now + max_s, after, priority, width, need, short))

    def store(
        self,
        job: Hashable,
        items: Sequence[Item],
        *,
        max_s: float = math.inf,
        priority: int = 1,
        width: int = 1,
    ) -> None:
        """Start to store the ``items`` that the pool lacks; they must not change until reported.

        A value without room in the pool fails the job, and later values are not sent.
        """
        now = self._clock.monotonic()
        self._submit(Job(job, False, items, STORE_TIMEOUT_S, now, now + max_s, DONE, priority, width))

    def cancel(self, job: Hashable, cause: str = "cancelled") -> None:
        """End a job early; ``poll`` reports it as failed. Unknown jobs are ignored."""
        if job in self._jobs:
            self._fail(self._jobs[job], cause)

    def moves(self, job: Hashable) -> bool:
        return job in self._jobs

    def poll(self, wait_s: float = 0.0) -> Finished:
        """Advance everything. Waits up to ``wait_s`` for loads or copies in flight, unless some have ended."""
        self._advance()
        if wait_s > 0 and not self._finished.loads and not self._finished.staged:
            awaited = [part for part in self._parts if part.stage.copies or part.job.is_load]
            if awaited:
                awaited[0].settle(wait_s, self._clock)
                self._advance()
        finished, self._finished = self._finished, Finished([], [], [])
        return finished

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; True if in time. ``poll`` reports the ended jobs."""
        deadline = self._clock.monotonic() + timeout_s
        self._advance()
        while self._parts and (left := deadline - self._clock.monotonic()) > 0:
            next(iter(self._parts)).settle(left, self._clock)
            self._advance()
        return not self._parts

    def close(self) -> None:
        """Cancel jobs in flight, and wait until they end, or for the memory's ``patience_s``. Reports no job."""
        for job in list(self._jobs.values()):
            self._fail(job, "cancelled")
        self._stopping += self._parts
        self._parts.clear()
        for part in self._stopping:
            part.cancel()
        self._memory.hold_engine()
        until = self._clock.monotonic() + self._memory.patience_s
        for part in self._stopping:
            while not part.over() and (left := until - self._clock.monotonic()) > 0:
                part.settle(min(left, SETTLE_STEP_S), self._clock)
        self._reap()
        for job in self._jobs.values():
            job.items = ()
        self._jobs.clear()

    # Jobs.

    def _submit(self, job: Job[Item]) -> None:
        assert job.name not in self._jobs, f"job {job.name!r} was submitted twice"
        self._jobs[job.name] = job
        self._start_parts(job.started)

    def _start_parts(self, now: float) -> None:
        pending = [job for job in self._jobs.values() if job.pending]
        for job in sorted(pending, key=lambda job: job.priority):
            while job.pending and (room := self._memory.room(len(self._parts))) > 0:
                count = min(self._memory.part_items, len(job.items) - job.taken, room)
                places = list(range(job.taken, job.taken + count))
                job.taken += count
                part = Part(Stage.GET, job, places, self._memory.acquire([job.items[at] for at in places]))
                self._add(part)
                try:
                    if job.is_load:
                        self._get(part, now)
                    else:
                        self._send(part)
                except Exception as error:
                    self._end_part(part)
                    self._fault(job, error)

    def _add(self, part: Part[Item]) -> None:
        self._parts[part] = None
        part.job.parts += 1

    def _end_part(self, part: Part[Item]) -> None:
        del self._parts[part]
        part.job.parts -= 1
        slots, part.slots = part.slots, []
        self._memory.release(slots)

    def _fail(self, job: Job[Item], cause: str, error: Exception | None = None, behind: int = -1) -> None:
        """Fail a job, or its part ``behind`` a place."""
        if not job.cause:
            job.cause, job.error = cause, error
        for part in self._parts:
            if part.job is job and part.places[0] > behind and part.transfer is not None:
                part.cancel()

    def _fault(self, job: Job[Item], error: Exception) -> None:
        if not isinstance(error, StoreUnavailable):
            self._fail(job, "fault", error)
            return
        error.with_traceback(None)  # its frames would keep the job's memory until a garbage collection
        late = self._clock.monotonic() >= job.deadline
        self._fail(job, "too_slow" if late else "store_unavailable", error)

    def _end_jobs(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if (job.parts or job.pending) and now > job.deadline:
                self._fail(job, "too_slow")
            if not job.parts and not job.pending:
                del self._jobs[job.name]
                (self._finished.loads if job.is_load else self._finished.stores).append(
                    self._loaded(job, now) if job.is_load else self._stored(job, now)
                )
                job.items = ()  # later references to the job hold no caller's memory

    def _loaded(self, job: Job[Item], now: float) -> Moved:
        if (job.missing or job.short) and not job.cause:
            job.cause = "missing"
        moved = job.moved_blocks()
        nbytes = self._nbytes(job, [block * job.width for block, ok in enumerate(moved) if ok], job.width)
        self._counters.add(metrics.LOAD_REQUESTS, 1, job.cause or "ok")
        self._counters.observe(metrics.LOAD_DURATION_SECONDS, now - job.started, job.cause or "ok")
        if not job.cause or job.need is not Need.ALL:
            self._counters.add(metrics.LOADED_BLOCKS, sum(moved))
            self._counters.add(metrics.LOADED_BYTES, nbytes)
        near = job.near / max(1, len(job.items))
        seconds = now - job.started
        return Moved(
            job.name,
            job.cause,
            moved,
            sorted(job.missing),
            sum(moved),
            nbytes,
            seconds,
            job.error,
            near,
            writers=frozenset(job.writers),
        )

    def _stored(self, job: Job[Item], now: float) -> Moved:
        moved, known, refused = job.moved_blocks(), sum(job.blocks(job.known)), job.refused_blocks()
        places = [place for place, ok in enumerate(job.moved) if ok and not job.known[place]]
        nbytes, sent = self._nbytes(job, places, 1), sum(moved) - known
        self._counters.add(metrics.STORE_SKIPPED_BLOCKS, known, "already_there")
        self._counters.add(metrics.STORED_BLOCKS, sent)
        self._counters.add(metrics.STORED_BYTES, nbytes)
        if refusals := sum(refused):
            self._counters.add(metrics.STORE_SKIPPED_BLOCKS, refusals, "refused")
        if failed := len(moved) - sum(moved) - refusals:
            self._counters.add(metrics.STORE_SKIPPED_BLOCKS, failed, job.cause)
        cause, seconds = job.cause or ("refused" if refusals else ""), now - job.started
        return Moved(job.name, cause, moved, [], sent, nbytes, seconds, job.error, refused=refused)

    def _nbytes(self, job: Job[Item], places: list[int], count: int) -> int:
        """Bytes of the ``count`` items from each place on."""
        return sum(self._memory.nbytes(item) for at in places for item in job.items[at : at + count])

    # Parts.

    def _get(self, part: Part[Item], now: float) -> None:
        timeout_s, views = self._timeout_s(part.job, now), self._memory.views(part.items, part.slots)
        max_s = min(max(timeout_s, part.job.deadline - now), MAX_TIMEOUT_S)
        transfer = self._store.submit_get(part.keys, views, timeout_s=timeout_s, max_s=max_s)
        self._begin(part, Stage.GET, transfer, max_s)

    def _send(self, part: Part[Item]) -> None:
        timeout_s = self._timeout_s(part.job, self._clock.monotonic())
        views = self._memory.views(part.items, part.slots)
        transfer = self._store.submit_put_absent(part.keys, views, timeout_s=timeout_s)
        self._begin(part, Stage.SEND, transfer, timeout_s)

    def _begin(self, part: Part[Item], stage: Stage, transfer: Batch, timeout_s: float) -> None:
        part.begin(stage, transfer, self._clock.monotonic() + timeout_s)

    @staticmethod
    def _timeout_s(job: Job[Item], now: float) -> float:
        return max(1e-3, min(job.timeout_s, job.deadline - now))

    def _advance(self) -> None:
        self._reap()
        now = self._clock.monotonic()
        arrived: list[Part[Item]] = []
        for part in list(self._parts):
            if not part.over():
                self._look_at_deadline(part, now)
            elif part.stage is Stage.GET and self._has_arrived(part):
                arrived.append(part)
            elif part.job.is_load:
                self._end_part(part)
            else:
                self._go_on_storing(part)
        self._scatter(arrived)
        self._start_parts(now)
        self._end_jobs(now)

    def _look_at_deadline(self, part: Part[Item], now: float) -> None:
        if part.stage.copies:
            return
        assert part.transfer is not None
        if part.deadline > now and part.transfer.given_up():
            part.deadline = now
        if now > part.deadline + self._memory.patience_s:
            # Abandon a batch that ignores its deadline (a kernel stuck in I/O).
            part.cancel()
            self._stopping.append(part)
            del self._parts[part]
            part.job.parts -= 1
            self._fail(part.job, "store_unavailable")
        elif now > part.deadline + STUCK_S and not part.reported:
            part.reported = True
            self._fail(part.job, "store_unavailable")
            logger.warning("kvpool: %r does not stop; its memory is kept until it does", part.transfer)

    def _has_arrived(self, part: Part[Item]) -> bool:
        """Take a load's result; whether slots remain to be scattered."""
        assert part.transfer is not None
        job = part.job
        try:
            results = part.transfer.results()
            found = self._taken(part, [result in FOUND for result in results])
            for place, ok in zip(part.places, found, strict=True):
                job.moved[place] = ok
        except Exception as error:
            self._fault(job, error)
            return False
        lost = [place for place, ok in zip(part.places, found, strict=True) if not ok]
        job.missing += lost
        job.near += results.count(_native.NEAR)
        if lost and job.need is not Need.EACH:
            self._fail(job, "missing", behind=lost[0] if job.need is Need.LEADING else -1)
        return any(found)

    def _taken(self, part: Part[Item], found: list[bool]) -> list[bool]:
        """Those found but of writers who are put away."""
        assert part.transfer is not None
        writers = part.transfer.writers()
        part.job.writers.update(writer for writer, ok in zip(writers, found, strict=True) if ok)
        if self.put_away.isdisjoint(writers):
            return found
        taken = [ok and writer not in self.put_away for writer, ok in zip(writers, found, strict=True)]
        self._not_taken += [
            key for key, ok, was in zip(part.keys, taken, found, strict=True) if was and not ok
        ]
        return taken

    def _scatter(self, arrived: list[Part[Item]]) -> None:
        """Scatter the arrived parts together, with as few launches as possible."""
        wanted = [part for part in arrived if not part.job.cause]
        if wanted:
            copy = self._memory.scatter(wanted)
            for part in wanted:
                part.stage, part.copy = Stage.SCATTER, copy
        for part in arrived:
            if part.over():
                self._end_part(part)

    def _go_on_storing(self, part: Part[Item]) -> None:
        try:
            if part.stage is Stage.GATHER:
                self._finished.staged.extend(cast("tuple[int, ...]", part.job.name))
                if not part.job.cause:
                    self._send(part)
                    return
            else:
                self._end_send(part)
        except Exception as error:
            self._fault(part.job, error)
        self._end_part(part)

    def _end_send(self, part: Part[Item]) -> None:
        assert part.transfer is not None
        results = part.transfer.statuses()
        for place, result in zip(part.places, results, strict=True):
            part.job.moved[place] = result in FOUND
            part.job.known[place] = result == _native.PRESENT
            part.job.refused[place] = result == _native.REFUSED
        if _native.NO_ROOM in results:
            self._fail(part.job, "pool_full", behind=part.places[results.index(_native.NO_ROOM)])
        if any(result in BROKEN for result in results):
            part.transfer.results()  # raises why

    def _reap(self) -> None:
        still = []
        for part in self._stopping:
            if part.over():
                slots, part.slots = part.slots, []
                self._memory.release(slots)
            else:
                still.append(part)
        self._stopping = still
