"""Copies that take their time: what may be read, written, freed and reported when, on a device with late events."""

from __future__ import annotations

import random
import time

import pytest
import torch

from kvpool.transfer.device import Device, device_of
from kvpool.transfer.job import Finished
from kvpool.transfer.kv_memory import ABANDON_AFTER_S
from kvpool.transfer.memory import Staging
from tests.support.deadlines import ends_within
from tests.support.mover import NOTHING, Bench, block, drive, run
from tests.support.soak import SEARCH_S


def told(finished: Finished) -> tuple[list[int], list[tuple[int, bool]]]:
    """(staged, stored), of what ended without a load."""
    assert not finished.loads
    return finished.staged, finished.stored


def test_a_block_is_read_when_it_has_been_computed_and_free_when_it_has_landed() -> None:
    at = Bench()
    at.compute(3, 7)
    at.engine.stage([block(7, 3)], [0])
    at.compute(3, 99)  # the next step's, which the engine may only give when the block is free
    assert at.gathers.go_on() == 0, "the forward is not over"
    assert at.engine.poll() == NOTHING
    assert at.store.under_way == []
    at.device.engine.go_on(2)  # the forward and the mark behind it
    assert at.engine.poll() == NOTHING, "computed, but not copied"
    assert at.gathers.go_on() == 1
    at.device.go_on()
    assert told(at.engine.poll()) == ([0], [])
    at.store.end()
    assert told(at.engine.poll()) == ([], [(0, True)])
    assert at.kept(7)
    assert not at.engine.busy
    assert at.engine.slots_in_use == 0


def test_a_load_is_reported_when_its_blocks_are_written_and_not_before_those_may_be() -> None:
    at = Bench()
    at.put(5)
    at.compute(4, 1)  # what had the block before
    at.engine.load("job", [block(5, 4)], timeout_s=60, max_s=60)
    at.store.end()
    assert at.engine.poll() == NOTHING
    assert at.engine.slots_in_use == 1
    assert at.scatters.go_on() == 0, "the one before may still use the block"
    at.device.engine.go_on()
    assert at.engine.poll() == NOTHING
    assert at.scatters.go_on() == 1
    (load,) = at.engine.poll().loads
    assert load.ok
    assert at.holds(4, 5)
    assert at.engine.slots_in_use == 0


def test_what_is_not_held_is_copied_before_the_engine_goes_on() -> None:
    at = Bench()
    at.compute(3, 7)
    at.engine.stage([block(7, 3)], [0])
    at.engine.hold_engine()
    at.compute(3, 99)
    at.device.engine.go_on()
    assert at.holds(3, 7), "the next step waits for the copy"
    at.device.go_on()
    assert at.holds(3, 99)
    at.engine.poll()
    at.store.end()
    assert at.engine.poll().stored == [(0, True)]
    assert at.kept(7)


def test_what_lets_go_of_memory_says_whether_all_copies_have_ended() -> None:
    at = Bench()
    at.put(5)
    at.compute(3, 7)
    at.engine.stage([block(7, 3)], [0])
    at.engine.load("copied", [block(5, 4)], timeout_s=60, max_s=60)
    at.store.end()
    at.engine.poll()
    at.engine.load("fetched", [block(5, 6)], timeout_s=60, max_s=60)
    assert not at.engine.let_go(0.01)
    at.device.go_on()
    assert at.engine.let_go(0)
    at.store.end_all()
    at.device.go_on()
    finished = run(at.engine)
    assert [(load.job, load.ok) for load in finished.loads] == [("copied", False), ("fetched", False)]
    assert finished.stored == [(0, True)]
    assert at.kept(7)
    assert at.holds(6, 0)


def test_a_load_past_its_deadline_waits_for_its_copy_and_no_longer() -> None:
    at = Bench()
    at.put(5)
    at.engine.load("job", [block(5, 4)], timeout_s=0.05, max_s=0.1)
    at.store.end()
    at.engine.poll()
    time.sleep(0.1 + ABANDON_AFTER_S + 0.1)
    assert at.engine.poll() == NOTHING
    at.device.go_on()
    (load,) = at.engine.poll().loads
    assert not load.ok, "too slow"
    assert at.engine.slots_in_use == 0


def test_waits_for_copies_have_deadlines() -> None:
    at = Bench()
    at.put(5)
    at.engine.load("job", [block(5, 4)], timeout_s=60, max_s=60)
    at.store.end()
    at.engine.poll()
    with ends_within(0.05 + 0.05 + ABANDON_AFTER_S):
        assert at.engine.poll(wait_s=0.05) == NOTHING
        assert not at.engine.drain(0.05)
        at.engine.stage([block(6, 6)], [0])
        at.engine.close()


def test_a_slot_is_returned_once() -> None:
    staging = Staging(100, 4)
    slots = staging.acquire(2)
    staging.release(slots)
    with pytest.raises(AssertionError, match="twice"):
        staging.release([slots[0]])
    assert staging.acquire(4) == [0, 1, 2, 3], "neighbours, lowest first"


def test_the_cpu_has_no_stream() -> None:
    assert type(device_of(torch.device("cpu"))) is Device


@pytest.mark.parametrize("seed", range(25))
def test_blocks_are_read_and_written_only_while_they_are_ours(seed: int) -> None:
    drive(seed)


@pytest.mark.soak
@pytest.mark.timeout(SEARCH_S + 120)
def test_blocks_are_read_and_written_only_while_they_are_ours_for_long() -> None:
    ends_s = time.monotonic() + SEARCH_S
    while time.monotonic() < ends_s:
        drive(random.randrange(1 << 32), 2000)
