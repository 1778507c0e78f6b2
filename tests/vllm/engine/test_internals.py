"""Where vLLM's objects are read: what is found there, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine.core import EngineCore

import kvpool.vllm
from kvpool.errors import EngineRefused
from kvpool.store import StoreURL
from kvpool.store.file_system import FileSystem
from kvpool.vllm.engine import internals
from kvpool.vllm.engine.support import groups_of
from tests.support.encoder import Picture
from tests.support.encoder import request as encoder_request
from tests.support.scheduler import BLOCK_TOKENS, request_with
from tests.support.specs import FULL, REFILLED, RING, WINDOW, cache_of

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]


def test_a_stage_without_a_layer_of_some_group_is_refused_by_name() -> None:
    cache = cache_of(FULL, WINDOW)
    cache.kv_cache_groups[1].layer_names.clear()
    assert len(groups_of(cache)) == 2, "who has no such layer has the group all the same"
    with pytest.raises(
        EngineRefused, match=r"stage has no layer of KV-cache group 1.*--pipeline-parallel-size"
    ):
        internals.layers_of(cache, {"layer0": torch.zeros(8, 32)})


@pytest.mark.parametrize("spec", [RING, REFILLED])
def test_of_scratch_no_layer_is_taken_whether_there_is_one_or_not(spec: Any) -> None:
    cache, layer = cache_of(FULL, spec, WINDOW), torch.zeros(8, 32)
    kv_caches = {"layer0": layer, "layer2": layer}
    for layers in (["layer1"], []):
        cache.kv_cache_groups[1].layer_names = layers
        assert [len(of_group) for of_group in internals.layers_of(cache, kv_caches)] == [1, 0, 1]


def test_what_is_computed_again_in_front_of_a_hits_end_is_held() -> None:
    again = SimpleNamespace(replay_start=24)
    held = [internals.tokens_held(again, tokens, 8) for tokens in (0, 24, 32)]
    assert held == [0, 32, 32]
    for other in (SimpleNamespace(replay_start=0), SimpleNamespace()):
        assert internals.tokens_held(other, 0, 8) == 0, "nothing is computed again; this version never does"


class Runner:
    """A worker with a model, and the connector that it registers its KV cache with."""

    def __init__(self, model: torch.nn.Module, drafts: torch.nn.Module | None = None) -> None:
        self._model, self._drafts = model, drafts

    def get_model(self) -> torch.nn.Module:
        return self._model

    def get_draft_model(self) -> torch.nn.Module | None:
        return self._drafts

    def register(self) -> Callable[[], Any]:
        return internals.model_tensors()


def linear(bias: bool = True) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2, bias=bias))


def test_all_that_is_loaded_of_the_callers_model_is_shown_by_name() -> None:
    model, drafts = linear(), linear(bias=False)
    model.register_buffer("lasting", torch.zeros(1))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    model.register_parameter("none", None)
    model.register_parameter("tied", model[0].weight)  # type: ignore[index]
    model.register_buffer("away", torch.zeros(1, device="meta"))
    runner = Runner(model, drafts)
    shown = runner.register()
    names = [".tied", ".lasting", "0.bias", "draft.0.weight"]
    assert [name for name, _ in shown()] == names, "one of two names of a tensor is enough"
    runner._model = linear()
    assert [name for name, _ in shown()] == ["0.weight", "0.bias", "draft.0.weight"], "as it is now"
    del runner
    with pytest.raises(EngineRefused, match="the worker is gone"):
        list(shown())


def test_weights_that_no_tensor_shows_are_named() -> None:
    model = linear(bias=False)
    model[0].weight = torch.nn.Parameter(torch.empty(0))  # type: ignore[index]
    runner = Runner(model)
    with pytest.raises(EngineRefused, match=r"the weights of 0\.weight are where no tensor shows them"):
        list(runner.register()())


def test_without_a_model_among_the_callers_none_is_shown() -> None:
    with pytest.raises(EngineRefused, match="does not show its model"):
        internals.model_tensors()


def test_an_engine_whose_calls_do_not_show_is_refused() -> None:
    with pytest.raises(EngineRefused, match="does not show its calls"):
        internals.watch_engine_calls(lambda name: None, lambda version: None)


@pytest.mark.parametrize(
    ("pool", "kind", "source"),
    [
        ("file:///pool", "ext4", "disk"),
        ("file:///pool", "tmpfs", "host"),
        ("valkey+unix:///run/valkey.sock", "", "host"),
        ("valkey://10.0.0.1", "", "external_unspecified"),
    ],
)
def test_hits_come_from_where_the_pool_is(
    pool: str, kind: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystem, "of", lambda path: FileSystem("/", kind, "never", 0, 0, 0))
    assert internals.cache_hit_source(StoreURL.parse(pool)) == source


def test_a_version_that_counts_no_sources_is_told_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    assert internals.cache_hit_source(StoreURL.parse("file:///pool")) is None


@pytest.mark.usefixtures("quiet")
def test_vllm_is_told_the_source_of_a_connectors_hits(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystem, "of", lambda path: FileSystem("/", "tmpfs", "never", 0, 0, 0))
    connector = engine().connector
    assert connector.get_external_cache_hit_sources(None, 7) == {"host": 7}
    assert connector.get_external_cache_hit_sources(None, 0) == {}


# What is no interface of vLLM's, and may change with every version.
MODULES = (
    "vllm.model_executor",
    "vllm.distributed.parallel_state",
    "vllm.v1.attention",
    "vllm.v1.core.kv_cache_utils",
)
ATTRIBUTES = {
    "cached_block_hash_to_block",
    "free_block_queue",
    "free_blocks",
    "ref_cnt",
    "get_num_free_blocks",
}


def test_no_other_module_reads_what_is_no_interface() -> None:
    found = []
    for file in Path(kvpool.vllm.__file__).parent.rglob("*.py"):
        if file.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(MODULES):
                found.append(f"{file.name}: {node.module}")
            if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
                found.append(f"{file.name}: {node.attr}")
    assert found == []


def test_a_tiers_result_has_the_fields_that_vllm_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.30 knows no bytes: each job of the tier failed there, was never reported, and pinned its rows."""
    older = dataclasses.make_dataclass("JobResult", ["job_id", "success"])
    said = {"job_id": 1, "success": True, "transfer_bytes": 7}
    assert dataclasses.asdict(internals.job_result(**said)).items() >= said.items()
    monkeypatch.setattr(internals, "JobResult", older)
    assert internals.job_result(**said) == older(1, True)


class Core(EngineCore):
    """vLLM's engine as far as its calls are watched; what is called is ``calls``'."""

    def __init__(
        self,
        told: Callable[[str], None] = lambda name: None,
        named: Callable[[str], None] = lambda version: None,
    ) -> None:
        self.model_executor: Any = SimpleNamespace(
            is_sleeping=False,
            sleep=lambda level: None,
            wake_up=lambda tags=None: None,
            collective_rpc=self.answer,
        )
        self.is_away = internals.watch_engine_calls(told, named)
        self.encoded = internals.encoder_outputs()

    def answer(self, method: Any, timeout: Any, args: Any, kwargs: Any) -> Any:
        if method == "fails":
            raise ZeroDivisionError
        return [(method, timeout, args, kwargs)]


def of_mine() -> None: ...


def test_each_call_that_may_write_weights_is_told_also_one_that_failed() -> None:
    told: list[str] = []
    core = Core(told.append)
    assert core.collective_rpc("update", 1.0, (2,), {"three": 3}) == [("update", 1.0, (2,), {"three": 3})]
    core.collective_rpc(of_mine)
    with pytest.raises(ZeroDivisionError):
        core.collective_rpc("fails")
    core.model_executor.sleep(1)
    core.model_executor.wake_up(tags=["weights"])
    assert told == ["update", "of_mine", "fails", "sleep", "wake_up"]


def test_a_version_of_the_weights_is_told_when_vllm_has_it() -> None:
    named: list[str] = []
    core = Core(named=lambda version: named.append(f"{version} {core.get_weight_version()}"))
    core.set_weight_version("step-41")
    assert named == ["step-41 step-41"]


def test_what_encoders_have_made_is_read_from_the_engines_own_cache_of_them() -> None:
    core: Any = Core(lambda name: None)
    assert not core.encoded()
    assert not internals.encoder_outputs()(), "no engine is among the callers"
    manager = EncoderCacheManager(64)
    core.scheduler = SimpleNamespace(encoder_cache_manager=manager)
    asked = request_with("asked", multimodal=[("small", 2, 4), ("image", 40, 8)])
    manager.allocate(asked, 1)
    assert set(core.encoded()) == {"image"}
    manager.free(asked)
    assert set(core.encoded()) == {"image"}, "it is kept for others"
    manager.reset()
    assert not core.encoded()
    assert [internals.first_item(asked, of) for of in ((), {"image"}, {"image", "small"})] == [None, 40, 2]


@pytest.mark.parametrize(
    ("away", "back"),
    [
        (("sleep", None, (1,)), [("wake_up",)]),
        (
            ("sleep", None, (), {"level": 2}),
            [("wake_up", None, (["weights"],)), ("wake_up", None, (), {"tags": ["kv_cache"]})],
        ),
        (("checkpoint_prepare",), [("checkpoint_restore",)]),
    ],
)
def test_memory_that_workers_give_away_by_a_call_of_their_own_is_not_looked_at(away: Any, back: Any) -> None:
    core = Core()
    assert not core.is_away()
    core.collective_rpc(*away)
    for call in back:
        assert core.is_away()
        core.collective_rpc(*call)
    assert not core.is_away()


@pytest.mark.parametrize("size", ["input_size_per_partition", "input_size"])
def test_of_weights_that_a_kernel_has_packed_columns_are_measured(size: str) -> None:
    """Replicated layers, as MLA has them, are of no partition."""
    packed = torch.arange(6 * 8.0).reshape(6, 8)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(0))
    setattr(model, size, 8)
    model.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed)  # type: ignore[assignment]
    runner = SimpleNamespace(get_model=lambda: model)
    ((name, columns),) = internals._tensors_of(lambda: runner)  # type: ignore[arg-type]
    assert name == ".weight"
    assert columns.T.tolist() == packed[:, [0, 2, 4, 7]].tolist()


def test_evicted_blocks_are_found_no_more_and_stay_with_those_who_hold_them() -> None:
    asked, pool = request_with("a"), BlockPool(32, True, BLOCK_TOKENS)
    for _ in range(2):  # vLLM keeps equal blocks side by side
        held = pool.get_new_blocks(4)
        pool.cache_full_blocks(asked, held, 0, 4, BLOCK_TOKENS, 0)
    keys = [internals.cache_key(one, 0) for one in asked.block_hashes]
    internals.evict(pool, keys[1:3])
    cached = internals.cached_blocks(pool)
    assert cached is not None
    assert [key in cached for key in keys[:4]] == [True, False, False, True]
    assert {internals.references(pool, block.block_id) for block in held} == {1}


@pytest.mark.parametrize(
    ("module", "prunes", "words"),
    [("molmo2", None, True), ("qwen3_vl", True, True), ("qwen3_vl", False, False), ("llava", None, False)],
)
def test_words_in_outputs_of_encoders_are_measured_with_the_encoder(
    module: str, prunes: bool | None, words: bool
) -> None:
    """Some models put embeddings of words between those of patches, which an update of the language model changes."""
    language = torch.nn.ModuleDict(
        {"words": torch.nn.Embedding(4, 2), "layer": torch.nn.Linear(2, 2, bias=False)}
    )
    language["head"] = torch.nn.Linear(2, 4, bias=False)
    language["head"].weight = language["words"].weight  # tied

    class Model(torch.nn.Module):
        __module__ = f"vllm.model_executor.models.{module}"

        def __init__(self) -> None:
            super().__init__()
            self.tower, self.language = torch.nn.Linear(2, 2, bias=False), language
            if prunes is not None:
                self.is_multimodal_pruning_enabled = prunes

        def get_language_model(self) -> torch.nn.Module:
            return self.language

    runner = SimpleNamespace(get_model=Model)
    found = [name for name, _ in internals._tensors_of_encoder(lambda: runner)]  # type: ignore[arg-type]
    assert found == ["tower.weight", *(["language.words.weight"] if words else [])]


def test_an_output_that_nobody_holds_is_evicted_as_vllm_does_it() -> None:
    manager = EncoderCacheManager(100)
    core = SimpleNamespace(scheduler=SimpleNamespace(encoder_cache_manager=manager))
    asked = encoder_request("r", Picture("a" * 64, 10), Picture("b" * 64, 40))
    for index in range(2):
        assert manager.can_allocate(asked, index, 100, 0)
        manager.allocate(asked, index)
    manager.free_encoder_input(asked, 0)
    evict = internals.output_evictor(core)
    assert [evict(name * 64) for name in "abc"] == [True, False, False]
    assert manager.get_freed_mm_hashes() == ["a" * 64]
    assert list(manager.cached) == ["b" * 64]
    manager.free(asked)
    assert evict("b" * 64)
    assert (manager.num_free_slots, manager.num_freeable_slots) == (100, 100)
    assert (manager.freeable, manager.num_embeds_by_hash) == ({}, {})
