"""Which KV-cache groups are taken, and as what; each other kind is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvpool.errors import EngineRefused
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.support import geometry_of, groups_of
from kvpool.vllm.geometry import Group
from tests.support.specs import (
    CHUNKED,
    FULL,
    LATENT,
    REFILLED,
    RING,
    ROWS,
    SMALL_WINDOW,
    STATE,
    WINDOW,
    cache_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]


ROOT = Path(__file__).parents[3]
BASES = (KVCacheSpec, AttentionSpec, UniformTypeKVCacheSpecs)  # not of a layer


def layers_of(**specs: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=next(iter(specs.values())).block_size, kv_cache_specs=specs)


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


def test_latent_vectors_of_which_a_model_does_not_say_who_has_them_are_stored_by_each_rank() -> None:
    unknown = replace(LATENT, max_tp_shards=None)
    for spec in (unknown, layers_of(a=LATENT, b=unknown)):
        assert groups_of(cache_of(spec), tensor_parallel=4) == [Group(32, latent=True)]
    window = replace(SMALL_WINDOW, max_tp_shards=None)
    assert groups_of(cache_of(window), tensor_parallel=4) == [Group(4, 8, latent=True)]


INDEXER = replace(LATENT, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER)
COMPRESSED = replace(ROWS, tokens_per_state=4, alignment=576, model_version="deepseek_v4")


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
    ],
)
def test_uncommon_mla_is_refused_by_name(field: str, value: Any) -> None:
    layers = {"a": LATENT, "b": replace(LATENT, **{field: value})}
    for spec in (layers["b"], layers_of(**layers)):
        with pytest.raises(EngineRefused, match=f"group 1 is MLA with {field} "):
            groups_of(cache_of(LATENT, spec))


@pytest.mark.parametrize(("field", "value"), [("extra_retained_tokens", 3), ("max_tp_shards", 2)])
def test_windows_of_latents_that_need_more_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(EngineRefused, match=f"group 1 is MLA with {field} "):
        groups_of(cache_of(LATENT, replace(SMALL_WINDOW, **{field: value})))


def test_what_vllm_keeps_out_of_its_own_prefix_cache_is_taken_as_scratch() -> None:
    """Rings of what is not compressed yet, and windows that are filled again: DeepSeek V4.1, GLM-5.3-Flash."""
    rings = layers_of(attention=RING, indexer=replace(RING, head_size=32))
    groups = groups_of(cache_of(LATENT, rings, REFILLED, SMALL_WINDOW), 2, 4)
    assert groups == [
        Group(32, None, 2, latent=True, copies=4),
        Group(8, scratch=True),
        Group(4, 8, scratch=True),
        Group(4, 8, 2, latent=True, copies=4),
    ]
    with pytest.raises(EngineRefused, match="no KV cache to share"):
        groups_of(cache_of(RING, REFILLED))


@pytest.mark.parametrize("refilled", [True, False])
def test_groups_are_those_that_vllm_makes_of_layers_like_deepseeks(
    engine_config: Any, refilled: bool
) -> None:
    """V4.1, with and without ``--swa-bounded-replay``: windows first, then the compressed latents, then rings."""
    window = replace(REFILLED, block_size=32, sliding_window=128, bounded_replay=refilled)
    attention = replace(COMPRESSED, block_size=256, max_tp_shards=None)
    indexer = replace(INDEXER, block_size=256, tokens_per_state=4, max_tp_shards=None)
    layers = {f"{i}.window": window for i in range(4)} | {f"{i}.attention": attention for i in (1, 3)}
    layers |= {"1.indexer": indexer, "1.ring": RING, "3.ring": RING}
    config = engine_config(block_size=256)
    config.cache_config.kv_cache_layout = "BLNHC"
    groups = kv_cache_utils.get_kv_cache_groups(config, layers)
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    found = groups_of(cache, tensor_parallel=2)
    windows = [index for index, group in enumerate(groups) if "0.window" in group.layer_names]
    assert found[windows[0]] == (
        Group(32, 128, scratch=True) if refilled else Group(32, 128, latent=True, copies=2)
    )
    (latents,) = [index for index, group in enumerate(groups) if "1.attention" in group.layer_names]
    assert found[latents] == Group(256, latent=True)
    assert latents > windows[0], "the first group in the pool is not the engine's first"
    assert Group(8, scratch=True) in found
    assert internals.block_sizes(config, cache) == (256, 256 if refilled else 32)


@pytest.mark.parametrize("spec", [RING, REFILLED])
def test_scratch_beside_drafts_that_read_ahead_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(EngineRefused, match=r"group 1 is computed anew .*drafts.*--speculative-config"):
        groups_of(cache_of(LATENT, spec), reads_ahead=True)


@pytest.mark.parametrize("spec", [LATENT, RING, REFILLED])
@pytest.mark.parametrize("change", [{"host_resident": True}, {"enable_kv_transfer": False}])
def test_a_part_in_main_memory_is_refused(spec: Any, change: dict[str, bool]) -> None:
    cache = cache_of(LATENT, spec)
    vars(cache.kv_cache_groups[1]).update(change)
    with pytest.raises(EngineRefused, match="main memory keeps a part of KV-cache group 1"):
        groups_of(cache)


def test_other_attention_is_refused_by_name() -> None:
    spec = HiddenStateCacheSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    with pytest.raises(EngineRefused, match="HiddenStateCacheSpec"):
        groups_of(cache_of(FULL, spec))


def test_each_kind_that_vllm_knows_is_in_the_table_and_taken_or_refused_by_name() -> None:
    """A new one is nobody's guess."""
    table = (ROOT / "docs/reference/versions.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and "Spec`" in line]
    specs = (FULL, WINDOW, LATENT, SMALL_WINDOW, CHUNKED, STATE, RING)
    taken = {type(spec) for spec in specs}
    assert len(groups_of(cache_of(*specs))) == len(taken)
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


def test_a_model_with_experts_is_known(engine_config: Any) -> None:
    config = engine_config()
    assert not geometry_of(config, cache_of(FULL), 1).has_experts
    config.model_config.model_arch_config.num_experts = 4
    assert geometry_of(config, cache_of(FULL), 1).has_experts
