"""A CPU worker for models with recurrent states; engines load it by ``worker_cls``. For tests only.

vLLM 0.32 on a CPU lacks what its prefix cache needs of two kinds of models, and ends the engine. Here it is, in torch:

- Mamba-2: the states at the ends of a scan's chunks, of which its kernel gives the last one, and their way to blocks;
- drafts beside states: what is copied between a request's blocks before and behind a step, by Triton kernels. Tokens of
  the draft that were refused are taken back from a state of convolutions by ``bias`` rows; of other states there is one
  for each token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import vllm.model_executor.layers.mamba.mamba_mixer2 as mixer
import vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm as kernels
import vllm.model_executor.layers.mamba.ops.ssd_checkpoint as checkpoints
import vllm.model_executor.layers.mamba.ops.ssd_combined as scans
import vllm.v1.worker.mamba_utils as moves
from vllm.v1.worker.cpu_worker import CPUWorker

_scan_to_end = kernels._mamba_chunk_scan_combined_fwd_cpu
_populate = moves.MambaSpecDecodeGPUContext._populate_metadata


class StatesCpuWorker(CPUWorker):
    """The functions below stand in for vLLM's as soon as this module is imported, in this process alone."""


def _scan(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, chunk_size: int,
    out: torch.Tensor, *, return_intermediate_states: bool = False, initial_states: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor, cu_chunk_seqlens: torch.Tensor, last_chunk_indices: torch.Tensor | None = None,
    z: torch.Tensor | None = None, **more: Any,
) -> Any:  # fmt: skip
    """``return_intermediate_states``: the states after all chunks, each scanned by itself."""
    if not return_intermediate_states:
        return _scan_to_end(
            x, dt, a, b, c, chunk_size, out, initial_states=initial_states, cu_seqlens=cu_seqlens,
            cu_chunk_seqlens=cu_chunk_seqlens, last_chunk_indices=last_chunk_indices, z=z, **more,
        )  # fmt: skip
    starts, ends = cu_seqlens.tolist()[:-1], cu_chunk_seqlens.tolist()
    states: list[torch.Tensor] = []
    for first, end in pairwise(ends):
        if first in starts:
            sequence = len(starts) - 1 - starts[::-1].index(first)
            state = None if initial_states is None else initial_states[sequence : sequence + 1]
        else:
            state = states[-1]
        chunk = slice(first, end)
        said = out[chunk].contiguous()
        alone = torch.tensor([0, end - first], dtype=torch.int32)
        of_chunk = [one[chunk].contiguous() for one in (x, dt, b, c)]
        after = _scan_to_end(
            of_chunk[0], of_chunk[1], a, *of_chunk[2:], chunk_size, said, initial_states=state, cu_seqlens=alone,
            z=None if z is None else z[chunk], **more,
        )  # fmt: skip
        states.append(after)
        out[chunk] = said
    return torch.cat(states)


def _store_prefill_checkpoint(
    checkpoint: Any, chunk_idx: torch.Tensor, x: torch.Tensor, conv_state: torch.Tensor, chunk_states: torch.Tensor,
    ssm_state: torch.Tensor, query_start_loc: torch.Tensor, *, state_len: int,
) -> None:  # fmt: skip
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if offset > 0:
            block, end = int(checkpoint.state_indices[row]), int(query_start_loc[row]) + offset
            conv_state[block][:, :state_len] = x[:, end - state_len : end].to(conv_state.dtype)
            ssm_state[block] = chunk_states[int(chunk_idx[row])].to(ssm_state.dtype)


def _populate_with_tables(
    self: Any, config: Any, context: Any, funcs: Any, tables: Any, aligned: Any
) -> None:
    """Also keeps what ``_copy`` moves: (block table, state, whether it is one of convolutions)."""
    _populate(self, config, context, funcs, tables, aligned)
    self.moved = []
    for at, group_id in enumerate(self.mamba_group_ids):
        group = config.kv_cache_groups[group_id]
        whole = tables[at] if tables[at]._base is None else tables[at]._base  # a view of this step's rows
        for name in group.layer_names:
            kinds = funcs[moves._get_mamba_spec_for_layer(group, name).mamba_type]
            for number, kind in enumerate(kinds):
                state = context[name].kv_cache[number]
                self.moved.append((whole, state, kind is moves.get_conv_copy_spec))


def _copy(self: Any, row: int, source: int, target: int, bias: int) -> None:
    for table, state, of_convolutions in self.moved:
        to = state[int(table[row, target])]
        if not of_convolutions:
            to.copy_(state[int(table[row, source + bias])].clone())
            continue
        kept = state[int(table[row, source])].clone()
        if moves.is_conv_state_dim_first():
            to[:, : to.shape[1] - bias] = kept[:, bias:]
        else:
            to[: to.shape[0] - bias] = kept[bias:]


def _before_step(
    self: Any, num_reqs: int, state_idx_gpu: torch.Tensor, src_col_gpu: torch.Tensor, token_bias_gpu: torch.Tensor,
    idx_mapping: torch.Tensor | None,
) -> None:  # fmt: skip
    for number in range(num_reqs if self.is_initialized else 0):
        row = number if idx_mapping is None else int(idx_mapping[number])
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if row >= 0 and source >= 0 and source != target:
            _copy(self, row, source, target, int(token_bias_gpu[row]))


def _behind_step(
    self: Any, num_reqs: int, num_accepted_tokens_gpu: torch.Tensor, mamba_state_idx_gpu: torch.Tensor,
    num_scheduled_tokens_gpu: torch.Tensor, num_computed_tokens_gpu: torch.Tensor, num_draft_tokens_gpu: torch.Tensor,
) -> None:  # fmt: skip
    if not (num_reqs and self.is_initialized):
        return
    self.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    of_rows = (
        num_accepted_tokens_gpu,
        mamba_state_idx_gpu,
        num_scheduled_tokens_gpu,
        num_computed_tokens_gpu,
    )
    for row in range(num_reqs):
        accepted, source, scheduled, computed = (int(one[row]) for one in of_rows)
        running = computed + scheduled - int(num_draft_tokens_gpu[row])
        boundary = (running + accepted - 1) // self.block_size * self.block_size
        if boundary < running:
            continue
        bias, target = boundary - running, boundary // self.block_size - 1
        if source == target:
            self.num_accepted_tokens_out[row] = 1
        if source != target or bias:
            _copy(self, row, source, target, bias)


kernels._mamba_chunk_scan_combined_fwd_cpu = scans._mamba_chunk_scan_combined_fwd = _scan
mixer.store_prefill_checkpoint = checkpoints.store_prefill_checkpoint = _store_prefill_checkpoint
moves.MambaSpecDecodeGPUContext._populate_metadata = _populate_with_tables
moves.MambaSpecDecodeGPUContext.run_fused_precopy = _before_step
moves.MambaSpecDecodeGPUContext.run_fused_postprocess = _behind_step
