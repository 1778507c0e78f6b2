"""Copies of a batch of blocks between a KV cache and staging, beside one plain copy of as many bytes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measure.arena import Arena
from benchmarks.measure.caches import Cache
from kvpool.errors import ConfigError
from kvpool.key.key import Namespace
from kvpool.transfer.copier import BlockCopier
from kvpool.transfer.device import DONE
from kvpool.transfer.job import Job, Part, Stage
from kvpool.transfer.kv_memory import Block, KVCacheMemory

TARGET_OVER_PLAIN = 0.9
TARGET_FROM_NBYTES = 512 << 10  # of a block's payload; smaller ones have no target
SEED = 3
NAMESPACE = Namespace("bench", {"model": "bench device"})


@dataclass(frozen=True)
class Speed:
    """Medians. ``plain_gb_per_s``: one contiguous copy of as many bytes, to or from the same host memory.

    ``over_plain``: the median of ratios within a round.
    """

    gb_per_s: float
    plain_gb_per_s: float
    over_plain: float


@dataclass(frozen=True)
class CopiesMeasured:
    """One cache. ``bytes_equal``: blocks were equal after staging and a load elsewhere."""

    model: str
    layout: str
    block_tokens: int
    block_nbytes: int  # payload, of the smallest group
    blocks: int  # of a batch
    launches: int  # index_select or index_copy_ calls of a batch within the scratch
    bytes_equal: bool
    store: Speed
    load: Speed
    both: Speed  # at once; the bytes of both
    target: str | None  # "met" or "missed" by all three; None without a target


def measure_copies(
    arena: Arena, cache: Cache, tokens: int, *, blocks: int | None, rounds: int, advance: Callable[[], None]
) -> CopiesMeasured:
    """Measure ``cache`` with blocks of ``tokens`` tokens; calls ``advance`` after each round.

    ``blocks``: of a batch; None: as many as ``arena.batch_nbytes`` hold. Blocks. Memory: an arena, twice the
    batch in staging, the batch and two scratches on the device. Errors: ``ConfigError`` when that is too
    much.
    """
    copies = Copies(arena, cache, tokens, blocks)
    plain = _Plain(arena, copies)
    kinds = {
        "store": (copies.store, plain.store, copies.nbytes),
        "load": (copies.load, plain.load, copies.nbytes),
        "both": (copies.both, plain.both, 2 * copies.nbytes),
    }
    equal = copies.bytes_equal(copies.both)  # also a warm-up
    speeds = {}
    for kind, (ours, theirs, nbytes) in kinds.items():
        arena.timed(theirs)
        pairs = []
        for _ in range(rounds):
            pairs.append((arena.timed(theirs), arena.timed(ours)))
            advance()
        plain_s, ours_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        speeds[kind] = Speed(nbytes / ours_s / 1e9, nbytes / plain_s / 1e9, ratio)
    equal = equal and copies.bytes_equal(copies.both)
    target = None
    if arena.accelerator and copies.block_nbytes >= TARGET_FROM_NBYTES:
        met = min(speed.over_plain for speed in speeds.values()) >= TARGET_OVER_PLAIN
        target = "met" if met else "missed"
    return CopiesMeasured(
        cache.model, cache.layout, tokens, copies.block_nbytes, copies.blocks, copies.launches, equal,
        speeds["store"], speeds["load"], speeds["both"], target,
    )  # fmt: skip


class Copies:
    """A batch stored from scattered blocks, and the same bytes loaded into others, by the mover's memory."""

    def __init__(self, arena: Arena, cache: Cache, tokens: int, blocks: int | None) -> None:
        self.arena = arena
        block_nbytes = cache.block_nbytes(tokens)
        self.blocks = max(blocks or arena.batch_nbytes // block_nbytes, len(cache.layers))
        raw = arena.take((2 * self.blocks + 1) * block_nbytes)
        self.layers = cache.views(raw, tokens)
        self.copiers = [BlockCopier(group) for group in self.layers]
        self.block_nbytes = min(copier.payload_nbytes for copier in self.copiers)
        self.launches = sum(copier.launches for copier in self.copiers)
        self.staging_nbytes = 2 * self.blocks * max(copier.payload_nbytes for copier in self.copiers)
        try:
            self._memory = KVCacheMemory(self.copiers, self.staging_nbytes, arena.device)
        except ConfigError as error:
            raise ConfigError(
                f"no memory to copy {self.blocks} blocks at once: lower --blocks ({error})"
            ) from error
        self.staging = self._memory.staging
        order = random.Random(SEED).sample(range(1, len(self.layers[0][0])), 2 * self.blocks)
        self.stored, self.loaded = self._blocks(order[: self.blocks]), self._blocks(order[self.blocks :])
        self.nbytes = sum(self._memory.nbytes(block) for block in self.stored)
        self._fill()
        self._slots = self._gather()
        job = Job("load", True, self.loaded, 0.0, time.monotonic(), 0.0, DONE)
        self._part = Part(Stage.GET, job, list(range(self.blocks)), self._slots)
        self._stored_slots: list[int] = []

    def store(self) -> None:
        """Start to copy a batch to slots, behind earlier ones on the stream."""
        self.staging.release(self._stored_slots)
        self._stored_slots = self._gather()

    def load(self) -> None:
        self._part.job.after = self._memory.mark()
        self._memory.scatter([self._part])

    def both(self) -> None:
        self.store()
        self.load()

    def bytes_equal(self, copy: Callable[[], None]) -> bool:
        """Whether ``copy`` writes the stored blocks' bytes into the loaded ones."""
        for layer, _, new in self._places():
            layer[new] = 0
        self.arena.wait()
        copy()
        self.arena.wait()
        slots = zip(
            self._slots, self._stored_slots, self.stored, strict=False
        )  # nothing was stored yet, or all
        return all(torch.equal(layer[old], layer[new]) for layer, old, new in self._places()) and all(
            torch.equal(self._slot(one, block), self._slot(other, block)) for one, other, block in slots
        )

    def _places(self) -> Iterator[tuple[torch.Tensor, list[int], list[int]]]:
        for group, layers in enumerate(self.layers):
            old, new = (
                [block.block_ids[0] for block in blocks if block.group == group]
                for blocks in (self.stored, self.loaded)
            )
            for layer in layers:
                yield layer, old, new

    def _slot(self, slot: int, block: Block) -> torch.Tensor:
        return self.staging.tensor[slot * self.staging.slot_nbytes :][: self._memory.nbytes(block)]

    def _blocks(self, numbers: list[int]) -> list[Block]:
        """The blocks at these places, group after group."""
        groups = sorted(number % len(self.layers) for number in range(len(numbers)))
        return [
            Block(NAMESPACE.key(at.to_bytes(32, "big"), group, 0), group, (number,))
            for at, (group, number) in enumerate(zip(groups, numbers, strict=True))
        ]

    def _fill(self) -> None:
        generator = torch.Generator(self.arena.torch_device).manual_seed(SEED)
        for layer, old, _ in self._places():
            shape = (len(old), *layer.shape[1:])
            layer[old] = torch.randint(
                -(1 << 15), 1 << 15, shape, dtype=layer.dtype, device=layer.device, generator=generator
            )

    def _gather(self) -> list[int]:
        mark, slots = self._memory.mark(), []
        for group in range(len(self.layers)):
            some = [block for block in self.stored if block.group == group]
            for _, part_slots, _ in self._memory.gather(group, some, mark):
                slots += part_slots
        return slots


class _Plain:
    """One contiguous copy each way of as many bytes, between device memory and the same staging."""

    def __init__(self, arena: Arena, copies: Copies) -> None:
        half = copies.staging.tensor.numel() // 2
        self._from, self._to = (copies.staging.tensor[start:][: copies.nbytes] for start in (0, half))
        self._there = torch.empty(copies.nbytes, dtype=torch.uint8, device=arena.torch_device)
        self._streams = [arena.device.copy_stream(1) for _ in range(2)]
        arena.timed(self.load)  # so that random bytes are stored

    def store(self) -> None:
        self._streams[0].submit(partial(self._copy, self._to, self._there), [])

    def load(self) -> None:
        self._streams[1].submit(partial(self._copy, self._there, self._from), [])

    def both(self) -> None:
        self.store()
        self.load()

    @staticmethod
    def _copy(to: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)
