"""What is refused by name, on real configurations, and the facts that keep engines apart."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from kvpool.errors import EngineRefused
from kvpool.key.key import Namespace
from kvpool.vllm import compat
from kvpool.vllm.facts import engine_facts
from kvpool.vllm.plan import Group

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]


def test_a_supported_configuration_shares_with_its_like_and_nobody_else(engine_config: Any) -> None:
    configs = [engine_config(), engine_config(), engine_config(dtype="bfloat16")]
    for config in configs:
        compat.refuse_unsupported(config)
    one, like, other = (Namespace("default", _facts(config)).hex for config in configs)
    assert one == like != other


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"transfer": {"kv_load_failure_policy": "fail"}}, ["kv_load_failure_policy", '"recompute"']),
        ({"enable_prefix_caching": False}, ["prefix caching is off", "--no-enable-prefix-caching"]),
        ({"prefix_caching_hash_algo": "sha256"}, ['"sha256"', "pickle", "sha256_cbor"]),
        ({"prefix_caching_hash_algo": "xxhash"}, ['"xxhash"', "pickle"]),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, ["xxhash_cbor", "PYTHONHASHSEED"]),
    ],
)
def test_refused_with_what_to_change(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], names: list[str]
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(EngineRefused) as refusal:
        compat.refuse_unsupported(engine_config(**options))
    assert all(name in str(refusal.value) for name in names), refusal.value
    assert "\n" not in str(refusal.value)


def test_xxhash_shares_by_its_seed(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    config = engine_config(prefix_caching_hash_algo="xxhash_cbor")
    compat.refuse_unsupported(config)
    facts = _facts(config)
    assert facts["hash_algorithm"] == "xxhash_cbor"
    assert _differing(facts, _facts(engine_config())) == {"hash_algorithm"}
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert _differing(facts, _facts(config)) == {"hash_seed"}


@pytest.mark.parametrize("flag", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_other_parallelism_is_refused(engine_config: Any, flag: str) -> None:
    config = engine_config()
    setattr(config.parallel_config, flag, 2)
    with pytest.raises(EngineRefused, match=f"--{flag.replace('_', '-')} 2"):
        compat.refuse_unsupported(config)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def test_drafts_of_tokens_alone_share_with_engines_that_have_none(engine_config: Any) -> None:
    config, plain = engine_config(speculative_config=NGRAM), _facts(engine_config())
    for method in ("ngram", "ngram_gpu", "suffix"):
        config.speculative_config.method = method
        compat.refuse_unsupported(config)
        assert _facts(config) == plain


@pytest.mark.parametrize(
    "method",
    ["eagle", "eagle3", "mtp", "dflash", "draft_model", "medusa", "mlp_speculator", "custom_class"],
)
def test_drafts_of_layers_are_refused_by_name(engine_config: Any, method: str) -> None:
    config = engine_config(speculative_config=NGRAM)
    config.speculative_config.method = method
    with pytest.raises(EngineRefused, match=f'by "{method}" is not supported yet.*--speculative-config'):
        compat.refuse_unsupported(config)


def test_hashes_that_cover_tokens_behind_the_block_are_refused(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.33 vLLM makes such hashes for drafts of layers, so far in engines without a connector only."""
    config = engine_config()
    monkeypatch.setattr(type(config), "num_hash_lookahead_tokens", 1, raising=False)
    with pytest.raises(EngineRefused, match=r"covers 1 tokens behind .*disable_lookahead_block_hashes"):
        compat.refuse_unsupported(config)


@pytest.mark.parametrize("kind", ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_kv_types_that_are_supported_are_facts(engine_config: Any, kind: str) -> None:
    config = engine_config()
    config.cache_config.cache_dtype = kind
    compat.refuse_unsupported(config)
    facts = _facts(config)
    assert facts["kv_dtype"] == ("float32" if kind == "auto" else kind), (
        "the model's own, where none is named"
    )
    assert _differing(facts, _facts(engine_config())) == (set() if kind == "auto" else {"kv_dtype"})


@pytest.mark.parametrize(
    "kind",
    ["fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4", "fp8_inc", "fp8_ds_mla",
     "turboquant_4bit_nc", "ultraquant_4bit", "of a later version"],
)  # fmt: skip
def test_other_kv_types_are_refused_by_name(engine_config: Any, kind: str) -> None:
    config = engine_config()
    config.cache_config.cache_dtype = kind
    with pytest.raises(EngineRefused, match=f"--kv-cache-dtype {kind} is not supported yet"):
        compat.refuse_unsupported(config)


def test_scales_that_each_engine_computes_for_itself_are_refused(engine_config: Any) -> None:
    config = engine_config()
    config.cache_config = types.SimpleNamespace(**vars(config.cache_config), calculate_kv_scales=True)
    with pytest.raises(EngineRefused, match="--calculate-kv-scales"):
        compat.refuse_unsupported(config)


def test_adapters_are_refused_where_their_path_is_not_in_the_hash(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(enable_lora=True)
    compat.refuse_unsupported(config)
    monkeypatch.delattr(compat.kv_cache_utils, "to_event_extra_keys")
    with pytest.raises(EngineRefused, match=r"adapter's name and not its path.*--enable-lora"):
        compat.refuse_unsupported(config)


def test_a_device_that_torch_does_not_drive_is_refused_by_name(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config()
    monkeypatch.setattr(type(compat.current_platform), "device_type", "tpu")
    for driven in (None, torch.device("cuda", 0)):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda driven=driven: driven)
        with pytest.raises(EngineRefused, match=r"device \(tpu\) that torch.accelerator does not drive"):
            compat.refuse_unsupported(config)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu"])
def test_accelerators_pass_but_for_sleep_mode(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = engine_config()
    monkeypatch.setattr(type(compat.current_platform), "device_type", kind)
    driven = types.SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: driven)
    compat.refuse_unsupported(config)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(EngineRefused, match="--enable-sleep-mode"):
        compat.refuse_unsupported(config)


WEIGHTS = {"weights": "0" * 32}


def test_attention_to_later_tokens_is_refused_by_name(engine_config: Any) -> None:
    config = engine_config()
    config.attention_config.use_non_causal = True
    with pytest.raises(EngineRefused, match=r"use_non_causal: .* not in the block's hash; remove it"):
        compat.refuse_unsupported(config)
    config.attention_config.use_non_causal = False
    config.diffusion_config = object()
    with pytest.raises(EngineRefused, match="diffusion models compute"):
        compat.refuse_unsupported(config)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rope_that_follows_the_batch_is_refused_by_name(engine_config: Any, kind: str) -> None:
    """Transformers' own modules take their factors by the longest request of a batch."""
    config = engine_config()
    model = config.model_config
    for parameters in ({"rope_type": kind}, {"full_attention": {"type": kind}, "sliding_attention": {}}):
        model.hf_text_config.rope_parameters = parameters
        model.model_impl = "auto"
        compat.refuse_unsupported(config)
        model.model_impl = "transformers"
        with pytest.raises(EngineRefused, match=f"rope of type {kind} follows the longest request"):
            compat.refuse_unsupported(config)
    model.hf_text_config.rope_parameters = {"rope_type": "llama3"}
    compat.refuse_unsupported(config)


def _cache(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


FULL = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=64, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, sliding_window=512
)


def test_full_attention_and_windows_are_supported() -> None:
    assert compat.groups_of(_cache(FULL, WINDOW)) == [Group(32), Group(64, 512)]
    assert compat.groups_of(_cache(FULL, WINDOW), 4) == [Group(32, None, 4), Group(64, 512, 4)]


LATENT = MLAAttentionSpec(
    block_size=32,
    num_kv_heads=1,
    max_tp_shards=1,
    head_size=576,
    dtype=torch.bfloat16,
    cache_dtype_str="auto",
)


def test_latent_vectors_are_told_from_heads_that_ranks_have_in_common() -> None:
    """One KV head on several ranks may be the same on each, but the configuration does not say so for sure."""
    one_head = replace(FULL, num_kv_heads=1)
    assert compat.groups_of(_cache(LATENT, one_head)) == [Group(32, latent=True), Group(32)]
    assert compat.groups_of(_cache(LATENT, one_head), tensor_parallel=4) == [
        Group(32, latent=True, copies=4),
        Group(32),
    ]
    padded = replace(LATENT, page_size_padded=1 << 20)
    layers = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": padded, "b": LATENT})
    assert compat.groups_of(_cache(layers)) == [Group(32, latent=True)]


def test_a_stage_without_a_layer_of_some_group_is_refused_by_name() -> None:
    cache = _cache(FULL, WINDOW)
    cache.kv_cache_groups[1].layer_names.clear()
    assert len(compat.groups_of(cache)) == 2, "who has no such layer has the group all the same"
    with pytest.raises(
        EngineRefused, match=r"stage has no layer of KV-cache group 1.*--pipeline-parallel-size"
    ):
        compat.layers_of(cache, {"layer0": torch.zeros(8, 32)})


def test_latent_vectors_are_facts_and_events_of_their_own() -> None:
    groups = [Group(32, latent=True), Group(32)]
    layout = compat.layout_of(groups, [[torch.zeros(4, 32, 8)], [torch.zeros(4, 32, 8)]], "float32")
    assert [layout.facts()[f"group{index}.attention"] for index in (0, 1)] == ["mla", "full"]
    pool = BlockPool(4, True, 32)
    kinds = [compat.held_event(pool, 0, group, []).kv_cache_spec_kind for group in groups]
    assert kinds == ["mla_attention", "full_attention"]
    assert kinds == [get_kv_cache_spec_kind(spec) for spec in (LATENT, FULL)], "as the engine's own"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_state", 4),
        ("model_version", "deepseek_v4"),
        ("alignment", 1024),
        ("cache_role", SparseCacheRole.INDEXER),
        ("is_index_group_leader", True),
        ("state_content_bytes", 656),
        ("sliding_window", 128),
        ("max_tp_shards", 2),
        ("max_tp_shards", None),
    ],
)
def test_uncommon_mla_is_refused_by_name(field: str, value: Any) -> None:
    layers = {"a": LATENT, "b": replace(LATENT, **{field: value})}
    for spec in (layers["b"], UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=layers)):
        with pytest.raises(EngineRefused, match=f"group 1 is MLA with {field} "):
            compat.groups_of(_cache(LATENT, spec))


def test_mla_with_a_part_in_main_memory_is_refused() -> None:
    cache = _cache(LATENT)
    cache.kv_cache_groups[0].host_resident = True
    with pytest.raises(EngineRefused, match="group 0 is MLA of which main memory keeps a part"):
        compat.groups_of(cache)


@pytest.mark.parametrize(
    "spec",
    [
        HiddenStateCacheSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16),
        ChunkedLocalAttentionSpec(
            block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, attention_chunk_size=64
        ),
    ],
)
def test_other_attention_is_refused_by_name(spec: Any) -> None:
    with pytest.raises(EngineRefused, match=type(spec).__name__):
        compat.groups_of(_cache(FULL, spec))


def test_records_of_several_blocks_have_a_namespace_of_their_own(engine_config: Any) -> None:
    cache = _cache(FULL, WINDOW)
    layers = [[torch.zeros((8, 2, 4, tokens, 32), dtype=torch.bfloat16)] for tokens in (32, 64)]
    config = engine_config()
    facts = [engine_facts(config, cache, WEIGHTS, layers, *more) for more in ((), (1,), (2,), (4,))]
    assert facts[0] == facts[1]
    assert len({Namespace("default", each).hex for each in facts}) == 3
    changed = {name: value for name, value in facts[3].items() if value != facts[0].get(name)}
    assert changed == {
        "blocks_per_record": 4,
        "group0.block_tokens": 128,
        "group0.payload_nbytes": 4 * 2 * 4 * 32 * 32 * 2,
        "group1.block_tokens": 256,
        "group1.payload_nbytes": 4 * 2 * 4 * 64 * 32 * 2,
    }


def test_sinks_that_are_weights_are_supported_and_those_that_are_blocks_are_not(engine_config: Any) -> None:
    """gpt-oss adds a learned number to each softmax; others keep the KV of first tokens in blocks aside."""
    config = engine_config()
    layers = _layers(config, 2, sinks=torch.zeros(4))
    specs = [layer.get_kv_cache_spec(config) for layer in layers]
    assert compat.groups_of(_cache(*specs)) == [Group(128), Group(128)]
    aside = SinkFullAttentionSpec(
        block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, sink_len=4
    )
    with pytest.raises(EngineRefused, match="SinkFullAttentionSpec"):
        compat.groups_of(_cache(FULL, aside))


def test_no_kv_cache_is_refused() -> None:
    with pytest.raises(EngineRefused, match="no KV cache"):
        compat.groups_of(_cache())


# Facts.


def _layers(config: Any, count: int, **options: Any) -> list[Attention]:
    """Attention layers of a model, as its code makes them; the configuration knows them by name."""
    with set_current_vllm_config(config):
        return [
            Attention(
                4,
                32,
                1.0,
                num_kv_heads=4,
                cache_config=config.cache_config,
                prefix=f"layers.{i}.attn",
                **options,
            )
            for i in range(count)
        ]


def _facts(config: Any) -> dict[str, Any]:
    views = [[torch.zeros((8, 4, 32, 64), dtype=torch.uint8)]]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.uint8)
    return engine_facts(config, _cache(spec), WEIGHTS, views)


def _fp8(engine_config: Any, **options: Any) -> tuple[Any, list[Attention]]:
    config = engine_config(kv_cache_dtype="fp8", **options)
    return config, _layers(config, 2)


needs_fp8 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="FP8 on a CPU takes AVX-512")


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@needs_fp8
def test_an_fp8_cache_is_known_by_its_format_its_layers_and_its_scales(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layers = _fp8(engine_config)
    facts = _facts(config)
    assert facts["kv_dtype"] == "fp8"
    assert _facts(_fp8(engine_config)[0]) == facts, "the same in every process"

    plain = engine_config()
    _layers(plain, 2)
    assert not [name for name in _facts(plain) if name.startswith("fp8")]

    other, _ = _fp8(engine_config, kv_cache_dtype_skip_layers=["1"])
    assert _differing(_facts(other), facts) == {"fp8_layers", "fp8_scales"}

    layers[1]._v_scale_float = 0.5
    assert _differing(_facts(config), facts) == {"fp8_scales"}
    layers[1]._v_scale_float = 1.0
    assert _facts(config) == facts
    layers[0]._k_scale.fill_(0.25)
    assert _differing(_facts(config), facts) == {"fp8_scales"}
    layers[0]._k_scale.fill_(1.0)

    monkeypatch.setattr(type(compat.current_platform), "fp8_dtype", lambda *_: torch.float8_e4m3fnuz)
    assert _differing(_facts(config), facts) == {"fp8_format"}


@needs_fp8
def test_scales_of_heads_are_refused_where_ranks_have_different_ones(engine_config: Any) -> None:
    config, layers = _fp8(engine_config)
    layers[0]._k_scale = torch.ones(4)
    _facts(config)
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(EngineRefused, match=r"layers.0.attn has a scale for each KV head"):
        _facts(config)


def test_a_type_that_only_a_layer_knows_of_is_refused(engine_config: Any) -> None:
    config = engine_config()
    _layers(config, 2)[1].kv_cache_dtype = "int8_per_token_head"
    with pytest.raises(EngineRefused, match=r"layers.1.attn is of type int8_per_token_head"):
        _facts(config)


@needs_fp8
def test_keys_are_packed_by_the_type_of_the_model_also_in_an_fp8_cache(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``CPUAttentionMetadataBuilder`` does it: else engines with and without AMX would share."""
    config, _ = _fp8(engine_config)
    config.model_config.dtype = torch.bfloat16
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    without = _facts(config)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert _differing(_facts(config), without) == {"kernel_packing"}


def test_images_that_are_processed_otherwise_are_other_images(engine_config: Any) -> None:
    config = engine_config()
    config.model_config.multimodal_config = MultiModalConfig()
    facts = _facts(config)
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_kwargs={"num_crops": 4})
    assert _differing(_facts(config), facts) == {"multimodal"}


def test_groups_of_other_layers_have_another_namespace(engine_config: Any) -> None:
    """Two groups of one shape: which layer is in which changes what a block means, and no shape tells it."""
    layers = [[torch.zeros((8, 2, 4, 32, 32), dtype=torch.bfloat16)] for _ in range(2)]
    config = engine_config()

    def named(*names: str) -> Namespace:
        groups = [KVCacheGroupSpec([name], FULL) for name in names]
        cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
        return Namespace("default", engine_facts(config, cache, WEIGHTS, layers))

    assert named("a", "b").hex == named("a", "b").hex
    assert named("a", "b").hex != named("b", "a").hex


def test_weights_that_a_trainer_sends_are_refused_by_name(engine_config: Any) -> None:
    config = engine_config(weight_transfer_config={"backend": "ipc"})
    with pytest.raises(EngineRefused, match=r"--weight-transfer-config lets a trainer change the weights"):
        compat.refuse_unsupported(config)


def test_the_mark_of_the_weights_changes_when_vllm_loads_them_anew_and_not_else(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    set_default_quant_scales(layer, register_buffer=True)
    monkeypatch.setattr(
        compat, "get_layers_from_vllm_config", lambda config, kind: {"no scale": None, "a": layer}
    )
    mark = compat.weights_mark(engine_config())
    first = mark()
    assert mark() == first
    set_default_quant_scales(layer)  # as process_weights_after_loading does it
    assert mark() != first
    monkeypatch.setattr(compat, "get_layers_from_vllm_config", lambda config, kind: {})
    assert compat.weights_mark(engine_config())() is None
