"""Copies that take their time: what may be read, written, freed and reported when, on a device with late events."""

from __future__ import annotations

import random
import time

import pytest
import torch

from kvpool.transfer.device import Host, device_of
from kvpool.transfer.kv_cache import ABANDON_AFTER_S
from kvpool.transfer.memory import Staging
from kvpool.transfer.mover import Finished
from tests.support.deadlines import ends_within
from tests.support.mover import NOTHING, Bench, block, drive
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


def test_what_arrives_together_is_one_copy_and_what_arrives_later_another() -> None:
    at = Bench(slots=64, scratch_blocks=64)
    at.engine._memory.part_items = 2
    at.put(*range(1, 13))
    at.engine.load("job", [block(n, n) for n in range(1, 13)], timeout_s=60, max_s=60)
    assert len(at.store.under_way) == 6
    for _ in range(4):
        at.store.end()
    at.engine.poll()
    assert len(at.scatters) == 1, "four parts, one copy"
    at.device.go_on()
    assert at.holds(8, 8)
    assert not at.holds(9, 9)
    at.store.end_all()
    at.engine.poll()
    assert len(at.scatters) == 1
    at.device.go_on()
    assert [load.ok for load in at.engine.poll().loads] == [True]


def test_a_copy_for_two_loads_waits_for_the_later_one() -> None:
    at = Bench()
    at.put(1, 2)
    at.engine.load("one", [block(1, 1)], timeout_s=60, max_s=60)
    at.compute(2, 99)
    at.engine.load("two", [block(2, 2)], timeout_s=60, max_s=60)
    at.store.end_all()
    at.engine.poll()
    at.device.engine.go_on(1)  # as far as the first load's mark
    assert at.scatters.go_on() == 0
    at.device.go_on()
    assert [load.ok for load in at.engine.poll().loads] == [True, True]
    assert at.holds(2, 2)


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


def test_a_batch_larger_than_the_scratch_is_several_copies() -> None:
    at = Bench(slots=40, scratch_blocks=3)
    for n in range(1, 9):
        at.compute(n, n)
    at.engine.stage([block(n, n) for n in range(1, 9)], list(range(8)))
    assert len(at.gathers) == 3
    at.device.go_on()
    assert sorted(at.engine.poll().staged) == list(range(8))
    at.store.end_all()
    assert sorted(at.engine.poll().stored) == [(tag, True) for tag in range(8)]
    assert all(at.kept(n) for n in range(1, 9))


def test_a_store_that_gets_no_slot_lands_at_once() -> None:
    at = Bench(slots=4)
    at.engine.stage([block(n, n) for n in range(1, 7)], list(range(6)))
    finished = at.engine.poll()
    assert finished.staged == [3, 4, 5], "nothing of them is read"
    assert finished.stored == [(3, False), (4, False), (5, False)]
    assert at.engine.slots_in_use == 3
    at.engine.stage([block(7, 7)], [6])
    assert told(at.engine.poll()) == ([6], [(6, False)]), "a copy under way has its slots"


def test_a_load_that_is_cancelled_while_it_is_copied_is_reported_after_the_copy() -> None:
    at = Bench()
    at.put(5)
    at.engine.load("job", [block(5, 4)], timeout_s=60, max_s=60)
    at.store.end()
    at.engine.poll()
    at.engine.cancel("job")
    assert at.engine.poll() == NOTHING, "the copy may still write the block"
    assert at.engine.slots_in_use == 1
    at.device.go_on()
    (load,) = at.engine.poll().loads
    assert not load.ok
    assert at.engine.slots_in_use == 0


def test_a_load_that_failed_copies_nothing_more() -> None:
    at = Bench(slots=64, scratch_blocks=64)
    at.engine._memory.part_items = 1
    at.put(1)
    at.engine.load("job", [block(1, 1), block(2, 2)], timeout_s=60, max_s=60)
    at.store.end_all()
    (load,) = at.engine.poll().loads
    assert (load.ok, load.missing) == (False, [1])
    assert len(at.scatters) == 0
    assert at.engine.slots_in_use == 0


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


def test_after_close_the_engine_computes_behind_the_copies_under_way() -> None:
    at = Bench()
    at.put(5)
    at.compute(6, 6)
    at.engine.load("job", [block(5, 4)], timeout_s=60, max_s=60)
    at.engine.stage([block(6, 6)], [0])
    at.store.end()
    at.engine.poll()
    at.engine.close()
    assert at.engine.slots_in_use == 2, "both copies may still use theirs"
    at.compute(4, 44)  # the block of the load is the engine's again
    at.compute(6, 66)
    at.device.engine.go_on()
    assert not at.holds(4, 44)
    assert not at.holds(6, 66)
    at.device.go_on()
    assert at.holds(4, 44)
    assert at.holds(6, 66)
    at.engine._reap()
    assert at.engine.slots_in_use == 0
    assert at.store.under_way == [], "what had not landed is not sent"


def test_a_store_that_is_away_when_blocks_land_drops_them() -> None:
    at = Bench()
    at.engine.stage([block(6, 6), block(7, 7)], [0, 1])
    at.store.close()
    at.device.go_on()
    assert told(at.engine.poll()) == ([0, 1], [(0, False), (1, False)])
    assert at.engine.slots_in_use == 0


def test_a_slot_is_returned_once() -> None:
    staging = Staging(100, 4)
    slots = staging.acquire(2)
    staging.release(slots)
    with pytest.raises(AssertionError, match="twice"):
        staging.release([slots[0]])
    assert staging.acquire(4) == [0, 1, 2, 3], "neighbours, lowest first"


def test_the_cpu_has_no_stream() -> None:
    assert isinstance(device_of(torch.device("cpu")), Host)


@pytest.mark.parametrize("seed", range(25))
def test_blocks_are_read_and_written_only_while_they_are_ours(seed: int) -> None:
    drive(seed)


@pytest.mark.soak
@pytest.mark.timeout(SEARCH_S + 120)
def test_blocks_are_read_and_written_only_while_they_are_ours_for_long() -> None:
    ends_s = time.monotonic() + SEARCH_S
    while time.monotonic() < ends_s:
        drive(random.randrange(1 << 32), 2000)
