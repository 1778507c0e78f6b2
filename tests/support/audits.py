"""A mover on a slow device, and a store that ends its reads when the test says so, for audits."""

from __future__ import annotations

import torch

from kvpool.key.key import writer_name
from kvpool.metrics import Counters
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.audit import Ended
from kvpool.transfer.kv_memory import Block
from tests.support.deadlines import eventually
from tests.support.devices import SlowDevice
from tests.support.scripted_store import ScriptedStore, key

BLOCKS, NUMBERS = 16, 32
ELSEWHERE = writer_name("another engine")


class Bench:
    """A mover on a slow device and a store that ends its reads when the test says so; two layers a group."""

    def __init__(self, *elements: str, slots: int = 16, blocks_per_record: int = 1) -> None:
        self.caches = [
            [torch.zeros((BLOCKS, NUMBERS)).to(getattr(torch, element)) for _ in "ab"]
            for element in elements or ("float32",)
        ]
        copiers = [BlockCopier(layers, blocks_per_record) for layers in self.caches]
        self.device = SlowDevice(2 * max(copier.scratch_nbytes for copier in copiers))
        self.store = ScriptedStore()
        self.mover = KVCacheMover(
            self.store,
            copiers,
            staging_nbytes=slots * max(copier.payload_nbytes for copier in copiers),
            max_store_nbytes_per_s=0,
            counters=Counters(),
            device=self.device,
        )
        self.device.go_on()  # through the first copies

    def fill(self, block_id: int, seed: int, group: int = 0) -> None:
        for number, layer in enumerate(self.caches[group]):
            random = torch.Generator().manual_seed(100 * seed + number)
            layer[block_id] = torch.randn(NUMBERS, generator=random).to(layer.dtype)

    def payload(self, *block_ids: int, group: int = 0) -> bytes:
        rows = [layer[block_id] for block_id in block_ids for layer in self.caches[group]]
        return b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows)

    def put(self, number: int, *block_ids: int, group: int = 0, writer: bytes = ELSEWHERE) -> None:
        """As if another engine had stored what is in the blocks now."""
        self.store.records[key(number, group)] = self.payload(*block_ids, group=group)
        self.store.written_by[key(number, group)] = writer

    def gathers_under_way(self) -> int:
        return len(self.device.streams[0].stream)

    def ended(self, *, fault: bool = False) -> Ended:
        """Let everything end; all that polls report."""
        found = Ended()

        def over() -> bool:
            self.device.go_on()
            while self.store.under_way:
                self.store.end(fault=fault)
            ended = self.mover.poll_audits()
            found.staged.extend(ended.staged)
            found.compared.extend(ended.compared)
            return not self.mover.auditor._audits

        assert eventually(over)
        return found


def block(number: int, *block_ids: int, group: int = 0) -> Block:
    return Block(key(number, group), group, block_ids)


def reasons(ended: Ended) -> list[tuple[int, str]]:
    """By tag; empty: it was compared."""
    return [(one.tag, one.why) for one in ended.compared]
