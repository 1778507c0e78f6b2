"""Copies between the KV cache of one group of layers and staging slots.

The payload of a block is, for each layer of the group in order, the block's bytes in the layer's logical
index order. On the CPU the copies are plain and done when the call returns.

Threads: called from the worker's model thread only. Torch releases the interpreter lock inside each copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool.transfer.staging import Staging


class BlockCopier:
    """Gathers and scatters whole blocks of one group; ``layers`` are views of shape ``[num_blocks, ...]``.

    Layers may be strided and may share storage with those of another group.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        assert layers, "a group has at least one layer"
        self._layers = [layer.view(torch.uint8) for layer in layers]
        self._shapes = [layer.shape[1:] for layer in self._layers]
        self._nbytes = [shape.numel() for shape in self._shapes]
        self.num_blocks = int(layers[0].shape[0])
        self.payload_nbytes = sum(self._nbytes)

    def gather(self, block_ids: Sequence[int], staging: Staging, slots: Sequence[int]) -> None:
        """Copy the blocks into the slots, one to one, in order."""
        blocks, rows = self._indices(block_ids, slots)
        start = 0
        for layer, nbytes in zip(self._layers, self._nbytes, strict=True):
            part = layer.index_select(0, blocks).reshape(len(block_ids), nbytes)
            staging.tensor[:, start : start + nbytes].index_copy_(0, rows, part)
            start += nbytes

    def scatter(self, block_ids: Sequence[int], staging: Staging, slots: Sequence[int]) -> None:
        """Copy the slots into the blocks, one to one, in order."""
        blocks, rows = self._indices(block_ids, slots)
        start = 0
        for layer, shape, nbytes in zip(self._layers, self._shapes, self._nbytes, strict=True):
            part = staging.tensor[:, start : start + nbytes].index_select(0, rows)
            layer.index_copy_(0, blocks, part.reshape(len(block_ids), *shape))
            start += nbytes

    def _indices(self, block_ids: Sequence[int], slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(block_ids) == len(slots)
        # Torch checks the upper bound; block 0 is vLLM's null block, which nothing may write.
        assert all(0 < block < self.num_blocks for block in block_ids)
        return torch.tensor(block_ids), torch.tensor(slots)
