"""KV caches of models, in vLLM 0.32's layouts.

A layer is a view ``[block, head, token, K and V]`` (B, H, N, C) of one allocation for all layers (L). A
layout's name is its order in memory, outermost first. Groups of a hybrid model share the allocation: each
block belongs to a single group at a time. Source: ``vllm/v1/kv_cache_layout.py`` and
``get_kv_cache_config_from_groups``; a test compares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK_TOKENS = (16, 64, 128)
LAYOUTS = {  # vLLM's names; values for display
    "LBNHC": "FlashAttention, FlashInfer NHD, MLA (vLLM's default)",
    "LBHNC": "FlashInfer HND",
    "BLHNC": "HND with all layers of a block side by side",
}


class Cache(NamedTuple):
    """``layers``: of each group. ``content``: elements of 2 bytes (bfloat16) per token, head and layer."""

    model: str
    layout: str
    layers: tuple[int, ...]
    heads: int
    content: int

    def block_nbytes(self, tokens: int) -> int:
        """Bytes of a block of ``tokens`` tokens: those of the largest group."""
        return max(self.layers) * self.heads * tokens * self.content * 2

    def views(self, memory: torch.Tensor, tokens: int) -> list[list[torch.Tensor]]:
        """The layers of each group over ``memory`` (bytes), as integers, because a NaN differs from itself."""
        blocks = memory.numel() // self.block_nbytes(tokens)
        sizes = {"L": max(self.layers), "B": blocks, "H": self.heads, "N": tokens, "C": self.content}
        strides, step = {}, 1
        for dim in reversed(self.layout):
            strides[dim] = step
            step *= sizes[dim]
        elements = memory[: step * 2].view(torch.int16)
        shape, stride = [sizes[dim] for dim in "BHNC"], [strides[dim] for dim in "BHNC"]
        return [
            [elements.as_strided(shape, stride, layer * strides["L"]) for layer in range(layers)]
            for layers in self.layers
        ]


# Numbers from the models' config.json. A head's K and V lie side by side: 2 x 128. MLA has a latent vector of
# 512 + 64. vLLM cuts Gemma 3's 52 layers with a sliding window into groups of at most 10, the number with
# full attention.
CACHES = (
    Cache("Llama-3-8B", "LBNHC", (32,), 8, 256),
    Cache("Llama-3-8B", "LBHNC", (32,), 8, 256),
    Cache("Llama-3-8B", "BLHNC", (32,), 8, 256),
    Cache("Qwen3-32B", "LBNHC", (64,), 8, 256),
    Cache("Qwen3-32B", "LBHNC", (64,), 8, 256),
    Cache("DeepSeek-V3", "LBNHC", (61,), 1, 576),
    Cache("Gemma-3-27B", "LBNHC", (10, 9, 9, 9, 9, 8, 8), 16, 256),
    Cache("gpt-oss-120b", "LBNHC", (18, 18), 8, 128),
)
