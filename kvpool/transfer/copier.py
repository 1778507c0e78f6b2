"""Copies between the KV cache of one group of layers and staging slots, through scratch memory of the device.

A record's payload is the payloads of its blocks in order; a block's payload is its bytes of each layer in the
layer's logical index order. A batch is gathered into the scratch by one launch per stack of layers; one
transfer per run of neighbouring slots copies the scratch to staging, and the reverse. The blocks' ids also
lie in the scratch, so that a copy allocates no device memory.

Threads: the worker's model thread only, on a stream. Torch releases the GIL inside each copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvpool.transfer.memory import Staging

_WIDTHS = {
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}  # bytes of an element: few, wide ones
_ID_NBYTES = 8  # the only width that all of torch's indexing takes


class _Placed(NamedTuple):
    """Bytes of some layers' blocks: ``dims`` are (size, stride) pairs of one block."""

    storage: torch.UntypedStorage
    offset: int
    block_stride: int
    dims: list[tuple[int, int]]

    @property
    def nbytes(self) -> int:
        product = 1
        for size, _ in self.dims:
            product *= size
        return product


class _Stack(NamedTuple):
    """Layers copied by one launch: ``cache`` has shape ``[num_blocks, ...]``; its bytes begin at ``start``."""

    cache: torch.Tensor
    start: int
    nbytes: int


class BlockCopier:
    """Gathers and scatters whole blocks of one group; ``layers`` are views of shape ``[num_blocks, ...]``.

    Layers may have any strides, shapes and types, and may share storage with another group's. Equidistant
    neighbours in one storage, as in vLLM 0.32, are copied as one. A slot takes a record:
    ``blocks_per_record`` blocks, ``payload_nbytes`` in all. ``scratch_nbytes``: needed by a batch. ``elements``: what
    the layers' numbers are, as torch calls them, where a tensor is of plain bytes.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        blocks_per_record: int = 1,
        elements: Sequence[str] | None = None,
    ) -> None:
        assert layers, "a group has at least one layer"
        assert blocks_per_record > 0
        self._blocks_per_record = blocks_per_record
        self.device = layers[0].device
        self.num_blocks = int(layers[0].shape[0])
        placed = [_placed(layer) for layer in layers]
        elements = elements or [str(layer.dtype).removeprefix("torch.") for layer in layers]
        # Of a block's payload: the layers' elements, and their bytes.
        self.pieces = [(element, one.nbytes) for element, one in zip(elements, placed, strict=True)]
        self._block_nbytes = sum(one.nbytes for one in placed)
        self.payload_nbytes = blocks_per_record * self._block_nbytes
        self.scratch_nbytes = _aligned(self.payload_nbytes) + blocks_per_record * _ID_NBYTES
        self._stacks: list[_Stack] = []
        start = 0
        for stack in _stacked(placed):
            self._stacks.append(
                _Stack(
                    _view(stack, self.num_blocks, start, self._block_nbytes, self.device),
                    start,
                    stack.nbytes,
                )
            )
            start += stack.nbytes

    @property
    def launches(self) -> int:
        return len(self._stacks)

    @torch.inference_mode()  # matches layers or steps made in inference mode
    def rehearse(self, scratch: torch.Tensor) -> None:
        """Copy some blocks onto themselves, before an engine computes.

        Torch loads a kernel at its first launch, which can stall the device and takes its memory. It has a
        kernel for few blocks and another for many.
        """
        records = min(
            (self.num_blocks - 1) // self._blocks_per_record, scratch.numel() // self.scratch_nbytes
        )
        for count in sorted({min(1, records), records} - {0}):
            rows, blocks = self._batch(range(1, 1 + count * self._blocks_per_record), count, scratch)
            for stack in self._stacks:
                part = self._part(rows, stack)
                torch.index_select(stack.cache, 0, blocks, out=part)
                stack.cache.index_copy_(0, blocks, part)

    @torch.inference_mode()
    def gather(
        self, block_ids: Sequence[int], staging: Staging, slots: Sequence[int], scratch: torch.Tensor
    ) -> None:
        """Copy the blocks into the slots in order, a record's blocks to each."""
        assert all(block_ids), "block 0 is vLLM's null block, which holds nothing"
        rows, blocks = self._batch(block_ids, len(slots), scratch)
        for stack in self._stacks:
            torch.index_select(stack.cache, 0, blocks, out=self._part(rows, stack))
        for first, count in self._runs(staging, slots):
            self._slots(staging, slots[first], count).copy_(
                self._payloads(rows, first, count), non_blocking=True
            )

    @torch.inference_mode()
    def scatter(
        self, block_ids: Sequence[int], staging: Staging, slots: Sequence[int], scratch: torch.Tensor
    ) -> None:
        """Copy the slots into the blocks in order, a record's each; block 0 (vLLM's null block) stays."""
        rows, blocks = self._batch(block_ids, len(slots), scratch)
        for first, count in self._runs(staging, slots):
            self._payloads(rows, first, count).copy_(
                self._slots(staging, slots[first], count), non_blocking=True
            )
        for wanted in _between_zeros(block_ids):
            for stack in self._stacks:
                stack.cache.index_copy_(0, blocks[wanted], self._part(rows[wanted], stack))

    def _batch(
        self, block_ids: Sequence[int], records: int, scratch: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scratch as a block per row, and the blocks' ids on the device."""
        assert len(block_ids) == records * self._blocks_per_record
        # An index out of bounds ends an accelerator's context.
        assert all(0 <= block < self.num_blocks for block in block_ids)
        most = scratch.numel() // self.scratch_nbytes
        assert records <= most, "more than the scratch holds"
        nbytes = records * self.payload_nbytes
        ids = scratch[_aligned(nbytes) : _aligned(nbytes) + len(block_ids) * _ID_NBYTES].view(torch.int64)
        ids.copy_(self._ids(block_ids, most * self._blocks_per_record), non_blocking=True)
        return scratch[:nbytes].view(len(block_ids), self._block_nbytes), ids

    def _ids(self, block_ids: Sequence[int], most: int) -> torch.Tensor:
        """The ids in host memory, for a later copy.

        A copy from pageable memory could wait for the stream. Pinning can stall the device, so each batch
        takes the same size: torch reuses a pinned block once the stream has read it. The device is explicit,
        because an engine may have changed torch's default.
        """
        pinned = self.device.type != "cpu"
        ids = torch.empty(most, dtype=torch.int64, device="cpu", pin_memory=pinned)[: len(block_ids)]
        return ids.copy_(torch.tensor(block_ids, dtype=torch.int64, device="cpu"))

    def _payloads(self, rows: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The bytes of ``count`` consecutive records."""
        return rows[first * self._blocks_per_record : (first + count) * self._blocks_per_record].view(-1)

    @staticmethod
    def _part(rows: torch.Tensor, stack: _Stack) -> torch.Tensor:
        part = rows[:, stack.start : stack.start + stack.nbytes].view(stack.cache.dtype)
        return part.view(rows.shape[0], *stack.cache.shape[1:])

    def _runs(self, staging: Staging, slots: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(index of the first slot, count) of each run that one transfer copies: full neighbours."""
        first = 0
        for i in range(1, len(slots) + 1):
            joined = i < len(slots) and slots[i] == slots[i - 1] + 1
            if not joined or self.payload_nbytes != staging.slot_nbytes:
                yield first, i - first
                first = i

    def _slots(self, staging: Staging, slot: int, count: int) -> torch.Tensor:
        start = slot * staging.slot_nbytes
        return staging.tensor[start : start + count * self.payload_nbytes]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ID_NBYTES) * _ID_NBYTES


def _between_zeros(block_ids: Sequence[int]) -> Iterator[slice]:
    """The fewest slices that cover the non-zero blocks."""
    zeros = [i for i, block in enumerate(block_ids) if block == 0]
    for before, after in zip([-1, *zeros], [*zeros, len(block_ids)], strict=True):
        if after > before + 1:
            yield slice(before + 1, after)


def _placed(layer: torch.Tensor) -> _Placed:
    item = layer.element_size()
    dims = [(size, stride * item) for size, stride in zip(layer.shape[1:], layer.stride()[1:], strict=True)]
    return _Placed(
        layer.untyped_storage(),
        int(layer.storage_offset()) * item,
        int(layer.stride(0)) * item,
        _merged([*dims, (item, 1)]),
    )


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in the same order, with the fewest dimensions."""
    merged = [dims[-1]]
    for size, stride in reversed(dims[:-1]):
        inner_size, inner_stride = merged[0]
        if stride == inner_size * inner_stride:
            merged[0] = (size * inner_size, inner_stride)
        elif size != 1:
            merged.insert(0, (size, stride))
    return merged


def _stacked(layers: list[_Placed]) -> Iterator[_Placed]:
    """Merge neighbours of one shape at equal distances in one storage."""
    rest = list(layers)
    while rest:
        first, distance, count = rest[0], 0, 1
        while count < len(rest) and _alike(first, rest[count]):
            step = rest[count].offset - rest[count - 1].offset
            if step <= 0 or (count > 1 and step != distance):
                break
            distance, count = step, count + 1
        yield first._replace(dims=_merged([(count, distance), *first.dims])) if count > 1 else first
        del rest[:count]


def _alike(one: _Placed, other: _Placed) -> bool:
    return (one.storage.data_ptr(), one.block_stride, one.dims) == (
        other.storage.data_ptr(),
        other.block_stride,
        other.dims,
    )


def _view(
    placed: _Placed, num_blocks: int, start: int, payload_nbytes: int, device: torch.device
) -> torch.Tensor:
    """A tensor ``[num_blocks, ...]`` over the bytes, with the widest elements that cache and payload allow."""
    *outer, (size, stride) = placed.dims
    assert stride == 1, "the last dimension are the bytes of an element"
    multiples = [placed.storage.data_ptr(), placed.offset, placed.block_stride, start, payload_nbytes, size]
    multiples += [outer_stride for _, outer_stride in outer]
    width = next(width for width in _WIDTHS if all(number % width == 0 for number in multiples))
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(placed.storage)
    whole = whole[: whole.numel() // width * width].view(_WIDTHS[width])
    return whole.as_strided(
        (num_blocks, *(outer_size for outer_size, _ in outer), size // width),
        (placed.block_stride // width, *(outer_stride // width for _, outer_stride in outer), 1),
        placed.offset // width,
    )
