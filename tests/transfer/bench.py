"""A mover on a device and a store, both of which the test drives; what an engine computes is one number a block."""

from __future__ import annotations

import torch

from kvpool.metrics import Counters
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.kv_cache import Block
from kvpool.transfer.mover import Finished
from tests.transfer.on_device import DEVICE, RunningDevice
from tests.transfer.scripted_store import ScriptedStore
from tests.transfer.slow_device import SlowDevice
from tests.transfer.test_mover import key

BLOCKS = 24
NUMBERS = 64  # elements of a block in each of two layers
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
            [torch.zeros((BLOCKS, NUMBERS), dtype=torch.int32, device=where) for _ in "ab"]
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
        self.gathers, self.scatters = (lane.stream for lane in self.device.lanes)
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
    return torch.full((2 * NUMBERS,), content, dtype=torch.int32).numpy().tobytes()


def block(content: int, block_id: int, group: int = 0) -> Block:
    return Block(key(content, group), group, (block_id,))


NOTHING = Finished([], [], [])
