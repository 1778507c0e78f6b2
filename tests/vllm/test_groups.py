"""Which KV-cache groups are taken, and as what; each other kind is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvpool.errors import EngineRefused
from kvpool.vllm.plan import Group
from kvpool.vllm.support import groups_of
from tests.support.specs import (
    CHUNKED,
    FULL,
    LATENT,
    ROWS,
    SMALL_WINDOW,
    STATE,
    WINDOW,
    cache_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]


ROOT = Path(__file__).parents[2]
BASES = (KVCacheSpec, AttentionSpec, UniformTypeKVCacheSpecs)  # not of a layer


def test_full_attention_and_windows_are_supported() -> None:
    assert groups_of(cache_of(FULL, WINDOW)) == [Group(32), Group(64, 512)]
    assert groups_of(cache_of(FULL, WINDOW), 4) == [Group(32, None, 4), Group(64, 512, 4)]


def test_latent_vectors_are_told_from_heads_that_ranks_have_in_common() -> None:
    """One KV head on several ranks may be the same on each, but the configuration does not say so for sure."""
    one_head = replace(FULL, num_kv_heads=1)
    assert groups_of(cache_of(LATENT, one_head)) == [Group(32, latent=True), Group(32)]
    assert groups_of(cache_of(LATENT, one_head), tensor_parallel=4) == [
        Group(32, latent=True, copies=4),
        Group(32),
    ]
    padded = replace(LATENT, page_size_padded=1 << 20)
    layers = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": padded, "b": LATENT})
    assert groups_of(cache_of(layers)) == [Group(32, latent=True)]


INDEXER = replace(LATENT, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)
COMPRESSED = replace(ROWS, tokens_per_state=4, alignment=576, model_version="deepseek_v4")


def layers_of(**specs: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=next(iter(specs.values())).block_size, kv_cache_specs=specs)


def test_sparse_latents_are_supported() -> None:
    """DeepSeek V3.2 and GLM-5: an indexer beside the latent vectors; V4: compressed ones, and windows of the rest."""
    leader = replace(INDEXER, is_index_group_leader=True)
    sparse = cache_of(layers_of(attention=ROWS, indexer=INDEXER, leader=leader))
    assert groups_of(sparse, 2, 4) == [Group(32, None, 2, latent=True, copies=4)]
    compressed = cache_of(
        layers_of(attention=COMPRESSED, indexer=replace(INDEXER, tokens_per_state=4)), SMALL_WINDOW
    )
    assert groups_of(compressed, tensor_parallel=2) == [
        Group(32, latent=True, copies=2),
        Group(4, 8, latent=True, copies=2),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sliding_window", 128),
        ("attention_chunk_size", 64),
        ("non_causal", True),
        ("max_tp_shards", 2),
        ("max_tp_shards", None),
    ],
)
def test_uncommon_mla_is_refused_by_name(field: str, value: Any) -> None:
    layers = {"a": LATENT, "b": replace(LATENT, **{field: value})}
    for spec in (layers["b"], layers_of(**layers)):
        with pytest.raises(EngineRefused, match=f"group 1 is MLA with {field} "):
            groups_of(cache_of(LATENT, spec))


@pytest.mark.parametrize(
    ("field", "value"), [("bounded_replay", True), ("extra_retained_tokens", 3), ("max_tp_shards", None)]
)
def test_windows_of_latents_that_need_more_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(EngineRefused, match=f"group 1 is MLA with {field} "):
        groups_of(cache_of(LATENT, replace(SMALL_WINDOW, **{field: value})))


def test_mla_with_a_part_in_main_memory_is_refused() -> None:
    cache = cache_of(LATENT)
    cache.kv_cache_groups[0].host_resident = True
    with pytest.raises(EngineRefused, match="group 0 is MLA of which main memory keeps a part"):
        groups_of(cache)


@pytest.mark.parametrize(
    "spec",
    [
        HiddenStateCacheSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16),
        CircularBufferSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16),
    ],
)
def test_other_attention_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(EngineRefused, match=type(spec).__name__):
        groups_of(cache_of(FULL, spec))


def test_each_kind_that_vllm_knows_is_in_the_table_and_taken_or_refused_by_name() -> None:
    """A new one is nobody's guess."""
    table = (ROOT / "docs/reference/versions.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and "Spec`" in line]
    taken = {type(spec) for spec in (FULL, WINDOW, LATENT, SMALL_WINDOW, CHUNKED, STATE)}
    assert len(groups_of(cache_of(FULL, WINDOW, LATENT, SMALL_WINDOW, CHUNKED, STATE))) == len(taken)
    for kind in vars(kv_cache_interface).values():
        if not isinstance(kind, type) or not issubclass(kind, KVCacheSpec) or kind in BASES:
            continue
        of_kind = [row for row in rows if f"`{kind.__name__}`" in row]
        assert of_kind, f"{kind.__name__} is not in the table"
        assert (kind in taken) is any(not row.endswith("| refused |") for row in of_kind)
        if kind not in taken:
            bare = object.__new__(kind)
            object.__setattr__(bare, "block_size", 32)
            with pytest.raises(EngineRefused, match=f"group 1 is of kind {kind.__name__}, "):
                groups_of(cache_of(FULL, bare))


def test_attention_in_chunks_is_supported() -> None:
    assert groups_of(cache_of(FULL, CHUNKED), 2) == [Group(32, None, 2), Group(32, None, 2, chunk=64)]


def test_states_at_the_ends_of_blocks_are_supported() -> None:
    assert groups_of(cache_of(STATE, FULL), 4) == [Group(32, 2, state=True), Group(32, None, 4)]
    of_all = groups_of(cache_of(replace(STATE, tp_replicated=True), LATENT), tensor_parallel=2)
    assert of_all == [Group(32, 2, state=True, copies=2), Group(32, latent=True, copies=2)]


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_elsewhere_are_refused_by_name(mode: str) -> None:
    with pytest.raises(
        EngineRefused, match=f"group 1 keeps states in mode '{mode}'.*--mamba-cache-mode align"
    ):
        groups_of(cache_of(FULL, replace(STATE, mamba_cache_mode=mode)))
