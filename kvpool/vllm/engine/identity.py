"""The identity of a vLLM engine: facts that change the meaning of a block, and their namespace.

Facts come from the built model where reachable, else from the configuration (``settings``). Ranks of a
pipeline stage have equal facts; stages differ by their layers.

Over 400 lines because all facts that separate engines stand together.

Threads: any.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from kvpool.config import hash_seed
from kvpool.errors import ConfigError, EngineRefused
from kvpool.files import read_file
from kvpool.key.checkpoint import MAX_TEXT_NBYTES
from kvpool.key.hashing import seed_id
from kvpool.key.key import Fact, GroupLayout, Layout, differing_facts
from kvpool.key.order import with_order
from kvpool.vllm.engine import internals, support
from kvpool.vllm.engine.parts import cut, strides_alone
from kvpool.vllm.engine.settings import settings_facts
from kvpool.vllm.engine.weights import snapshot_commit
from kvpool.vllm.geometry import Group

logger = init_logger("vllm.kvpool")


# Of each rotary embedding's table; its parameters are facts too.
ROPE_ROWS = 64
# Table lengths; if they change other numbers, the rows show it.
_ROPE_LENGTHS = frozenset(("max_position_embeddings", "cache_max_position_num", "max_position"))
_NOT_OF_THE_ROPE = frozenset(("training", "update_cache"))
# Settings that change an image's embeddings but not its hash, at least in some versions.
_MULTIMODAL_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
# Beside the method and the model of drafts with layers.
_DRAFT_SETTINGS = (
    "num_speculative_tokens", "quantization", "draft_tensor_parallel_size", "moe_backend", "attention_backend",
    "kv_cache_dtype", "parallel_drafting", "index_share_for_mtp_iteration",
)  # fmt: skip
# Their processors cut images by ``--max-model-len``.
_CUT_BY_LENGTH = ("nano_nemotron_vl", "dots3_note")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def engine_facts(
    config: VllmConfig,
    cache: KVCacheConfig,
    weights: Mapping[str, Fact],
    layers: Sequence[Sequence[torch.Tensor]],
    blocks_per_record: int = 1,
    shared: Sequence[Group] | None = None,
) -> dict[str, Fact]:
    """Every fact that changes the meaning of a block's hash or bytes; equal on all ranks of a pipeline stage.

    ``weights``: from ``weights_of``. ``shared``: the groups with their parts (``parts``), whose facts are the same at
    each tensor-parallel size. Call it in a worker after it built its model. Errors: ``ConfigError``.
    """
    model, parallel, caching = config.model_config, config.parallel_config, config.cache_config
    _, hash_block_tokens = internals.block_sizes(config, cache)
    kv_dtype = str(caching.cache_dtype)
    if kv_dtype == "auto":
        kv_dtype = str(model.dtype)
    facts: dict[str, Fact] = {
        "engine": "vllm",
        **model_facts(model),
        "rope": rope_fact(internals.rotary_embeddings(), model.dtype),
        "hash_algorithm": str(caching.prefix_caching_hash_algo),
        "hash_seed": seed_id(hash_seed()),
        "hash_block_tokens": hash_block_tokens,
        "hash_tags": internals.hash_tags(),
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "decode_context_parallel": parallel.decode_context_parallel_size,
        "device": current_platform.device_type,
        "attention_backend": internals.attention_backends(config),
        "kernel_packing": internals.kernel_packing(config, cache),
        "blocks_per_record": blocks_per_record,
        **weights,
    }
    if (drafts := support.drafts_with_layers(config)) is not None:
        of_model = model_facts(drafts.draft_model_config)
        settings = [str(getattr(drafts, name, None)) for name in _DRAFT_SETTINGS]
        facts["drafts"] = digest_of([str(drafts.method), of_model, settings])
    facts |= scale_facts(config) | settings_facts(config)
    # The layers of each group, because versions of vLLM group a hybrid model differently.
    for index, group in enumerate(cache.kv_cache_groups):
        facts[f"group{index}.layer_names"] = digest_of(list(group.layer_names))
        specs = internals.layer_specs(group)
        if any(isinstance(one, MambaSpec) for one in specs):
            facts["conv_state_layout"] = internals.conv_state_layout()
        if internals.is_scratch(group) or any(
            isinstance(one, MambaSpec) or support.is_sparse_mla(one) for one in specs
        ):
            facts[f"group{index}.specs"] = digest_of([_spec(one) for one in specs])
    kv_dtype = kv_dtype.removeprefix("torch.")
    if shared is None:
        facts["tensor_parallel"] = parallel.tensor_parallel_size
        return facts | layout_of(support.groups_of(cache, blocks_per_record), layers, kv_dtype).facts()
    for index, of_group in enumerate(shared):
        if not of_group.scratch:
            facts[f"group{index}.parts"] = len(of_group.all_parts(parallel.tensor_parallel_size))
    first = [cut(views, of_group.parts)[0] for of_group, views in zip(shared, layers, strict=True)]
    return facts | layout_of(shared, first, kv_dtype, strides_alone).facts()


def model_facts(model: ModelConfig) -> dict[str, Fact]:
    """What the configuration says of the model, after all overrides."""
    model_class = internals.model_class(model)
    facts: dict[str, Fact] = {
        "model_config": digest_of(_model_config(model.hf_config)),
        "implementation": f"{model_class.__module__}:{model_class.__qualname__}",
        "runner": f"{model.runner_type}, {model.convert_type}",
        "weights_dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
    }
    if (multimodal := getattr(model, "multimodal_config", None)) is not None:
        settings = {name: getattr(multimodal, name, None) for name in _MULTIMODAL_SETTINGS}
        if any(name in model_class.__module__ for name in _CUT_BY_LENGTH):
            settings["max_model_len"] = model.max_model_len
        facts["multimodal"] = digest_of([settings, _processor(model)])
    return facts


def _strides(view: torch.Tensor) -> tuple[int, ...]:
    return tuple(view.stride()[1:])


def layout_of(
    groups: Sequence[Group],
    layers: Sequence[Sequence[torch.Tensor]],
    kv_dtype: str,
    strides: Callable[[torch.Tensor], tuple[int, ...]] = _strides,
) -> Layout:
    """The composition of a rank's records, or their parts, from its blocks, and the blocks' memory layout."""
    return Layout(
        kv_dtype,
        tuple(
            None
            if group.scratch
            else GroupLayout(
                block_tokens=group.record_tokens,
                layers=len(views),
                payload_nbytes=group.blocks_per_record
                * sum(view[0].numel() * view.element_size() for view in views),
                shapes=tuple(tuple(view.shape[1:]) for view in views),
                strides=tuple(strides(view) for view in views),
                attention=_attention(group),
            )
            for group, views in zip(groups, layers, strict=True)
        ),
    )


def _attention(group: Group) -> str:
    if group.state:
        return "state"
    if group.chunk is not None:
        return f"chunk:{group.chunk}"
    if group.window is not None:
        return f"sliding_window{'_mla' if group.latent else ''}:{group.window}"
    return "mla" if group.latent else "full"


def scale_facts(config: VllmConfig) -> dict[str, Fact]:
    """The scales of an FP8 cache; empty without FP8 layers.

    Read from the layers: a checkpoint may set their types, and ``--kv-cache-dtype-skip-layers`` skips some.
    Errors: ``EngineRefused``.
    """
    layers = internals.attention_layers(config)
    kinds = {name: str(getattr(layer, "kv_cache_dtype", "auto")) for name, layer in layers.items()}
    scales: dict[str, list[Any]] = {}
    for name, kind in kinds.items():
        if kind in support.PLAIN_KV_DTYPES + support.ROW_KV_DTYPES:
            continue
        if kind not in support.FP8_KV_DTYPES:
            raise EngineRefused(f"the KV cache of layer {name} is of type {kind}, which is not supported yet")
        on_device, on_host = internals.kv_scales(layers[name])
        if config.parallel_config.tensor_parallel_size > 1 and any(len(one) > 1 for one in on_device):
            raise EngineRefused(
                f"layer {name} has a scale for each KV head, so each rank has others, which is not supported yet; "
                "set --tensor-parallel-size to 1, or --kv-cache-dtype to auto"
            )
        scales[name] = [on_device, on_host]
    facts: dict[str, Fact] = {}
    if scales or not {*support.ROW_KV_DTYPES}.isdisjoint(kinds.values()):
        facts["fp8_format"] = _fp8_format()
    if scales:
        facts["fp8_layers"] = digest_of({name: kinds[name] for name in scales})
        facts["fp8_scales"] = digest_of(scales)
    return facts


def elements_of(
    config: VllmConfig, cache: KVCacheConfig, layers: Sequence[Sequence[torch.Tensor]]
) -> list[list[str]]:
    """By group and layer, what the numbers of a KV cache are, as torch calls them: of FP8 the tensors are bytes."""
    kinds = {
        name: str(layer.kv_cache_dtype)
        for name, layer in internals.attention_layers(config).items()
        if hasattr(layer, "kv_cache_dtype")
    }
    found: list[list[str]] = []
    for group, views in zip(cache.kv_cache_groups, layers, strict=True):
        of_group = [str(view.dtype).removeprefix("torch.") for view in views]
        for place, name in enumerate(group.layer_names if len(group.layer_names) == len(views) else ()):
            if of_group[place] == "uint8" and kinds.get(name) in support.FP8_KV_DTYPES:
                of_group[place] = "float8_e5m2" if kinds[name] == "fp8_e5m2" else _fp8_format()
        found.append(of_group)
    return found


def _fp8_format() -> str:
    """This processor's ``fp8``: ``float8_e4m3fn`` or ``float8_e4m3fnuz``."""
    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def rope_fact(built: Sequence[nn.Module], dtype: Any) -> str:
    """A digest of the rotary embeddings ``built`` by vLLM in this process; empty without any.

    It covers kinds, parameters, and the tables' first rows, in the ``dtype`` of their use (some models store
    another). Table lengths are left out: engines of different ``--max-model-len`` share if their tables begin
    alike and no parameter differs.
    """
    return digest_of(sorted({_rotary(one, dtype) for one in built})) if built else ""


def _rotary(embedding: nn.Module, dtype: torch.dtype) -> str:
    says: dict[str, Any] = {"kind": type(embedding).__qualname__}
    for name, value in vars(embedding).items():
        if name.startswith("_") or name in _ROPE_LENGTHS | _NOT_OF_THE_ROPE:
            continue
        # Numbers have the same text in every process; an object's may hold its address.
        if isinstance(value, (bool, int, float, str, tuple, list)):
            says[name] = str(value)
    for name, table in (*embedding.named_parameters(), *embedding.named_buffers()):
        if table.dim() == 0:
            continue
        rows = table[:ROPE_ROWS].detach().to("cpu", dtype).float().contiguous()
        shape = "x".join(map(str, rows.shape))
        says[f"table {name}"] = f"{shape} {hashlib.sha256(rows.numpy().tobytes()).hexdigest()}"
    return digest_of(says)


# Of a model's configuration: where it was found, and by whom; the length is MiniMax's, for its rope.
_NOT_OF_THE_MODEL = frozenset(
    ("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "max_model_len")
)


def _model_config(hf_config: Any) -> dict[str, Any]:
    """The model's configuration after all overrides, including those by the model's own code."""
    try:
        told = hf_config.to_diff_dict()
    except Exception:
        # One that is made around another's has no defaults (``vllm/transformers_utils/configs/eagle.py``).
        told = hf_config.to_dict()
        told["model"] = _model_config(hf_config.model)
    return {name: value for name, value in told.items() if name not in _NOT_OF_THE_MODEL}


def _processor(model: ModelConfig) -> list[str]:
    """The image processor's files beside the model; a hub commit identifies them."""
    folder = Path(model.model)
    if not folder.is_dir() or snapshot_commit(folder):
        return []
    files = [folder / name for name in _PROCESSOR_FILES]
    if model.trust_remote_code:
        files += sorted(folder.glob("*.py"))
    try:
        return [
            f"{one.name} {hashlib.sha256(read_file(one, MAX_TEXT_NBYTES)).hexdigest()}"
            for one in files
            if one.is_file()
        ]
    except OSError as error:
        raise ConfigError(
            f"the configuration beside the model cannot be read ({error}); make {folder} readable"
        ) from error


# Fields of a layer's specification that follow from the parallel sizes, and from facts of their own.
_SPEC_OF_RANKS = frozenset(
    (
        "block_size",
        "num_kv_heads",
        "num_head_slots",
        "page_size_padded",
        "max_tp_shards",
        "block_stride_alignment",
    )
)


def tier_facts(
    config: Any, engine: VllmConfig, cache: KVCacheConfig, model_id: str, chunk_nbytes: int
) -> dict[str, Fact]:
    """Every fact of what vLLM gives a tier (``vllm/v1/kv_offload/config.py``), of ``engine`` and of ``cache``.

    In this process no layer is built: settings stand for attention backends and rotary embeddings.

    The tensor-parallel size is left out where a row is equal for all (``_is_same_for_all_ranks``). Errors:
    ``EngineRefused``.
    """
    support.refuse_tier(engine, cache)
    parallel = config.parallel
    facts: dict[str, Fact] = {
        "engine": "vllm",
        "integration": "tier",
        "model": model_id,
        "kv_dtype": config.model.dtype,
        "hash_seed": seed_id(hash_seed()),
        "hash_block_tokens": config.cache.tokens_per_hash,
        "hash_tags": internals.hash_tags(),
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "chunk_nbytes": chunk_nbytes,
        "kv_cache_layout": config.kv_cache_layout or "",
        "canonical_layout": config.canonical_layout,
        "replicated_layout": config.replicated_layout,
        "parallelism_agnostic": parallel.is_parallelism_agnostic,
        "pipeline_parallel": parallel.pp_size,
        "prefill_context_parallel": parallel.pcp_size,
        "decode_context_parallel": parallel.dcp_size,
        "device": current_platform.device_type,
    }
    # The device decides on kernels, and on how a page is laid out, where no setting does.
    if current_platform.device_type == "cpu":
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    else:
        facts["device_capability"] = str(current_platform.get_device_capability())
    attention = getattr(engine, "attention_config", None)
    backends = [getattr(attention, name, None) for name in ("backend", "backend_per_kind")]
    facts["attention_backend"] = digest_of(backends)
    skipped = getattr(engine.cache_config, "kv_cache_dtype_skip_layers", None) or ()
    facts["skipped_layers"] = digest_of(sorted(skipped))
    if (model := engine.model_config) is not None:
        facts |= model_facts(model)
        if support.ropes_of_length(model):
            facts["max_model_len"] = model.max_model_len
    if config.model.dtype in support.FP8_KV_DTYPES:
        facts["fp8_format"] = _fp8_format()
    if not _is_same_for_all_ranks(config):
        facts["tensor_parallel"] = parallel.tp_size
    for index, group in enumerate(config.groups):
        facts[f"group{index}.block_tokens"] = group.tokens_per_block
        facts[f"group{index}.layers"] = digest_of(list(group.layer_names))
    for index, group in enumerate(cache.kv_cache_groups):
        facts[f"cache{index}.specs"] = digest_of([_spec(one) for one in internals.layer_specs(group)])
    if (drafts := support.drafts_with_layers(engine)) is not None:
        facts["drafts"] = digest_of([drafts.method, drafts.model])
    return facts | settings_facts(engine)


def _spec(spec: Any) -> dict[str, str]:
    """Of a layer: its kind, and what is not at its default."""
    says = {
        one.name: str(value)
        for one in dataclasses.fields(spec)
        if one.name not in _SPEC_OF_RANKS and (value := getattr(spec, one.name)) != one.default
    }
    return {"kind": type(spec).__name__, **says}


def _is_same_for_all_ranks(config: Any) -> bool:
    """Whether a row has the same bytes at every tensor-parallel size.

    vLLM guarantees this for its canonical layout, certified layer by layer, and for a single copy of latent
    vectors. It claims the same for its direct layout, where ranks lie side by side: true only with one block
    a chunk and heads outside of layers (vllm-project/vllm#55904).
    """
    if config.canonical_layout or config.replicated_layout:
        return bool(config.parallel.is_parallelism_agnostic or config.replicated_layout)
    return (
        bool(config.parallel.is_parallelism_agnostic)
        and config.parallel.pp_size == 1
        and config.cache.blocks_per_chunk == 1
        and config.kv_cache_layout == "BHLNC"
    )


def adapter_settings(config: VllmConfig) -> str:
    """A fingerprint of the settings that turn an adapter's files into weights; empty without adapters."""
    lora = config.lora_config
    names = ("target_modules", "lora_dtype", "enable_tower_connector_lora", "enable_mixed_moe_lora_format")
    return "" if lora is None else digest_of({name: getattr(lora, name, None) for name in names})


def digest_of(value: object) -> str:
    """16 hex digits of SHA-256 over a text, or over a value as JSON."""
    text = value if isinstance(value, str) else json.dumps(with_order(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def facts_of_engine(ranks: Sequence[Mapping[str, Fact]], pipeline_parallel: int) -> dict[str, Fact]:
    """The facts of a namespace for all ``ranks`` of an engine, given in order, stage by stage.

    A fact equal in all stages keeps its name; others become ``stage0.NAME``, ``stage1.NAME``, and so on, so
    that engines share when each of their stages matches. Errors: ``EngineRefused``: ranks of one stage differ.
    """
    of_stage = len(ranks) // pipeline_parallel
    for rank, facts in enumerate(ranks):
        first = rank // of_stage * of_stage
        for name, here, there in differing_facts(ranks[first], facts):
            values = [json.dumps(value) if value is not None else "absent" for value in (here, there)]
            raise EngineRefused(
                f"its ranks differ: {name} is {values[0]} on rank {first} and {values[1]} on rank {rank}; "
                "give all ranks the same model and settings"
            )
    firsts = ranks[::of_stage]
    own = {name for facts in firsts for name, _, _ in differing_facts(firsts[0], facts)}
    return {
        f"stage{stage}.{name}" if name in own else name: value
        for stage, facts in enumerate(firsts)
        for name, value in facts.items()
    }
