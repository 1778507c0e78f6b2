"""Copies that take their time: what may be read, written, freed and reported when, on a device with late events.

Over 400 lines because it holds one model of a device and the machine that drives it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvpool.metrics import Counters
from kvpool.store import open_store
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.kv_cache import ABANDON_AFTER_S, Block
from kvpool.transfer.lane import Host, device_of
from kvpool.transfer.mover import Finished
from kvpool.transfer.staging import Staging
from tests.conftest import SOAK_S, eventually
from tests.transfer.scripted_store import ScriptedStore
from tests.transfer.slow_device import SlowDevice
from tests.transfer.test_mover import key, run

BLOCKS = 24
NUMBERS = 64  # elements of a block in each of two layers
PAYLOAD_NBYTES = 2 * NUMBERS * 4


class Bench:
    """An engine on a slow device and a scripted store, with one group of two layers."""

    def __init__(self, slots: int = 8, scratch_blocks: int = 3, groups: int = 1) -> None:
        self.caches = [
            [torch.zeros((BLOCKS, NUMBERS), dtype=torch.int32) for _ in "ab"] for _ in range(groups)
        ]
        self.device = SlowDevice(scratch_blocks * PAYLOAD_NBYTES)
        self.store = ScriptedStore()
        self.engine = KVCacheMover(
            self.store,
            [BlockCopier(layers) for layers in self.caches],
            staging_nbytes=slots * PAYLOAD_NBYTES,
            max_store_nbytes_per_s=0,
            counters=Counters(),
            device=self.device,
        )
        self.gathers, self.scatters = (lane.stream for lane in self.device.lanes)

    def compute(self, block_id: int, content: int, group: int = 0) -> None:
        """Have the engine's stream write a block."""

        def write() -> None:
            for layer in self.caches[group]:
                layer[block_id] = content

        self.device.engine.give(write)

    def holds(self, block_id: int, content: int, group: int = 0) -> bool:
        return all(bool((layer[block_id] == content).all()) for layer in self.caches[group])

    def kept(self, content: int, group: int = 0) -> bool:
        return self.store.records.get(key(content, group)) == payload(content)

    def put(self, *contents: int) -> None:
        """As if another engine had stored them."""
        self.store.records |= {key(content, 0): payload(content) for content in contents}


def payload(content: int) -> bytes:
    return torch.full((2 * NUMBERS,), content, dtype=torch.int32).numpy().tobytes()


def block(content: int, block_id: int, group: int = 0) -> Block:
    return Block(key(content, group), group, (block_id,))


NOTHING = Finished([], [], [])


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
    at.engine.load("job", [block(5, 4)], timeout_s=5, max_s=20)
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
    at.engine.load("job", [block(n, n) for n in range(1, 13)], timeout_s=5, max_s=20)
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
    at.engine.load("one", [block(1, 1)], timeout_s=5, max_s=20)
    at.compute(2, 99)
    at.engine.load("two", [block(2, 2)], timeout_s=5, max_s=20)
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
    at.engine.load("job", [block(5, 4)], timeout_s=5, max_s=20)
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
    at.engine.load("job", [block(1, 1), block(2, 2)], timeout_s=5, max_s=20)
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
    at.engine.load("job", [block(5, 4)], timeout_s=5, max_s=20)
    at.store.end()
    at.engine.poll()
    started = time.monotonic()
    assert at.engine.poll(wait_s=0.05) == NOTHING
    assert not at.engine.drain(0.05)
    at.engine.stage([block(6, 6)], [0])
    at.engine.close()
    assert time.monotonic() - started < 0.05 + 0.05 + ABANDON_AFTER_S + 0.5


def test_after_close_the_engine_computes_behind_the_copies_under_way() -> None:
    at = Bench()
    at.put(5)
    at.compute(6, 6)
    at.engine.load("job", [block(5, 4)], timeout_s=5, max_s=20)
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


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator on this machine")
def test_an_accelerator_moves_the_same_bytes_behind_what_it_computes(tmp_path: Path) -> None:
    driven = torch.accelerator.current_accelerator()
    cache = torch.zeros((4, 65, 2, 16, 8, 128), dtype=torch.bfloat16, device=driven)
    copiers = [BlockCopier(list(cache))]
    with open_store(f"file://{tmp_path}/pool") as store:
        engine = KVCacheMover(
            store, copiers, staging_nbytes=64 << 20, max_store_nbytes_per_s=0, counters=Counters()
        )
        # Long enough that a copy which did not wait for it would read zeros.
        product = torch.randn((4096, 4096), device=driven)
        for _ in range(20):
            product = (product @ product).clamp(-1, 1)
        cache.copy_(torch.randn(cache.shape, device=driven))
        engine.stage([block(n, n) for n in range(1, 33)], list(range(32)))
        assert sorted(run(engine).stored) == [(tag, True) for tag in range(32)]
        cache[:, 33:] = 0
        engine.load("job", [block(n, 32 + n) for n in range(1, 33)], timeout_s=5, max_s=20)
        assert [load.ok for load in run(engine).loads] == [True]
        assert torch.equal(cache[:, 1:33], cache[:, 33:])
        assert bool(cache[:, 1:].any())
        engine.close()


# A driver: random steps of everything at once, with a scheduler that gives blocks away as early as it may.


@dataclass
class _Model:
    """What must be true. The free blocks are those that neither an engine's request nor a copy has."""

    at: Bench
    random: random.Random
    free: list[int] = field(default_factory=lambda: list(range(1, BLOCKS)))
    storing: dict[int, tuple[int, int]] = field(default_factory=dict)  # tag: (block, content), not landed
    sending: dict[int, int] = field(default_factory=dict)  # tag: content, landed
    loading: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # job: (block, content)
    stored: set[int] = field(default_factory=set)
    owned: dict[int, int] = field(default_factory=dict)  # block: what its new owner has computed in it
    contents: int = 0
    tags: int = 0

    def take(self, count: int) -> list[int]:
        """Blocks for a request, any that are free, and what it computed in them before is forgotten."""
        self.random.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        for one in taken:
            self.owned.pop(one, None)
        return taken

    def store(self) -> None:
        """A step that fills some blocks, whose request is over at once."""
        blocks, tags = [], []
        for block_id in self.take(self.random.randint(1, 5)):
            self.contents += 1
            content = self.contents if self.random.random() < 0.8 else self.random.randint(1, self.contents)
            self.at.compute(block_id, content)
            self.storing[self.tags] = (block_id, content)
            blocks.append(block(content, block_id))
            tags.append(self.tags)
            self.tags += 1
        self.at.engine.stage(blocks, tags)

    def load(self) -> None:
        there = sorted(self.stored)
        if not there:
            return
        pairs = [
            (block_id, self.random.choice(there) if self.random.random() < 0.97 else self.contents + 1)
            for block_id in self.take(self.random.randint(1, 6))
        ]
        if pairs:
            self.tags += 1
            job = f"job {self.tags}"
            self.loading[job] = pairs
            self.at.engine.load(job, [block(n, block_id) for block_id, n in pairs], timeout_s=60, max_s=60)

    def poll(self) -> None:
        finished = self.at.engine.poll()
        for tag in finished.staged:
            block_id, self.sending[tag] = self.storing.pop(tag)
            self.reuse(block_id)
        for tag, ok in finished.stored:
            content = self.sending.pop(tag)  # landed before, and neither twice
            if ok:
                self.stored.add(content)
        for load in finished.loads:
            for block_id, content in self.loading.pop(load.job):
                assert not load.ok or self.at.holds(block_id, content), f"{load} without its bytes"
                self.reuse(block_id)

    def reuse(self, block_id: int) -> None:
        """A block is free: whoever is next writes it at once. Nothing of ours may read or write it any more."""
        self.owned[block_id] = -self.random.randint(1, 1 << 30)
        self.at.compute(block_id, self.owned[block_id])
        self.free.append(block_id)

    def end_batch(self) -> None:
        if batches := self.at.store.under_way:
            self.at.store.end(self.random.randrange(len(batches)), fault=self.random.random() < 0.03)

    def step(self) -> None:
        lanes, engine = self.at.device.lanes, self.at.device.engine
        actions = [
            (1, self.store),
            (2, self.load),
            (8, self.poll),
            (8, self.end_batch),
            (6, lambda: engine.go_on(self.random.randint(1, 8))),
            (4, lambda: self.random.choice(lanes).stream.go_on(1)),
            (0.5, lambda: self.at.engine.cancel(self.random.choice(["none", *self.loading]))),
        ]
        self.random.choices([action for _, action in actions], [weight for weight, _ in actions])[0]()
        assert 0 <= self.at.engine.slots_in_use <= self.at.engine.staging.slots

    def close(self) -> None:
        """The engine ends in the middle of it, and every block is somebody else's at once."""
        self.at.engine.close()
        for block_id in [block_id for block_id, _ in self.storing.values()]:
            self.reuse(block_id)
        for block_id in [block_id for pairs in self.loading.values() for block_id, _ in pairs]:
            self.reuse(block_id)
        self.at.device.go_on()
        self.at.store.end_all()
        self.at.engine._reap()
        self.check()

    def end(self) -> None:
        def over() -> bool:
            self.at.device.go_on()
            self.at.store.end_all()
            self.poll()
            return not self.at.engine.busy

        assert eventually(over)
        self.at.device.go_on()
        assert not self.storing
        assert not self.sending
        assert not self.loading
        self.check()

    def check(self) -> None:
        assert self.at.engine.slots_in_use == 0
        assert sorted(self.free) == list(range(1, BLOCKS))
        for block_id, content in self.owned.items():
            assert self.at.holds(block_id, content), f"block {block_id} was written after it was given away"
        for content in range(1, self.contents + 1):
            if key(content, 0) in self.at.store.records:
                assert self.at.kept(content), f"record {content} was read too early or too late"


def drive(seed: int, steps: int = 400) -> None:
    chance = random.Random(seed)
    at = Bench(slots=chance.randint(2, 16), scratch_blocks=chance.randint(1, 4))
    model = _Model(at, chance)
    try:
        for _ in range(steps):
            model.step()
        if seed % 5:
            model.end()
        else:
            model.close()
    except BaseException:
        print(f"drive({seed}, {steps})")
        raise


@pytest.mark.parametrize("seed", range(25))
def test_blocks_are_read_and_written_only_while_they_are_ours(seed: int) -> None:
    drive(seed)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 120)
def test_blocks_are_read_and_written_only_while_they_are_ours_for_long() -> None:
    ends_s = time.monotonic() + SOAK_S
    while time.monotonic() < ends_s:
        drive(random.randrange(1 << 32), 2000)
