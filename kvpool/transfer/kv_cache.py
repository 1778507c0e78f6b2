"""KVCacheMover: a ``BlockMover`` for the blocks of an engine's KV cache, through staging slots, beside the step loop.

Copies run on two streams, one in each direction, behind what the engine computes: a gather waits for the forward that
it was submitted after, a scatter for the one before its load. So a block may be given to another request when its tag
is in ``Finished.staged``, and a load's blocks when it is in ``Finished.loads``; not earlier. The store's threads touch
staging slots only, never the KV cache.

Threads: everything here belongs to the thread that calls it (the worker's model thread).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from kvpool import metrics
from kvpool.errors import ConfigError
from kvpool.metrics import Counters
from kvpool.store import Store
from kvpool.transfer.copier import BlockCopier
from kvpool.transfer.device import DONE, CopyStream, Device, Event, device_of
from kvpool.transfer.job import Job, Moved, Part, Stage
from kvpool.transfer.memory import LOAD_RESERVE, Staging, slot_size
from kvpool.transfer.mover import PART_NBYTES, STORE_TIMEOUT_S, BlockMover

ABANDON_AFTER_S = 0.25  # how long after its own deadline a batch may still be stopping


class Block(NamedTuple):
    """One record to move: its key, its group, and where its blocks are in the engine's KV cache.

    0 stands where a load is to write nothing.
    """

    key: str
    group: int
    block_ids: tuple[int, ...]


class KVCacheMemory:
    """The KV cache behind ``staging``; ``copiers[g]`` moves the blocks of group g."""

    patience_s = ABANDON_AFTER_S

    def __init__(self, copiers: Sequence[BlockCopier], staging_nbytes: int, device: Device) -> None:
        """Errors: ``ConfigError`` when host or device has too little memory for copies, or cannot make one."""
        self._copiers = copiers
        self._device = device
        slot_nbytes = max(copier.payload_nbytes for copier in copiers)
        # Not more than was asked for: of pinned memory torch takes the next power of two.
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
        """Copy blocks of one group to slots: (which of them, their slots, ready when they are copied)."""
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
        """Copy filled slots to their blocks."""
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
        return copy  # the last of them: a stream keeps the order

    def hold_engine(self) -> None:
        for stream in (self._gathers, self._scatters):
            self._hold_engine_for(stream)

    def hold_engine_for_gathers(self) -> None:
        self._hold_engine_for(self._gathers)

    def _hold_engine_for(self, stream: CopyStream) -> None:
        # Behind all that the stream was given, a copy that failed half-way included.
        self._device.follow(stream.submit(lambda scratch: None, []))


class KVCacheMover(BlockMover[Block]):
    """Loads blocks into a KV cache, and stores blocks of it, through ``staging_nbytes`` of host memory.

    Loads are ``load``; stores are ``stage``.
    """

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
    ) -> None:
        """``device``: where the copiers' layers lie, when it is not told by their tensors."""
        memory = KVCacheMemory(copiers, staging_nbytes, device or device_of(copiers[0].device))
        super().__init__(store, memory, counters)
        self._groups = len(copiers)
        self._payload_nbytes = [copier.payload_nbytes for copier in copiers]
        self._reserve = max(1, int(self.staging.slots * LOAD_RESERVE))
        self._store_rate = max_store_nbytes_per_s
        self._store_allowance = float(max_store_nbytes_per_s)
        self._store_allowance_at = time.monotonic()

    @property
    def staging(self) -> Staging:
        return self._memory.staging

    @property
    def store_slots(self) -> int:
        """How many records stores have in staging at most."""
        return self.staging.slots - self._reserve

    @property
    def slots_in_use(self) -> int:
        """Staging slots that are not free, those of abandoned transfers included."""
        return self.staging.slots - self.staging.free

    def stage(self, blocks: Sequence[Block], tags: Sequence[int]) -> None:
        """Copy ``blocks``, as the engine's stream leaves them, to staging and store them later.

        Blocks for which there is no slot, or no bandwidth under the cap, are dropped and counted. The caller keeps
        the others as they are until they are staged. Each tag comes once in ``Finished.staged`` and once in
        ``Finished.stores``, whose jobs are tuples of tags: a fault costs the blocks of one batch.
        """
        assert len(blocks) == len(tags)
        self._reap()
        computed = self._memory.mark()
        for group, payload_nbytes in enumerate(self._payload_nbytes):
            chosen = [i for i, block in enumerate(blocks) if block.group == group]
            room = max(0, self.staging.free - self._reserve)
            allowed = self._allowed_blocks(payload_nbytes, min(room, len(chosen)))
            if allowed < len(chosen):
                cause = "staging_full" if room < len(chosen) else "bandwidth_cap"
                self._drop([tags[i] for i in chosen[allowed:]], cause)
            some = [blocks[i] for i in chosen[:allowed]]
            for places, slots, copy in self._memory.gather(group, some, computed):
                self._stage(tuple(tags[i] for i in chosen[:allowed][places]), some[places], slots, copy)

    def hold_engine(self) -> None:
        """Have what the engine computes from now on come after the copies of all stores until now."""
        self._memory.hold_engine_for_gathers()

    def _stage(self, tags: tuple[int, ...], blocks: list[Block], slots: list[int], copy: Event) -> None:
        now, count = time.monotonic(), len(blocks)
        job = Job(tags, False, blocks, STORE_TIMEOUT_S, now, float("inf"), DONE, taken=count)
        self._jobs[tags] = job
        part = Part(Stage.GATHER, job, list(range(count)), slots, copy)
        self._add(part)
        if part.over():
            self._go_on_storing(part)

    def _drop(self, tags: list[int], cause: str) -> None:
        self._counters.add(metrics.STORE_SKIPPED_BLOCKS, len(tags), cause)
        self._finished.staged.extend(tags)
        self._finished.stores.append(Moved(tuple(tags), cause, [False] * len(tags), [], 0, 0, 0.0, None))

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
