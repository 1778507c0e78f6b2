"""KVCacheMover: a ``BlockMover`` for the blocks of an engine's KV cache, through staging slots.

Copies run on two streams, one per direction, ordered after the engine's work: a gather after the forward
before it, a scatter after the forward before its load. A stored block may be reused once its tag is in
``Finished.staged``, a load's blocks once it is in ``Finished.loads``. The store's threads touch staging slots
only, never the KV cache.

Threads: the worker's model thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

from kvpool import metrics
from kvpool.clock import REAL, Clock
from kvpool.errors import ConfigError
from kvpool.metrics import Counters
from kvpool.store import Store
from kvpool.transfer.allowance import Allowance
from kvpool.transfer.copier import BlockCopier
from kvpool.transfer.device import DONE, CopyStream, Device, Event, device_of
from kvpool.transfer.job import Job, Moved, Part, Stage
from kvpool.transfer.memory import LOAD_RESERVE, Staging, slot_size
from kvpool.transfer.mover import PART_NBYTES, STORE_TIMEOUT_S, BlockMover

ABANDON_AFTER_S = 0.25  # grace of a batch that stops after its own deadline


class Block(NamedTuple):
    """One record to move: key, group, and its blocks in the engine's KV cache; a load skips block 0.

    ``joined``: it is stored with the one before it, or not at all.
    """

    key: str
    group: int
    block_ids: tuple[int, ...]
    joined: bool = False


class KVCacheMemory:
    """The KV cache behind ``staging``; ``copiers[g]`` moves group g."""

    patience_s = ABANDON_AFTER_S

    def __init__(self, copiers: Sequence[BlockCopier], staging_nbytes: int, device: Device) -> None:
        """Errors: ``ConfigError`` when host or device lacks memory for copies, or a copy fails."""
        self._copiers = copiers
        self._device = device
        slot_nbytes = max(copier.payload_nbytes for copier in copiers)
        # Never above the request: torch rounds pinned memory up to a power of two.
        self.staging = Staging(slot_nbytes, max(2, staging_nbytes // slot_size(slot_nbytes)), device.pinned)
        record_nbytes = max(copier.scratch_nbytes for copier in copiers)
        scratch_nbytes = max(record_nbytes, min(device.scratch_nbytes, self.staging.slots * record_nbytes))
        self._gathers, self._scatters = (device.copy_stream(scratch_nbytes) for _ in range(2))
        self.part_items = max(1, min(PART_NBYTES // slot_nbytes, self.staging.slots // 2))
        try:
            for copier in copiers:
                self._scatters.submit(copier.rehearse, [device.mark()])
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{copiers[0].device} failed at its first copy of KV blocks ({reason}); "
                "run python -m benchmarks device, which makes such copies alone"
            ) from error
        self._hold_engine_for(self._scatters)

    def room(self, parts: int) -> int:
        return self.staging.free

    def acquire(self, items: Sequence[Block]) -> list[Any]:
        return self.staging.acquire(len(items))

    def release(self, slots: list[Any]) -> None:
        self.staging.release(slots)

    def views(self, items: Sequence[Block], slots: Sequence[Any]) -> list[memoryview]:
        return [self.staging.view(slot, self.nbytes(block)) for block, slot in zip(items, slots, strict=True)]

    def nbytes(self, item: Block) -> int:
        return self._copiers[item.group].payload_nbytes

    def mark(self) -> Event:
        return self._device.mark()

    def gather(
        self, group: int, blocks: Sequence[Block], after: Event
    ) -> Iterator[tuple[slice, list[int], Event]]:
        """Copy blocks of one group to slots; yields (slice of blocks, their slots, event of the copy)."""
        copier = self._copiers[group]
        at_once = self._gathers.scratch_nbytes // copier.scratch_nbytes
        for start in range(0, len(blocks), at_once):
            some = blocks[start : start + at_once]
            slots = self.staging.acquire(len(some))
            ids = [*chain.from_iterable(block.block_ids for block in some)]
            copy = self._gathers.submit(partial(copier.gather, ids, self.staging, slots), [after])
            for first in range(0, len(some), self.part_items):
                part_slots = slots[first : first + self.part_items]
                yield slice(start + first, start + first + len(part_slots)), part_slots, copy

    def scatter(self, parts: Sequence[Part[Block]]) -> Event:
        after = list({id(part.job): part.job.after for part in parts}.values())
        copy: Event = DONE
        for group, copier in enumerate(self._copiers):
            pairs = [
                (block.block_ids, slot)
                for part in parts
                for block, slot in zip(part.items, part.slots, strict=True)
                if block.group == group
            ]
            at_once = self._scatters.scratch_nbytes // copier.scratch_nbytes
            for start in range(0, len(pairs), at_once):
                ids, slots = zip(*pairs[start : start + at_once], strict=True)
                flat = [*chain.from_iterable(ids)]
                copy = self._scatters.submit(partial(copier.scatter, flat, self.staging, slots), after)
        return copy  # the last event: a stream keeps the order

    def hold_engine(self) -> None:
        for stream in (self._gathers, self._scatters):
            self._hold_engine_for(stream)

    def hold_engine_for_gathers(self) -> None:
        self._hold_engine_for(self._gathers)

    def _hold_engine_for(self, stream: CopyStream) -> None:
        # Behind all earlier work of the stream, even a copy that failed half-way.
        self._device.follow(stream.submit(lambda scratch: None, []))


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
        return True

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
