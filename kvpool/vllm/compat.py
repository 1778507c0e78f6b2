"""Where kvpool reads vLLM's configuration and objects: what it supports, and what it refuses.

Supported: vLLM 0.30 to 0.33. Differences between versions are told by feature, never by version number.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from kvpool.config import hash_seed
from kvpool.errors import EngineRefused
from kvpool.key.hashing import seed_id
from kvpool.key.key import Fact, GroupLayout, Layout
from kvpool.vllm.plan import Group

EVENT_MEDIUM = "STORAGE"  # vllm/distributed/kv_events.py: MEDIUM_STORAGE
EVENT_OWNER = "kvpool"
_OF_THE_POOL = {"locality": "REMOTE", "ownership": EVENT_OWNER}
# In these, specifications of MLA differ by model and cache type; they stand in the layout's facts. In any other field,
# those of later versions too, they say that a block is something else than a latent vector for each of its tokens.
_MLA_LAYOUT = frozenset(
    (
        "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "cache_dtype_str", "kv_quant_mode",
        "page_size_padded", "block_stride_alignment", "num_head_slots", "dcp_sharded",
    )
)  # fmt: skip
_PLAIN_KV_DTYPES = ("auto", "bfloat16", "float16")
# One scale for a layer, or for a head, fixed when the weights are loaded. The others keep scales beside the values,
# or turn the values first.
_FP8_KV_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
# Their drafts are made of tokens alone: they have no layers, so a block has no part that is theirs.
_DRAFTS_OF_TOKENS = ("ngram", "ngram_gpu", "suffix")


def refuse_unsupported(config: VllmConfig) -> None:
    """Check everything that the configuration alone tells.

    Errors: ``EngineRefused``, one sentence with the setting to change.
    """
    transfer = config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_load_failure_policy != "recompute":
        raise EngineRefused(
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}": a lost block would fail the request; '
            'add "kv_load_failure_policy":"recompute" to --kv-transfer-config'
        )
    if not config.cache_config.enable_prefix_caching:
        raise EngineRefused(
            "prefix caching is off, so blocks have no hashes to share; remove --no-enable-prefix-caching"
        )
    _refuse_hashing(config.cache_config.prefix_caching_hash_algo)
    if current_platform.device_type != "cpu":
        _refuse_device(current_platform.device_type, config.model_config.enable_sleep_mode)
    parallel = config.parallel_config
    for name, size in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if size != 1:
            raise EngineRefused(f"{name} {size} is not supported yet; set it to 1")
    if getattr(config, "weight_transfer_config", None) is not None:
        raise EngineRefused(
            "--weight-transfer-config lets a trainer change the weights while requests run, so blocks of old and new "
            "weights would be taken for each other; remove it, or remove --kv-transfer-config"
        )
    if config.speculative_config is not None:
        _refuse_speculation(str(config.speculative_config.method))
    if ahead := getattr(config, "num_hash_lookahead_tokens", 0):
        raise EngineRefused(
            f"a block's hash covers {ahead} tokens behind the block, which other workers do not hash; "
            'add "disable_lookahead_block_hashes": true to --speculative-config'
        )
    if config.model_config.is_encoder_decoder:
        raise EngineRefused("encoder-decoder models are not supported; remove --kv-transfer-config")
    _refuse_later_tokens(config)
    _refuse_moving_rope(config.model_config)
    _refuse_kv_dtype(config)
    if config.lora_config is not None and not hash_tags():
        raise EngineRefused(
            "this version of vLLM hashes an adapter's name and not its path, so adapters of one name would be taken "
            "for each other by other workers; use vLLM 0.31 or newer, or remove --enable-lora"
        )


def _refuse_speculation(method: str) -> None:
    """Drafts need nothing of us: a block is stored when its tokens are accepted (``plan.records_to_store``)."""
    if method not in _DRAFTS_OF_TOKENS:
        raise EngineRefused(
            f'speculative decoding by "{method}" is not supported yet: its layers may keep in a block what depends on '
            f"tokens behind it, which are not in the block's hash; supported are {', '.join(_DRAFTS_OF_TOKENS)}; "
            "change or remove --speculative-config"
        )


def _refuse_later_tokens(config: VllmConfig) -> None:
    """A block's hash is made of its own tokens and those before it."""
    if getattr(config, "diffusion_config", None) is not None:
        raise EngineRefused(
            "diffusion models compute the K and V of a token with those behind it, which are not in the block's hash; "
            "remove --kv-transfer-config"
        )
    if getattr(getattr(config, "attention_config", None), "use_non_causal", False):
        raise EngineRefused(
            "attention_config.use_non_causal: the K and V of a token depend on those behind it, which are not in the "
            "block's hash; remove it, or --kv-transfer-config"
        )


def _refuse_moving_rope(model: ModelConfig) -> None:
    """Transformers' own rotary embeddings of these kinds follow the longest request of each batch."""
    if not get_model_architecture(model)[0].__module__.startswith("vllm.model_executor.models.transformers"):
        return
    if kinds := {"dynamic", "longrope"} & rope_types(model.hf_text_config):
        raise EngineRefused(
            f"the model runs on Transformers' implementation, whose rope of type {min(kinds)} follows the longest "
            "request of a batch, so equal prompts have different keys; use --model-impl vllm where there is one, or "
            "remove --kv-transfer-config"
        )


def rope_types(hf_config: Any) -> set[str]:
    """The kinds of rotary embeddings that a model's configuration names, those of single layer types, too."""
    found = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    of_layers = [one for one in found.values() if isinstance(one, Mapping)]
    return {str(one.get("rope_type", one.get("type", "default"))) for one in (of_layers or [found])}


def _refuse_kv_dtype(config: VllmConfig) -> None:
    kind = str(config.cache_config.cache_dtype)
    if kind not in _PLAIN_KV_DTYPES + _FP8_KV_DTYPES:
        raise EngineRefused(
            f"--kv-cache-dtype {kind} is not supported yet; supported are "
            + ", ".join(_PLAIN_KV_DTYPES + _FP8_KV_DTYPES)
        )
    # In versions before 0.32: each engine takes its scales from the first tokens that it happens to see.
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise EngineRefused(
            "--calculate-kv-scales gives each engine scales of its own, so its blocks mean other numbers elsewhere; "
            "remove it, and use a checkpoint with KV scales or none"
        )


def _refuse_device(kind: str, sleeps: bool) -> None:
    """Copies beside the engine need streams and events as ``torch.accelerator`` gives them."""
    driven = torch.accelerator.current_accelerator()
    if driven is None or driven.type != kind:
        raise EngineRefused(
            f"the KV cache is on a device ({kind}) that torch.accelerator does not drive here, so blocks cannot be "
            "copied beside the engine; remove --kv-transfer-config"
        )
    if sleeps:
        raise EngineRefused(
            "sleep mode takes the KV cache away while blocks may still be copied, which is not supported yet on an "
            "accelerator; remove --enable-sleep-mode"
        )


def _refuse_hashing(algorithm: str) -> None:
    if algorithm not in ("sha256_cbor", "xxhash_cbor"):
        raise EngineRefused(
            f'prefix caching hashes with "{algorithm}", which hashes a pickle, so equal prompts may hash '
            "differently and workers would not share; add --prefix-caching-hash-algo sha256_cbor"
        )
    if algorithm == "xxhash_cbor" and hash_seed() is None:
        raise EngineRefused(
            "xxhash_cbor draws a random seed in each process, so workers would never share; set PYTHONHASHSEED "
            "to the same number in every worker, or use --prefix-caching-hash-algo sha256_cbor"
        )


def groups_of(config: KVCacheConfig, blocks_per_record: int = 1, tensor_parallel: int = 1) -> list[Group]:
    """The KV-cache groups as plans need them, all with as many blocks in a record.

    Errors: ``EngineRefused`` naming the kind of attention that is not supported.
    """
    if not config.kv_cache_groups:
        raise EngineRefused("the model has no KV cache to share; remove --kv-transfer-config")
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        layers = _layer_specs(group)
        spec = layers[0] if len(set(map(type, layers))) == 1 else group.kv_cache_spec
        # Subclasses (sinks, chunked windows, ...) keep other bytes or need other blocks: exact types only.
        if type(spec) is FullAttentionSpec:
            groups.append(Group(group.kv_cache_spec.block_size))
        elif type(spec) is SlidingWindowSpec and not getattr(spec, "extra_retained_tokens", 0):
            groups.append(Group(group.kv_cache_spec.block_size, spec.sliding_window))
        elif type(spec) is MLAAttentionSpec:
            _refuse_uncommon_mla(index, group)
            groups.append(Group(group.kv_cache_spec.block_size, latent=True, copies=tensor_parallel))
        else:
            raise EngineRefused(
                f"KV-cache group {index} is of kind {type(spec).__name__}, which is not supported yet; "
                "supported are full attention, sliding windows and MLA"
            )
    return [dataclasses.replace(group, blocks_per_record=blocks_per_record) for group in groups]


def _layer_specs(group: KVCacheGroupSpec) -> list[Any]:
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _refuse_uncommon_mla(index: int, group: KVCacheGroupSpec) -> None:
    """Sparse indexers, compressed states, caches in main memory: their blocks hold, or need, something else."""
    for layer in _layer_specs(group):
        for one in dataclasses.fields(layer):
            value = getattr(layer, one.name)
            plain = 1 if one.name == "max_tp_shards" else one.default  # 1: every rank has it whole
            if one.name not in _MLA_LAYOUT and value != plain:
                raise EngineRefused(
                    f"KV-cache group {index} is MLA with {one.name} {value!r}, which is not supported yet; "
                    "supported is one latent vector for each token"
                )
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise EngineRefused(
            f"KV-cache group {index} is MLA of which main memory keeps a part, which is not supported yet"
        )


def block_sizes(config: VllmConfig, cache: KVCacheConfig) -> tuple[int, int]:
    """(tokens to which hits are aligned, tokens of one block hash)."""
    return kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)


def layers_of(cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """For each group, its layers as views of shape ``[num_blocks, ...]``."""
    group_kernel_blocks = _group_kernel_blocks()
    for index, group in enumerate(cache.kv_cache_groups):
        if not group.layer_names:
            raise EngineRefused(
                f"a pipeline stage has no layer of KV-cache group {index}, which is not supported yet; "
                "change --pipeline-parallel-size"
            )
    missing = [name for group in cache.kv_cache_groups for name in group.layer_names if name not in kv_caches]
    if missing:
        raise EngineRefused(f"layer {missing[0]} has no KV cache of its own, which is not supported yet")
    return [
        [group_kernel_blocks(kv_caches[name], cache.num_blocks) for name in group.layer_names]
        for group in cache.kv_cache_groups
    ]


def _group_kernel_blocks() -> Any:
    try:
        from vllm.v1.kv_cache_interface import group_kernel_blocks
    except ImportError as error:
        raise EngineRefused(f"this version of vLLM is not supported ({error}); use 0.30 to 0.33") from error
    return group_kernel_blocks


def layout_of(groups: Sequence[Group], layers: Sequence[Sequence[torch.Tensor]], kv_dtype: str) -> Layout:
    """How one rank's records are made of its blocks, and how these lie in memory."""
    return Layout(
        kv_dtype,
        tuple(
            GroupLayout(
                block_tokens=group.record_tokens,
                layers=len(views),
                payload_nbytes=group.blocks_per_record
                * sum(view[0].numel() * view.element_size() for view in views),
                shapes=tuple(tuple(view.shape[1:]) for view in views),
                strides=tuple(tuple(view.stride()[1:]) for view in views),
                attention=_attention(group),
            )
            for group, views in zip(groups, layers, strict=True)
        ),
    )


def _attention(group: Group) -> str:
    if group.latent:
        return "mla"
    return "full" if group.window is None else f"sliding_window:{group.window}"


def tier_facts(config: Any, model_id: str, chunk_nbytes: int) -> dict[str, Fact]:
    """Every fact that a tier is told (``vllm/v1/kv_offload/config.py``); ``model_id`` stands for the others.

    The tensor-parallel size is not among them where a row is the same for all sizes; see ``_is_same_for_all_ranks``.
    """
    parallel = config.parallel
    facts: dict[str, Fact] = {
        "engine": "vllm",
        "integration": "tier",
        "model": model_id,
        "kv_dtype": config.model.dtype,
        "hash_seed": seed_id(hash_seed()),
        "hash_block_tokens": config.cache.tokens_per_hash,
        "hash_tags": hash_tags(),
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
    if current_platform.device_type == "cpu":
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    if config.model.dtype in _FP8_KV_DTYPES:
        facts["fp8_format"] = _fp8_format()
    if not _is_same_for_all_ranks(config):
        facts["tensor_parallel"] = parallel.tp_size
    for index, group in enumerate(config.groups):
        facts[f"group{index}.block_tokens"] = group.tokens_per_block
        facts[f"group{index}.layers"] = digest_of(list(group.layer_names))
    return facts


def _is_same_for_all_ranks(config: Any) -> bool:
    """Whether a row has the same bytes at every tensor-parallel size.

    vLLM says so of its canonical layout, which it certifies layer by layer, and of one copy of latent vectors. Of its
    direct layout it says so, too; there ranks lie side by side, each with its blocks and layers, so it is true of one
    block a chunk, and of heads outside of layers, alone (vllm-project/vllm#55904).
    """
    if config.canonical_layout or config.replicated_layout:
        return bool(config.parallel.is_parallelism_agnostic or config.replicated_layout)
    return (
        bool(config.parallel.is_parallelism_agnostic)
        and config.parallel.pp_size == 1
        and config.cache.blocks_per_chunk == 1
        and config.kv_cache_layout == "BHLNC"
    )


def digest_of(value: object) -> str:
    """A short fingerprint of what is long."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scale_facts(config: VllmConfig) -> dict[str, Fact]:
    """What the bytes of an FP8 cache stand for; nothing where no layer has one.

    The types are asked of the layers: a checkpoint may set them, and ``--kv-cache-dtype-skip-layers`` leaves some out.
    Errors: ``EngineRefused``.
    """
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)  # type: ignore[type-abstract]
    kinds = {name: str(getattr(layer, "kv_cache_dtype", "auto")) for name, layer in layers.items()}
    scales: dict[str, list[Any]] = {}
    for name, kind in kinds.items():
        if kind in _PLAIN_KV_DTYPES:
            continue
        if kind not in _FP8_KV_DTYPES:
            raise EngineRefused(f"the KV cache of layer {name} is of type {kind}, which is not supported yet")
        found = [getattr(layers[name], side, None) for side in ("_k_scale", "_v_scale")]
        of_device = [
            one.detach().float().flatten().tolist() for one in found if isinstance(one, torch.Tensor)
        ]
        if config.parallel_config.tensor_parallel_size > 1 and any(len(one) > 1 for one in of_device):
            raise EngineRefused(
                f"layer {name} has a scale for each KV head, so each rank has others, which is not supported yet; "
                "set --tensor-parallel-size to 1, or --kv-cache-dtype to auto"
            )
        # Some kernels read these, others a copy on the host.
        of_host = [getattr(layers[name], side, None) for side in ("_k_scale_float", "_v_scale_float")]
        scales[name] = [of_device, of_host]
    if not scales:
        return {}
    return {
        "fp8_format": _fp8_format(),
        "fp8_layers": digest_of({name: kinds[name] for name in scales}),
        "fp8_scales": digest_of(scales),
    }


def _fp8_format() -> str:
    """What ``fp8`` is on this processor: ``float8_e4m3fn`` or ``float8_e4m3fnuz``."""
    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def hash_tags() -> bool:
    """Whether extra keys enter the hash tagged (from 0.31), which changes the hashes of LoRA, salt and images."""
    return hasattr(kv_cache_utils, "to_event_extra_keys")


def attention_backends(config: VllmConfig) -> str:
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)  # type: ignore[type-abstract]
    return ",".join(sorted({layer.get_attn_backend().get_name() for layer in layers.values()}))


def kernel_packing(config: VllmConfig, cache: KVCacheConfig) -> str:
    """How the CPU kernels pack keys inside a block: it depends on the processor (AMX, AVX-512, NEON, ...)."""
    if current_platform.device_type != "cpu":
        return ""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        # Not told by this version: the processor's name is then the safe answer.
        return str(current_platform.get_cpu_architecture())
    packings = set()
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype), "vLLM has resolved its name"
    for group in cache.kv_cache_groups:
        for layer in _layer_specs(group):
            assert isinstance(layer, AttentionSpec), "groups_of refuses every other kind"
            if not isinstance(layer, MLAAttentionSpec):  # latent vectors lie there as they are
                # The backend looks at the model's type, not at that of the cache, which is FP8's bytes.
                packings.add(_get_attn_isa(dtype, layer.block_size, layer.head_size))
    return ",".join(sorted(packings))


def weights_mark(config: VllmConfig) -> Callable[[], object]:
    """A function whose answer changes when vLLM loads weights anew into the living model (``reload_weights``).

    vLLM then sets the scales of every attention layer again, in place, which torch counts; nothing else does. Who
    writes into parameters by other means is not noticed. Takes a microsecond and asks nothing of the device.
    """
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)  # type: ignore[type-abstract]
    for layer in layers.values():
        if isinstance(getattr(layer, "_k_scale", None), torch.Tensor):
            return functools.partial(_times_written, layer)
    return lambda: None


def _times_written(layer: Any) -> object:
    scale: torch.Tensor = layer._k_scale
    return None if scale.is_inference() else (id(scale), scale._version)


def scheduled_tokens(output: SchedulerOutput) -> list[tuple[str, int]]:
    """(request, tokens computed when the step is over, drafts among them) for every request of the step."""
    cached = output.scheduled_cached_reqs
    before = [(request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs]
    before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [(name, computed + output.num_scheduled_tokens[name]) for name, computed in before]


def block_tables(output: SchedulerOutput, request_id: str) -> tuple[list[int], ...] | None:
    """The block ids of a scheduled request, by group, as they stand in this step."""
    state = output.kv_connector_block_state
    assert state is not None, "vLLM gives connectors the block tables from 0.29 on"
    tables: tuple[list[int], ...] | None = state.get_block_ids(request_id)
    return tables


def record_hashes(request: Request, hash_block_tokens: int, group: Group) -> Sequence[bytes]:
    """The hashes of the request's records in a group: each that of the last block that is hashed in it."""
    step = group.record_tokens // hash_block_tokens
    hashes: Sequence[bytes] = request.block_hashes
    return hashes if step == 1 else hashes[step - 1 :: step]


def block_keys(
    request: Request, hash_block_tokens: int, group_index: int, group: Group, record: int
) -> list[bytes]:
    """The keys of ``cached_blocks`` for the blocks of a record, in order."""
    step = group.block_tokens // hash_block_tokens
    first = record * group.blocks_per_record
    ends = [(block + 1) * step - 1 for block in range(first, first + group.blocks_per_record)]
    return [cache_key(request.block_hashes[end], group_index) for end in ends]


def adapter_settings(config: VllmConfig) -> str:
    """A fingerprint of what, beside its files, decides how an adapter's weights are made; empty: there are none."""
    lora = config.lora_config
    names = ("target_modules", "lora_dtype", "enable_tower_connector_lora", "enable_mixed_moe_lora_format")
    return "" if lora is None else digest_of({name: getattr(lora, name, None) for name in names})


def adapter_changed_in_place(request: Request) -> bool:
    """Whether the request's adapter was loaded over an earlier one of the same name and path, so of the same hashes."""
    return bool(getattr(request.lora_request, "load_inplace", False))


def stored_event(
    request: Request, group_index: int, group: Group, index: int, hashes: Sequence[bytes]
) -> BlockStored:
    """The KV event that says: record ``index`` of ``request`` is in the pool now.

    A record of several blocks is told as one block of their size: by its last hash alone can it be found.
    """
    start, end = index * group.record_tokens, (index + 1) * group.record_tokens
    lora = request.lora_request
    fields: dict[str, Any] = {
        "block_hashes": [_event_hash(hashes[index])],
        "parent_block_hash": _event_hash(hashes[index - 1]) if index else None,
        "token_ids": list(request.all_token_ids[start:end]),
        "block_size": group.record_tokens,
        "lora_id": lora.adapter_id if lora else None,
        "lora_name": lora.name if lora else None,
        "medium": EVENT_MEDIUM,
        "extra_keys": _event_extra_keys(request, start, end),
        **_group_fields(group_index, group),
    }
    return BlockStored(**_known(BlockStored, fields | _OF_THE_POOL))


def removed_event(block_hash: bytes, group: int) -> BlockRemoved:
    """The KV event that says: the pool turned out not to hold this record any more."""
    fields = {
        "block_hashes": [_event_hash(block_hash)],
        "medium": EVENT_MEDIUM,
        "group_idx": group,
    }
    return BlockRemoved(**_known(BlockRemoved, fields | _OF_THE_POOL))


def cached_blocks(block_pool: Any) -> Mapping[bytes, Any] | None:
    """The engine's prefix cache: by hash and group, a block, or where there are copies their dictionary by block id.

    It is the engine's own dictionary, to be read before the engine goes on. None: this version of vLLM shows none.
    """
    blocks: Mapping[bytes, Any] | None = getattr(block_pool.cached_block_hash_to_block, "_cache", None)
    return blocks if isinstance(blocks, dict) else None


def holds_blocks(block_pool: Any) -> bool:
    """Whether anybody holds a block of the engine's memory, but for the null block, which is always held."""
    return bool(block_pool.num_gpu_blocks - block_pool.get_num_free_blocks() > 1)


def next_evicted(block_pool: Any, count: int) -> list[tuple[int, bytes | None]]:
    """The ``count`` blocks that the engine will use next, soonest first: block id, and hash and group of its content.

    A key as in ``cached_blocks``; None: it holds nothing that could be found again.
    """
    found: list[tuple[int, bytes | None]] = []
    block = block_pool.free_block_queue.fake_free_list_head.next_free_block
    # The head and the tail of the list are no blocks.
    while len(found) < count and block is not None and block.next_free_block is not None:
        found.append((block.block_id, block.block_hash))
        block = block.next_free_block
    return found


def cache_key(block_hash: bytes, group: int) -> bytes:
    """The key of ``cached_blocks`` for a block of ``group``."""
    return bytes(kv_cache_utils.make_block_hash_with_group_id(kv_cache_utils.BlockHash(block_hash), group))


def by_group(keys: Sequence[bytes], groups: int) -> list[list[bytes | int]]:
    """For each group, the hashes in keys of ``cached_blocks``, as events carry them.

    All keys have one length, that of the one hash algorithm; the last 4 bytes are the group, big-endian.
    """
    if not keys:
        return [[] for _ in range(groups)]
    if isinstance(_event_hash(keys[0][:-4]), bytes):
        return [[key[:-4] for key in keys if key[-4:] == group.to_bytes(4, "big")] for group in range(groups)]
    width = len(keys[0])
    form: Any = {
        "names": ["hash", "group"],
        "formats": [">u8", ">u4"],
        "offsets": [width - 12, width - 4],
        "itemsize": width,
    }
    parts = numpy.frombuffer(b"".join(keys), numpy.dtype(form))
    return [parts["hash"][parts["group"] == group].astype("u8").tolist() for group in range(groups)]


class DeviceCleared(AllBlocksCleared, tag="AllBlocksCleared"):
    """``AllBlocksCleared`` of the engine's own memory alone; who does not know ``medium`` clears every tier."""

    medium: str


def cleared_event(block_pool: Any) -> DeviceCleared:
    """The KV event that says: what was told of the engine's own cache is told anew from here on."""
    return DeviceCleared(_medium(block_pool))


def held_event(block_pool: Any, group_index: int, group: Group, hashes: list[bytes | int]) -> BlockStored:
    """The KV event that says: the engine's own cache holds these blocks, which are of any prompts.

    A block stands in ``hashes`` as often as there are copies of it. An event with a parent is believed whole and adds
    a copy of each (decisions 16 and 56), and which parent that is is nothing to an index.
    """
    fields: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": hashes[0] if hashes else None,
        "token_ids": [],  # the engine does not keep them
        "block_size": group.block_tokens,
        "lora_id": None,
        "lora_name": None,
        "medium": _medium(block_pool),
        **_group_fields(group_index, group),
    }
    return BlockStored(**_known(BlockStored, fields))


def _medium(block_pool: Any) -> str:
    return str(getattr(block_pool, "medium", MEDIUM_GPU))


def _group_fields(group_index: int, group: Group) -> dict[str, Any]:
    whole = "mla_attention" if group.latent else "full_attention"
    return {
        "group_idx": group_index,
        "kv_cache_spec_kind": whole if group.window is None else "sliding_window",
        "kv_cache_spec_sliding_window": group.window,
    }


def _event_hash(block_hash: bytes) -> bytes | int:
    """As events carry it: the last eight bytes as an integer, unless the engine is set to send it whole."""
    return kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(block_hash))


def _event_extra_keys(request: Request, start: int, end: int) -> Any:
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    if keys is None:
        return None
    return kv_cache_utils.to_event_extra_keys([keys]) if hash_tags() else [keys]


def _known(event: type[KVCacheEvent], fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` without those that this version of the event lacks."""
    return {name: value for name, value in fields.items() if name in event.__struct_fields__}
