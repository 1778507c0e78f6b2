"""KVCacheMover: a ``BlockMover`` for the blocks of an engine's KV cache, through staging slots.

A stored block may be reused once its tag is in ``Finished.staged``, a load's blocks once it is in
``Finished.loads``. The store's threads touch staging slots only, never the KV cache.

Threads: the worker's model thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvpool import metrics
from kvpool.clock import REAL, Clock
from kvpool.metrics import Counters
from kvpool.store import Store
from kvpool.transfer.allowance import Allowance
from kvpool.transfer.audit import Auditor, Ended
from kvpool.transfer.copier import BlockCopier
from kvpool.transfer.device import DONE, Device, Event, device_of
from kvpool.transfer.job import COPY_PAUSE_S, Job, Moved, Part, Stage
from kvpool.transfer.kv_memory import Block, KVCacheMemory
from kvpool.transfer.memory import LOAD_RESERVE, Staging
from kvpool.transfer.mover import STORE_TIMEOUT_S, BlockMover


class KVCacheMover(BlockMover[Block]):
    """Loads blocks into a KV cache, and ``stage`` stores them, through ``staging_nbytes`` of host memory."""

    _memory: KVCacheMemory

    def __init__(
        self,
        store: Store,
        copiers: Sequence[BlockCopier],
        *,
        staging_nbytes: int,
        max_store_nbytes_per_s: int,
        counters: Counters,
        device: Device | None = None,
        clock: Clock = REAL,
    ) -> None:
        """``device``: of the copiers' layers; None: their tensors' device."""
        memory = KVCacheMemory(copiers, staging_nbytes, device or device_of(copiers[0].device))
        super().__init__(store, memory, counters, clock)
        self._groups = len(copiers)
        self._payload_nbytes = [copier.payload_nbytes for copier in copiers]
        self._reserve = max(1, int(self.staging.slots * LOAD_RESERVE))
        self.auditor = Auditor(store, memory, [copier.pieces for copier in copiers], clock)
        self._allowance = Allowance(max_store_nbytes_per_s, clock.monotonic)

    @property
    def staging(self) -> Staging:
        return self._memory.staging

    @property
    def store_slots(self) -> int:
        """Most records of stores in staging."""
        return self.staging.slots - self._reserve

    @property
    def slots_in_use(self) -> int:
        """Slots in use, including those of abandoned transfers."""
        return self.staging.slots - self.staging.free

    def stage(self, blocks: Sequence[Block], tags: Sequence[int]) -> None:
        """Copy ``blocks``, as the engine's stream leaves them, to staging and store them later.

        Blocks without a slot or without bandwidth under the cap are dropped and counted. The caller keeps the
        others unchanged until staged. Each tag appears once in ``Finished.staged`` and once in
        ``Finished.stores``, whose jobs are tuples of tags: a fault costs the blocks of one batch.
        """
        assert len(blocks) == len(tags)
        self._reap()
        computed = self._memory.mark()
        refused = self._refused(blocks)
        for cause in dict.fromkeys(filter(None, refused)):
            self._drop([tag for tag, why in zip(tags, refused, strict=True) if why == cause], cause)
        for group in range(self._groups):
            chosen = [i for i, block in enumerate(blocks) if block.group == group and not refused[i]]
            some = [blocks[i] for i in chosen]
            for places, slots, copy in self._memory.gather(group, some, computed):
                self._stage(tuple(tags[i] for i in chosen[places]), some[places], slots, copy)

    def audit(self, blocks: Sequence[Block], tags: Sequence[int]) -> None:
        """Compare records of the pool with these blocks, as the engine's stream leaves them. See ``Auditor``."""
        self.auditor.begin(blocks, tags, self._memory.staging.free - self._reserve, self._memory.mark())

    def poll_audits(self) -> Ended:
        if self._not_taken:
            self.auditor.delete(self._not_taken)
            self._not_taken = []
        return self.auditor.poll()

    def let_go(self, timeout_s: float) -> bool:
        """Fail all loads, and wait until no copy is under way: True if in time.

        Until the next load or store nothing touches the KV cache. What is staged is still stored.
        """
        for job in self._jobs.values():
            if job.is_load:
                self._fail(job, "cancelled")
        until = self._clock.monotonic() + timeout_s
        self._advance()
        while copied := [part for part in self._parts if part.stage.copies]:
            if (left := until - self._clock.monotonic()) <= 0:
                return False
            copied[0].settle(left, self._clock)
            self._advance()
        while self.auditor.copies:
            if self._clock.monotonic() >= until:
                return False
            self._clock.sleep(COPY_PAUSE_S)
            self.auditor.advance()
        return True

    def close(self) -> None:
        super().close()
        self.auditor.close()

    def hold_engine(self) -> None:
        """Order the engine's further work after the copies of all stores so far."""
        self._memory.hold_engine_for_gathers()

    def _stage(self, tags: tuple[int, ...], blocks: list[Block], slots: list[int], copy: Event) -> None:
        now, count = self._clock.monotonic(), len(blocks)
        job = Job(tags, False, blocks, STORE_TIMEOUT_S, now, float("inf"), DONE, taken=count)
        self._jobs[tags] = job
        part = Part(Stage.GATHER, job, list(range(count)), slots, copy)
        self._add(part)
        if part.over():
            self._go_on_storing(part)

    def _stored(self, job: Job[Block], now: float) -> Moved:
        # Else ranks whose allowances are out of step take one record in turns, and never agree that it is there.
        known = [place for place, there in enumerate(job.known) if there]
        self._allowance.give_back(self._nbytes(job, known, 1))
        return super()._stored(job, now)

    def _drop(self, tags: list[int], cause: str) -> None:
        self._counters.add(metrics.STORE_SKIPPED_BLOCKS, len(tags), cause)
        self._finished.staged.extend(tags)
        self._finished.stores.append(Moved(tuple(tags), cause, [False] * len(tags), [], 0, 0, 0.0, None))

    def _refused(self, blocks: Sequence[Block]) -> list[str]:
        """By block, why it is not staged now; "": it is. Behind a refused one, no further one of its group is."""
        room = max(0, self.staging.free - self._reserve)
        causes: list[str] = []
        of_group: dict[int, str] = {}
        self._allowance.refill()
        for first, behind in _joined(blocks):
            group, count = blocks[first].group, behind - first
            nbytes = sum(self._payload_nbytes[block.group] for block in blocks[first:behind])
            if not of_group.get(group):
                fits = count <= room
                of_group[group] = (
                    "staging_full" if not fits else "" if self._allowance.take(nbytes) else "bandwidth_cap"
                )
            if not of_group[group]:
                room -= count
            causes += [of_group[group]] * count
        return causes


def _joined(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """The (first, behind the last) places of blocks that are stored together."""
    starts = [i for i, block in enumerate(blocks) if not block.joined]
    return pairwise([*starts, len(blocks)])
