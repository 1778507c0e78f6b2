"""The facts of a vLLM engine: everything that changes what a block's hash or its bytes mean.

Asked of what was built, where that can be reached, and else of the configuration: ``judged`` lists the settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvpool.config import hash_seed
from kvpool.errors import ConfigError
from kvpool.key.hashing import seed_id
from kvpool.key.key import Fact
from kvpool.vllm import compat
from kvpool.vllm.judged import settings_facts
from kvpool.vllm.weights import snapshot_commit

# Of the tables of a rotary embedding: its parameters are facts, too, and these say how they were used.
ROPE_ROWS = 64
# They say how long a table is. What they change in it, its rows say.
_ROPE_LENGTHS = frozenset(("max_position_embeddings", "cache_max_position_num", "max_position"))
_NOT_OF_THE_ROPE = frozenset(("training", "update_cache"))
# What turns an image into other embeddings without being in its hash, or not in every version.
_MULTIMODAL_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
# Their processors cut images by ``--max-model-len``.
_CUT_BY_LENGTH = ("nano_nemotron_vl", "dots3_note")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def engine_facts(
    config: VllmConfig,
    cache: KVCacheConfig,
    weights: Mapping[str, Fact],
    layers: Sequence[Sequence[torch.Tensor]],
    blocks_per_record: int = 1,
) -> dict[str, Fact]:
    """Every fact that changes what a block's hash or its bytes mean; the same on every rank of one pipeline stage.

    ``weights``: the facts of these (``weights_of``). Call it in a worker that has built its model.
    Errors: ``ConfigError``.
    """
    model, parallel, caching = config.model_config, config.parallel_config, config.cache_config
    _, hash_block_tokens = compat.block_sizes(config, cache)
    kv_dtype = str(caching.cache_dtype)
    if kv_dtype == "auto":
        kv_dtype = str(model.dtype)
    model_class, _ = get_model_architecture(model)
    facts: dict[str, Fact] = {
        "engine": "vllm",
        "model_config": compat.digest_of(_model_config(model.hf_config)),
        "implementation": f"{model_class.__module__}:{model_class.__qualname__}",
        "runner": f"{model.runner_type}, {model.convert_type}",
        "rope": rope_fact(list(rotary_embedding._ROPE_DICT.values()), model.dtype),
        "weights_dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
        "hash_algorithm": str(caching.prefix_caching_hash_algo),
        "hash_seed": seed_id(hash_seed()),
        "hash_block_tokens": hash_block_tokens,
        "hash_tags": compat.hash_tags(),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "decode_context_parallel": parallel.decode_context_parallel_size,
        "device": current_platform.device_type,
        "attention_backend": compat.attention_backends(config),
        "kernel_packing": compat.kernel_packing(config, cache),
        "blocks_per_record": blocks_per_record,
        **weights,
    }
    if (multimodal := getattr(model, "multimodal_config", None)) is not None:
        settings = {name: getattr(multimodal, name, None) for name in _MULTIMODAL_SETTINGS}
        if any(name in model_class.__module__ for name in _CUT_BY_LENGTH):
            settings["max_model_len"] = model.max_model_len
        facts["multimodal"] = compat.digest_of([settings, _processor(model)])
    facts |= compat.scale_facts(config) | settings_facts(config)
    # Which layers a group has, for versions of vLLM may group those of a hybrid model in several ways.
    for index, group in enumerate(cache.kv_cache_groups):
        facts[f"group{index}.layer_names"] = compat.digest_of(list(group.layer_names))
    groups = compat.groups_of(cache, blocks_per_record)
    return facts | compat.layout_of(groups, layers, kv_dtype.removeprefix("torch.")).facts()


def rope_fact(built: Sequence[nn.Module], dtype: Any) -> str:
    """A digest of the rotary embeddings that vLLM has ``built`` in this process; empty when there are none.

    It holds their kinds, their parameters, and the first rows of their tables, in the ``dtype`` in which they are
    used (some models keep them in another one until then). Not the length of a table: engines of different
    ``--max-model-len`` share where their tables begin alike and no parameter differs.
    """
    return compat.digest_of(sorted({_rotary(one, dtype) for one in built})) if built else ""


def _rotary(embedding: nn.Module, dtype: torch.dtype) -> str:
    says: dict[str, Any] = {"kind": type(embedding).__qualname__}
    for name, value in vars(embedding).items():
        if name.startswith("_") or name in _ROPE_LENGTHS | _NOT_OF_THE_ROPE:
            continue
        # A list of numbers has the same text in every process; an object's may hold its address.
        if isinstance(value, (bool, int, float, str, tuple, list)):
            says[name] = str(value)
    for name, table in (*embedding.named_parameters(), *embedding.named_buffers()):
        if table.dim() == 0:
            continue
        rows = table[:ROPE_ROWS].detach().to("cpu", dtype).float().contiguous()
        shape = "x".join(map(str, rows.shape))
        says[f"table {name}"] = f"{shape} {hashlib.sha256(rows.numpy().tobytes()).hexdigest()}"
    return compat.digest_of(says)


def _model_config(hf_config: Any) -> dict[str, Any]:
    """The model's configuration after all overrides, and after what the model's own code has written into it."""
    facts: dict[str, Any] = dict(hf_config.to_diff_dict())
    for name in (
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "max_model_len",
    ):
        facts.pop(name, None)  # the length is MiniMax's, for its rope
    return facts


def _processor(model: ModelConfig) -> list[str]:
    """What turns images into numbers, where it lies beside the model; of a commit of the hub, that says it."""
    folder = Path(model.model)
    if not folder.is_dir() or snapshot_commit(folder):
        return []
    files = [folder / name for name in _PROCESSOR_FILES]
    if model.trust_remote_code:
        files += sorted(folder.glob("*.py"))
    try:
        return [
            f"{one.name} {hashlib.sha256(one.read_bytes()).hexdigest()}" for one in files if one.is_file()
        ]
    except OSError as error:
        raise ConfigError(
            f"the configuration beside the model cannot be read ({error}); make {folder} readable"
        ) from error
