"""What vLLM makes of a model before an engine starts: its KV-cache groups, its attention layers, its facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvpool.vllm.engine.identity import engine_facts

WEIGHTS = {"weights": "0" * 32}
FULL = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=64, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, sliding_window=512
)
LATENT = MLAAttentionSpec(
    block_size=32, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.bfloat16, cache_dtype_str="auto",
)  # fmt: skip

ROWS = replace(LATENT, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656)
SMALL_WINDOW = SlidingWindowMLASpec(
    block_size=4, num_kv_heads=1, max_tp_shards=1, head_size=1024, dtype=torch.float32, sliding_window=8, alignment=576,
)  # fmt: skip
RING = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, head_size_v=0, dtype=torch.float32)
REFILLED = replace(SMALL_WINDOW, bounded_replay=True)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, attention_chunk_size=64
)
STATE = MambaSpec(
    block_size=32,
    shapes=((3, 64), (4, 16, 16)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_cache_mode="align",
)


def cache_of(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def attention_layers(config: Any, count: int, **options: Any) -> list[Attention]:
    """Attention layers of a model, as its code makes them; the configuration knows them by name."""
    with set_current_vllm_config(config):
        return [
            Attention(
                4, 32, 1.0, num_kv_heads=4, cache_config=config.cache_config, prefix=f"layers.{i}.attn", **options,
            )
            for i in range(count)
        ]  # fmt: skip


def facts_of(config: Any) -> dict[str, Any]:
    views = [[torch.zeros((8, 4, 32, 64), dtype=torch.uint8)]]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.uint8)
    return engine_facts(config, cache_of(spec), WEIGHTS, views)


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """The facts that are not the same in both."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
