"""The KV cache of a model, by its config.json alone: what a token takes, over all layers and ranks.

A layer with attention keeps K and V of each token, KV heads x (head size of K + that of V) elements; with MLA one
vector of latent and rotary dimensions. Layers with a window or chunks are stored like others; those with a state keep
nothing of a token; drafts are not counted. What the file does not tell is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpool.cli.tables import Column, add_row, console, fitted, show
from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.text import counted

MAX_FILE_NBYTES = 4 << 20
TYPES = ("16 bits", "fp8")  # of a cache's elements

_MEASURE = "kvpool size --json tells the block_nbytes of engines that run"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_NESTED = ("text_config", "thinker_config", "language_config", "llm_config")  # of pictures or sound, too
_WINDOWS = ("sliding_attention", "chunked_attention")
_ATTENTION = ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention", *_WINDOWS)
_STATES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
_NOTHING = ("mlp", "moe")
_LETTERS = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}
_INTERVALS = ("full_attention_interval", "layer_group_size")  # the last layer of each has attention
# Settings of layers that differ from each other, or keep something else; and signs of layers with a state.
_UNTOLD = ("block_configs", "compress_", "global_head_dim", "index_topk_freq", "index_topk_pattern", "indexer_types",
           "is_encoder_decoder", "loop_num", "num_global_key_value_heads", "num_layers", "swa_")  # fmt: skip
_OF_STATES = ("attn_layer_", "linear_", "mamba", "ssm_")
# Where their files leave head_dim out, it is hidden_size / num_attention_heads; others have one of their own.
_DIVIDED = ("cohere", "granite", "granitemoehybrid", "lfm2", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2",
            "qwen2_5_omni", "qwen2_5_vl", "qwen2_moe", "qwen2_vl")  # fmt: skip
_EXPANDED = ("minicpm3",)  # has latent vectors, of which vLLM keeps K and V of all heads
_OF_QK = ("qk_nope_head_dim", "qk_rope_head_dim")


class KVCache(NamedTuple):
    """``layers``: those that keep something of each token, ``window_layers`` of them with a window or chunks; None: the
    file has a window, and does not say for which. ``state_layers``: those that keep a state. ``row``: what a layer
    keeps of a token, in words. ``heads``: ranks beyond them keep copies; 0: one copy for any number.
    ``token_nbytes``: by ``TYPES``.
    """

    layers: int
    window_layers: int | None
    state_layers: int
    row: str
    heads: int
    token_nbytes: tuple[int, int]


def read_kv_cache(source: str) -> KVCache:
    """``source``: a folder with config.json, such a file, or ORG/MODEL of the Hugging Face hub, whose package finds it
    in its cache or fetches it. Blocking. Errors: ``ConfigError``.
    """
    path = Path(source)
    try:
        if path.is_dir():
            path /= "config.json"
        elif not path.exists() and _HUB_NAME.fullmatch(source):
            path = _of_hub(source)
        raw = read_file(path, MAX_FILE_NBYTES)
    except OSError as error:
        raise ConfigError(
            f"--model {source}: {path}: {error.strerror}; write a folder with config.json, such a file, or ORG/MODEL "
            "of the Hugging Face hub"
        ) from error
    try:
        return kv_cache_of(json.loads(raw))
    except ConfigError as error:
        raise ConfigError(f"--model {source}: {path} {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--model {source}: {path} is no JSON") from error


def _of_hub(name: str) -> Path:
    ours = "write the path of a config.json, or of its folder"
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model {name}: no such folder, and no package huggingface_hub to ask the hub: install it, or {ours}"
        ) from error
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # of many kinds: the network, the name, rights
        why = (str(error.__cause__ or error).strip().rstrip(".").splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model {name}: no config.json of the hub: {why:.200}; else {ours}") from error


def print_kv_cache(model: str, cache: KVCache, *, as_json: bool) -> None:
    """A table or JSON, with the network's rule: N tokens a second need N times the bits of one."""
    needs = [
        {
            "cache": name,
            "token_nbytes": nbytes,
            "tokens_of_a_gib": (1 << 30) // nbytes,
            "gbit_per_s_for_1000_tokens_per_s": nbytes * 8 / 1e6,
            "tokens_per_s_by_10_gbit_per_s": 10**10 // (nbytes * 8),
        }
        for name, nbytes in zip(TYPES, cache.token_nbytes, strict=True)
    ]
    if as_json:
        of_model = {name: value for name, value in cache._asdict().items() if name != "token_nbytes"}
        print(json.dumps({"model": model, **of_model, "caches": needs}))
        return
    out = console()
    show(out, f"{model}: {cache.row}, in {counted(cache.layers, 'layer')}")
    names = ("KV cache", "a token takes", "a GiB holds", "1,000 tokens/s need", "10 Gbit/s bring")
    columns = [Column(name) for name in names]
    for name, nbytes, tokens, gbits, rate in (one.values() for one in needs):
        add_row(
            columns,
            name,
            f"{nbytes:,} bytes",
            f"{tokens:,} tokens",
            f"{gbits:.2f} Gbit/s",
            f"{rate:,} tokens/s",
        )
    show(out, *fitted(columns, out.width))
    of_all = "all ranks together, without layers of drafts"
    if cache.heads:
        of_all += f"; beyond {cache.heads} tensor-parallel ranks each KV head is kept more than once"
    show(out, of_all)
    if cache.window_layers != 0:
        some = "layers may" if cache.window_layers is None else f"{cache.window_layers} of the layers"
        show(out, f"{some} have a window or chunks: all is stored, only the last is loaded")
    if cache.state_layers:
        show(
            out,
            f"{cache.state_layers} more layers keep a state, stored at ends of prompts and not counted here",
        )
    show(
        out,
        "N tokens/s need N / 1,000 times that network; a pool pays where the network brings more tokens a second than "
        "the engine prefills",
    )


def kv_cache_of(config: object) -> KVCache:
    """By a config.json. Errors: ``ConfigError`` without the file's name."""
    if not isinstance(config, dict):
        raise ConfigError("is no object")
    text, told = config, dict(config)
    while part := next((text[name] for name in _NESTED if isinstance(text.get(name), dict)), None):
        text, told = part, told | part
    for name, value in told.items():
        if name.startswith(_UNTOLD) and value and (value is True or value != 1):
            raise ConfigError(
                f"has {name}: what its layers keep differs in ways that this does not read; {_MEASURE}"
            )
    kinds = _kinds(text)
    if text.get("num_kv_shared_layers"):  # the last ones use what others keep
        kinds = kinds[: -_count(text, "num_kv_shared_layers")]
    layers, windows, states = (sum(kind in of for kind in kinds) for of in (_ATTENTION, _WINDOWS, _STATES))
    if not layers:
        raise ConfigError("has layers with states alone, which keep nothing of a token")
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    is_untold = window and text.get("use_sliding_window", True) and set(kinds) == {"attention"}
    row, heads, nbytes = _row(text)
    return KVCache(
        layers, None if is_untold else windows, states, row, heads, (layers * nbytes[0], layers * nbytes[1])
    )


def _kinds(text: Mapping[str, Any]) -> Sequence[str]:
    """Of each layer, what it keeps."""
    layers = _count(text, "num_hidden_layers")
    kinds = text.get("layer_types") or text.get("layers_block_type")
    linear = text.get("linear_attn_config")
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
    elif not kinds and isinstance(numbers := text.get("attn_type_list"), list):
        kinds = ["attention" if number == 1 else "linear_attention" for number in numbers]
    elif not kinds and isinstance(linear, dict) and isinstance(full := linear.get("full_attn_layers"), list):
        kinds = ["attention" if layer + 1 in full else "linear_attention" for layer in range(layers)]
    elif not kinds and (interval := next(filter(text.get, _INTERVALS), None)):
        every = _count(text, interval)
        kinds = ["linear_attention" if (layer + 1) % every else "attention" for layer in range(layers)]
    if not kinds:
        if any(name.startswith(_OF_STATES) and value for name, value in text.items()):
            raise ConfigError(f"does not say which layers have attention and which a state; {_MEASURE}")
        return ["attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(f"has {layers} layers, and kinds of another number")
    for kind in kinds:
        if kind not in (*_ATTENTION, *_STATES, *_NOTHING):
            raise ConfigError(f"has layers of a kind that this does not know, {str(kind)!r:.60}; {_MEASURE}")
    return kinds


def _row(text: Mapping[str, Any]) -> tuple[str, int, tuple[int, int]]:
    """What a layer keeps of a token: in words, KV heads, and bytes by ``TYPES``."""
    if text.get("kv_lora_rank") and text.get("model_type") in _EXPANDED:
        heads, size = _count(text, "num_attention_heads"), sum(_count(text, name) for name in _OF_QK)
        return f"K and V of {heads} heads of {size}", heads, (4 * heads * size, 2 * heads * size)
    if text.get("kv_lora_rank"):
        latent, rotary = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
        row = f"a vector of {latent} + {rotary}"
        if not text.get("index_head_dim"):
            return row, 0, (2 * (latent + rotary), latent + rotary)
        # Keys in FP8 with a scale for 128; vectors in FP8 (fp8_ds_mla) likewise, but their rotary part.
        index = _count(text, "index_head_dim")
        keys = index + index // 128 * 4
        fp8 = latent + latent // 128 * 4 + 2 * rotary
        return f"{row} and a key of {index}", 0, (2 * (latent + rotary) + keys, fp8 + keys)
    heads = _count(text, "num_key_value_heads")
    if text.get("head_dim") is None and str(text.get("model_type")).removesuffix("_text") in _DIVIDED:
        divided = _count(text, "hidden_size") // _count(text, "num_attention_heads")
        text = {**text, "head_dim": divided}
    size = _count(text, "head_dim")
    value_size = _count(text, "v_head_dim") if text.get("v_head_dim") else size
    elements = heads * (size + value_size)
    sizes = f"{size}" if size == value_size else f"{size} and {value_size}"
    return f"K and V of {heads} heads of {sizes}", heads, (2 * elements, elements)


def _count(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if type(value) is not int or not 1 <= value <= 1 << 30:
        raise ConfigError(f"does not say {name}: write it into a copy; {_MEASURE}")
    return value
