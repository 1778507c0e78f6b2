"""The only module that reads vLLM beyond its connector interface; the rest of the package calls it.

Versions are distinguished by feature, never by version number.

Over 400 lines because it is the only one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import cbor2
import numpy
import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.distributed.kv_events import MEDIUM_GPU, ZmqEventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor import model_loader
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.request import Request

from kvpool.errors import EngineRefused
from kvpool.store import StoreURL
from kvpool.store.file_system import FileSystem
from kvpool.vllm.geometry import Geometry
from kvpool.vllm.plan import DRAFT

# The engine, its model and its layers.


def engine_rank(stage_ranks: int) -> int:
    return int(get_pp_group().rank_in_group * stage_ranks + get_tp_group().rank_in_group)


def rank_endpoint(endpoint: str | None, dp_rank: int) -> str | None:
    """The endpoint of data-parallel rank ``dp_rank``; None without an endpoint. Errors: ``ValueError``."""
    found: str | None = ZmqEventPublisher.offset_endpoint_port(endpoint, dp_rank)
    return found


def began_ns() -> int:
    """When this process began, if it is one of an engine's own: it has loaded nothing before. Else "never"."""
    if multiprocessing.parent_process() is None:
        return 1 << 63
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):  # a sandbox without it
        return 1 << 63
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age_s * 1e9)


def _callers() -> Iterator[Mapping[str, Any]]:
    """The local names of each caller, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def engine_under_construction() -> tuple[VllmConfig, KVCacheConfig]:
    """The configuration of the engine whose connector is being built: among its callers' arguments.

    vLLM gives a tier neither. Errors: ``EngineRefused``.
    """
    for names in _callers():
        config, cache = names.get("vllm_config"), names.get("kv_cache_config")
        if isinstance(config, VllmConfig) and isinstance(cache, KVCacheConfig):
            return config, cache
    raise EngineRefused(
        "this version of vLLM does not show a tier the engine that it belongs to, so its blocks cannot be told from "
        "those of other engines; use a version from 0.30 to 0.33, or remove KVPoolTier from secondary_tiers"
    )


def cache_hit_source(pool: StoreURL) -> Any:
    """Where hits of a pool come from, of vLLM's ``CacheHitSource``; None: this version counts no sources.

    A directory is a disk, or on tmpfs this host's memory, as what a Unix socket reaches; other servers have no name.
    """
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ModuleNotFoundError:
        return None
    if pool.scheme == "file":
        in_memory = FileSystem.of(pool.path).kind == "tmpfs"
        return CacheHitSource.HOST if in_memory else CacheHitSource.DISK
    return CacheHitSource.HOST if pool.scheme == "valkey+unix" else CacheHitSource.EXTERNAL_UNSPECIFIED


def model_class(model: ModelConfig) -> type:
    found, _ = get_model_architecture(model)
    return found


def loader_module(load_format: str) -> str | None:
    """The module of a load format's registered loader; None without one."""
    loader = model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(load_format)
    return None if loader is None else loader.__module__


def rotary_embeddings() -> list[nn.Module]:
    return list(rotary_embedding._ROPE_DICT.values())


def attention_layers(config: VllmConfig) -> dict[str, Any]:
    return get_layers_from_vllm_config(config, AttentionLayerBase)


def attention_backends(config: VllmConfig) -> str:
    return ",".join(
        sorted({layer.get_attn_backend().get_name() for layer in attention_layers(config).values()})
    )


def kv_scales(layer: Any) -> tuple[list[list[float]], list[float | None]]:
    """(scales of K and V on the device, their copies on the host): kernels differ in which they read."""
    on_device = [getattr(layer, name, None) for name in ("_k_scale", "_v_scale")]
    return (
        [one.detach().float().flatten().tolist() for one in on_device if isinstance(one, torch.Tensor)],
        [getattr(layer, name, None) for name in ("_k_scale_float", "_v_scale_float")],
    )


# The weights in memory, and the calls that may change them.


def model_tensors() -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """A function that lists what the model of the worker under construction holds now: all that is loaded, by name.

    Names are of the model, ``draft.`` before those of drafts. Linear layers of the CPU, whose kernels keep the weights
    where no tensor shows them, say four of their columns. Call it while the worker's KV cache is registered: the worker
    is among the callers, and is not kept alive. Errors: ``EngineRefused``, of the function, too: why they do not show.
    """
    if (runner := _runner_under_construction()) is None:
        raise EngineRefused("this version of vLLM does not show its model to a connector")
    return functools.partial(_tensors_of, weakref.ref(runner))


def _runner_under_construction() -> Any:
    """What runs the model of the worker whose KV cache is being registered, among the callers; None: nothing shows."""
    for names in _callers():
        runner: Any = names.get("self")
        if callable(getattr(runner, "get_model", None)) and isinstance(runner.get_model(), nn.Module):
            return runner
    return None


def _draft_model(runner: Any) -> nn.Module | None:
    drafts: Callable[[], nn.Module | None] = getattr(runner, "get_draft_model", lambda: None)
    return drafts()


def _tensors_of(reference: weakref.ref[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if (runner := reference()) is None:
        raise EngineRefused("the worker is gone")
    seen: set[int] = set()
    for prefix, model in (("", runner.get_model()), (DRAFT, _draft_model(runner))):
        for name, module in () if model is None else model.named_modules():
            for own, tensor in _loaded_of(module):
                if id(tensor) not in seen and not tensor.is_meta:
                    seen.add(id(tensor))
                    full = f"{prefix}{name}.{own}"
                    yield full, tensor if tensor.numel() else _columns(module, full)


def _loaded_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Its parameters, and the buffers that are saved with it."""
    lasting = module._buffers.keys() - module._non_persistent_buffers_set
    tensors = [*module._parameters.items(), *((name, module._buffers[name]) for name in sorted(lasting))]
    return [(name, tensor) for name, tensor in tensors if tensor is not None]


def _columns(module: nn.Module, name: str) -> torch.Tensor:
    """Columns of the weights that a CPU's kernel has packed: what it makes of inputs with a single 1."""
    kernel: Any = getattr(module, "cpu_linear", None)
    inputs = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    weight = module._parameters.get("weight")
    if kernel is None or inputs is None or weight is None:
        raise EngineRefused(f"the weights of {name} are where no tensor shows them")
    asked = torch.zeros(4, int(inputs), dtype=weight.dtype)
    asked[range(4), [place * (int(inputs) - 1) // 3 for place in range(4)]] = 1
    columns: torch.Tensor = kernel(asked, weight, None)
    return columns


def watch_engine_calls(told: Callable[[str], None], named: Callable[[str], None]) -> Callable[[], bool]:
    """Tell ``told`` after each call from outside that may write to workers' weights, by its name; also after a failure.

    ``named``: is told the version that somebody gives the weights (``weight_version``). Returns whether the engine's
    memory sleeps. Call it while the engine's connector is built: the engine is among the callers. On its own thread,
    between two steps. Errors: ``EngineRefused``: this version does not show it.
    """
    core = _core_under_construction()
    executor: Any = getattr(core, "model_executor", None)
    if executor is None:
        raise EngineRefused(
            "this version of vLLM does not show its calls to a connector, so weights could change unnoticed; use a "
            "version from 0.30 to 0.33, or remove --kv-transfer-config"
        )
    away: set[str] = set()
    core.collective_rpc = _telling_rpc(core.collective_rpc, told, away)
    for name in ("sleep", "wake_up"):
        setattr(executor, name, _telling(getattr(executor, name), name, told))
    set_version = core.set_weight_version

    def set_weight_version(weight_version: str) -> None:
        set_version(weight_version)
        named(weight_version)

    core.set_weight_version = set_weight_version
    return lambda: bool(executor.is_sleeping or away)


def _core_under_construction() -> Any:
    from vllm.v1.engine.core import EngineCore

    owners: Iterator[Any] = (names.get("self") for names in _callers())
    return next((one for one in owners if isinstance(one, EngineCore)), None)


def _encoder_cache(core: Any) -> Any:
    return getattr(getattr(core, "scheduler", None), "encoder_cache_manager", None)


def encoder_outputs() -> Callable[[], Collection[str]]:
    """A function that lists the items whose encoders' outputs the engine has, by the ``identifier`` of a feature.

    Call it while the engine's connector is built: the engine is among the callers, and its scheduler comes later.
    """
    core = _core_under_construction()

    def outputs() -> Collection[str]:
        listed: Collection[str] = getattr(_encoder_cache(core), "cached", ())
        return listed

    return outputs


def output_holder() -> Callable[[str, str], bool]:
    """A function that says whether the engine keeps an output (identifier) for a request (its id) until it has used it.

    Call it as ``encoder_outputs``.
    """
    core = _core_under_construction()

    def holds(identifier: str, request_id: str) -> bool:
        return request_id in getattr(_encoder_cache(core), "cached", {}).get(identifier, ())

    return holds


def output_evictor(core: Any = None) -> Callable[[str], bool]:
    """A function that has the engine forget an output which no request holds, as if it needed its place.

    It returns whether it did. Not while a step is planned between an item's look and its allocation. ``core``: of the
    engine; by default the one under construction, among the callers.
    """
    core = core or _core_under_construction()

    def evict(identifier: str) -> bool:
        manager = _encoder_cache(core)
        if type(manager) is not EncoderCacheManager or identifier not in manager.freeable:
            return False
        rows = manager.freeable.pop(identifier)
        del manager.cached[identifier]
        getattr(manager, "num_embeds_by_hash", {}).pop(identifier, None)  # 0.30 has none
        manager.freed.append(identifier)
        manager.num_free_slots += rows
        return True

    return evict


MAX_BARE_NUMBERS = 8  # of an item, for each row of its output


class Item(NamedTuple):
    """An image, a clip or another item of a request. ``end``: the tokens up to its own end; ``rows``: of its output.

    ``by_name``: its output depends on an adapter of which only the name is known. ``bare``: no encoder can run for it.
    """

    identifier: str
    modality: str
    end: int
    rows: int
    by_name: bool
    bare: bool = False


def items_of(request: Request, sizes: Callable[[str], Collection[str]]) -> list[Item]:
    """Those that an encoder makes embeddings of. ``sizes``: ``size_fields``."""
    return [
        Item(
            one.identifier,
            one.modality,
            _end(one),
            one.mm_position.get_num_embeds(),
            one.mm_hash not in (None, one.identifier),
            bare=_is_bare(one, sizes(one.modality)),
        )
        for one in request.mm_features
        if one.modality != "prompt_embeds"  # no encoder runs
    ]


def _is_bare(feature: MultiModalFeatureSpec, sizes: Collection[str]) -> bool:
    """Whether it has its sizes, and at most seconds and times beside them: pixels and samples are hundreds a row."""
    fields: Mapping[str, MultiModalFieldElem] = feature.data or {}
    if not fields.keys().isdisjoint(sizes):
        numbers = sum(_numbers(one.data) for one in fields.values())
        return numbers <= MAX_BARE_NUMBERS * max(1, feature.mm_position.get_num_embeds())
    return False


def _numbers(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_numbers, value)) if isinstance(value, list | tuple) else 1


def size_fields(config: VllmConfig) -> Callable[[str], Collection[str]]:
    """By modality: which fields of an item say how many rows its output has; none: the model names none.

    An engine that consumes outputs takes requests with these alone (``allow_missing_mm_embeddings``). Makes vLLM's
    processor, which takes a while: call it at start.
    """
    resolver = PlaceholderMetadataResolver(config.model_config)
    found = {modality: resolver.fields_for(modality) for modality in ("image", "video", "audio")}
    return lambda modality: found.get(modality, ())


def places_of(request: Request, computed_tokens: int) -> Iterator[str]:
    """The identifiers of what has to have a place in the engine's cache of outputs, behind these tokens."""
    return (one.identifier for one in request.mm_features if _end(one) > computed_tokens)


def _end(feature: MultiModalFeatureSpec) -> int:
    return feature.mm_position.offset + feature.mm_position.length


def item_at(request: Request, index: int) -> str:
    """The identifier of an item."""
    return str(request.mm_features[index].identifier)


def output_widths(config: VllmConfig) -> dict[str, int]:
    """Numbers in a row of an encoder's output, by modality, as vLLM has measured them; empty: it has not."""
    return dict(getattr(config.ec_transfer_config, "mm_encoder_output_widths", None) or {})


def watch_arrivals(arrived: Callable[[Request], None], reset: Callable[[], None]) -> None:
    """Tell ``arrived`` of each request that comes to the scheduler under construction, which is among the callers.

    ``reset``: is called when the engine forgets all outputs of encoders. On the scheduler's own thread. A version that
    does not show its scheduler tells nothing.
    """
    owners: Iterator[Any] = (names.get("self") for names in _callers())
    scheduler: Any = next((one for one in owners if isinstance(one, SchedulerInterface)), None)
    if scheduler is None:
        return
    add_request, forget = scheduler.add_request, scheduler.reset_encoder_cache

    def add(request: Request) -> None:
        add_request(request)
        # Else it is a turn of a session, which has taken it over, or has it in a queue, or has ended.
        if getattr(scheduler, "requests", {}).get(request.request_id, request) is request:
            arrived(request)

    def reset_encoder_cache() -> None:
        forget()
        reset()

    scheduler.add_request = add
    scheduler.reset_encoder_cache = reset_encoder_cache


def on_workers() -> Callable[[Callable[[Any], Any]], list[Any]]:
    """A function that runs another one on each worker of the engine under construction, and waits for the answers.

    It comes behind all steps that the workers were sent. Errors: ``EngineRefused``: this version does not show them.
    """
    executor: Any = getattr(_core_under_construction(), "model_executor", None)
    if executor is None:
        raise EngineRefused(
            "this version of vLLM does not show its workers to a connector; use a version from 0.30 to 0.33, or remove "
            "--ec-transfer-config"
        )

    def run(call: Callable[[Any], Any]) -> list[Any]:
        answers: list[Any] = executor.collective_rpc(call)
        return answers

    return run


def encoder_tensors(worker: Any) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """As ``model_tensors``, of a worker's model without its language model: what makes the outputs of encoders."""
    return functools.partial(_tensors_of_encoder, weakref.ref(worker.model_runner))


# Modules of models whose outputs of encoders have embeddings of words between those of patches or frames; of Qwen3-VL
# where it prunes videos.
_WITH_WORDS = ("molmo2", "nano_nemotron_vl", "qwen3_vl")


def _tensors_of_encoder(reference: weakref.ref[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    if (runner := reference()) is None:
        raise EngineRefused("the worker is gone")
    model = runner.get_model()
    language: set[int] = set()
    with contextlib.suppress(NotImplementedError, AttributeError):  # then all of it is measured
        inner = model.get_language_model()
        # Models from elsewhere may put anything into outputs.
        if inner is not model and type(model).__module__.startswith("vllm."):
            language = {id(tensor) for module in inner.modules() for _, tensor in _loaded_of(module)}
            language -= {id(tensor) for module in _words_of(model, inner) for _, tensor in _loaded_of(module)}
    for name, module in model.named_modules():
        for own, tensor in _loaded_of(module):
            if id(tensor) not in language and not tensor.is_meta:
                language.add(id(tensor))
                full = f"{name}.{own}"
                yield full, tensor if tensor.numel() else _columns(module, full)


def _words_of(model: nn.Module, language: nn.Module) -> list[nn.Module]:
    """The embeddings of words that are in outputs of the model's encoders."""
    inside = any(name in one.__module__ for one in type(model).__mro__ for name in _WITH_WORDS)
    if not (inside and getattr(model, "is_multimodal_pruning_enabled", True)):
        return []
    embeddings = (nn.Embedding, VocabParallelEmbedding)
    return [
        one
        for one in language.modules()
        if isinstance(one, embeddings) and not isinstance(one, ParallelLMHead)
    ]


def says_when_memory_goes() -> bool:
    """Whether connectors hear of a sleep before it takes the KV cache away; from vLLM 0.33 on."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def _telling(call: Callable[..., Any], name: str, told: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def telling(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        finally:
            told(name)

    return telling


# What workers give away when they are called by themselves, of which the executor does not hear.
_GIVES_AWAY = {"sleep": ("weights", "kv_cache"), "checkpoint_prepare": ("distributed state",)}


def _telling_rpc(call: Callable[..., Any], told: Callable[[str], None], away: set[str]) -> Callable[..., Any]:
    """``away``: what the workers have given away since."""

    @functools.wraps(call)
    def telling(
        method: Any, timeout: Any = None, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(getattr(method, "__name__", method))
        away.update(_GIVES_AWAY.get(name, ()))
        try:
            answer = call(method, timeout, args, kwargs)
            if name == "wake_up":
                away.difference_update((kwargs or {}).get("tags") or (*args, None)[0] or _GIVES_AWAY["sleep"])
            elif name == "checkpoint_restore":
                away.difference_update(_GIVES_AWAY["checkpoint_prepare"])
            return answer
        finally:
            told(name)

    return telling


# The KV cache.


def has_experts(config: VllmConfig) -> bool:
    experts: int = config.model_config.get_num_experts()
    return experts > 0


def block_sizes(config: VllmConfig, cache: KVCacheConfig) -> tuple[int, int]:
    """(tokens to which hits are aligned, tokens of one block hash)."""
    return kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)


def match_tokens(cache: KVCacheConfig) -> int:
    """Hits end at multiples of so many tokens (``--prefix-match-unit``); 0: this version does not say."""
    return int(getattr(cache, "cache_hit_alignment_tokens", None) or 0)


def layer_specs(group: KVCacheGroupSpec) -> list[Any]:
    """The specification of each layer of a group, or their common one."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def is_scratch(group: KVCacheGroupSpec) -> bool:
    """Whether vLLM keeps a group out of its prefix cache: each request computes its blocks anew behind a hit."""
    return not group.kv_cache_spec.prefix_cacheable


def layers_of(cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """For each group, its layers as views of shape ``[num_blocks, ...]``; none of scratch.

    Errors: ``EngineRefused``.
    """
    try:
        from vllm.v1.kv_cache_interface import group_kernel_blocks
    except ImportError as error:
        raise EngineRefused(f"this version of vLLM is not supported ({error}); use 0.30 to 0.33") from error
    names = [[] if is_scratch(group) else group.layer_names for group in cache.kv_cache_groups]
    for index, group in enumerate(cache.kv_cache_groups):
        if not (names[index] or is_scratch(group)):
            raise EngineRefused(
                f"a pipeline stage has no layer of KV-cache group {index}, which is not supported yet; "
                "change --pipeline-parallel-size"
            )
    missing = [name for of_group in names for name in of_group if name not in kv_caches]
    if missing:
        raise EngineRefused(f"layer {missing[0]} has no KV cache of its own, which is not supported yet")
    return [
        [group_kernel_blocks(one, cache.num_blocks) for name in of_group for one in _tensors(kv_caches[name])]
        for of_group in names
    ]


def layer_names(cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> list[list[str]]:
    """Of ``layers_of``, the layers' names in the model, ``draft.`` before those of drafts.

    Call it while the worker's KV cache is registered.
    """
    draft = _draft_model(_runner_under_construction())
    modules = () if draft is None else draft.modules()
    of_drafts = {getattr(module, "layer_name", "") for module in modules}
    return [
        [
            f"{DRAFT}{name}" if name in of_drafts else name
            for name in (() if is_scratch(group) else group.layer_names)
            for _ in _tensors(kv_caches[name])
        ]
        for group in cache.kv_cache_groups
    ]


def evict(block_pool: BlockPool, keys: Iterable[bytes]) -> None:
    """Take blocks out of the engine's prefix cache. Requests that hold them keep them."""
    cached = cached_blocks(block_pool) or {}
    found = [cached[key] for key in keys if key in cached]
    blocks = [block for one in found for block in (one.values() if isinstance(one, dict) else (one,))]
    block_pool.evict_blocks({block.block_id for block in blocks})


def _tensors(layer: Any) -> Sequence[torch.Tensor]:
    """Of a layer: K and V are one; states may be several."""
    return [layer] if isinstance(layer, torch.Tensor) else list(layer)


def kernel_packing(config: VllmConfig, cache: KVCacheConfig) -> str:
    """How the CPU kernels pack keys inside a block, by processor (AMX, AVX-512, NEON, ...)."""
    if current_platform.device_type != "cpu":
        return ""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        # The version lacks this call; the processor's name separates at least as much.
        return str(current_platform.get_cpu_architecture())
    packings = set()
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype), "vLLM has resolved its name"
    for group in cache.kv_cache_groups:
        for layer in () if is_scratch(group) else layer_specs(group):
            # Latent vectors and states are not packed.
            if isinstance(layer, AttentionSpec) and not isinstance(layer, MLAAttentionSpec):
                # The backend reads the model's type, not the cache's, which is bytes for FP8.
                packings.add(_get_attn_isa(dtype, layer.block_size, layer.head_size))
    return ",".join(sorted(packings))


def conv_state_layout() -> str:
    """The order of the dimensions in states of short convolutions, by processor and environment."""
    return str(mamba_utils.get_conv_state_layout())


# A step, and its requests.


def scheduled_tokens(output: SchedulerOutput) -> list[tuple[str, int]]:
    """(request, computed tokens after the step, drafts included) for every request of the step."""
    cached = output.scheduled_cached_reqs
    before = [(request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs]
    before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [(name, computed + output.num_scheduled_tokens[name]) for name, computed in before]


def block_tables(output: SchedulerOutput, request_id: str) -> tuple[list[int], ...] | None:
    """The block ids of a scheduled request, by group, as of this step."""
    state = output.kv_connector_block_state
    assert state is not None, "vLLM gives connectors the block tables from 0.29 on"
    tables: tuple[list[int], ...] | None = state.get_block_ids(request_id)
    return tables


def offered_states(output: SchedulerOutput) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """By request: states that the engine has at the end of this step, as (group, block id, tokens before it).

    Of vLLM's ``align`` mode; nothing else tells where a state lies. The engine may reuse the block in the next
    step.
    """
    state = output.kv_connector_block_state
    offered: Mapping[str, Sequence[tuple[int, int, int]]] = getattr(state, "boundary_state_offloads", {})
    return offered


def tokens_held(request: Request, computed_tokens: int, refilled_tokens: int) -> int:
    """Of how many tokens a request has blocks at the start of its first step, at ``computed_tokens``.

    ``refilled_tokens``: that the engine computes again in front of a hit's end, without writing their blocks.
    """
    begins = int(getattr(request, "replay_start", 0))
    return computed_tokens + (refilled_tokens if begins and begins == computed_tokens else 0)


def stop_at(request: Request, tokens: int) -> None:
    """Let the engine end a step of the request's prompt there, and keep its states, if it can."""
    if hasattr(request, "shared_prefix_boundary"):
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, tokens)


def stop_of(request: Request) -> int:
    """Where prompts part, and the engine keeps states for the next one; 0: nowhere."""
    return int(getattr(request, "shared_prefix_boundary", 0))


_DIGEST = "digest_of_kvpool"  # attribute of vLLM's adapter, so that the digest lives as long as its tensors
_DUMMY = "adds_dummy_for_kvpool"  # attribute of vLLM's manager, while it takes in one of its own
# Attribute of vLLM's manager: adapters that it has not asked for yet, by number, name and path.
_AHEAD = "read_ahead_by_kvpool"
MAX_READ_AHEAD = 4  # adapters
AHEAD_S = 60.0  # what was read longer ago is read again: its files may be others

Digest = Callable[[Iterable[tuple[str, torch.Tensor]]], str]


def digest_adapters(digest: Digest) -> bool:
    """Have each adapter that vLLM takes in from now on digested before it is packed; False: it does not show them.

    All ways to an adapter end in ``_add_adapter``: options, calls, resolvers, trainers, and the step that lacks it.
    ``digest`` never raises.
    """
    from vllm.lora.model_manager import LoRAModelManager  # much, and few engines have adapters
    from vllm.lora.worker_manager import WorkerLoRAManager

    if not (hasattr(LoRAModelManager, "_add_adapter") and hasattr(LoRAModelManager, "list_adapters")):
        return False
    _wrap_once(LoRAModelManager, "_add_adapter", functools.partial(_takes_in, digest))
    _wrap_once(WorkerLoRAManager, "_load_adapter", _loads)
    _wrap_once(WorkerLoRAManager, "add_dummy_lora", _adds_dummy)
    return True


class HeldAdapters:
    """What a worker's vLLM holds of adapters. ``digest``: as ``digest_adapters`` has it."""

    def __init__(self, manager: Any, digest: Digest) -> None:
        self._manager, self._digest = weakref.ref(manager), digest

    @classmethod
    def under_construction(cls, digest: Digest) -> HeldAdapters | None:
        """Of the worker whose KV cache is being registered; None: it has no adapters."""
        manager: Any = getattr(_runner_under_construction(), "lora_manager", None)
        return None if manager is None else cls(manager, digest)

    def digests(self) -> dict[int, str]:
        """By vLLM's number; empty: not known."""
        manager = self._manager()
        held = {} if manager is None else manager._adapter_manager.list_adapters()
        return {int(number): getattr(adapter, _DIGEST, "") for number, adapter in held.items()}

    def ahead(self, number: int, name: str, path: str) -> str | None:
        """The digest of an adapter that was read, and that vLLM gets when it asks for it; None: there is none."""
        read = getattr(self._manager(), _AHEAD, {}).get((number, name, path))
        return None if read is None or time.monotonic() > read[0] + AHEAD_S else getattr(read[1], _DIGEST)

    def read(self, lora_request: Any) -> str:
        """Read a request's adapter as vLLM will; its digest. Errors: vLLM's own of the load."""
        manager: Any = self._manager()
        adapter = manager._load_adapter(lora_request)
        _digest_once(self._digest, adapter)
        ahead: dict[tuple[int, str, str], tuple[float, Any]] = vars(manager).setdefault(_AHEAD, {})
        while len(ahead) >= MAX_READ_AHEAD:
            del ahead[next(iter(ahead))]
        ahead[_of_request(lora_request)] = time.monotonic(), adapter
        return str(getattr(adapter, _DIGEST))


def _of_request(lora_request: Any) -> tuple[int, str, str]:
    return int(lora_request.lora_int_id), str(lora_request.lora_name), str(lora_request.lora_path)


def _wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    call: Any = getattr(owner, name)
    if hasattr(call, "wrapped_by_kvpool"):
        return

    @functools.wraps(call)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return wrapper(call, *arguments, **named)

    wrapped.wrapped_by_kvpool = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _takes_in(digest: Digest, take_in: Callable[..., Any], manager: Any, adapter: Any) -> Any:
    if not hasattr(manager, _DUMMY):
        _digest_once(digest, adapter)
    return take_in(manager, adapter)


def _adds_dummy(add: Callable[..., Any], manager: Any, *arguments: Any, **named: Any) -> Any:
    """Of zeros, for steps without requests, as of data parallelism: digests would take longer than they do."""
    taking_in = vars(manager._adapter_manager)
    taking_in[_DUMMY] = True
    try:
        return add(manager, *arguments, **named)
    finally:
        del taking_in[_DUMMY]


def _digest_once(digest: Digest, adapter: Any) -> None:
    """Before vLLM packs and scales its tensors."""
    if not hasattr(adapter, _DIGEST):
        setattr(adapter, _DIGEST, digest(_adapter_tensors(adapter)))


def _loads(load: Callable[..., Any], manager: Any, lora_request: Any) -> Any:
    read = getattr(manager, _AHEAD, {}).pop(_of_request(lora_request), None)
    in_place = getattr(lora_request, "load_inplace", False)
    is_fresh = read is not None and not in_place and time.monotonic() <= read[0] + AHEAD_S
    return read[1] if is_fresh else load(manager, lora_request)


def _adapter_layers(adapter: Any) -> list[tuple[str, Any]]:
    """All that holds its tensors, by name: low ranks, and layers that it replaces as a whole."""
    kinds = ((kind, getattr(adapter, kind, None) or {}) for kind in ("loras", "modules_to_save"))
    return [(f"{kind} {name}", layer) for kind, layers in kinds for name, layer in sorted(layers.items())]


def _adapter_tensors(adapter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All that is computed with, taken from its file, by names with the factors and the form.

    Nothing is done before the first one is asked for, by what catches all errors.
    """
    _take_from_file(adapter)
    form = getattr(adapter, "is_3d_lora_weight", False)
    for module, layer in _adapter_layers(adapter):
        for name, value in sorted(vars(layer).items()):
            for place, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(one, torch.Tensor):
                    yield f"{module}.{name}.{place} {getattr(layer, 'scaling', None)} {form}", one


def _take_from_file(adapter: Any) -> None:
    """Copy tensors that are views of their file, as safetensors makes them.

    vLLM reads them again whenever an adapter comes back to a slot: of what a trainer has written there since.
    """
    for _, layer in _adapter_layers(adapter):
        for name, tensor in vars(layer).items():
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not tensor.is_pinned():
                setattr(layer, name, tensor.clone())


def adapter_changed_in_place(request: Request) -> bool:
    """Whether the adapter replaced an earlier one of the same name and path, and so the same hashes."""
    return bool(getattr(request.lora_request, "load_inplace", False))


def job_result(**says: Any) -> JobResult:
    """A tier's result with what this version of vLLM has a field for: 0.30 has none for bytes."""
    known = {one.name for one in dataclasses.fields(JobResult)}
    return JobResult(**{name: value for name, value in says.items() if name in known})


# Hashes.

_EVERYWHERE = 1 << 62  # tokens


def hash_tags() -> bool:
    """Whether hashes tag their extra keys (from 0.31), which changes them for LoRA, salt and images."""
    return hasattr(kv_cache_utils, "to_event_extra_keys")


def first_parent_hash() -> bytes:
    """The hash before a prompt's first block, of this process."""
    return bytes(kv_cache_utils.NONE_HASH)


def extra_keys(request: Request, blocks: range, block_tokens: int) -> dict[int, bytes]:
    """What the hashes of a request's blocks cover beside tokens, as CBOR, by place in ``blocks``; empty ones left out.

    Of embeddings vLLM keeps a digest for each block of the prompt, and covers it and the zeros in the tokens' places.
    """
    last = request.mm_features[-1].mm_position if request.mm_features else None
    changing = blocks.stop if request.prompt_embeds is not None else 1  # from here on all have the same
    if last is not None:
        changing = max(changing, -(-(last.offset + last.length) // block_tokens))
    found: dict[int, bytes] = {}
    for place, block in enumerate(blocks):
        start = block * block_tokens
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block_tokens, 0)
        spelled = None if keys is None else cbor2.dumps(keys, canonical=True)
        if block >= changing:
            return found if spelled is None else found | dict.fromkeys(range(place, len(blocks)), spelled)
        if spelled is not None:
            found[place] = spelled
    return found


def covered_tokens(request: Request) -> int:
    """Up to where a request's hashes cover all that its KV depends on. They leave out

    - whether a token 0 of a mixed prompt stands for itself or for an embedding (vllm-project/vllm#56655),
    - an item that begins inside of another, as the sound of a video does, until the other one ends,
    - the path of the adapter that an item was encoded with: vLLM's cache of encoders knows its name alone
      (vllm-project/vllm#44939).
    """
    covered, reach = _EVERYWHERE, 0
    if (are_tokens := getattr(request, "prompt_is_token_ids", None)) is not None:
        given = enumerate(zip(request.prompt_token_ids or (), are_tokens, strict=False))
        covered = next((at for at, (token, is_token) in given if is_token and not token), covered)
    for item in request.mm_features:
        begin, of_adapter = item.mm_position.offset, item.mm_hash not in (None, item.identifier)
        if begin < reach or of_adapter:
            covered = min(covered, begin)
        reach = max(reach, begin + item.mm_position.length)
    return covered


def first_item(request: Request, identifiers: Collection[str]) -> int | None:
    """Where the first of these items begins in a prompt; None: it has none."""
    return next(
        (one.mm_position.offset for one in request.mm_features if one.identifier in identifiers), None
    )


def mixes_adapters() -> bool:
    """Whether tokens without an adapter get the last slot's in a step that has adapters: vLLM's kernels for CPUs take
    -1, which stands for none, as an index.
    """
    return bool(current_platform.device_type == "cpu")


def is_resumable(request: Request) -> bool:
    """Whether it is a streaming session, whose last token is replaced by what is said next."""
    return bool(getattr(request, "resumable", False))


def cache_key(block_hash: bytes, group: int) -> bytes:
    return bytes(kv_cache_utils.make_block_hash_with_group_id(kv_cache_utils.BlockHash(block_hash), group))


def cache_keys(request: Request, geometry: Geometry, group_index: int, record: int) -> list[bytes]:
    """The keys of a record's blocks in the engine's prefix cache, in order."""
    group = geometry.groups[group_index]
    step = group.block_tokens // geometry.hash_block_tokens
    first = record * group.blocks_per_record
    ends = [(block + 1) * step - 1 for block in range(first, first + group.blocks_per_record)]
    return [cache_key(request.block_hashes[end], group_index) for end in ends]


def event_hash(block_hash: bytes) -> bytes | int:
    """The form in events: the last eight bytes as an integer, unless the engine sends whole hashes."""
    return kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(block_hash))


def event_hashes_by_group(keys: Sequence[bytes], groups: int) -> list[list[bytes | int]]:
    """The groups' hashes in prefix cache keys of equal length, whose last 4 bytes are the group, big-endian."""
    if not keys:
        return [[] for _ in range(groups)]
    if isinstance(event_hash(keys[0][:-4]), bytes):
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


def event_extra_keys(request: Request, start: int, end: int) -> Any:
    """Extra keys in the hash of tokens ``start`` to ``end``, as in events."""
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    if keys is None:
        return None
    return kv_cache_utils.to_event_extra_keys([keys]) if hash_tags() else [keys]


# The engine's own cache: its block pool, keyed by hash and group.


def cached_blocks(block_pool: BlockPool) -> Mapping[bytes, Any] | None:
    """The engine's prefix cache: key to a block, or to its copies by block id.

    A live dictionary of the engine: read it before the engine continues. None: this version of vLLM hides it.
    """
    blocks: Any = getattr(block_pool.cached_block_hash_to_block, "_cache", None)
    return blocks if isinstance(blocks, dict) else None


def block_contents(block_pool: BlockPool, block_ids: Iterable[int]) -> tuple[bytes | None, ...]:
    """By block, its present key; None: it cannot be found again."""
    return tuple(block_pool.blocks[block_id].block_hash for block_id in block_ids)


def next_evicted(block_pool: BlockPool, count: int) -> list[tuple[int, bytes | None]]:
    """The ``count`` blocks to be evicted next, soonest first: block id, and key as in ``block_contents``."""
    found: list[tuple[int, bytes | None]] = []
    block = block_pool.free_block_queue.fake_free_list_head.next_free_block
    # The list's head and tail are no blocks.
    while len(found) < count and block is not None and block.next_free_block is not None:
        found.append((block.block_id, block.block_hash))
        block = block.next_free_block
    return found


def count_free(block_pool: BlockPool) -> int:
    return int(block_pool.get_num_free_blocks())


def is_in_use(block_pool: BlockPool) -> bool:
    return bool(block_pool.num_gpu_blocks - count_free(block_pool) > 1)


def references(block_pool: BlockPool, block_id: int) -> int:
    return int(block_pool.blocks[block_id].ref_cnt)


def hold(block_pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Add a reference to each block, so that the engine does not reuse it."""
    block_pool.touch([block_pool.blocks[block_id] for block_id in block_ids])


def release(block_pool: BlockPool, block_ids: Sequence[int]) -> None:
    """Drop a reference to each block; the last is evicted first, like the end of a prompt in the engine."""
    block_pool.free_blocks(block_pool.blocks[block_id] for block_id in reversed(block_ids))


def medium(block_pool: BlockPool) -> str:
    return str(getattr(block_pool, "medium", MEDIUM_GPU))
