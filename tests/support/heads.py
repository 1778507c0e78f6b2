"""The KV cache of a model whose heads are dealt out to ranks, in any layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.support.specs import FULL

HEADS, BLOCKS, TOKENS, HEAD_SIZE, LAYERS = 4, 8, 32, 32, 2
SIZES = (1, 2, 4)
# How a block lies in memory: its heads, its tokens, what a head has of a token; or heads outside of blocks or layers.
LAYOUTS = ("BHNC", "BNHC", "HBNC", "BHLNC")


def spec_of(ranks: int, **more: Any) -> FullAttentionSpec:
    return dataclasses.replace(FULL, num_kv_heads=HEADS // ranks, **more)


def placed(values: torch.Tensor, layout: str) -> torch.Tensor:
    """``values`` [blocks, heads, tokens, content] of a layer, in memory as ``layout`` says."""
    names = "BHNC"
    inner = layout.replace("L", "")
    view = values.permute([names.index(one) for one in inner]).contiguous()
    if "L" in layout:  # this layer among others
        at = layout.index("L")
        whole = torch.zeros((*view.shape[:at], 3, *view.shape[at:]), dtype=view.dtype)
        whole.select(at, 1).copy_(view)
        view = whole.select(at, 1)
    return view.permute([inner.index(one) for one in names])


def model_cache() -> list[torch.Tensor]:
    """Each layer of the whole model: [blocks, heads, tokens, K and V of a head]."""
    torch.manual_seed(7)
    shape = (BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)
    return [torch.randn(shape).to(torch.bfloat16) for _ in range(LAYERS)]


def of_rank(model: list[torch.Tensor], ranks: int, rank: int, layout: str = "BHNC") -> list[torch.Tensor]:
    """The layers of a rank: as vLLM gives them out, neighbouring heads in order."""
    heads = HEADS // ranks
    return [placed(layer[:, rank * heads : (rank + 1) * heads], layout) for layer in model]
