"""The facts of an engine: of what was built, and of every setting that changes K or V.

Over 400 lines because all facts of an engine are of one function.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.config
from transformers import LlamaConfig
from vllm.config import MultiModalConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    SparseCacheRole,
    get_kv_cache_spec_kind,
)

from kvpool.errors import EngineRefused
from kvpool.key.key import Namespace
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.identity import (
    ROPE_ROWS,
    _model_config,
    _processor,
    digest_of,
    elements_of,
    engine_facts,
    layout_of,
    rope_fact,
    scale_facts,
)
from kvpool.vllm.engine.support import groups_of
from kvpool.vllm.tell.events import held_event
from tests.support.specs import (
    CHUNKED,
    FULL,
    LATENT,
    REFILLED,
    RING,
    ROWS,
    SMALL_WINDOW,
    STATE,
    WEIGHTS,
    WINDOW,
    attention_layers,
    cache_of,
    differing,
    facts_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]

needs_fp8 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="FP8 on a CPU takes AVX-512")
PACKAGE = Path(vllm.config.__file__).parents[1]
HALF = 16
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512,
    "short_factor": [1.0] * HALF, "long_factor": [1.0 + index for index in range(HALF)],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.fixture
def built(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The fact of a rotary embedding as vLLM builds it for an engine of some length."""

    def build(parameters: dict[str, Any] | None = None, *, longest: int = 512, **options: Any) -> str:
        config = engine_config()
        config.model_config.max_model_len = longest
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
        with set_current_vllm_config(config):
            get_rope(
                **{"head_size": 2 * HALF, "max_position": 8192, "rope_parameters": parameters, **options}
            )
        return rope_fact(list(rotary_embedding._ROPE_DICT.values()), torch.float32)

    return build


def test_a_length_that_selects_other_factors_is_another_rope(built: Callable[..., str]) -> None:
    assert built(LONGROPE, longest=512) == built(LONGROPE, longest=300)
    assert built(LONGROPE, longest=512) != built(LONGROPE, longest=513)
    assert built(LONGROPE, longest=513) == built(LONGROPE, longest=8192)


@pytest.mark.parametrize("parameters", [None, YARN], ids=["plain", "yarn"])
def test_a_length_that_only_makes_a_table_longer_is_the_same_rope(
    built: Callable[..., str], parameters: dict[str, Any] | None
) -> None:
    assert built(parameters, longest=512) == built(parameters, longest=8192)
    assert built(parameters, max_position=2048) == built(parameters, max_position=8192)


def test_a_length_that_scales_a_table_is_another_rope(built: Callable[..., str]) -> None:
    assert built(DYNAMIC, max_position=2048) != built(DYNAMIC, max_position=8192)


def test_every_parameter_of_a_rope_counts(built: Callable[..., str]) -> None:
    found = [
        built(None),
        built({"rope_theta": 10001.0}),
        built({"partial_rotary_factor": 0.5}),
        built(None, is_neox_style=False),
        built(YARN),
        built({**YARN, "factor": 8.0}),
        built({**YARN, "beta_fast": 16}),
        built({"rope_type": "linear", "factor": 4.0}),
        built({"mrope_section": [4, 6, 6]}),
        built({"mrope_section": [6, 6, 4]}),
    ]
    assert len(set(found)) == len(found)
    assert built(None) == found[0]


def test_what_stands_in_a_table_counts() -> None:
    """Where no parameter tells: a length that scales, or code of a later version."""
    with set_current_vllm_config(VllmConfig()):
        embedding = get_rope(32, 256, dtype=torch.float32)
    before = rope_fact([embedding], torch.float32)
    embedding.cos_sin_cache[ROPE_ROWS - 1, 0] += 0.5
    after = rope_fact([embedding], torch.float32)
    embedding.cos_sin_cache[ROPE_ROWS - 1, 0] -= 0.5
    assert after != before


def test_a_table_that_was_used_in_another_type_is_the_same() -> None:
    """Some models keep it in float32 until the first use replaces it."""
    with set_current_vllm_config(VllmConfig()):
        one = get_rope(32, 128, dtype=torch.float32)
        used = get_rope(32, 128, dtype=torch.bfloat16)
    facts = {rope_fact([one], torch.bfloat16), rope_fact([used], torch.bfloat16)}
    assert len(facts) == 1


def test_without_rotary_embeddings_the_fact_is_empty() -> None:
    assert rope_fact([], torch.float32) == ""


def test_what_a_models_own_code_writes_into_its_configuration_counts(engine_config: Any) -> None:
    """Llama 4 keeps its attention temperature there, which follows ``--max-model-len``."""
    hf_config = engine_config().model_config.hf_config
    facts = _model_config(hf_config)
    hf_config.attn_temperature_tuning = True
    assert _model_config(hf_config) == {**facts, "attn_temperature_tuning": True}
    hf_config.max_model_len = 4096  # MiniMax: for the length of its rope's table
    assert "max_model_len" not in _model_config(hf_config)


def test_the_order_of_patterns_counts_where_the_first_that_matches_decides() -> None:
    """As ``--hf-overrides`` may give them."""
    patterns = {"q_proj": 8, ".*": 4}

    def fact(**given: Any) -> str:
        return digest_of(_model_config(LlamaConfig(quantization_config={"bits": 4, **given})))

    assert fact(dynamic=patterns) == fact(dynamic=dict(patterns))
    assert fact(dynamic=patterns) != fact(dynamic=dict(reversed(patterns.items())))
    assert fact(x=patterns) == fact(x=dict(reversed(patterns.items()))), "no other order does"


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_configuration_around_another_ones_counts_as_a_whole_wherever_it_lies(method: str) -> None:
    """EAGLE's class cannot be made without arguments, as Transformers does to see what differs from its defaults."""

    def facts(**options: Any) -> dict[str, Any]:
        around = LlamaConfig(architectures=["LlamaForCausalLM"], **options)
        return _model_config(EAGLEConfig(around, method=method))

    assert facts(name_or_path="/here") == facts(name_or_path="/there")
    assert facts() != facts(rms_norm_eps=1e-4)


def test_models_that_look_at_the_length_are_those_that_were_looked_through() -> None:
    """Beside rotary tables (``rope``), dummy inputs and limits; a file that is new here is to be read first."""
    looked_through = {
        "llama4.py",  # writes what it makes of it into the configuration
        "nano_nemotron_vl.py", "dots3_note",  # their images: facts._CUT_BY_LENGTH
        "minimax_m2.py", "plamo3.py", "embedding_gemma2.py", "cohere_compass.py", "config.py",  # the rope's table
        "internvl.py", "kimi_vl.py", "qwen3_vl.py", "parakeet.py", "diffusion_gemma.py", "gemma4_mm.py",
        "deepseek_ocr.py", "step3_vl.py", "voxtral_realtime.py", "voxtral.py", "qwen2_5_vl.py", "qwen2_vl.py",
        "kimi_k25.py", "idefics3.py", "glm4_1v.py", "lfm2_vl.py", "minicpmv.py", "ernie45_vl.py", "gemma3_mm.py",
        "mllama4.py", "kimi_k3", "inkling",  # limits
        "deepseek_v2.py", "deepseek_v32", "deepseek_v4", "deepseek_v41", "hy_v4", "glm5next", "minimax_m3",  # sparse
    }  # fmt: skip
    trees = [PACKAGE / "model_executor" / "models", PACKAGE / "models"]
    found = {
        file.relative_to(tree).parts[0]
        for tree in trees
        for file in tree.rglob("*.py")
        if "config.max_model_len" in file.read_text()
    }
    assert found <= looked_through


# FP8, groups and images.


def test_records_of_several_blocks_have_a_namespace_of_their_own(engine_config: Any) -> None:
    cache = cache_of(FULL, WINDOW)
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


KINDS: list[tuple[Any, str]] = [
    (FULL, "full"),
    (WINDOW, "sliding_window:512"),
    (LATENT, "mla"),
    (SMALL_WINDOW, "sliding_window_mla:8"),
    (CHUNKED, "chunk:64"),
    (STATE, "state"),
]


def test_each_kind_of_attention_is_a_fact_and_an_event_of_its_own() -> None:
    groups = groups_of(cache_of(*(spec for spec, _ in KINDS)))
    layout = layout_of(groups, [[torch.zeros(4, 32, 8)] for _ in groups], "float32")
    assert [layout.facts()[f"group{index}.attention"] for index in range(len(groups))] == [
        fact for _, fact in KINDS
    ]
    pool = BlockPool(4, True, 32)
    kinds = [held_event(pool, 0, group, []).kv_cache_spec_kind for group in groups]
    assert kinds == [get_kv_cache_spec_kind(spec) for spec, _ in KINDS], "as the engine's own"


def test_latents_of_another_form_share_nothing(engine_config: Any) -> None:
    """Where their blocks have as many bytes, too."""
    config, layers = engine_config(), [[torch.zeros((8, 32, 656), dtype=torch.uint8)]]
    facts = engine_facts(config, cache_of(ROWS), WEIGHTS, layers)
    for other in (
        {"cache_role": SparseCacheRole.INDEXER},
        {"tokens_per_state": 4},
        {"state_content_bytes": 584},
        {"cache_dtype_str": "nvfp4_ds_mla"},
        {"model_version": "deepseek_v4"},
    ):
        found = engine_facts(config, cache_of(replace(ROWS, **other)), WEIGHTS, layers)
        assert differing(facts, found) == {"group0.specs"}, other


def test_scratch_of_another_form_shares_nothing(engine_config: Any) -> None:
    """What stands in it decides on what is computed behind it. A ring's length depends on drafts and does not."""
    config, latents = engine_config(), [torch.zeros((8, 32, 576))]

    def facts(*specs: Any) -> dict[str, Any]:
        layers = [latents if spec in (LATENT, SMALL_WINDOW) else [] for spec in specs]
        return engine_facts(config, cache_of(*specs), WEIGHTS, layers)

    ring = facts(LATENT, RING)
    assert (ring["groups"], ring["hash_block_tokens"]) == (2, 32)
    assert "group1.attention" not in ring
    with_ring, without = facts(LATENT, LATENT, RING), facts(LATENT, LATENT)
    assert differing(with_ring, without) == {"groups", "group2.layer_names", "group2.specs"}
    assert differing(ring, facts(LATENT, replace(RING, dtype=torch.bfloat16))) == {"group1.specs"}
    assert differing(ring, facts(LATENT, replace(RING, head_size=32))) == {"group1.specs"}
    assert differing(ring, facts(LATENT, replace(RING, block_size=16))) == set()
    stored, refilled = facts(LATENT, SMALL_WINDOW), facts(LATENT, REFILLED)
    assert {"group1.specs", "group1.attention"} <= differing(stored, refilled)
    assert differing(refilled, facts(LATENT, replace(REFILLED, sliding_window=16))) == {"group1.specs"}


def test_scales_inside_of_rows_are_no_facts(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"layer0": types.SimpleNamespace(kv_cache_dtype="fp8_ds_mla")}
    monkeypatch.setattr(internals, "attention_layers", lambda config: layers)
    assert scale_facts(engine_config()).keys() == {"fp8_format"}


def _fp8(engine_config: Any, **options: Any) -> tuple[Any, list[Attention]]:
    config = engine_config(kv_cache_dtype="fp8", **options)
    return config, attention_layers(config, 2)


@needs_fp8
def test_an_fp8_cache_is_known_by_its_format_its_layers_and_its_scales(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layers = _fp8(engine_config)
    facts = facts_of(config)
    assert facts["kv_dtype"] == "fp8"
    assert facts_of(_fp8(engine_config)[0]) == facts, "the same in every process"

    plain = engine_config()
    attention_layers(plain, 2)
    assert not [name for name in facts_of(plain) if name.startswith("fp8")]

    other, _ = _fp8(engine_config, kv_cache_dtype_skip_layers=["1"])
    assert differing(facts_of(other), facts) == {"fp8_layers", "fp8_scales"}

    layers[1]._v_scale_float = 0.5
    assert differing(facts_of(config), facts) == {"fp8_scales"}
    layers[1]._v_scale_float = 1.0
    assert facts_of(config) == facts
    layers[0]._k_scale.fill_(0.25)
    assert differing(facts_of(config), facts) == {"fp8_scales"}
    layers[0]._k_scale.fill_(1.0)

    monkeypatch.setattr(type(current_platform), "fp8_dtype", lambda *_: torch.float8_e4m3fnuz)
    assert differing(facts_of(config), facts) == {"fp8_format"}


@needs_fp8
def test_the_bytes_of_an_fp8_cache_are_read_as_numbers(engine_config: Any) -> None:
    names, views = ["layers.0.attn", "layers.1.attn"], [torch.zeros((8, 2), dtype=torch.uint8)] * 2
    cache = KVCacheConfig(8, [], [KVCacheGroupSpec(names, FULL)])
    config, layers = _fp8(engine_config)
    layers[1].kv_cache_dtype = "fp8_e5m2"
    assert elements_of(config, cache, [views]) == [["float8_e4m3fn", "float8_e5m2"]]
    layers[1].kv_cache_dtype = "fp8_ds_mla"
    assert elements_of(config, cache, [views]) == [["float8_e4m3fn", "uint8"]], "rows with scales among them"
    skipped = [views[0], torch.zeros((8, 2), dtype=torch.bfloat16)]
    assert elements_of(config, cache, [skipped]) == [["float8_e4m3fn", "bfloat16"]]


@needs_fp8
def test_scales_of_heads_are_refused_where_ranks_have_different_ones(engine_config: Any) -> None:
    config, layers = _fp8(engine_config)
    layers[0]._k_scale = torch.ones(4)
    facts_of(config)
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(EngineRefused, match=r"layers.0.attn has a scale for each KV head"):
        facts_of(config)


def test_a_type_that_only_a_layer_knows_of_is_refused(engine_config: Any) -> None:
    config = engine_config()
    attention_layers(config, 2)[1].kv_cache_dtype = "int8_per_token_head"
    with pytest.raises(EngineRefused, match=r"layers.1.attn is of type int8_per_token_head"):
        facts_of(config)


@needs_fp8
def test_keys_are_packed_by_the_type_of_the_model_also_in_an_fp8cache_of(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``CPUAttentionMetadataBuilder`` does it: else engines with and without AMX would share."""
    config, _ = _fp8(engine_config)
    config.model_config.dtype = torch.bfloat16
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    without = facts_of(config)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert differing(facts_of(config), without) == {"kernel_packing"}


def test_images_that_are_processed_otherwise_are_other_images(engine_config: Any) -> None:
    config = engine_config()
    config.model_config.multimodal_config = MultiModalConfig()
    facts = facts_of(config)
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_kwargs={"num_crops": 4})
    assert differing(facts_of(config), facts) == {"multimodal"}


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


def test_how_images_are_processed_is_read_beside_a_local_model(engine_config: Any, tmp_path: Path) -> None:
    model = engine_config().model_config
    folder = tmp_path / "model"
    folder.mkdir()
    model.model = str(folder)
    assert _processor(model) == []
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    (folder / "processing.py").write_text("one = 1")
    found = _processor(model)
    assert len(found) == 1
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.6]}')
    assert _processor(model) != found
    model.trust_remote_code = True
    assert len(_processor(model)) == 2
    of_commit = tmp_path / "snapshots" / ("a" * 40)
    folder.rename(of_commit.parent.parent / "moved")
    of_commit.parent.mkdir()
    (tmp_path / "moved").rename(of_commit)
    model.model = str(of_commit)
    assert _processor(model) == [], "there the commit says it"
