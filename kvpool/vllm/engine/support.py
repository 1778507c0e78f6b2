"""Supported vLLM configurations; each refusal is one sentence with the setting to change.

Supported: vLLM 0.30 to 0.33. Versions are distinguished by feature, never by version number.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
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

from kvpool.config import hash_seed
from kvpool.errors import EngineRefused
from kvpool.vllm.engine import internals
from kvpool.vllm.geometry import Geometry, Group

# MLA specification fields that vary by model and cache type; the layout's facts cover them. Any other set
# field, in later versions too, means that a block is not latent vectors of its tokens.
_MLA_LAYOUT = frozenset(
    (
        "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "cache_dtype_str", "kv_quant_mode",
        "page_size_padded", "block_stride_alignment", "num_head_slots", "dcp_sharded",
    )
)  # fmt: skip
# Those of sparse MLA: an indexer's keys beside the vectors, one vector for several tokens, rows of bytes. The facts of
# its specifications cover them.
_SPARSE_MLA = frozenset(
    (
        "cache_role", "is_index_group_leader", "topk_buffer_width", "state_content_bytes", "tokens_per_state",
        "alignment", "model_version",
    )
)  # fmt: skip
PLAIN_KV_DTYPES = ("auto", "bfloat16", "float16")
# A fixed scale per layer or head. Other types keep scales beside the values, or rotate them first.
FP8_KV_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
# Rows of bytes with their own scales among them.
ROW_KV_DTYPES = ("fp8_ds_mla",)
# These draft from tokens alone, without layers, so they own no part of a block.
_DRAFTS_OF_TOKENS = ("ngram", "ngram_gpu", "suffix")
_DRAFTS_WITH_LAYERS = ("draft_model", "eagle", "eagle3", "mtp")


def refuse_unsupported(config: VllmConfig) -> None:
    """Check the configuration. Errors: ``EngineRefused``, one sentence with the setting to change."""
    for sentence in itertools.chain(_refusals(config), _refusals_of_all(config)):
        raise EngineRefused(sentence)


def _refusals(config: VllmConfig) -> Iterator[str]:
    """Why this configuration is unsupported, each with the setting to change; empty: it is supported."""
    transfer, caching, parallel = config.kv_transfer_config, config.cache_config, config.parallel_config
    assert transfer is not None
    if transfer.kv_load_failure_policy != "recompute":
        yield (
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}": a lost block would fail the request; '
            'add "kv_load_failure_policy":"recompute" to --kv-transfer-config'
        )
    if not caching.enable_prefix_caching:
        yield "prefix caching is off, so blocks have no hashes to share; remove --no-enable-prefix-caching"
    if caching.prefix_caching_hash_algo not in ("sha256_cbor", "xxhash_cbor"):
        yield (
            f'prefix caching hashes with "{caching.prefix_caching_hash_algo}", which hashes a pickle, so equal prompts '
            "may hash differently and workers would not share; add --prefix-caching-hash-algo sha256_cbor"
        )
    if caching.prefix_caching_hash_algo == "xxhash_cbor" and hash_seed() is None:
        yield (
            "xxhash_cbor draws a random seed in each process, so workers would never share; set PYTHONHASHSEED "
            "to the same number in every worker, or use --prefix-caching-hash-algo sha256_cbor"
        )
    if (kind := current_platform.device_type) != "cpu":
        # Copies beside the engine need ``torch.accelerator``'s streams and events.
        driven = torch.accelerator.current_accelerator()
        if driven is None or driven.type != kind:
            yield (
                f"the KV cache is on a device ({kind}) that torch.accelerator does not drive here, so blocks cannot be "
                "copied beside the engine; remove --kv-transfer-config"
            )
        if config.model_config.enable_sleep_mode:
            yield from _refusals_of_sleep(config.model_config)
    for name, size in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if size != 1:
            yield f"{name} {size} is not supported yet; set it to 1"
    # A block is stored once its tokens are accepted (``Group.records_to_store``).
    if (drafts := drafts_with_layers(config)) is not None:
        if str(drafts.method) not in _DRAFTS_WITH_LAYERS:
            yield (
                f'speculative decoding by "{drafts.method}" is not supported yet: its layers may keep in a block what '
                "depends on tokens behind it, which are not in the block's hash; supported are "
                f"{', '.join(_DRAFTS_OF_TOKENS + _DRAFTS_WITH_LAYERS)}; change or remove --speculative-config"
            )
        if drafts.use_eagle() and not drafts.use_eagle_block_drop():
            yield (
                "disable_eagle_block_drop uses blocks whose drafts were computed with another next token; remove it "
                "from --speculative-config"
            )
    if ahead := getattr(config, "num_hash_lookahead_tokens", 0):
        yield (
            f"a block's hash covers {ahead} tokens behind the block, which other workers do not hash; "
            'add "disable_lookahead_block_hashes": true to --speculative-config'
        )
    of_drafts = getattr(drafts, "kv_cache_dtype", None) or "auto"
    for option, kv_dtype in (
        ("--kv-cache-dtype", caching.cache_dtype),
        ("kv_cache_dtype of --speculative-config", of_drafts),
    ):
        if str(kv_dtype) not in PLAIN_KV_DTYPES + FP8_KV_DTYPES + ROW_KV_DTYPES:
            supported = ", ".join(PLAIN_KV_DTYPES + FP8_KV_DTYPES + ROW_KV_DTYPES)
            yield f"{option} {kv_dtype} is not supported yet; supported are {supported}"
    for name in ("use_replayssm", "use_kda_recoverssm"):
        if getattr(caching, name, False):
            yield (
                f"{name} keeps a part of each state in the inputs of its last tokens, so a block is not the state at "
                "its end; remove --use-replayssm, or --kv-transfer-config"
            )
    if config.lora_config is not None and not internals.hash_tags():
        yield (
            "this version of vLLM hashes an adapter's name and not its path, so adapters of one name would be taken "
            "for each other by other workers; use vLLM 0.31 or newer, or remove --enable-lora"
        )


def _refusals_of_sleep(model: ModelConfig) -> Iterator[str]:
    """On an accelerator: of what takes memory away in a way that kvpool cannot follow."""
    if not internals.says_when_memory_goes():
        yield (
            "vLLM before 0.33 tells no connector when sleep mode takes the KV cache away, so blocks might still be "
            "copied; use vLLM 0.33, or remove --enable-sleep-mode"
        )
    if (backend := model.sleep_mode_backend) != "cumem":
        yield (
            f'--sleep-mode-backend {backend} may bring memory back elsewhere, which is not supported; use "cumem", or '
            "remove --enable-sleep-mode"
        )


def _refusals_of_all(config: VllmConfig) -> Iterator[str]:
    """Of the connector and the tier: K and V that no hash and no fact tells apart, and answers that need them all."""
    # A block's hash covers only its own and earlier tokens.
    if getattr(config, "diffusion_config", None) is not None:
        yield (
            "diffusion models compute the K and V of a token with those behind it, which are not in the block's hash; "
            "remove --kv-transfer-config"
        )
    if getattr(getattr(config, "attention_config", None), "use_non_causal", False):
        yield (
            "attention_config.use_non_causal: the K and V of a token depend on those behind it, which are not in the "
            "block's hash; remove it, or --kv-transfer-config"
        )
    # Before 0.32: each engine derives its scales from its first tokens.
    if getattr(config.cache_config, "calculate_kv_scales", False):
        yield (
            "--calculate-kv-scales gives each engine scales of its own, so its blocks mean other numbers elsewhere; "
            "remove it, and use a checkpoint with KV scales or none"
        )
    # What these answer of a prompt's tokens is not in its blocks.
    if getattr(getattr(config, "aux_output_config", None), "enabled", False):
        yield (
            "--enable-return-routed-experts answers with what was computed for each token of a prompt, and the engine "
            "would end at the first hit; remove it, or remove --kv-transfer-config"
        )
    if (model := config.model_config) is not None:
        if model.is_encoder_decoder:
            yield "encoder-decoder models are not supported; remove --kv-transfer-config"
        if not model.is_prefix_caching_supported:
            yield (
                "vLLM supports no prefix caching for this model, whose answers need all tokens of a prompt; remove "
                "--enable-prefix-caching and --kv-transfer-config"
            )
        if counts_items(config):
            yield (
                "without prefix caching and a processor's cache vLLM counts images and does not hash them, so other "
                "images have the same hash; remove --no-enable-prefix-caching, or --mm-processor-cache-gb 0"
            )
        if kinds := _moving_ropes(model):
            yield (
                f"the model runs on Transformers' implementation, whose rope of type {min(kinds)} follows the longest "
                "request of a batch, so equal prompts have different keys; use --model-impl vllm where there is one, "
                "or remove --kv-transfer-config"
            )


def counts_items(config: VllmConfig) -> bool:
    """Whether vLLM names the items of prompts by counting them, so that others have the same name."""
    items = getattr(config.model_config, "multimodal_config", None)
    hashed = items is None or items.mm_processor_cache_gb or config.cache_config.enable_prefix_caching
    return not hashed


def why_not_measured(config: VllmConfig) -> str:
    """Why the weights in memory say nothing of what is computed; empty: they do."""
    offload = getattr(config, "offload_config", None)
    if getattr(getattr(offload, "prefetch", None), "offload_group_size", 0):
        return "--offload-group-size moves weights between host and device while they are used"
    cpu_gb = getattr(getattr(offload, "uva", config.cache_config), "cpu_offload_gb", 0)
    if cpu_gb:
        return "--cpu-offload-gb keeps weights on the host, and moves them while they are used"
    if getattr(config.parallel_config, "enable_eplb", False):
        return "--enable-eplb moves experts between ranks"
    return ""


def _moving_ropes(model: ModelConfig) -> set[str]:
    """Kinds of Transformers' rotary embeddings that follow the longest request of each batch."""
    transformers = internals.model_class(model).__module__.startswith(
        "vllm.model_executor.models.transformers"
    )
    return ropes_of_length(model) if transformers else set()


def ropes_of_length(model: ModelConfig) -> set[str]:
    """Kinds of the model's rotary embeddings that depend on a length besides the token's place."""
    config: Any = model.hf_text_config
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_layers = [one for one in found.values() if isinstance(one, Mapping)]
    kinds = {str(one.get("rope_type", one.get("type", "default"))) for one in (of_layers or [found])}
    return {"dynamic", "longrope"} & kinds


def drafts_with_layers(config: VllmConfig) -> SpeculativeConfig | None:
    """The drafts, where their layers own a part of each block."""
    drafts = config.speculative_config
    return None if drafts is None or str(drafts.method) in _DRAFTS_OF_TOKENS else drafts


def reads_ahead(config: VllmConfig) -> bool:
    """Whether layers of drafts compute a token with the next one (``geometry.Group``)."""
    drafts = config.speculative_config
    return drafts is not None and drafts.use_eagle_block_drop()


def geometry_of(config: VllmConfig, cache: KVCacheConfig, blocks_per_record: int) -> Geometry:
    """Errors: ``EngineRefused``, as of ``groups_of``."""
    parallel = config.parallel_config
    groups = groups_of(
        cache, blocks_per_record, parallel.tensor_parallel_size, reads_ahead=reads_ahead(config)
    )
    align_tokens, hash_block_tokens = internals.block_sizes(config, cache)
    return Geometry(
        tuple(groups),
        ranks=parallel.pipeline_parallel_size * parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        align_tokens=align_tokens,
        hash_algorithm=str(config.cache_config.prefix_caching_hash_algo),
        hash_block_tokens=hash_block_tokens,
        match_tokens=internals.match_tokens(cache),
        step_tokens=config.scheduler_config.max_num_batched_tokens,
        has_experts=internals.has_experts(config),
    )


def groups_of(
    config: KVCacheConfig, blocks_per_record: int = 1, tensor_parallel: int = 1, *, reads_ahead: bool = False
) -> list[Group]:
    """The KV-cache groups for plans, of equal record sizes. Errors: ``EngineRefused`` names the attention."""
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        layers = internals.layer_specs(group)
        spec = layers[0] if len(set(map(type, layers))) == 1 else group.kv_cache_spec
        # Exact types only: subclasses (sinks, chunked windows, ...) keep other bytes or need other blocks.
        if internals.is_scratch(group) and type(spec) in (CircularBufferSpec, SlidingWindowMLASpec):
            groups.append(_scratch_group(index, group, spec, reads_ahead))
        elif type(spec) is FullAttentionSpec:
            groups.append(Group(group.kv_cache_spec.block_size))
        elif type(spec) is SlidingWindowSpec and not getattr(spec, "extra_retained_tokens", 0):
            groups.append(Group(group.kv_cache_spec.block_size, spec.sliding_window))
        elif type(spec) in (MLAAttentionSpec, SlidingWindowMLASpec):
            _refuse_uncommon_mla(index, group)
            window = spec.sliding_window if type(spec) is SlidingWindowMLASpec else None
            # None: the model does not say whether its ranks have the same. 0.30 has no such field.
            whole = all(getattr(layer, "max_tp_shards", 1) == 1 for layer in layers)
            copies = tensor_parallel if whole else 1
            groups.append(Group(group.kv_cache_spec.block_size, window, latent=True, copies=copies))
        elif type(spec) is ChunkedLocalAttentionSpec:
            groups.append(Group(group.kv_cache_spec.block_size, chunk=spec.attention_chunk_size))
        elif type(spec) is MambaSpec:
            groups.append(_state_group(index, group, tensor_parallel))
        else:
            raise EngineRefused(
                f"KV-cache group {index} is of kind {type(spec).__name__}, which is not supported yet; "
                "supported are full attention, sliding windows, chunks, MLA, states and rings"
            )
    if all(group.scratch for group in groups):
        raise EngineRefused("the model has no KV cache to share; remove --kv-transfer-config")
    return [
        group
        if group.scratch
        else dataclasses.replace(
            group, blocks_per_record=1 if group.state else blocks_per_record, reads_ahead=reads_ahead
        )
        for group in groups
    ]


def is_sparse_mla(spec: Any) -> bool:
    """Whether a layer keeps more, or something else, than one latent vector for each token."""
    if type(spec) is SlidingWindowMLASpec:
        return True
    return type(spec) is MLAAttentionSpec and any(
        getattr(spec, one.name) != one.default for one in dataclasses.fields(spec) if one.name in _SPARSE_MLA
    )


def _scratch_group(index: int, group: KVCacheGroupSpec, spec: Any, reads_ahead: bool) -> Group:
    _refuse_main_memory(index, group)
    if reads_ahead:
        raise EngineRefused(
            f"KV-cache group {index} is computed anew behind each hit, which is not supported yet beside drafts whose "
            "layers read ahead; remove --speculative-config"
        )
    return Group(spec.block_size, getattr(spec, "sliding_window", None), scratch=True)


def _state_group(index: int, group: KVCacheGroupSpec, tensor_parallel: int) -> Group:
    for one in internals.layer_specs(group):
        if one.mamba_cache_mode != "align":
            raise EngineRefused(
                f"KV-cache group {index} keeps states in mode {one.mamba_cache_mode!r}, in which a block is not the "
                "state at its end; set --mamba-cache-mode align"
            )
    copies = tensor_parallel if getattr(group.kv_cache_spec, "tp_replicated", False) else 1
    return Group(group.kv_cache_spec.block_size, window=2, state=True, copies=copies)


def refuse_tier(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Check what an engine with the tier is; vLLM tells it too little of some. Errors: ``EngineRefused``."""
    for sentence in _refusals_of_all(config):
        raise EngineRefused(sentence)
    if getattr(config, "weight_transfer_config", None) is not None:
        raise EngineRefused(
            "--weight-transfer-config lets a trainer change the weights, which KVPoolTier does not see, so blocks of "
            "old and new weights would be taken for each other; use KVPoolConnector, or remove it"
        )
    if config.lora_config is not None:
        raise EngineRefused(
            "KVPoolTier sees no adapter's files, so blocks of adapters with one name and path would be taken for each "
            "other; use KVPoolConnector, or remove --enable-lora"
        )
    for index, group in enumerate(cache.kv_cache_groups):
        for spec in internals.layer_specs(group):
            # Pages have as many bytes for states of any type, order and number of rows.
            if not isinstance(spec, AttentionSpec):
                raise EngineRefused(
                    f"KV-cache group {index} is of kind {type(spec).__name__}, which KVPoolTier does not support yet: "
                    "states of other types and lengths have as many bytes; remove KVPoolTier from secondary_tiers"
                )


def _refuse_uncommon_mla(index: int, group: KVCacheGroupSpec) -> None:
    """Refuse MLA whose blocks hold, or need, more than latent vectors of their tokens."""
    for layer in internals.layer_specs(group):
        known = _MLA_LAYOUT | _SPARSE_MLA
        if type(layer) is SlidingWindowMLASpec:  # else of a hybrid whose layers vLLM takes for one kind
            known |= {"sliding_window"}
        for one in dataclasses.fields(layer):
            value = getattr(layer, one.name)
            if one.name not in known and value != one.default and (one.name, value) != ("max_tp_shards", 1):
                raise EngineRefused(
                    f"KV-cache group {index} is MLA with {one.name} {value!r}, which is not supported yet; "
                    "supported are latent vectors, indexers beside them, and windows of both"
                )
    _refuse_main_memory(index, group)


def _refuse_main_memory(index: int, group: KVCacheGroupSpec) -> None:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise EngineRefused(
            f"main memory keeps a part of KV-cache group {index}, which is not supported yet; "
            "remove --kv-transfer-config"
        )
