"""The cost of copies to an engine: matrix products and a replayed CUDA graph beside stores and loads.

A step has the products of a prefill of ``STEP_TOKENS`` tokens by Llama-3-8B and stores or loads as many
tokens. As in vLLM without asynchronous scheduling, each step ends by a wait for the engine's stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.measure.arena import Arena
from benchmarks.measure.caches import CACHES
from benchmarks.measure.copies import Copies

TARGET_SLOWER = 0.01  # with stores
CACHE, BLOCK_TOKENS = CACHES[0], 16
STEP_TOKENS = 8192
STEPS = 2  # per round: the second's products run beside the first's copies
# Products of (tokens, 4096) by (4096, 14336), the shape of Llama-3-8B's largest: 137 of them are 2 x 8e9
# operations per token. A graph has several weights, 0.9 GB, so that they come from the device's memory.
SHAPE, PRODUCTS, WEIGHTS = (4096, 14336), 137, 8
GRAPH_TOKENS = 64  # a decoding step, bound by reading weights
HOST_SHAPE, HOST_PRODUCTS, HOST_TOKENS = (64, 64), 2, 32  # on the CPU, without meaningful figures
COVERED = 0.8  # share of a load's time taken by the replays, so that all run beside it


@dataclass(frozen=True)
class EngineMeasured:
    """``*_slower``: 0.01 is 1 %; medians of ratios within a round. ``*_call_ms``: our calls in the model
    thread.

    All None on the CPU, which has no parallel copies; ``graph_slower`` also without CUDA.
    """

    step_tokens: int
    step_nbytes: int
    bytes_equal: bool
    step_ms: float | None
    store_slower: float | None
    store_call_ms: float | None
    load_slower: float | None
    load_call_ms: float | None
    graph_slower: float | None
    target: str | None  # "met" or "missed" by stores


def measure_engine(
    arena: Arena, *, blocks: int | None, rounds: int, advance: Callable[[], None]
) -> EngineMeasured:
    """Calls ``advance`` after each round. ``blocks``: of a step; None: those of ``STEP_TOKENS``.

    Blocks. Memory: that of ``measure_copies`` with a step's blocks, and 1.4 GB on an accelerator.
    """
    most = (STEP_TOKENS if arena.accelerator else HOST_TOKENS) // BLOCK_TOKENS
    copies = Copies(arena, CACHE, BLOCK_TOKENS, min(blocks or most, most))
    engine = _Engine(arena, copies.blocks * BLOCK_TOKENS)
    equal = copies.bytes_equal(copies.both)
    replay = engine.graph()
    replay()  # the first replay also uploads the graph
    replays = max(1, int(COVERED * arena.timed(copies.load) / arena.timed(replay)))
    for beside in (None, copies.store, copies.load):  # a warm-up
        engine.steps(beside)
    alone, stores, loads, graphs = [], [], [], []
    for _ in range(rounds):
        alone.append(engine.steps(None))
        stores.append(engine.steps(copies.store))
        loads.append(engine.steps(copies.load))
        graphs.append((engine.replayed(replay, replays, None), engine.replayed(replay, replays, copies.load)))
        advance()
    equal = equal and copies.bytes_equal(copies.both)
    tokens, nbytes = copies.blocks * BLOCK_TOKENS, copies.nbytes
    if not arena.accelerator:
        return EngineMeasured(tokens, nbytes, equal, None, None, None, None, None, None, None)
    step_s = statistics.median(taken.seconds for taken in alone) / STEPS
    store_slower, load_slower = (
        statistics.median(one.seconds / base.seconds - 1 for one, base in zip(beside, alone, strict=True))
        for beside in (stores, loads)
    )
    store_call_s, load_call_s = (
        statistics.median(taken.call_seconds for taken in beside) / STEPS for beside in (stores, loads)
    )
    graph_slower = None
    if arena.accelerator == "cuda":
        graph_slower = statistics.median(beside / base - 1 for base, beside in graphs)
    return EngineMeasured(
        tokens, nbytes, equal, step_s * 1e3, store_slower, store_call_s * 1e3, load_slower, load_call_s * 1e3,
        graph_slower, "met" if store_slower <= TARGET_SLOWER else "missed",
    )  # fmt: skip


@dataclass(frozen=True)
class _Taken:
    seconds: float  # until the engine's stream is done
    call_seconds: float  # in our calls


class _Engine:
    def __init__(self, arena: Arena, tokens: int) -> None:
        self._arena = arena
        self._products = PRODUCTS if arena.accelerator else HOST_PRODUCTS
        deep, wide = SHAPE if arena.accelerator else HOST_SHAPE
        self._weights = [self._random(deep, wide) for _ in range(WEIGHTS)]
        self._prompt, self._decoded = self._random(tokens, deep), self._random(GRAPH_TOKENS, deep)
        self._outs = {size: self._random(size, wide) for size in (tokens, GRAPH_TOKENS)}

    def steps(self, beside: Callable[[], None] | None) -> _Taken:
        """Run a few steps, each followed by ``beside``."""
        self._arena.wait()
        call_s, started = 0.0, time.perf_counter()
        for _ in range(STEPS):
            for number in range(self._products):
                self._product(self._prompt, number)
            if beside is not None:
                called = time.perf_counter()
                beside()
                call_s += time.perf_counter() - called
            self._arena.wait_for_engine()
        taken_s = time.perf_counter() - started
        self._arena.wait()
        return _Taken(taken_s, call_s)

    def graph(self) -> Callable[[], None]:
        """Replays a CUDA graph of products that read all weights; without CUDA, computes them."""
        self._decode()
        self._arena.wait()
        if self._arena.accelerator != "cuda":
            return self._decode
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        return graph.replay

    def replayed(self, replay: Callable[[], None], times: int, beside: Callable[[], None] | None) -> float:
        """Seconds of ``times`` replays on the engine's stream, begun with ``beside``."""
        self._arena.wait()
        if beside is not None:
            beside()
        started = time.perf_counter()
        for _ in range(times):
            replay()
        self._arena.wait_for_engine()
        taken_s = time.perf_counter() - started
        self._arena.wait()
        return taken_s

    def _decode(self) -> None:
        for number in range(WEIGHTS):
            self._product(self._decoded, number)

    def _product(self, left: torch.Tensor, number: int) -> None:
        torch.mm(left, self._weights[number % WEIGHTS], out=self._outs[len(left)])

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=self._arena.torch_device)
