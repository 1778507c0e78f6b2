"""Which servers compute the same keys and values: told by the files of the weights and SGLang's resolved arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from tests.sglang.server import Server, hashes

pytestmark = pytest.mark.sglang


def checkpoint(folder: Path, weights: bytes = b"weights", name: str = "pytorch_model.bin") -> str:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / name).write_bytes(weights)
    return str(folder)


class Fleet:
    """Servers on one pool, each with the arguments that it was started with; ``model_id`` is unset."""

    def __init__(self, pool: str, stack: ExitStack) -> None:
        self.pool, self._stack = pool, stack

    def start(self, model: str, *, settings: dict[str, Any] | None = None, **arguments: Any) -> Server:
        from sglang.srt.runtime_context import get_context

        arguments = {"hicache_storage_backend": "dynamic", **arguments}
        with get_context().override_server_args(model_path=model, **arguments):
            server = Server(self.pool, **{"model_id": None, **(settings or {})})
        self._stack.callback(server.backend.close)
        return server

    def finds(self, model: str, **options: Any) -> bool:
        """Whether a server that starts now finds what ``stores`` has stored."""
        return int(self.start(model, **options).backend.batch_exists(hashes(2))) == 2

    def stores(self, model: str, **options: Any) -> None:
        server = self.start(model, **options)
        assert all(server.backend.batch_set_v1(hashes(2), server.slots(2)))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(f"file://{tmp_path}/pool", stack)


def test_weights_are_told_by_their_files_wherever_they_lie(fleet: Fleet, tmp_path: Path) -> None:
    here = checkpoint(tmp_path / "here")
    fleet.stores(here)
    assert fleet.finds(here)
    assert fleet.finds(checkpoint(tmp_path / "there")), "they were moved"
    assert fleet.finds("org/model", settings={"model_path": here}), "an operator says where they are"
    assert not fleet.finds(here, settings={"model_id": "name"}), "a name is not what is in files"
    checkpoint(tmp_path / "here", b"WEIGHTS")
    assert not fleet.finds(here), "they were overwritten"
    checkpoint(tmp_path / "here")
    assert fleet.finds(here)


def test_a_hubs_name_is_found_in_its_cache(fleet: Fleet, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--org--model"
    for commit, weights in (("a" * 40, b"weights"), ("b" * 40, b"WEIGHTS")):
        checkpoint(cache / "snapshots" / commit, weights)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    place = {"download_dir": str(tmp_path / "hub")}
    fleet.stores("org/model", **place)
    assert fleet.finds("org/model", revision="a" * 40, **place)
    assert fleet.finds(checkpoint(tmp_path / "copy"))
    assert not fleet.finds("org/model", revision="b" * 40, **place)
    (cache / "refs" / "main").write_text("b" * 40)
    assert not fleet.finds("org/model", **place), "the branch has moved"


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"context_length": 512},
        {"json_model_override_args": '{"rope_theta": 1e6}'}, {"load_format": "safetensors"},
        {"model_impl": "transformers"}, {"model_loader_extra_config": '{"x": 1}'}, {"trust_remote_code": True},
        {"attention_backend": "triton"}, {"prefill_attention_backend": "triton"},
        {"decode_attention_backend": "triton"}, {"mm_process_config": {"image": {"max_pixels": 1}}},
        {"lora_target_modules": ["q_proj"]}, {"max_lora_rank": 8},
    ],
    ids=str,
)  # fmt: skip
def test_servers_that_compute_differently_never_meet(
    fleet: Fleet, tmp_path: Path, other: dict[str, Any]
) -> None:
    model = checkpoint(tmp_path / "model")
    checkpoint(tmp_path / "model", name="model.safetensors") if "load_format" in other else None
    fleet.stores(model)
    assert fleet.finds(model)
    assert not fleet.finds(model, **other)
    vouched = {"settings": {"model_id": "name"}}
    fleet.stores(model, **vouched)
    assert not fleet.finds(model, **vouched, **other), "a name does not hide what SGLang says"


def test_what_only_says_where_things_are_keeps_nobody_apart(fleet: Fleet, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    fleet.stores(model, json_model_override_args='{"a": 1, "b": 2}')
    elsewhere = {
        "download_dir": str(tmp_path),
        "weight_loader_prefetch_num_threads": 2,
        "served_model_name": "x",
    }
    assert fleet.finds(model, json_model_override_args='{"b":2,"a":1}', port=1234, **elsewhere)


def test_the_order_of_patterns_counts_in_an_override_too(fleet: Fleet, tmp_path: Path) -> None:
    """Of GPTQModel's the first that matches a layer decides for it."""
    model = checkpoint(tmp_path / "model")
    given, other = (
        {"json_model_override_args": f'{{"quantization_config": {{"dynamic": {{{patterns}}}}}}}'}
        for patterns in ('"-:.*": {}, "+:.*q": {"bits": 8}', '"+:.*q": {"bits": 8}, "-:.*": {}')
    )
    fleet.stores(model, **given)
    assert fleet.finds(model, **given)
    assert not fleet.finds(model, **other)


def test_scales_and_adapters_are_told_by_what_is_in_their_files(fleet: Fleet, tmp_path: Path) -> None:
    from sglang.srt.lora.lora_registry import LoRARef

    model, scales = checkpoint(tmp_path / "model"), tmp_path / "scales.json"
    scales.write_text("{}")
    adapter = checkpoint(tmp_path / "adapter", b"adapter", "adapter_model.bin")
    options = {
        "quantization_param_path": str(scales),
        "lora_paths": [LoRARef(lora_name="adapter", lora_path=adapter)],
    }
    fleet.stores(model, **options)
    assert fleet.finds(model, **options)
    scales.write_text('{"kv": 2}')
    assert not fleet.finds(model, **options)
    scales.write_text("{}")
    assert fleet.finds(model, **options)
    checkpoint(tmp_path / "adapter", b"ADAPTER", "adapter_model.bin")
    assert not fleet.finds(model, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": "org/nowhere"}, '"model_path"'),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"load_format": "remote"}, "--load-format remote"),
        ({"quantize_and_serve": True}, "--quantize-and-serve"),
        (
            {"checkpoint_engine_wait_weights_before_ready": True},
            "--checkpoint-engine-wait-weights-before-ready",
        ),
        ({"kt_weight_path": "/weights"}, "--kt-weight-path"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode"),
        ({"load_format": "npcache"}, "--load-format npcache"),
        ({"quantization_param_path": "/dev/null/scales"}, "cannot be read"),
        ({"settings": {"model_path": "/dev/null"}}, "/dev/null"),
    ],
    ids=str,
)
def test_what_nobody_can_tell_is_refused_in_one_sentence(
    fleet: Fleet, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    options = {"model": checkpoint(tmp_path / "model"), **options}
    with pytest.raises(ConfigError) as refusal:
        fleet.start(options.pop("model"), **options)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_adapter_is_told_by_the_files_that_the_servers_loader_may_read(
    fleet: Fleet, tmp_path: Path
) -> None:
    """SGLang reads adapters as ``--load-format`` says, and a folder may have files of several kinds."""
    from sglang.srt.lora.lora_registry import LoRARef

    model, adapter = checkpoint(tmp_path / "model", name="model.pt"), checkpoint(tmp_path / "adapter")
    checkpoint(tmp_path / "adapter", b"adapter", "adapter_model.pt")
    options = {"load_format": "pt", "lora_paths": [LoRARef(lora_name="adapter", lora_path=adapter)]}
    fleet.stores(model, **options)
    assert fleet.finds(model, **options)
    checkpoint(tmp_path / "adapter", b"ADAPTER", "adapter_model.pt")
    assert not fleet.finds(model, **options)


def test_files_of_the_hub_do_not_stand_for_those_of_modelscope(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub" / "models--org--model"
    checkpoint(cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    place = {"download_dir": str(tmp_path / "hub")}
    fleet.stores("org/model", **place)
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    with pytest.raises(ConfigError, match='in no folder that can be found: set "model_path"'):
        fleet.start("org/model", **place)


@pytest.mark.parametrize("load_format", ["dummy", "remote"])
def test_a_name_vouches_for_weights_that_are_in_no_file(fleet: Fleet, load_format: str) -> None:
    options: dict[str, Any] = {"load_format": load_format, "settings": {"model_id": "name"}}
    fleet.stores("org/nowhere", **options)
    assert fleet.finds("org/nowhere", **options)
    assert not fleet.finds("org/nowhere", load_format="auto", settings={"model_id": "name"})


def test_without_sglangs_arguments_a_name_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='"model_id"'):
        Server(f"file://{tmp_path}/pool", model_id=None)
    with pytest.raises(ConfigError, match='"model_id"'):
        Server(f"file://{tmp_path}/pool", model_id=None, model_path=checkpoint(tmp_path / "model"))


def test_an_sglang_whose_hashes_hold_no_adapters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.sglang.served.storage_namespace_seed", lambda *_: None)
    with pytest.raises(ConfigError, match="no adapters"):
        Server(f"file://{tmp_path}/pool")
