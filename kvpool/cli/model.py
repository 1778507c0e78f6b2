"""The KV cache of a model, by its config.json alone: what a token takes, over all layers and ranks, and a record.

What an encoder makes of an image or a sound is stored beside that, if the engines share it.

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

from kvpool import _native
from kvpool.cli.settings import CacheType, SizeOptions
from kvpool.cli.tables import Column, add_row, console, fitted, show
from kvpool.errors import ConfigError
from kvpool.files import read_file
from kvpool.text import MAX_NBYTES, counted

MAX_FILE_NBYTES = 4 << 20
TYPES = ("16 bits", "fp8")  # of a cache's elements
BLOCK_TOKENS = 16  # vLLM's, unless its kernels or layers with a state want more

_MEASURE = "kvpool size --json tells the block_nbytes of engines that run"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_NESTED = ("text_config", "thinker_config", "language_config", "llm_config")  # of pictures or sound, too
_ENCODERS = ("vision_config", "audio_config")
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
    ``token_nbytes``: by ``TYPES``. ``item_token_nbytes``: of an encoder's output, for each token of an image or sound
    (``KVPoolECConnector``); 0: the model has no encoder.
    """

    layers: int
    window_layers: int | None
    state_layers: int
    row: str
    heads: int
    token_nbytes: tuple[int, int]
    item_token_nbytes: int = 0

    def on_ranks(self, ranks: int) -> KVCache:
        """With the bytes of so many tensor-parallel ranks together. Errors: ``ConfigError`` where heads do not part."""
        heads = self.heads or ranks
        if heads % ranks and ranks % heads:
            raise ConfigError(f"--tp {ranks}: {heads} KV heads are not shared out evenly to so many ranks")
        plain, fp8 = (nbytes * max(1, ranks // heads) for nbytes in self.token_nbytes)
        return self._replace(token_nbytes=(plain, fp8))

    def record_layers(self) -> int | None:
        """Of the largest of vLLM's groups of attention, which has a record for each block and rank; None: not told."""
        if self.window_layers is None:
            return None
        kinds = (self.layers - self.window_layers, self.window_layers)
        counts = [count for count in (*kinds, self.state_layers) if count]
        is_close = max(counts) < 1.5 * min(counts)
        return min(max(counts) if is_close else min(counts), max(kinds))


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


def print_kv_cache(cache: KVCache, options: SizeOptions) -> None:
    """A table or JSON. ``cache``: of ``options.model`` on so many ranks."""
    layers, prefill = cache.record_layers(), options.prefill
    block_tokens = options.block_tokens or (None if cache.state_layers else BLOCK_TOKENS)
    keys = options.tp if cache.heads else 1
    of_types: list[dict[str, Any]] = []
    for name, nbytes in zip(TYPES, cache.token_nbytes, strict=True):
        record = nbytes // cache.layers // keys * layers * block_tokens if layers and block_tokens else None
        if record and record > MAX_NBYTES:
            raise ConfigError(
                f"--model {options.model}: a record of {block_tokens:,} tokens would be too large"
            )
        of_types.append({
            "cache": name,
            "token_nbytes": nbytes,
            "tokens_of_a_gib": (1 << 30) // nbytes,
            "record_nbytes": record,
            "record_server_nbytes": record and _native.record_server_nbytes(record),
            "link_gbit_per_s": nbytes * prefill * 8 / 1e9,
            "disk_gb_per_s": nbytes * prefill / 1e9,
        })  # fmt: skip
    if options.dtype:
        of_types = [of_types[options.dtype is CacheType.FP8]]
    if options.as_json:
        of_model = {name: value for name, value in cache._asdict().items() if name != "token_nbytes"}
        of_engine = {"ranks": options.tp, "block_tokens": block_tokens, "prefill_tokens_per_s": prefill}
        print(json.dumps({"model": options.model, **of_model, **of_engine, "caches": of_types}))
        return
    out = console()
    show(out, f"{options.model}: {cache.row}, in {counted(cache.layers, 'layer')}")
    names = ("KV cache", "a token takes", "a GiB holds", "a record", "in a server", "link", "disk")
    columns = [Column(name) for name in names]
    for name, nbytes, tokens, record, of_server, gbits, gbytes in (one.values() for one in of_types):
        add_row(
            columns,
            name,
            f"{nbytes:,} bytes",
            f"{tokens:,} tokens",
            f"{record:,} bytes" if record else "-",
            f"{of_server / record:.3f} times" if record else "-",
            f"{gbits:.2f} Gbit/s",
            f"{gbytes:.3f} GB/s",
        )
    show(out, *fitted(columns, out.width))
    show(
        out,
        f"link, disk: on slower ones an engine that prefills {prefill:,} tokens/s (--prefill) is faster without a pool",
    )
    of_all = "a token: all ranks together, without layers of drafts"
    if cache.heads >= options.tp:
        of_all += f"; beyond {cache.heads} tensor-parallel ranks (--tp) each KV head is kept more than once"
    show(out, of_all)
    if cache.item_token_nbytes:
        show(
            out,
            f"an image or sound: its encoder's output, {cache.item_token_nbytes:,} bytes a token, in 16 bits",
        )
    if layers and block_tokens:
        whose = "a rank's" if keys > 1 else "a block's"
        show(
            out,
            f"a record: {whose} {counted(layers, 'layer')} for {block_tokens:,} tokens (--block-tokens)",
        )
    elif layers:
        show(out, "a record: --block-tokens says of how many tokens; layers with a state make blocks large")
    else:
        show(out, "a record: the file does not say which layers are stored together")
    if cache.window_layers != 0:
        some = "layers may" if cache.window_layers is None else f"{cache.window_layers} of the layers"
        show(out, f"{some} have a window or chunks: all is stored, only the last is loaded")
    if cache.state_layers:
        show(
            out,
            f"{cache.state_layers} more layers keep a state, stored at ends of prompts and not counted here",
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
    by_type = layers * nbytes[0], layers * nbytes[1]
    items = _item_token_nbytes(config, text)
    return KVCache(layers, None if is_untold else windows, states, row, heads, by_type, items)


def _item_token_nbytes(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """An output is as wide as a word's embedding, and DeepStack puts that of further layers beside it."""
    parts = [part for part in (config, config.get("thinker_config")) if isinstance(part, dict)]
    encoders = [part[name] for part in parts for name in _ENCODERS if isinstance(part.get(name), dict)]
    if not encoders or type(text.get("hidden_size")) is not int:
        return 0
    stacked = max(len(one.get("deepstack_visual_indexes") or ()) for one in encoders)
    return 2 * _count(text, "hidden_size") * (1 + stacked)


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
