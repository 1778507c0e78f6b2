"""The facts of an SGLang server's weights and computation.

A backend receives only the served model name, which identifies nothing. Its process has the rest: the
server's resolved arguments (``sglang/srt/runtime_context.py``), and the checkpoint's files to digest. Without
files, an operator vouches with ``model_id``.

Threads: any; called once, at the server's start. Blocks as ``checkpoint_digest`` does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from sglang.srt.mem_cache.utils import get_storage_hash_str, storage_namespace_seed
from sglang.srt.runtime_context import get_context
from sglang.srt.utils import get_bool_env_var

from kvpool.config import HiCacheConfig
from kvpool.errors import ConfigError, EngineRefused
from kvpool.files import read_file
from kvpool.key.checkpoint import (
    LOADED_PATTERNS,
    MAX_TEXT_NBYTES,
    checkpoint_digest,
    served_digest,
)
from kvpool.key.key import MAX_FACT_CHARS, Fact
from kvpool.key.order import with_order

# Of the namespace ``model``: location and fetching of files. Everything else is a fact, including additions
# of later versions of SGLang.
_NO_FACTS = frozenset(
    (
        "model_path", "download_dir", "model_checksum", "startup_weight_load_mode", "weight_loader_disable_mmap",
        "weight_loader_prefetch_checkpoints", "weight_loader_prefetch_num_threads",
        "weight_loader_drop_cache_after_load", "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports", "remote_instance_weight_loader_backend",
        "remote_instance_weight_loader_start_seed_via_transfer_engine", "engine_info_bootstrap_port",
        "delete_ckpt_after_loading", "modelopt_checkpoint_save_path", "modelopt_export_path", "weight_cache_socket",
        "weight_cache_timeout", "is_startup_weight_load_overlap", "shared_experts", "revision", "custom_weight_loader",
    )
)  # fmt: skip
# Of other namespaces: arguments that change keys and values or their layout in a page. Versions lack some.
_FACTS = (
    "exec.kernel.attention_backend", "exec.kernel.prefill_attention_backend", "exec.kernel.decode_attention_backend",
    "exec.kernel.prefill_kv_cache_dequant_dtype", "exec.kernel.enable_precise_embedding_interpolation",
    "exec.deterministic.rl_on_policy_target", "exec.dllm.dllm_algorithm", "exec.moe.kt_method",
    "parallel.cp_strategy", "parallel.enable_kv_cache_sharding", "parallel.enable_dsa_cache_layer_split",
    "mm.mm_attention_backend", "mm.mm_process_config", "mm.image_processor_backend", "mm.disable_fast_image_processor",
    "mm.trust_mm_content_hashes", "lora.enable_lora", "lora.lora_target_modules", "lora.max_lora_rank",
    "spec.speculative_algorithm", "spec.speculative_draft_model_path", "spec.speculative_draft_model_revision",
)  # fmt: skip
_FILES = frozenset(("quantization_param_path", "decrypted_config_file"))  # identified by content
# Other formats read other sources: ``npcache`` a folder of arrays, which may be of earlier files.
_PATTERNS = LOADED_PATTERNS | {"layered": LOADED_PATTERNS["auto"]}
# Weights from outside of the folder.
_OTHER_WEIGHTS = (
    "model.modelopt_checkpoint_restore_path", "model.quantize_and_serve", "model.rl_quant_profile",
    "model.checkpoint_engine_wait_weights_before_ready", "exec.moe.kt_weight_path",
)  # fmt: skip


def served_facts(settings: HiCacheConfig) -> dict[str, Fact]:
    """The facts of this process's server. Errors: ``ConfigError``, one sentence that says what to do."""
    facts: dict[str, Fact] = {
        "model": settings.model_id or "",
        "page_hash": _page_hash(),
        "processor": _processor(),
    }
    if not is_published():
        if settings.model_id is None:
            raise EngineRefused(
                'SGLang does not say how this server computes: set "model_id" to a name that stands for exactly these '
                "weights, and for revision, quantization, overrides and attention backend"
            )
        return facts | {"weights": served_digest("", settings.model_path)}
    for path, value in _arguments():
        facts[path] = _fact(path, value)
    return facts | {"weights": _weights(settings), "lora.adapters": _adapters()}


def is_published() -> bool:
    """Whether SGLang published the server's arguments in this process: false inside other programs."""
    return bool(get_context().is_config_namespace_published("model"))


def _arguments() -> Iterator[tuple[str, Any]]:
    for name, value in get_context().config_bag("model")._fields.items():
        if name not in _NO_FACTS:
            yield f"model.{name}", value
    for path in _FACTS:
        value = argument(path)
        if value is not None:
            yield path, value


def argument(path: str) -> Any:
    """The argument in effect, such as ``memory.hicache_storage_backend``; None where this version lacks it."""
    space, *names = path.split(".")
    if not get_context().is_config_namespace_published(space):
        return None
    found = get_context().config_bag(space)
    for name in names:
        found = getattr(found, name, None)
    return found


def _fact(path: str, value: Any) -> Fact:
    if value is None:
        return ""
    if isinstance(value, (bool, int)):
        return value
    if path.rpartition(".")[2] in _FILES:
        try:
            return hashlib.sha256(read_file(value, MAX_TEXT_NBYTES)).hexdigest()[:32]
        except OSError as error:
            raise ConfigError(f"{path} is {value}, which cannot be read: {error.strerror}") from error
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.dumps(with_order(json.loads(value)), sort_keys=True)
    text = value if isinstance(value, str) else json.dumps(with_order(value), sort_keys=True, default=str)
    return text if len(text) <= MAX_FACT_CHARS else hashlib.sha256(text.encode()).hexdigest()


def _weights(settings: HiCacheConfig) -> str:
    load_format = str(argument("model.load_format"))
    patterns = _PATTERNS.get(load_format)
    if settings.model_path is not None:
        return served_digest("", settings.model_path, patterns)
    if settings.model_id is not None:
        return ""
    reason = "" if load_format in _PATTERNS else f"--load-format {load_format} loads weights from elsewhere"
    if str(argument("model.weight_cache_mode") or "off") != "off":
        reason = "with --weight-cache-mode weights come from another process"
    for path in _OTHER_WEIGHTS:
        if argument(path):
            reason = f"--{path.rpartition('.')[2].replace('_', '-')} brings weights from elsewhere"
    if reason:
        raise EngineRefused(
            f'{reason}, so the weights cannot be identified: set "model_id" to a name that stands for exactly these '
            "weights"
        )
    model = str(argument("model.model_path"))
    folder = _folder(model, argument("model.revision"))
    if folder is None:
        raise EngineRefused(
            f'the files of {model} are in no folder that can be found: set "model_path" to that of the checkpoint, or '
            '"model_id" to a name that stands for exactly these weights'
        )
    return checkpoint_digest(folder, patterns=patterns).hex


def _adapters() -> str:
    """Digest of the adapters at the server's start, because SGLang's page hash has only their name and path.

    Adapters loaded later have a random name there, and are not shared.
    """
    found = []
    for adapter in argument("lora.lora_paths") or ():
        folder = _folder(str(adapter.lora_path), None)
        if folder is None:
            raise EngineRefused(
                f"the adapter {adapter.lora_name} is in no folder that can be found ({adapter.lora_path}): name its "
                "folder in --lora-paths"
            )
        found.append([str(adapter.lora_name), str(adapter.lora_path), checkpoint_digest(folder).hex])
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()[:32] if found else ""


def _folder(model: str, revision: Any) -> Path | None:
    """The folder of a path or a hub's name, already fetched by the server."""
    path = Path(model)
    try:
        if path.exists():
            return path
        if get_bool_env_var("SGLANG_USE_MODELSCOPE"):  # not the hub's files of this name
            return None
        cache = argument("model.download_dir")
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, cache_dir=cache, local_files_only=True
            )
        )
    except (OSError, ValueError):  # not cached, or no hub name
        return None


def _page_hash() -> str:
    """SGLang's page hash of a probe: a fact. Errors: ``EngineRefused`` where it ignores adapters and salts."""
    plain, named = (
        get_storage_hash_str([1, 2], seed, page_size=2)[0]
        for seed in (None, storage_namespace_seed("adapter", "salt"))
    )
    if plain == named:
        raise EngineRefused(
            "the page hashes of this SGLang hold no adapters and no salts: use 0.5.23 or newer"
        )
    return str(named)[:32]


def _processor() -> str:
    """The processor's kind: FP8 differs on some AMD processors, and so do kernels."""
    if torch.version.hip is not None and torch.cuda.is_available():
        return f"hip {torch.cuda.get_device_properties(0).gcnArchName}"
    return "cuda" if torch.version.cuda is not None and torch.cuda.is_available() else "other"
