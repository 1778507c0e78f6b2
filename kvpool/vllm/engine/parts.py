"""Parts of records: neighbouring KV heads of all layers, which engines of several tensor-parallel sizes share.

With ``share_across_tp`` N, a record of a group with KV heads has N parts, each under a key of its own. Of T ranks,
rank r holds parts r * N / T to (r + 1) * N / T - 1: vLLM gives each rank as many neighbouring heads as the others, in
the model's order (``QKVParallelLinear``; its canonical pages rely on it, too). A part's bytes are in logical index
order, as all payloads are, so that they do not depend on how many other heads a rank has.

Whatever is not known to be alike at every size keeps the engine from sharing with other sizes.

Threads: any.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvpool.errors import EngineRefused
from kvpool.text import format_nbytes
from kvpool.vllm.engine import internals, support
from kvpool.vllm.geometry import Group

# Records of 64 KiB move at half to two thirds of the rate of 512 KiB; smaller ones cost their headers and keys.
MIN_PART_NBYTES = 64 << 10
_HEADS = -3  # of a layer's dimensions: blocks, kernel's blocks where they are smaller, heads, tokens, content


def shared_groups(
    config: VllmConfig,
    cache: KVCacheConfig,
    groups: Sequence[Group],
    layers: Sequence[Sequence[torch.Tensor]],
    share_across_tp: int,
) -> list[Group]:
    """``groups`` with the parts that this rank makes of a record. ``layers``: the rank's own, by group.

    Errors: ``EngineRefused`` says why this engine shares with engines of its own tensor-parallel size only.
    """
    _refuse_engine(config, share_across_tp)
    ranks = config.parallel_config.tensor_parallel_size
    parts, heads = share_across_tp // ranks, config.model_config.get_total_num_kv_heads()
    shared = []
    for index, group in enumerate(groups):
        specs = internals.layer_specs(cache.kv_cache_groups[index])
        if group.scratch:
            shared.append(group)
        elif group.state or group.latent:
            if not all(_is_whole(spec) for spec in specs):
                kind = "states" if group.state else "latent vectors"
                raise EngineRefused(f"each rank has {kind} of its own in KV-cache group {index}")
            if group.latent and current_platform.device_type == "cpu":
                # vLLM 0.32: equal in the first layer; behind its attention two ranks differ from one in all digits.
                raise EngineRefused(
                    "vLLM's CPU kernels compute other latent vectors at each tensor-parallel size"
                )
            shared.append(group)
        else:
            if heads < ranks:
                raise EngineRefused(
                    f"the model has {heads} KV heads, so several of {ranks} ranks have the same"
                )
            specs = specs * len(layers[index]) if len(specs) == 1 else specs
            for spec, view in zip(specs, layers[index], strict=True):
                _refuse_heads(index, spec, view, parts)
            _refuse_small(index, group, layers[index], parts, share_across_tp)
            shared.append(dataclasses.replace(group, parts=parts))
    return shared


def cut(layers: Sequence[torch.Tensor], parts: int) -> list[list[torch.Tensor]]:
    """By part, the views of its heads in each layer."""
    if parts == 1:
        return [list(layers)]
    heads = [layer.shape[_HEADS] // parts for layer in layers]
    return [
        [layer.narrow(_HEADS, part * count, count) for layer, count in zip(layers, heads, strict=True)]
        for part in range(parts)
    ]


def strides_alone(view: torch.Tensor) -> tuple[int, ...]:
    """The strides of one block without gaps between its dimensions, as the heads of other parts are.

    0: of a dimension of size 1, which has none. The order of the dimensions in memory remains.
    """
    strides, step = [0] * (view.dim() - 1), 1
    dims = [dim for dim in range(1, view.dim()) if view.shape[dim] > 1]
    for dim in sorted(dims, key=lambda dim: (view.stride(dim), -dim)):
        strides[dim - 1] = step
        step *= view.shape[dim]
    return tuple(strides)


def _refuse_engine(config: VllmConfig, share_across_tp: int) -> None:
    model, parallel = config.model_config, config.parallel_config
    ranks = parallel.tensor_parallel_size
    if share_across_tp % ranks:
        raise EngineRefused(
            f"{share_across_tp} is no multiple of --tensor-parallel-size {ranks}; set it to one of all engines' sizes"
        )
    if parallel.pipeline_parallel_size != 1:
        raise EngineRefused("stages are not cut; set --pipeline-parallel-size to 1")
    if support.drafts_with_layers(config) is not None:
        raise EngineRefused("layers of drafts are not cut; remove --speculative-config")
    if not internals.model_class(model).__module__.startswith("vllm."):
        raise EngineRefused("the model's class is not vLLM's own, and may give ranks their heads otherwise")
    if model.quantization and _quantized_here(model):
        raise EngineRefused(
            f"weights are quantized ({model.quantization}) when they are loaded, by each rank for itself, so other "
            "sizes compute other keys and values; use a checkpoint that is quantized"
        )


def _quantized_here(model: Any) -> bool:
    """Whether no scales come with the checkpoint, or they are not used."""
    told = [getattr(model.hf_config, name, None) for name in ("quantization_config", "compression_config")]
    return not any(told) or getattr(model, "quantization_config", None) is not None


def _refuse_heads(index: int, spec: Any, view: torch.Tensor, parts: int) -> None:
    """Refuse a layer unless each cell of (head, token) is known to have the bytes of that head alone."""
    heads, group = spec.num_kv_heads, f"KV-cache group {index}"
    # A version of vLLM without one of these fields says less.
    packing = ("num_head_slots", None), ("state_content_bytes", None), ("tokens_per_state", 1)
    if any(getattr(spec, name, "absent") != plain for name, plain in packing):
        raise EngineRefused(f"this version of vLLM, or its backend, does not say how heads lie in {group}")
    if heads % parts:
        raise EngineRefused(
            f"a rank has {heads} KV heads in {group}, which are not {parts} equal parts; set share_across_tp to a "
            "divisor of the model's KV heads"
        )
    content_nbytes = view.shape[-1] * view.element_size()
    tokens = math.prod(view.shape[1:_HEADS]) * view.shape[-2]
    if (
        view.dim() not in (4, 5)
        or (view.shape[_HEADS], tokens, content_nbytes)
        != (heads, spec.block_size, spec.state_content_size_bytes)
        or not _is_cell_by_cell(view)
    ):
        raise EngineRefused(
            f"a block of {group} lies in memory as {tuple(view.shape[1:])} by {view.stride()[1:]}, which is not "
            "known to be head by head; use another attention backend"
        )


def _is_cell_by_cell(view: torch.Tensor) -> bool:
    """Whether all heads of a token lie side by side, or all tokens of a head."""
    heads, content = view.shape[_HEADS], view.shape[-1]
    head, token, inner = view.stride()[_HEADS:]
    side_by_side = heads == 1 or (head, token) == (content, heads * content)
    return inner == 1 and (token == content or side_by_side)


def _is_whole(spec: Any) -> bool:
    """Whether every rank has the same bytes of a layer, at any size."""
    return getattr(spec, "max_tp_shards", None) == 1 or bool(getattr(spec, "tp_replicated", False))


def _refuse_small(
    index: int, group: Group, layers: Sequence[torch.Tensor], parts: int, share_across_tp: int
) -> None:
    block_nbytes = sum(view[0].numel() * view.element_size() for view in layers) // parts
    if (nbytes := block_nbytes * group.blocks_per_record) < MIN_PART_NBYTES:
        wanted = -(-MIN_PART_NBYTES // block_nbytes)
        has, least = format_nbytes(nbytes), format_nbytes(MIN_PART_NBYTES)
        raise EngineRefused(
            f"each of {share_across_tp} parts of a record of KV-cache group {index} would have {has}, less than "
            f"{least}; set blocks_per_record to {wanted} or more, a larger --block-size, or a lower share_across_tp"
        )
