"""Measures the copies between KV cache and staging beside one plain copy of as many bytes, on the device that is here.

Source of the shapes: the models' ``config.json``, with blocks of 16 tokens of bfloat16.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvpool.transfer.device import BlockCopier
from kvpool.transfer.lane import Device, Lane, device_of
from kvpool.transfer.staging import Staging

SHAPES = {  # (layers, shape of a layer's block)
    "Llama-3-8B": (32, (2, 16, 8, 128)),  # K and V, 16 tokens, 8 heads of 128
    "DeepSeek-V3": (61, (16, 576)),  # MLA: 16 tokens, one latent vector of 512 + 64
}
PRODUCT_SIZE = 4096  # of the square matrices whose product runs beside
PRODUCT_OVER_COPY = (
    1.5  # how much longer than the copies the products take, so that all of a copy is beside them
)
SEED = 3


@dataclass(frozen=True)
class Direction:
    """Medians. ``plain_gb_per_s``: one copy of as many bytes that lie together, to or from the same host memory.

    ``over_plain`` and ``product_cost`` are medians of ratios within a round. ``product_cost``: how much longer a matrix
    product on the engine's stream takes with the copies beside it; None on the CPU, which has nothing beside.
    """

    gb_per_s: float
    plain_gb_per_s: float
    over_plain: float
    product_cost: float | None


@dataclass(frozen=True)
class Measured:
    """One shape. ``bytes_equal``: blocks that went to staging and back into other places are the same there."""

    shape: str
    block_nbytes: int
    blocks: int
    launches: int  # for a batch of blocks, beside its transfers
    bytes_equal: bool
    store: Direction
    load: Direction


def accelerator() -> str | None:
    """The accelerator that ``measure`` uses, or None: the CPU."""
    driven = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if driven is None else driven.type


def measure(name: str, *, blocks: int, rounds: int, advance: Callable[[], None]) -> Measured:
    """Measure the shape ``name`` of ``SHAPES``; calls ``advance`` after each round.

    Blocking. Memory: twice the blocks on the device, once in staging. Errors: ``ConfigError`` when that is too much.
    """
    return _Bench(name, blocks).run(rounds, advance)


class _Bench:
    def __init__(self, name: str, blocks: int) -> None:
        layers, shape = SHAPES[name]
        self._name, self._blocks = name, blocks
        self._torch_device = torch.device(accelerator() or "cpu")
        self._device: Device = device_of(self._torch_device)
        generator = torch.Generator().manual_seed(SEED)
        whole = torch.randint(
            -(1 << 15), 1 << 15, (layers, 2 * blocks + 1, *shape), dtype=torch.int16, generator=generator
        )
        self._cache = whole.to(self._torch_device)
        self._copier = BlockCopier(list(self._cache.view(torch.bfloat16)))
        self._staging = Staging(self._copier.payload_nbytes, blocks, self._device.pinned)
        self._slots = self._staging.acquire(blocks)
        self._nbytes = blocks * self._copier.payload_nbytes
        self._lane: Lane = self._device.lane(max(self._copier.scratch_nbytes, self._device.scratch_nbytes))
        order = random.Random(SEED).sample(range(1, 2 * blocks + 1), 2 * blocks)
        self._from, self._to = order[:blocks], order[blocks:]

    def run(self, rounds: int, advance: Callable[[], None]) -> Measured:
        self._timed(self._store)
        self._timed(self._load)
        equal = torch.equal(self._cache[:, self._from], self._cache[:, self._to])
        products = self._products()
        stores, loads = (
            self._direction(copies, plain, products, rounds, advance)
            for copies, plain in ((self._store, self._plain_store), (self._load, self._plain_load))
        )
        return Measured(
            self._name, self._copier.payload_nbytes, self._blocks, self._copier.launches, equal, stores, loads
        )

    def _direction(
        self,
        copies: Callable[[], None],
        plain: Callable[[], None],
        products: Callable[[], None] | None,
        rounds: int,
        advance: Callable[[], None],
    ) -> Direction:
        times: dict[str, list[float]] = {"copies": [], "plain": [], "alone": [], "beside": []}
        for _ in range(rounds):
            times["plain"].append(self._timed(plain))
            times["copies"].append(self._timed(copies))
            if products is not None:
                times["alone"].append(self._computed(products))
                times["beside"].append(self._computed(products, copies))
            advance()
        pairs = list(zip(times["plain"], times["copies"], strict=True))
        costs = [beside / alone - 1 for alone, beside in zip(times["alone"], times["beside"], strict=True)]
        return Direction(
            self._nbytes / statistics.median(times["copies"]) / 1e9,
            self._nbytes / statistics.median(times["plain"]) / 1e9,
            statistics.median(plain_s / copies_s for plain_s, copies_s in pairs),
            statistics.median(costs) if costs else None,
        )

    def _store(self) -> None:
        self._submit(self._copier.gather, self._from)

    def _load(self) -> None:
        self._submit(self._copier.scatter, self._to)

    def _submit(self, move: Callable[..., None], block_ids: list[int]) -> None:
        mark = self._device.mark()
        at_once = self._lane.scratch_nbytes // self._copier.scratch_nbytes
        for start in range(0, self._blocks, at_once):
            some = slice(start, start + at_once)
            self._lane.submit(partial(move, block_ids[some], self._staging, self._slots[some]), [mark])

    def _plain_store(self) -> None:
        host, device = self._plain()
        host.copy_(device, non_blocking=True)

    def _plain_load(self) -> None:
        host, device = self._plain()
        device.copy_(host, non_blocking=True)

    def _plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._staging.tensor[: self._nbytes], self._cache.view(-1).view(torch.uint8)[: self._nbytes]

    def _products(self) -> Callable[[], None] | None:
        """Matrix products on the engine's stream that take a little longer than the copies; None on the CPU."""
        if not self._device.pinned:
            return None
        size = (PRODUCT_SIZE, PRODUCT_SIZE)
        left, right = (torch.randn(size, dtype=torch.bfloat16, device=self._torch_device) for _ in range(2))
        out = torch.empty(size, dtype=torch.bfloat16, device=self._torch_device)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(left, right, out=out)

        self._computed(lambda: multiply(10))
        one_s = self._computed(lambda: multiply(10)) / 10
        longest_s = max(self._timed(self._store), self._timed(self._load))
        return partial(multiply, 1 + int(PRODUCT_OVER_COPY * longest_s / one_s))

    def _timed(self, work: Callable[[], None]) -> float:
        """Seconds until everything that ``work`` starts is over."""
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _computed(self, work: Callable[[], None], beside: Callable[[], None] | None = None) -> float:
        """Seconds that ``work`` takes on the engine's stream, with the copies of ``beside`` going on."""
        self._wait()
        started = time.perf_counter()
        if beside is not None:
            beside()
        work()
        torch.accelerator.current_stream().synchronize()
        taken_s = time.perf_counter() - started
        self._wait()
        return taken_s

    def _wait(self) -> None:
        if self._device.pinned:
            torch.accelerator.synchronize()
