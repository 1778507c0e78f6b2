"""What is refused by name, on real configurations."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    SinkFullAttentionSpec,
)

from kvpool.errors import EngineRefused
from kvpool.key.key import Namespace
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.support import groups_of, reads_ahead, refuse_unsupported, why_not_measured
from kvpool.vllm.geometry import Group
from tests.support.specs import (
    FULL,
    STATE,
    attention_layers,
    cache_of,
    differing,
    facts_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]


def test_a_supported_configuration_shares_with_its_like_and_nobody_else(engine_config: Any) -> None:
    configs = [engine_config(), engine_config(), engine_config(dtype="bfloat16")]
    for config in configs:
        refuse_unsupported(config)
    one, like, other = (Namespace("default", facts_of(config)).hex for config in configs)
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
        refuse_unsupported(engine_config(**options))
    assert all(name in str(refusal.value) for name in names), refusal.value
    assert "\n" not in str(refusal.value)


def test_xxhash_shares_by_its_seed(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    config = engine_config(prefix_caching_hash_algo="xxhash_cbor")
    refuse_unsupported(config)
    facts = facts_of(config)
    assert facts["hash_algorithm"] == "xxhash_cbor"
    assert differing(facts, facts_of(engine_config())) == {"hash_algorithm"}
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert differing(facts, facts_of(config)) == {"hash_seed"}


DRAFTS = ("dflash", "dspark", "medusa", "mlp_speculator", "extract_hidden_states", "custom_class")
KV_TYPES = (
    "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4", "fp8_inc", "nvfp4_ds_mla",
    "turboquant_4bit_nc", "ultraquant_4bit", "of a later version",
)  # fmt: skip
REFUSED: list[tuple[str, Any, str]] = [
    ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size 2"),
    ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size 2"),
    *(
        ("speculative_config.method", method, f'by "{method}" is not supported yet.*--speculative-config')
        for method in DRAFTS
    ),
    *(
        ("cache_config.cache_dtype", kind, f"--kv-cache-dtype {kind} is not supported yet")
        for kind in KV_TYPES
    ),
    ("attention_config.use_non_causal", True, "use_non_causal: .* not in the block's hash; remove it"),
    ("diffusion_config", object(), "diffusion models compute"),
    ("aux_output_config", types.SimpleNamespace(enabled=True), "--enable-return-routed-experts"),
]


@pytest.mark.parametrize(("setting", "value", "words"), REFUSED)
def test_a_setting_is_refused_by_name(engine_config: Any, setting: str, value: Any, words: str) -> None:
    *section, name = setting.split(".")
    config = engine_config(speculative_config=NGRAM if "speculative_config" in section else None)
    setattr(functools.reduce(getattr, section, config), name, value)
    with pytest.raises(EngineRefused, match=words):
        refuse_unsupported(config)


def test_a_model_without_prefix_caching_is_refused_though_it_is_switched_on(engine_config: Any) -> None:
    """Poolings such as the mean of all tokens: vLLM warns, and answers with what it computed behind a hit."""
    for pooling, refused in (("LAST", False), ("MEAN", True)):
        config = engine_config(
            runner="pooling",
            convert="embed",
            pooler_config={"seq_pooling_type": pooling},
            enable_prefix_caching=True,
        )
        if not refused:
            refuse_unsupported(config)
            continue
        with pytest.raises(EngineRefused, match=r"no prefix caching for this model.*--enable-prefix-caching"):
            refuse_unsupported(config)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def test_drafts_of_tokens_alone_share_with_engines_that_have_none(engine_config: Any) -> None:
    config, plain = engine_config(speculative_config=NGRAM), facts_of(engine_config())
    for method in ("ngram", "ngram_gpu", "suffix"):
        config.speculative_config.method = method
        refuse_unsupported(config)
        assert facts_of(config) == plain


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_drafts_with_layers_share_with_their_like_only(engine_config: Any, method: str) -> None:
    config, plain = engine_config(speculative_config=NGRAM), facts_of(engine_config())
    config.speculative_config.method = method
    refuse_unsupported(config)
    facts = facts_of(config)
    assert differing(facts, plain) == {"drafts"}
    config.speculative_config.num_speculative_tokens += 1
    assert differing(facts_of(config), facts) == {"drafts"}
    config.speculative_config.kv_cache_dtype = "nvfp4"
    with pytest.raises(EngineRefused, match="kv_cache_dtype of --speculative-config nvfp4"):
        refuse_unsupported(config)
    config.speculative_config.kv_cache_dtype = None
    assert reads_ahead(config) is (method != "draft_model")
    assert not reads_ahead(engine_config())
    config.speculative_config.disable_eagle_block_drop = True
    if method == "draft_model":
        refuse_unsupported(config)
    else:
        with pytest.raises(EngineRefused, match=r"^disable_eagle_block_drop .*remove it"):
            refuse_unsupported(config)


def test_groups_of_engines_whose_drafts_read_ahead_say_so() -> None:
    assert groups_of(cache_of(STATE, FULL), 2, reads_ahead=True) == [
        Group(32, 2, state=True, reads_ahead=True),
        Group(32, None, 2, reads_ahead=True),
    ]


def test_hashes_that_cover_tokens_behind_the_block_are_refused(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.33 vLLM makes such hashes for drafts of layers, so far in engines without a connector only."""
    config = engine_config()
    monkeypatch.setattr(type(config), "num_hash_lookahead_tokens", 1, raising=False)
    with pytest.raises(EngineRefused, match=r"covers 1 tokens behind .*disable_lookahead_block_hashes"):
        refuse_unsupported(config)


@pytest.mark.parametrize("kind", ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_kv_types_that_are_supported_arefacts_of(engine_config: Any, kind: str) -> None:
    config = engine_config()
    config.cache_config.cache_dtype = kind
    refuse_unsupported(config)
    facts = facts_of(config)
    assert facts["kv_dtype"] == ("float32" if kind == "auto" else kind), (
        "the model's own, where none is named"
    )
    assert differing(facts, facts_of(engine_config())) == (set() if kind == "auto" else {"kv_dtype"})


def test_scales_that_each_engine_computes_for_itself_are_refused(engine_config: Any) -> None:
    config = engine_config()
    config.cache_config = types.SimpleNamespace(**vars(config.cache_config), calculate_kv_scales=True)
    with pytest.raises(EngineRefused, match="--calculate-kv-scales"):
        refuse_unsupported(config)


def test_adapters_are_refused_where_their_path_is_not_in_the_hash(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(enable_lora=True)
    refuse_unsupported(config)
    monkeypatch.delattr(internals.kv_cache_utils, "to_event_extra_keys")
    with pytest.raises(EngineRefused, match=r"adapter's name and not its path.*--enable-lora"):
        refuse_unsupported(config)


def test_a_device_that_torch_does_not_drive_is_refused_by_name(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config()
    monkeypatch.setattr(type(current_platform), "device_type", "tpu")
    for driven in (None, torch.device("cuda", 0)):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda driven=driven: driven)
        with pytest.raises(EngineRefused, match=r"device \(tpu\) that torch.accelerator does not drive"):
            refuse_unsupported(config)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu"])
def test_accelerators_pass_and_sleep_where_vllm_says_so_before(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = engine_config()
    monkeypatch.setattr(type(current_platform), "device_type", kind)
    driven = types.SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: driven)
    refuse_unsupported(config)
    config.model_config.enable_sleep_mode = True
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    with pytest.raises(EngineRefused, match=r"use vLLM 0\.33, or remove --enable-sleep-mode"):
        refuse_unsupported(config)
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda connector: None, raising=False)
    refuse_unsupported(config)
    config.model_config.sleep_mode_backend = "criu"
    with pytest.raises(EngineRefused, match="--sleep-mode-backend criu"):
        refuse_unsupported(config)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rope_that_follows_the_batch_is_refused_by_name(engine_config: Any, kind: str) -> None:
    """Transformers' own modules take their factors by the longest request of a batch."""
    config = engine_config()
    model = config.model_config
    for parameters in ({"rope_type": kind}, {"full_attention": {"type": kind}, "sliding_attention": {}}):
        model.hf_text_config.rope_parameters = parameters
        model.model_impl = "auto"
        refuse_unsupported(config)
        model.model_impl = "transformers"
        with pytest.raises(EngineRefused, match=f"rope of type {kind} follows the longest request"):
            refuse_unsupported(config)
    model.hf_text_config.rope_parameters = {"rope_type": "llama3"}
    refuse_unsupported(config)


@pytest.mark.parametrize("name", ["use_replayssm", "use_kda_recoverssm"])
def test_states_in_parts_are_refused_by_name(engine_config: Any, name: str) -> None:
    config = engine_config()
    setattr(config.cache_config, name, True)
    with pytest.raises(EngineRefused, match=f"{name} keeps a part of each state"):
        refuse_unsupported(config)


def test_sinks_that_are_weights_are_supported_and_those_that_are_blocks_are_not(engine_config: Any) -> None:
    """gpt-oss adds a learned number to each softmax; others keep the KV of first tokens in blocks aside."""
    config = engine_config()
    layers = attention_layers(config, 2, sinks=torch.zeros(4))
    specs = [layer.get_kv_cache_spec(config) for layer in layers]
    assert groups_of(cache_of(*specs)) == [Group(128), Group(128)]
    aside = SinkFullAttentionSpec(
        block_size=32, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, sink_len=4
    )
    with pytest.raises(EngineRefused, match="SinkFullAttentionSpec"):
        groups_of(cache_of(FULL, aside))


def test_no_kv_cache_is_refused() -> None:
    with pytest.raises(EngineRefused, match="no KV cache"):
        groups_of(cache_of())


def test_weights_that_a_trainer_sends_are_taken_for_they_are_measured(engine_config: Any) -> None:
    refuse_unsupported(engine_config(weight_transfer_config={"backend": "ipc"}))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"offload_group_size": 2}, "--offload-group-size moves weights"),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb keeps weights on the host"),
    ],
)
def test_weights_that_move_while_they_are_used_are_not_measured(
    engine_config: Any, options: dict[str, Any], why: str
) -> None:
    assert why_not_measured(engine_config(**options)).startswith(why)
    assert bool(why_not_measured(engine_config(**options))) == bool(why)


def test_experts_that_move_between_ranks_are_not_measured(engine_config: Any) -> None:
    config = engine_config()
    config.parallel_config.enable_eplb = True
    assert why_not_measured(config).startswith("--enable-eplb moves experts")
