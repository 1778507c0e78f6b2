"""Of the config.json of known models: what decides the size of their KV caches, as their files have it."""

from __future__ import annotations

from typing import Any

_DEEPSEEK = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "sliding_window": 131072, "use_sliding_window": False,
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None,
    },
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "head_dim": 128,
    },
    "Qwen/Qwen3-32B": {
        "model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 64, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "Qwen/Qwen3.6-27B": {
        "model_type": "qwen3_5", "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "num_attention_heads": 24, "num_hidden_layers": 64,
            "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
        },
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "meta-llama/Llama-3.3-70B-Instruct": {
        "model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "mistralai/Mistral-7B-Instruct-v0.3": {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "sliding_window": None,
    },
    "google/gemma-3-27b-it": {
        "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "num_attention_heads": 32, "num_hidden_layers": 62,
            "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        },
    },
    "openai/gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "openai/gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "deepseek-ai/DeepSeek-V3.1": {"model_type": "deepseek_v3", **_DEEPSEEK},
    "deepseek-ai/DeepSeek-V3.2": {
        "model_type": "deepseek_v32", **_DEEPSEEK, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    },
}  # fmt: skip
