"""Copies beside an engine that computes: which bytes are read, and when blocks may be written.

Before what a test looks at, the engine's stream has work for a time (``BUSY_S``), so that a copy that did not wait for
the engine would be early by as much. On the CPU nothing is late; there ``slow_device`` shows the same orders.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from kvpool.transfer import BlockCopier
from kvpool.transfer.device import DONE, Event, device_of
from kvpool.transfer.kv_memory import Block
from kvpool.transfer.memory import Staging
from tests.support.devices import (
    LAYERS,
    NUMBERS,
    Engine,
    RunningDevice,
    assert_contents,
    keep_busy,
    wait_for_all,
)
from tests.support.mover import drive, run
from tests.support.scripted_store import key

pytestmark = pytest.mark.gpu

BUSY_S = 0.2
BLOCKS = 64
COPIES = 400


def named(contents: dict[int, int]) -> list[Block]:
    return [Block(key(content, 0), 0, (block,)) for block, content in contents.items()]


def test_a_store_has_what_was_computed_before_it_and_not_what_is_written_after(engine: Engine) -> None:
    """As with write-back: no block is held, and the engine writes over them in the very next step."""
    first, second = range(1, 31), range(101, 131)
    blocks = list(range(1, 31))
    keep_busy(BUSY_S)
    engine.compute(dict(zip(blocks, first, strict=True)))
    engine.mover.stage(named(dict(zip(blocks, first, strict=True))), list(range(30)))
    engine.mover.hold_engine()
    engine.compute(dict(zip(blocks, second, strict=True)))
    assert sorted(run(engine.mover).stored) == [(tag, True) for tag in range(30)]
    engine.holds(dict(zip(blocks, second, strict=True)))
    places = dict(zip(range(31, 61), first, strict=True))
    engine.mover.load("job", named(places), timeout_s=60, max_s=60)
    assert [load.ok for load in run(engine.mover).loads] == [True]
    engine.holds(places)
    engine.holds(dict(zip(blocks, second, strict=True)))


def test_before_memory_goes_copies_have_ended_and_loads_have_failed(engine: Engine) -> None:
    """Whatever is in it then, no stream of ours touches it; what was computed before is stored all the same."""
    first, second = dict(zip(range(1, 31), range(1, 31), strict=True)), dict.fromkeys(range(1, 61), 99)
    engine.compute(first)
    engine.mover.stage(named(first), list(range(30)))
    assert all(ok for _, ok in run(engine.mover).stored)
    more = dict(zip(range(1, 31), range(101, 131), strict=True))
    keep_busy(BUSY_S)
    engine.compute(more)
    engine.mover.stage(named(more), list(range(30)))
    engine.mover.load(
        "job", named(dict(zip(range(31, 61), range(1, 31), strict=True))), timeout_s=60, max_s=60
    )
    assert engine.mover.let_go(60)
    engine.compute(second)  # waits for no copy
    finished = run(engine.mover)
    assert sorted(finished.stored) == [(tag, True) for tag in range(30)]
    assert [load.ok for load in finished.loads] == [False]
    engine.holds(second)
    places = dict(zip(range(61, 91), range(101, 131), strict=True))
    engine.mover.load("later", named(places), timeout_s=60, max_s=60)
    assert [load.ok for load in run(engine.mover).loads] == [True]
    engine.holds(places)


@pytest.mark.parametrize("seed", range(10))
def test_blocks_are_read_and_written_only_while_they_are_ours(device: torch.device, seed: int) -> None:
    drive(seed, device=RunningDevice)


@pytest.mark.parametrize("seed", range(3))
def test_copies_of_many_lanes_keep_the_order_that_their_events_say(device: torch.device, seed: int) -> None:
    """Both directions on six streams at random: a copy waits for those that had its blocks and slots, and no other."""
    chance, there = random.Random(seed), device_of(device)
    cache = torch.zeros((LAYERS, BLOCKS, NUMBERS), dtype=torch.int32, device=device)
    copier = BlockCopier(list(cache))
    staging = Staging(copier.payload_nbytes, BLOCKS, there.pinned)
    staging.acquire(BLOCKS)
    streams = [there.copy_stream(5 * copier.scratch_nbytes) for _ in range(6)]
    in_blocks, in_slots = [0] * BLOCKS, [0] * BLOCKS
    staging.tensor.zero_()
    of_blocks: list[Event] = [DONE] * BLOCKS
    of_slots: list[Event] = [DONE] * BLOCKS
    for content in range(1, COPIES):
        blocks = chance.sample(range(1, BLOCKS), chance.randint(1, 5))
        slots = chance.sample(range(BLOCKS), len(blocks))
        after = {of_blocks[block] for block in blocks} | {of_slots[slot] for slot in slots}
        kind = chance.choice(("compute", "gather", "scatter"))
        if kind == "compute":
            for event in {of_blocks[block] for block in blocks} - {DONE}:
                there.follow(event)
            keep_busy(chance.random() * 1e-3)
            for block in blocks:
                cache[:, block].fill_(content)
                in_blocks[block] = content
            ready = there.mark()
            for block in blocks:
                of_blocks[block] = ready
            continue
        move = copier.gather if kind == "gather" else copier.scatter
        copy = partial(move, blocks, staging, slots)
        ready = chance.choice(streams).submit(copy, [event for event in after if event is not DONE])
        for block, slot in zip(blocks, slots, strict=True):
            if kind == "gather":
                in_slots[slot] = in_blocks[block]
            else:
                in_blocks[block] = in_slots[slot]
            of_blocks[block] = of_slots[slot] = ready
    wait_for_all()
    assert_contents(list(cache.transpose(0, 1)), in_blocks)
    staged = staging.tensor.view(BLOCKS, -1)[:, : copier.payload_nbytes].view(torch.int32)
    assert_contents(list(staged), in_slots)
