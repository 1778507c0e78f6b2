"""What is refused by name, on real configurations, and the facts that keep engines apart."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvpool.errors import EngineRefused
from kvpool.keys import Namespace
from kvpool.vllm import compat
from kvpool.vllm.plan import Group

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]


def test_a_supported_configuration_passes(engine_config: Any) -> None:
    compat.refuse_unsupported(engine_config())


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


def test_xxhash_with_a_seed_passes(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    compat.refuse_unsupported(engine_config(prefix_caching_hash_algo="xxhash_cbor"))


@pytest.mark.parametrize(
    "flag", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_other_parallelism_is_refused(engine_config: Any, flag: str) -> None:
    config = engine_config()
    setattr(config.parallel_config, flag, 2)
    with pytest.raises(EngineRefused, match=f"--{flag.replace('_', '-')} 2"):
        compat.refuse_unsupported(config)


def test_speculative_decoding_is_refused(engine_config: Any) -> None:
    config = engine_config()
    config.speculative_config = object()
    with pytest.raises(EngineRefused, match="speculative"):
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


@pytest.mark.parametrize(
    "spec",
    [
        MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16),
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
    facts = [compat.engine_facts(config, cache, "m", layers, *more) for more in ((), (1,), (2,), (4,))]
    assert facts[0] == facts[1]
    assert "blocks_per_record" not in facts[0], "as before there was this setting"
    assert len({Namespace("default", each).hex for each in facts}) == 3
    changed = {name: value for name, value in facts[3].items() if value != facts[0].get(name)}
    assert changed == {
        "blocks_per_record": 4,
        "group0.block_tokens": 128,
        "group0.payload_nbytes": 4 * 2 * 4 * 32 * 32 * 2,
        "group1.block_tokens": 256,
        "group1.payload_nbytes": 4 * 2 * 4 * 64 * 32 * 2,
    }


def test_no_kv_cache_is_refused() -> None:
    with pytest.raises(EngineRefused, match="no KV cache"):
        compat.groups_of(_cache())
