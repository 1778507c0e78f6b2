"""A mover on a device and a store that a test drives, and a driver of random steps: loads, stores, audits.

An engine computes one number a block. The driver's scheduler gives blocks away as early as it may.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from kvpool.metrics import Counters
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.job import Finished
from kvpool.transfer.kv_memory import Block
from tests.support.deadlines import eventually
from tests.support.devices import DEVICE, RunningDevice, SlowDevice
from tests.support.scripted_store import ScriptedStore, key


def run(engine: KVCacheMover, *, within_s: float = 60.0) -> Finished:
    """Poll until nothing is under way; everything that ended."""
    all_of_it = Finished([], [], [])

    def over() -> bool:
        finished = engine.poll()
        all_of_it.loads.extend(finished.loads)
        all_of_it.stores.extend(finished.stores)
        return not engine.busy

    assert eventually(over, within_s=within_s)
    return all_of_it


BLOCKS = 24
NUMBERS = 64  # elements of a block in each of two layers
MOST = 1 << 24  # that a float holds
PAYLOAD_NBYTES = 2 * NUMBERS * 4


class Bench:
    """A mover on a device, whose stream the test is the engine of, and a scripted store; groups of two layers."""

    def __init__(
        self,
        slots: int = 8,
        scratch_blocks: int = 3,
        groups: int = 1,
        device: type[SlowDevice] | type[RunningDevice] = SlowDevice,
    ) -> None:
        where = torch.device("cpu") if device is SlowDevice else DEVICE
        self.caches = [
            [torch.zeros((BLOCKS, NUMBERS), dtype=torch.float32, device=where) for _ in "ab"]
            for _ in range(groups)
        ]
        copiers = [BlockCopier(layers) for layers in self.caches]
        self.device = device(scratch_blocks * copiers[0].scratch_nbytes)
        self.store = ScriptedStore()
        self.engine = KVCacheMover(
            self.store,
            copiers,
            staging_nbytes=slots * PAYLOAD_NBYTES,
            max_store_nbytes_per_s=0,
            counters=Counters(),
            device=self.device,
        )
        self.gathers, self.scatters = (stream.stream for stream in self.device.streams)
        self.device.go_on()  # through the first copies, made before the engine computes

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
    return torch.full((2 * NUMBERS,), content, dtype=torch.float32).numpy().tobytes()


def block(content: int, block_id: int, group: int = 0) -> Block:
    return Block(key(content, group), group, (block_id,))


NOTHING = Finished([], [], [])


@dataclass
class _Model:
    """What must be true. The free blocks are those that neither an engine's request nor a copy has."""

    at: Bench
    random: random.Random
    free: list[int] = field(default_factory=lambda: list(range(1, BLOCKS)))
    storing: dict[int, tuple[int, int]] = field(default_factory=dict)  # tag: (block, content), not landed
    sending: dict[int, int] = field(default_factory=dict)  # tag: content, landed
    loading: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # job: (block, content)
    auditing: dict[int, int] = field(default_factory=dict)  # tag: block, not landed
    # tag: content of the record and of the block, and whether it was there
    audited: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
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

    def audit(self) -> None:
        """A step that computes what the pool has, or something else."""
        blocks, tags = [], []
        for block_id in self.take(self.random.randint(1, 2)):
            known = sorted(self.stored) if self.random.random() < 0.9 else []
            wanted = self.random.choice(known or range(1, self.contents + 2))
            content = wanted if self.random.random() < 0.7 else self.random.randint(1, MOST)
            self.at.compute(block_id, content)
            self.tags += 1
            self.auditing[self.tags] = block_id
            self.audited[self.tags] = (wanted, content, wanted in self.stored)
            blocks.append(block(wanted, block_id))
            tags.append(self.tags)
        self.at.engine.audit(blocks, tags)

    def poll_audits(self) -> None:
        ended = self.at.engine.poll_audits()
        for tag in ended.staged:
            self.reuse(self.auditing.pop(tag))
        for one in ended.compared:
            wanted, content, was_there = self.audited.pop(one.tag)  # landed before, and neither twice
            assert one.tag not in self.auditing
            assert one.why in ("", "no_room", "store_unavailable") or not was_there
            if not one.why:
                is_same = not any(layer[-2] for layer in one.distances)
                assert is_same == (wanted == content), f"{one} of {content} beside {wanted}"

    def poll(self) -> None:
        self.poll_audits()
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
        self.owned[block_id] = -self.random.randint(1, MOST)
        self.at.compute(block_id, self.owned[block_id])
        self.free.append(block_id)

    def end_batch(self) -> None:
        if batches := self.at.store.under_way:
            self.at.store.end(self.random.randrange(len(batches)), fault=self.random.random() < 0.03)

    def step(self) -> None:
        streams, engine = self.at.device.streams, self.at.device.engine
        actions = [
            (1, self.store),
            (2, self.load),
            (1, self.audit),
            (8, self.poll),
            (8, self.end_batch),
            (6, lambda: engine.go_on(self.random.randint(1, 8))),
            (4, lambda: self.random.choice(streams).stream.go_on(1)),
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
        for block_id in self.auditing.values():
            self.reuse(block_id)
        self.at.device.go_on()
        self.at.store.end_all()
        self.at.engine._reap()
        self.check(kept=2 * len(self.audited))

    def end(self) -> None:
        def over() -> bool:
            self.at.device.go_on()
            self.at.store.end_all()
            self.poll()
            return not (self.at.engine.busy or self.audited)

        assert eventually(over)
        self.at.device.go_on()
        assert not self.storing
        assert not self.sending
        assert not self.loading
        assert not self.auditing
        self.check()

    def check(self, kept: int = 0) -> None:
        """``kept``: most slots that audits keep which were given up."""
        assert self.at.engine.slots_in_use <= kept
        assert sorted(self.free) == list(range(1, BLOCKS))
        for block_id, content in self.owned.items():
            assert self.at.holds(block_id, content), f"block {block_id} was written after it was given away"
        for content in range(1, self.contents + 1):
            if key(content, 0) in self.at.store.records:
                assert self.at.kept(content), f"record {content} was read too early or too late"


def drive(seed: int, steps: int = 400, device: type[SlowDevice] | type[RunningDevice] = SlowDevice) -> None:
    chance = random.Random(seed)
    at = Bench(
        slots=chance.choice([chance.randint(2, 16), 32]), scratch_blocks=chance.randint(1, 4), device=device
    )
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
