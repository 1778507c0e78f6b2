"""Tiny models with random weights, written to a folder, for the demo, the tests and the benchmarks.

Attention is sharp and logits are far apart (normal with deviation 1/sqrt(fan-in), query projections times 3).
So outputs depend on every byte of the KV cache, and a corrupted block shows.

Runs in its own process with torch and transformers, without vLLM's seconds of imports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

Kind = Literal["llama", "gemma3", "deepseek", "gpt_oss"]

VOCABULARY = 8192
FIRST_WORD = 10  # lower ids have a meaning in some models
QUERY_GAIN = 3.0
MAX_TOKENS = 8192


def write_tiny_model(
    folder: Path,
    kind: Kind = "llama",
    *,
    width: int = 512,
    layers: int = 8,
    seed: int = 0,
    window: int = 512,
) -> None:
    """Write configuration, weights (bfloat16) and a word-level tokenizer into the new ``folder``.

    ``llama``: full attention, 8 heads, 4 KV heads. ``gemma3``: five layers with a sliding window of
    ``window`` tokens per layer with full attention. ``deepseek``: MLA with latent vectors of 512 + 64
    elements, the only size of vLLM's CPU kernels, without experts. ``gpt_oss``: a sliding window in every
    other layer, attention sinks, four experts, two per token. ``width`` is a multiple of 256. About 54 MB at
    the defaults.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": width // 8,
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    model: Any
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))  # type: ignore[no-untyped-call]
    elif kind == "deepseek":
        common |= {"num_key_value_heads": 8, "first_k_dense_replace": layers, "q_lora_rank": None}
        common |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
        deepseek = transformers.DeepseekV2Config(**common)
        model = transformers.DeepseekV2ForCausalLM(deepseek)  # type: ignore[no-untyped-call]
    elif kind == "gpt_oss":
        moe = transformers.GptOssConfig(
            **common, sliding_window=window, num_local_experts=4, num_experts_per_tok=2
        )
        model = transformers.GptOssForCausalLM(moe)  # type: ignore[no-untyped-call]
    else:
        kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
        config = transformers.Gemma3TextConfig(**common, sliding_window=window, layer_types=kinds)
        model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()  # as large as other weights of a softmax
            if parameter.dim() < 2:
                continue  # norms keep their neutral start
            gain = QUERY_GAIN if "q_proj" in name else 1.0
            parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    import tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))  # noqa: S106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "w0",
        "eos_token": "w1",
        "model_max_length": MAX_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser("tiny_model.py", description="Write a model of random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "options", type=json.loads, nargs="?", default={}, help="arguments of write_tiny_model, as JSON"
    )
    given = parser.parse_args()
    write_tiny_model(given.folder, **given.options)
