"""The settings of vLLM, one by one: the table has each, and those that change K or V are facts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import vllm.config
from vllm import envs
from vllm.config import MultiModalConfig
from vllm.config.compilation import PassConfig

from kvpool.vllm.engine.settings import TABLE, settings_facts

VARIABLES = TABLE["variables"]
pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "namespace.md"


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


def test_a_setting_that_the_table_lacks_is_a_fact_when_it_is_set(engine_config: Any) -> None:
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
def test_the_table_has_every_setting_of_vllm(section: Any) -> None:
    """A new version must not slip one in. Say in ``settings.json`` what it does to K and V, and in the page."""
    names = {one.name for one in dataclasses.fields(section) if not one.name.startswith("_")}
    known = [name for one in TABLE["settings"] for name in one["names"].get(section.__name__, "").split()]
    assert names - set(known) == set(), "say what they do"
    assert len(set(known)) == len(known), "each once"


def test_the_table_has_no_class_that_is_not_held_against_vllm() -> None:
    assert {name for one in TABLE["settings"] for name in one["names"]} == {one.__name__ for one in CLASSES}


def test_the_page_shows_the_table() -> None:
    text = PAGE.read_text()
    words = {"fact": "fact", "refused": "refused"}
    for one in TABLE["settings"]:
        settings = "; ".join(f"{kind}: {names.replace(' ', ', ')}" for kind, names in one["names"].items())
        row = f"| {words.get(one['verdict'])} | {one['why']} | {settings} |"
        if one["verdict"] not in words:  # their names are in the file that the page links
            row = f"\n- {one['why']}\n"
        assert row in text, f"write it into the page: {row}"
    for name in VARIABLES:
        assert f"`{name}`" in text
