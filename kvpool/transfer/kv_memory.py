"""``KVCacheMemory``: an engine's KV cache behind staging slots, and ``Block``, which is moved.

Copies run on two streams, one per direction, ordered after the engine's work: a gather after the forward
before it, a scatter after the forward before its load.

Threads: the worker's model thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from kvpool.errors import ConfigError
from kvpool.transfer.copier import BlockCopier
from kvpool.transfer.device import DONE, CopyStream, Device, Event
from kvpool.transfer.job import Part
from kvpool.transfer.memory import Staging, slot_size
from kvpool.transfer.mover import PART_NBYTES

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
