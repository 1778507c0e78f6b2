"""What copies cost an engine in correctness: CUDA graphs beside them, and no call of ours that waits for the device."""

from __future__ import annotations

import pytest
import torch

from kvpool.metrics import Counters
from kvpool.store import Store
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.kv_memory import Block
from tests.support.devices import NUMBERS, Engine, keep_busy, needs_cuda, wait_for_all
from tests.support.mover import run
from tests.support.scripted_store import key

pytestmark = pytest.mark.gpu

REPLAYS = 60
SIZE = 1024  # of the graph's matrices


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """Its blocks hold anything."""
    engine.cache.random_(-99, 99)
    return engine


def blocks(numbers: range, shift: int = 0) -> list[Block]:
    return [Block(key(number, 0), 0, (number + shift,)) for number in numbers]


@needs_cuda
def test_a_graph_that_is_replayed_beside_loads_gives_what_eager_gives(
    engine: Engine, device: torch.device
) -> None:
    """The graph turns one static buffer into the next and writes a block of the cache, loads write others.

    Its products are with a permutation, so they are exact whatever kernel computes them.
    """
    mover, numbers = engine.mover, range(1, 41)
    mover.stage(blocks(numbers), list(numbers))
    run(mover)
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))
    permutation = torch.eye(SIZE)[order].to(device)
    state = torch.randint(-99, 99, (SIZE, SIZE)).to(device, torch.float32)
    eager, written = state.clone(), engine.cache[:, 120]

    def step(buffer: torch.Tensor) -> None:
        for _ in range(4):
            buffer.copy_(buffer @ permutation)
        written.copy_(buffer.view(-1)[:NUMBERS].to(torch.int32).expand_as(written))

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step(state.clone())
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    mover.load("before", blocks(numbers, shift=40), timeout_s=60, max_s=60)  # on its way while it is captured
    with torch.cuda.graph(graph):
        step(state)
    loads = 0
    for at in range(REPLAYS):
        graph.replay()
        if not mover.busy:
            mover.load(at, blocks(numbers, shift=40), timeout_s=60, max_s=60)
        loads += sum(load.ok for load in mover.poll().loads)
        if at % 5 == 4:
            wait_for_all()  # else all replays are given before the first load is there
    loads += sum(load.ok for load in run(mover).loads)
    replayed = written.clone()
    for _ in range(REPLAYS):
        step(eager)
    assert loads > 2
    assert torch.equal(state, eager)
    assert torch.equal(engine.cache[:, 41:81], engine.cache[:, 1:41])
    assert torch.equal(replayed, written)


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device_and_nothing_is_allocated_after_start_up(
    engine: Engine, device: torch.device
) -> None:
    """Torch raises at calls of its own that wait; allocations, which wait in the driver, are counted."""
    mover, numbers = engine.mover, range(1, 41)

    def both_ways() -> bool:
        keep_busy(5e-3)
        mover.stage(blocks(numbers), list(numbers))
        mover.hold_engine()
        mover.load("job", blocks(numbers, shift=40), timeout_s=60, max_s=60)
        return all(load.ok for load in run(mover).loads)

    both_ways()  # its load may be there before its store
    pinned = torch.cuda.host_memory_stats()["num_host_alloc"]
    allocated = torch.cuda.memory_stats(device)["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert all(both_ways() for _ in range(10))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(device)["num_device_alloc"] == allocated
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == pinned
    assert torch.equal(engine.cache[:, 41:81], engine.cache[:, 1:41])


@needs_cuda
def test_submissions_return_before_the_device_has_come_to_them(engine: Engine) -> None:
    mover, numbers = engine.mover, range(1, 41)
    mover.stage(blocks(numbers), list(numbers))
    run(mover)
    before = torch.cuda.Event()
    keep_busy(0.5)
    before.record()
    mover.stage(blocks(numbers), list(numbers))
    mover.hold_engine()
    mover.load("job", blocks(numbers, shift=40), timeout_s=60, max_s=60)
    mover.poll()
    assert not before.query(), "something waited for what the engine was given"
    assert [load.ok for load in run(mover).loads] == [True]


def test_an_engine_may_have_made_another_device_torchs_default(store: Store, device: torch.device) -> None:
    """Where a tensor belongs is said wherever one is made: ids, staging and scratch."""
    with torch.device("meta"):
        copier = BlockCopier([torch.randint(-99, 99, (9, 5), dtype=torch.int32, device="cpu").to(device)])
        mover = KVCacheMover(
            store, [copier], staging_nbytes=4096, max_store_nbytes_per_s=0, counters=Counters()
        )
        mover.stage(blocks(range(1, 3)), [1, 2])
        assert run(mover).stored == [(1, True), (2, True)]
        mover.load("job", blocks(range(1, 3), shift=4), timeout_s=60, max_s=60)
        assert [load.ok for load in run(mover).loads] == [True]
        mover.close()


def test_copies_are_made_in_and_out_of_inference_mode(store: Store, device: torch.device) -> None:
    """vLLM steps in it, and begins and ends outside of it."""
    with torch.inference_mode():
        engine = Engine(store, device)
        engine.cache.random_(-99, 99)
    engine.mover.stage(blocks(range(1, 3)), [1, 2])
    with torch.inference_mode():
        assert run(engine.mover).stored == [(1, True), (2, True)]
        engine.mover.load("in", blocks(range(1, 3), shift=4), timeout_s=60, max_s=60)
    assert [load.ok for load in run(engine.mover).loads] == [True]
    assert torch.equal(engine.cache[:, 5:7], engine.cache[:, 1:3])
    engine.mover.close()
