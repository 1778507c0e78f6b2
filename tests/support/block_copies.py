"""Copies of blocks between layers and staging, compared with indexing byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from kvpool.transfer import BlockCopier
from kvpool.transfer.device import Copy, device_of
from kvpool.transfer.memory import Staging
from tests.support.devices import wait_for


def storage(draw: Any, nbytes: int, device: torch.device) -> torch.Tensor:
    """Random bytes, so that whatever is not copied, or copied to another place, is seen."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)


def content(layers: Sequence[torch.Tensor], block: int) -> bytes:
    """The reference of a gather: each layer's block in logical order."""
    parts = [torch.empty(layer.shape[1:], dtype=layer.dtype).copy_(layer[block]) for layer in layers]
    return b"".join(part.view(-1).view(torch.uint8).numpy().tobytes() for part in parts)


def memory(layers: Sequence[torch.Tensor]) -> list[bytes]:
    """All bytes of the allocations, those between the blocks, too."""
    storages = {layer.untyped_storage().data_ptr(): layer.untyped_storage() for layer in layers}
    return [
        torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy().tobytes()
        for storage in storages.values()
    ]


def twin(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same views on copies of the allocations, in host memory."""
    copies = {layer.untyped_storage().data_ptr(): layer.untyped_storage() for layer in layers}
    copies = {at: one.clone() if one.device.type == "cpu" else one.cpu() for at, one in copies.items()}
    return [
        torch.empty(0, dtype=layer.dtype).set_(
            copies[layer.untyped_storage().data_ptr()], layer.storage_offset(), layer.shape, layer.stride()
        )
        for layer in layers
    ]


def assign(layers: Sequence[torch.Tensor], block: int, row: bytes) -> None:
    """The reference of a scatter."""
    for layer in layers:
        nbytes = layer[block].numel() * layer.element_size()
        part, row = torch.frombuffer(bytearray(row[:nbytes]), dtype=torch.uint8), row[nbytes:]
        layer[block] = part.view(layer.dtype).reshape(layer.shape[1:])
    assert not row


class Copies:
    """A stream for ``records`` records of a group at a time; each call returns when the bytes are there."""

    def __init__(self, layers: Sequence[torch.Tensor], records: int, per_record: int = 1) -> None:
        self.copier = BlockCopier(layers, per_record)
        self._device = device_of(self.copier.device)
        self._stream = self._device.copy_stream(records * self.copier.scratch_nbytes)

    def gather(self, block_ids: Sequence[int], staging: Staging, slots: Sequence[int]) -> None:
        self._submit(partial(self.copier.gather, block_ids, staging, slots))

    def scatter(self, block_ids: Sequence[int], staging: Staging, slots: Sequence[int]) -> None:
        self._submit(partial(self.copier.scatter, block_ids, staging, slots))

    def rehearse(self) -> None:
        self._submit(self.copier.rehearse)

    def _submit(self, copy: Copy) -> None:
        self._stream.submit(
            lambda scratch: scratch.fill_(0xA5), []
        )  # what the last copy left would hide a hole
        wait_for(self._stream.submit(copy, [self._device.mark()]))


def check(
    layers: Sequence[torch.Tensor],
    staging: Staging,
    ids: Sequence[int],
    slots: Sequence[int],
    places: Sequence[int],
) -> None:
    """Copy blocks ``ids`` to slots and from there to ``places``, of which 0 is none, and compare all bytes."""
    per_record = len(ids) // len(slots)
    copies = Copies(layers, len(slots), per_record)
    payload_nbytes = copies.copier.payload_nbytes
    reference = twin(layers)
    blocks = [content(reference, block) for block in ids]
    rows = [b"".join(blocks[at : at + per_record]) for at in range(0, len(ids), per_record)]
    copies.rehearse()
    copies.gather(ids, staging, slots)
    assert memory(layers) == memory(reference)
    assert [bytes(staging.view(slot, payload_nbytes)) for slot in slots] == rows
    for place, block in zip(places, blocks, strict=True):
        if place:
            assign(reference, place, block)
    copies.scatter(places, staging, slots)
    assert memory(layers) == memory(reference)
    assert [bytes(staging.view(slot, payload_nbytes)) for slot in slots] == rows
