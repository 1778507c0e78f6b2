"""vLLM's settings one by one: which of them change K or V, and what kvpool makes of each.

``docs/reference/namespace.md`` shows this table; a test holds both against the configuration classes of vLLM, so that a
new version adds no setting unseen. At run time an unknown setting is a fact as soon as it is not at its default, but
for those of ``ParallelConfig`` and ``CompilationConfig``, which differ by rank and host.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from vllm import envs
from vllm.config import VllmConfig

from kvpool.key.key import Fact

MAX_SHOWN_CHARS = 200  # a longer value is a fact as a digest


class Judged(NamedTuple):
    """``fact``: under its own name, unless at its default. ``covered``: by other facts. ``same``: K and V stay."""

    verdict: Literal["fact", "covered", "refused", "same"]
    why: str
    settings: Mapping[str, str]  # by configuration class, names with spaces between


JUDGED = (
    Judged(
        "covered",
        "`weights` is a digest of what these lead to, or refused without `model_id`; `revision` is the commit",
        {
            "ModelConfig": "model model_weights revision code_revision trust_remote_code",
            "LoadConfig": "load_format download_dir ignore_patterns model_loader_extra_config",
        },
    ),
    Judged(
        "covered",
        "`model_config` is a digest of the configuration that comes out, after all overrides; `implementation` is the "
        "class of the model; `runner` what it is run as",
        {
            "ModelConfig": "hf_config hf_text_config hf_config_path hf_overrides config_format "
            "generation_config override_generation_config model_impl model_class_overrides runner convert "
            "word_embeddings_untied_by_checkpoint pooler_config",
        },
    ),
    Judged(
        "covered",
        "`rope` is a digest of the rotary embeddings that were built: a length counts where it changes them (LongRoPE, "
        "dynamic NTK), and not where it only makes their tables longer",
        {"ModelConfig": "max_model_len spec_target_max_model_len"},
    ),
    Judged(
        "covered",
        "`weights_dtype`, `kv_dtype`, `quantization`, `fp8_layers`, `fp8_scales`",
        {
            "ModelConfig": "dtype quantization allow_deprecated_quantization",
            "CacheConfig": "cache_dtype kv_cache_dtype_skip_layers skip_page_size_padded",
            "VllmConfig": "quant_config",
        },
    ),
    Judged(
        "covered",
        "the facts of the groups: which layers, block sizes, windows, shapes and strides",
        {
            "ModelConfig": "disable_sliding_window",
            "CacheConfig": "block_size user_specified_block_size kv_cache_layout sliding_window "
            "effective_attention_block_size",
        },
    ),
    Judged(
        "covered",
        "`hash_algorithm`, `hash_block_tokens`; other algorithms, and no prefix caching, are refused",
        {
            "CacheConfig": "enable_prefix_caching prefix_caching_hash_algo prefix_match_unit hash_block_size "
            "cache_hit_alignment_tokens"
        },
    ),
    Judged(
        "covered",
        "`attention_backend`, `kernel_packing`",
        {"AttentionConfig": "backend backend_per_kind"},
    ),
    Judged(
        "covered",
        "`tensor_parallel`, `pipeline_parallel`; context parallelism is refused",
        {
            "ParallelConfig": "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate "
            "cp_kv_cache_interleave_size"
        },
    ),
    Judged(
        "covered",
        "`multimodal` is a digest of these, and of the processor's configuration in the model's folder",
        {
            "ModelConfig": "multimodal_config",
            "MultiModalConfig": "media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_encoder_attn_dtype "
            "mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method",
        },
    ),
    Judged(
        "covered",
        "the methods that are not refused draft from tokens alone, and a block is stored when its tokens are accepted",
        {"VllmConfig": "speculative_config"},
    ),
    Judged(
        "fact",
        "how weights are quantized when they are loaded, and with which precision products are computed",
        {
            "ModelConfig": "quantization_config",
            "KernelConfig": "moe_backend linear_backend linear_backend_per_quant",
            "AttentionConfig": "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype "
            "indexer_sparse_logits",
            "ParallelConfig": "all2all_backend",
        },
    ),
    Judged(
        "fact",
        "which layers compute which tokens of a prompt",
        {"CacheConfig": "kv_sharing_fast_prefill swa_bounded_replay"},
    ),
    Judged(
        "fact",
        "what becomes of a request with an adapter; one without has the K and V of the base model all the same",
        {
            "LoRAConfig": "target_modules lora_dtype enable_tower_connector_lora enable_mixed_moe_lora_format "
            "enable_moe_shared_loras"
        },
    ),
    Judged(
        "fact",
        "code or options from outside vLLM, which may do anything",
        {"ParallelConfig": "worker_cls worker_extension_cls", "VllmConfig": "additional_config"},
    ),
    Judged(
        "refused",
        "attention to later tokens: K and V of a block would depend on what is behind it",
        {"AttentionConfig": "use_non_causal", "VllmConfig": "diffusion_config"},
    ),
    Judged(
        "refused",
        "weights that change in a living engine",
        {"VllmConfig": "weight_transfer_config"},
    ),
    Judged(
        "refused",
        "states of Mamba, sparse MLA and caches in main memory: their groups are refused by kind",
        {
            "CacheConfig": "is_attention_free mamba_page_size_padded mamba_block_size mamba_cache_dtype "
            "mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len "
            "use_replayssm use_kda_recoverssm user_specified_mamba_block_size "
            "enable_mamba_fine_grained_prefix_cache",
            "AttentionConfig": "minimax_m3_msa_decode_backend hisparse_config sparse_mla_force_mqa "
            "sparse_mla_prefill_workspace_factor indexer_tp_shard_min_rows minimax_m3_indexer_cp",
            "KernelConfig": "sparse_indexer_topk_backend",
            "VllmConfig": "mamba_config",
        },
    ),
    Judged(
        "same",
        "other kernels, graphs, places and orders of the same sums: they change the last bits, as another batch does",
        {
            "ModelConfig": "enforce_eager disable_cascade_attn seed",
            "AttentionConfig": "flash_attn_version flash_attn_max_num_splits_for_cuda_graph "
            "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend "
            "flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size "
            "trtllm_ragged_backend",
            "KernelConfig": "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
            "enable_cutedsl_warmup enable_jit_warmup monokernel",
            "ParallelConfig": "disable_custom_all_reduce enable_hc_sp enable_expert_parallel enable_eplb eplb_config "
            "expert_placement_strategy enable_dbo ubatch_size dbo_decode_token_threshold "
            "dbo_prefill_token_threshold enable_elastic_ep elastic_ep_max_dp_size is_moe_model",
            "CompilationConfig": "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder "
            "cudagraph_mm_encoder encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
            "encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay "
            "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold compile_sizes "
            "compile_ranges_endpoints inductor_compile_config inductor_passes cudagraph_mode "
            "cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
            "use_inductor_graph_partition pass_config max_cudagraph_capture_size dynamic_shapes_config "
            "fast_moe_cold_start enabled_custom_ops disabled_custom_ops static_forward_context "
            "static_all_moe_layers",
            "PassConfig": "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms "
            "enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm "
            "fuse_rope_kvcache fuse_qk_norm_rope_kvcache rope_kvcache_fusion_max_token_num "
            "fi_allreduce_fusion_max_size_mb enable_sp fuse_gemm_comms sp_min_token_num",
            "LoRAConfig": "fully_sharded_loras specialize_active_lora",
            "MultiModalConfig": "mm_encoder_tp_mode mm_encoder_attn_backend",
            "VllmConfig": "kernel_config compilation_config attention_config optimization_level performance_mode",
        },
    ),
    Judged(
        "same",
        "what is offered to requests, and in what words; what a request brings is in its hashes",
        {
            "ModelConfig": "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init served_model_name "
            "allowed_local_media_path allowed_media_domains enable_prompt_embeds io_processor_plugin "
            "renderer_num_workers hf_token",
            "MultiModalConfig": "language_model_only limit_per_prompt enable_mm_embeds mm_hasher_algorithm "
            "interleave_mm_strings mm_encoder_only allow_missing_mm_embeddings",
            "LoRAConfig": "default_mm_loras",
            "VllmConfig": "structured_outputs_config reasoning_config ec_transfer_config ec_manager_config",
        },
    ),
    Judged(
        "same",
        "what is done with logits",
        {
            "ModelConfig": "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
            "logits_processors enable_return_routed_experts",
            "ParallelConfig": "enable_batch_sharded_sampling",
            "VllmConfig": "watermark_config aux_output_config",
            "LoRAConfig": "max_lora_cls_labels",
        },
    ),
    Judged(
        "same",
        "how much memory, where it lies, and how files get into it",
        {
            "ModelConfig": "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
            "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
            "CacheConfig": "gpu_memory_utilization num_gpu_blocks_override prefix_cache_retention_interval "
            "num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
            "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks",
            "LoadConfig": "safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
            "LoRAConfig": "max_lora_rank max_loras max_cpu_loras",
            "MultiModalConfig": "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling mm_tensor_ipc "
            "mm_ipc_gpu_memory_gb",
            "VllmConfig": "offload_config engram_config",
        },
    ),
    Judged(
        "same",
        "which process runs where, when, and what it writes down",
        {
            "ModelConfig": "is_submodel_config",
            "ParallelConfig": "data_parallel_size data_parallel_size_local data_parallel_rank "
            "data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port dp_sync_interval "
            "data_parallel_master_port data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb "
            "enable_ep_weight_filter max_parallel_loading_workers enable_shm_tensor_arena "
            "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group "
            "distributed_executor_backend master_addr master_port node_rank nnodes numa_bind numa_bind_nodes "
            "numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds "
            "cpu_distributed_timeout_seconds world_size rank data_parallel_index enable_fault_tolerance "
            "fault_tolerance_config sd_worker_cls",
            "CompilationConfig": "debug_dump_path cache_dir compile_cache_save_format local_cache_dir traced_files "
            "compilation_time encoder_compilation_time",
            "VllmConfig": "scheduler_config device_config observability_config logging_config profiler_config "
            "kv_transfer_config kv_events_config instance_id shutdown_timeout watchdog_config",
        },
    ),
    Judged(
        "covered",
        "looked at setting by setting",
        {"VllmConfig": "model_config cache_config parallel_config load_config lora_config"},
    ),
)
# Switches of the environment that change a precision, a layout that no stride shows, or what is computed at all.
VARIABLES: Mapping[str, Any] = {
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_USE_F16_ACCUM": False,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": True,
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": False,
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": False,
    "VLLM_MLA_DISABLE": False,
}
_BY_RANK = frozenset(("ParallelConfig", "CompilationConfig"))
_VERDICTS = {
    (section, name): judged.verdict
    for judged in JUDGED
    for section, names in judged.settings.items()
    for name in names.split()
}


def settings_facts(config: VllmConfig) -> dict[str, Fact]:
    """The settings that change K or V and that no other fact covers, where they are not at vLLM's default."""
    facts: dict[str, Fact] = {}
    for section in _sections(config):
        kind = type(section).__name__
        for one in dataclasses.fields(section):
            verdict = _VERDICTS.get((kind, one.name))
            unseen = verdict is None and kind not in _BY_RANK and not one.name.startswith("_")
            if verdict != "fact" and not unseen:
                continue
            value = _plain(getattr(section, one.name, None))
            if value is not NotImplemented and value != _plain(_default(one)):
                facts[f"{kind}.{one.name}"] = _shown(value)
    for name, default in VARIABLES.items():
        value = _plain(getattr(envs, name, default))
        if value != default:
            facts[name] = _shown(value)
    return facts


def _sections(config: VllmConfig) -> Iterator[Any]:
    yield config
    for name in ("model", "cache", "parallel", "load", "attention", "kernel", "lora"):
        section = getattr(config, f"{name}_config", None)
        if dataclasses.is_dataclass(section):
            yield section
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if dataclasses.is_dataclass(multimodal):
        yield multimodal


def _default(field: dataclasses.Field[Any]) -> Any:
    # pydantic puts a description of its own where a default has conditions.
    source = field if field.default is dataclasses.MISSING else field.default
    factory = getattr(source, "default_factory", None)
    if factory not in (None, dataclasses.MISSING):
        return factory()
    return getattr(source, "default", source)


def _plain(value: Any) -> Any:
    """As JSON has it; ``NotImplemented`` for what has no text that is the same in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        inner = {str(name): _plain(one) for name, one in value.items()}
        return NotImplemented if NotImplemented in inner.values() else inner
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        items = [_plain(one) for one in value]
        return NotImplemented if NotImplemented in items else items
    return NotImplemented


def _shown(value: Any) -> Fact:
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= MAX_SHOWN_CHARS else hashlib.sha256(text.encode()).hexdigest()[:16]
