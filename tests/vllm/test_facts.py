"""The facts of an engine: of what was built, and of every setting that changes K or V."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.config
from vllm import envs
from vllm.config import MultiModalConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import PassConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvpool.vllm.facts import ROPE_ROWS, _model_config, _processor, rope_fact
from kvpool.vllm.judged import JUDGED, VARIABLES, settings_facts

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]

PAGE = Path(__file__).parents[2] / "docs" / "namespace.md"
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


# Settings.


def test_settings_at_their_defaults_are_no_facts(engine_config: Any) -> None:
    facts = settings_facts(engine_config())
    assert facts == {"ParallelConfig.worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}


@pytest.mark.parametrize(
    ("section", "name", "value", "says"),
    [
        ("cache_config", "kv_sharing_fast_prefill", True, True),
        ("attention_config", "disable_flashinfer_q_quantization", True, True),
        ("kernel_config", "moe_backend", "triton", "triton"),
        ("parallel_config", "all2all_backend", "deepep_low_latency", "deepep_low_latency"),
        ("parallel_config", "worker_extension_cls", "mine.Extension", "mine.Extension"),
        (
            "model_config",
            "quantization_config",
            {"linear": {"weight": "fp8"}},
            '{"linear": {"weight": "fp8"}}',
        ),
    ],
)
def test_a_setting_that_changes_k_or_v_is_a_fact_of_its_own_name(
    engine_config: Any, section: str, name: str, value: Any, says: Any
) -> None:
    config = engine_config()
    facts = settings_facts(config)
    setattr(getattr(config, section), name, value)
    kind = type(getattr(config, section)).__name__
    assert settings_facts(config) == {**facts, f"{kind}.{name}": says}


def test_adapters_target_modules_are_a_fact(engine_config: Any) -> None:
    config = engine_config(enable_lora=True)
    facts = settings_facts(config)
    config.lora_config.target_modules = ["q_proj", "k_proj"]
    assert settings_facts(config) == {**facts, "LoRAConfig.target_modules": '["q_proj", "k_proj"]'}


def test_a_long_value_is_a_fact_as_a_digest(engine_config: Any) -> None:
    config = engine_config()
    config.additional_config = {"a": "x" * 5000}
    assert len(str(settings_facts(config)["VllmConfig.additional_config"])) == 16


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_BATCH_INVARIANT", True), ("VLLM_FLOAT32_MATMUL_PRECISION", "high")]
)
def test_a_switch_of_the_environment_is_a_fact(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    config = engine_config()
    facts = settings_facts(config)
    monkeypatch.setattr(envs, name, value, raising=False)
    assert settings_facts(config) == {**facts, name: value}


def test_the_switches_are_vllms_and_their_defaults_too() -> None:
    assert {name: getattr(envs, name) for name in VARIABLES} == dict(VARIABLES)


def test_a_setting_that_nobody_has_judged_is_a_fact_when_it_is_set(engine_config: Any) -> None:
    """As a later version may bring one; what differs by rank and host is left out."""
    config = engine_config()
    facts = settings_facts(config)
    made = dataclasses.make_dataclass("CacheConfig", [("fold_keys", bool, dataclasses.field(default=False))])
    config.cache_config = made()
    assert settings_facts(config) == facts
    config.cache_config = made(fold_keys=True)
    assert settings_facts(config) == {**facts, "CacheConfig.fold_keys": True}
    by_rank = dataclasses.make_dataclass("ParallelConfig", [("port", int, dataclasses.field(default=1))])
    config.parallel_config = by_rank(port=2)
    assert settings_facts(config) == {"CacheConfig.fold_keys": True}


CLASSES = [
    vllm.config.VllmConfig, vllm.config.ModelConfig, vllm.config.CacheConfig, vllm.config.ParallelConfig,
    vllm.config.LoadConfig, vllm.config.AttentionConfig, vllm.config.CompilationConfig, PassConfig,
    vllm.config.KernelConfig, vllm.config.LoRAConfig, MultiModalConfig,
]  # fmt: skip


@pytest.mark.parametrize("section", CLASSES, ids=lambda section: section.__name__)
def test_every_setting_of_vllm_is_judged(section: Any) -> None:
    """A new version must not slip one in. Say in ``judged.py`` what it does to K and V, and in the page."""
    names = {one.name for one in dataclasses.fields(section) if not one.name.startswith("_")}
    judged = [name for one in JUDGED for name in one.settings.get(section.__name__, "").split()]
    assert names - set(judged) == set(), "judge them"
    assert len(set(judged)) == len(judged), "each once"


def test_no_class_is_judged_that_is_not_held_against_vllm() -> None:
    assert {name for one in JUDGED for name in one.settings} == {one.__name__ for one in CLASSES}


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text()
    words = {"fact": "fact", "covered": "by other facts", "refused": "refused", "same": "no matter"}
    for one in JUDGED:
        settings = "; ".join(f"{kind}: {names.replace(' ', ', ')}" for kind, names in one.settings.items())
        row = f"| {words[one.verdict]} | {one.why} | {settings} |"
        assert row in text, f"write it into the page: {row}"
    for name in VARIABLES:
        assert f"`{name}`" in text


# Images.


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
