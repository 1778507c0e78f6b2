"""Too little of something: slots, scratch, memory of the device or of the host, and 32 bits of an index."""

from __future__ import annotations

import gc

import pytest
import torch

from kvpool import metrics
from kvpool.errors import ConfigError
from kvpool.metrics import Counters
from kvpool.store import Store
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.device import device_of
from kvpool.transfer.kv_memory import Block
from kvpool.transfer.memory import Staging, slot_size
from tests.support.block_copies import Copies, content
from tests.support.devices import ACCELERATED, DEVICE, RunningDevice, keep_busy, needs_cuda
from tests.support.mover import run
from tests.support.scripted_store import key

pytestmark = pytest.mark.gpu

BLOCKS = 100
NUMBERS = 8 << 10 if ACCELERATED else 48  # elements of four bytes of a layer's block
PER_RECORD = 3


def caches(device: torch.device, seed: int) -> list[list[torch.Tensor]]:
    """Two groups; the blocks of the second one have a third of the bytes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(3, BLOCKS, NUMBERS), (1, BLOCKS, NUMBERS)]
    return [
        list(torch.randint(-99, 99, size, dtype=torch.int32, generator=generator).to(device))
        for size in sizes
    ]


def records(numbers: range, shift: int = 0) -> list[Block]:
    """Three blocks each, of both groups."""
    return [
        Block(
            key(n, g), g, tuple(1 + (PER_RECORD * n + shift + at) % (BLOCKS - 1) for at in range(PER_RECORD))
        )
        for g in range(2)
        for n in numbers
    ]


@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("scratch_nbytes", [1, 70 * NUMBERS])
def test_more_than_staging_and_scratch_hold_goes_in_turns(
    store: Store, device: torch.device, slots: int, scratch_nbytes: int
) -> None:
    """A scratch of less than a record is made as large as one; what gets no slot is not stored, and a load waits."""
    source, target = caches(device, 1), caches(device, 2)
    at_most = slots * slot_size(BlockCopier(source[0], PER_RECORD).payload_nbytes)

    def mover(layers: list[list[torch.Tensor]], staging_nbytes: int) -> KVCacheMover:
        copiers = [BlockCopier(group, PER_RECORD) for group in layers]
        return KVCacheMover(
            store,
            copiers,
            staging_nbytes=staging_nbytes,
            max_store_nbytes_per_s=0,
            counters=Counters(),
            device=RunningDevice(scratch_nbytes),
        )

    writer, reader = mover(source, at_most), mover(target, at_most)
    wanted = records(range(16))
    keep_busy(0.05)  # so that no slot is free again while more is asked for
    writer.stage(wanted, list(range(32)))
    stored = dict(run(writer).stored)
    assert len(stored) == 32
    assert sum(stored.values()) == slots - 1, "one is kept for loads"
    skipped = writer._counters.take()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/staging_full"]
    assert skipped == 32 - sum(stored.values())
    left = [block for tag, block in enumerate(wanted) if not stored[tag]]
    while left:
        writer.stage(left[:1], [0])
        assert run(writer).stored == [(0, True)]
        del left[0]
    untouched = [layer[97:].clone() for layer in target[0]]
    for job in "ab":
        reader.load(job, records(range(16), shift=48), timeout_s=60, max_s=60)
    assert sorted((load.job, load.ok) for load in run(reader).loads) == [("a", True), ("b", True)]
    for ours, theirs in zip(target, source, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine[49:97], other[1:49])
    assert all(torch.equal(layer[97:], old) for layer, old in zip(target[0], untouched, strict=True))
    assert writer.slots_in_use == reader.slots_in_use == 0
    writer.close()
    reader.close()


def test_what_host_or_device_have_no_room_for_is_refused_in_a_sentence(device: torch.device) -> None:
    there = device_of(device)
    with pytest.raises(ConfigError, match="set a lower staging_nbytes"):
        Staging(1 << 30, 1 << 20, there.pinned)
    with pytest.raises(ConfigError, match="no 1024TiB left for copies of KV blocks"):
        there.copy_stream(1 << 50)


@pytest.mark.parametrize("elements", [7, 16, 17, 1000])
def test_staging_is_no_larger_than_it_was_set(store: Store, device: torch.device, elements: int) -> None:
    """Torch pins the next power of two: a byte more than 2 GiB would be 4."""
    copier = BlockCopier([torch.zeros((4, elements), dtype=torch.int8, device=device)])
    mover = KVCacheMover(
        store, [copier], staging_nbytes=1 << 20, max_store_nbytes_per_s=0, counters=Counters()
    )
    assert (1 << 20) - mover.staging.slot_nbytes < mover.staging.tensor.nbytes <= 1 << 20
    mover.close()


@needs_cuda
def test_copies_need_nothing_of_a_device_that_is_full(store: Store, device: torch.device) -> None:
    layers = caches(device, 1)
    mover = KVCacheMover(
        store,
        [BlockCopier(group, PER_RECORD) for group in layers],
        staging_nbytes=64 << 20,
        max_store_nbytes_per_s=0,
        counters=Counters(),
    )
    wanted, before = records(range(16)), [[layer.clone() for layer in group] for group in layers]
    taken: list[torch.Tensor] = []
    try:
        for nbytes in (1 << 30, 64 << 20, 2 << 20, 1 << 20, 64 << 10, 512):
            while len(taken) < 10_000:
                try:
                    taken.append(torch.empty(nbytes, dtype=torch.uint8, device=device))
                except torch.OutOfMemoryError:
                    break
        free, _ = torch.cuda.mem_get_info(device)
        assert free < 64 << 20
        with pytest.raises(ConfigError, match="lower --gpu-memory-utilization"):
            device_of(device).copy_stream(64 << 20)
        allocated = torch.cuda.memory_stats(device)["num_device_alloc"]
        mover.stage(wanted, list(range(32)))
        assert sorted(run(mover).stored) == [(tag, True) for tag in range(32)]
        mover.load("job", records(range(16), shift=48), timeout_s=60, max_s=60)
        assert [load.ok for load in run(mover).loads] == [True]
        assert torch.cuda.memory_stats(device)["num_device_alloc"] == allocated
    finally:
        taken.clear()
        gc.collect()
        torch.cuda.empty_cache()
    for group, old in zip(layers, before, strict=True):
        for layer, was in zip(group, old, strict=True):
            assert torch.equal(layer[49:97], was[1:49])
            assert torch.equal(layer[1:49], was[1:49])
    mover.close()


@pytest.mark.parametrize("width", [1, 8])
def test_blocks_beyond_32_bits_of_an_index(device: torch.device, width: int) -> None:
    """A stack of three layers of more than 2**31 elements of ``width`` bytes; on the CPU few of its pages are touched.

    Where blocks have an odd number of bytes, elements are bytes.
    """
    block_nbytes = (1 << 20) + (1 if width == 1 else 0)
    blocks = ((1 << 31) + (1 << 28)) * width // 3 // block_nbytes
    try:
        whole = torch.empty(3 * blocks * block_nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        pytest.skip(f"{3 * blocks * block_nbytes >> 30} GiB are more than {DEVICE} has: {error}")
    assert whole.numel() // width > 1 << 31
    layers = list(whole.view(3, blocks, block_nbytes))
    ids = [blocks - 1, 2, blocks - 2, blocks // 2]
    places = [blocks // 2 + 1, blocks - 4, 4, blocks - 3]
    generator = torch.Generator().manual_seed(width)
    for block in ids:
        for layer in layers:
            layer[block] = torch.randint(0, 256, (block_nbytes,), dtype=torch.uint8, generator=generator)
    copies = Copies(layers, len(ids))
    assert copies.copier.launches == 1
    staging = Staging(copies.copier.payload_nbytes, len(ids), device_of(device).pinned)
    rows = [content(layers, block) for block in ids]
    copies.rehearse()
    copies.gather(ids, staging, range(len(ids)))
    assert [bytes(staging.view(slot, copies.copier.payload_nbytes)) for slot in range(len(ids))] == rows
    copies.scatter(places, staging, range(len(ids)))
    for block, place, row in zip(ids, places, rows, strict=True):
        assert content(layers, block) == row
        assert content(layers, place) == row
