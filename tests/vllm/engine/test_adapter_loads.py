"""No block is moved of an adapter whose tensors are others in this worker than those it is called by."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.v1.core.block_pool import BlockPool

from kvpool import metrics
from kvpool.config import PoolConfig
from kvpool.store import Store
from kvpool.vllm.engine import adapter_loads, internals
from kvpool.vllm.engine.adapter_loads import AdapterLoads
from kvpool.vllm.engine.adapters import GONE, UNREADABLE
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import AdapterWeights, BlockRef, LoadPlan, PoolMetadata
from kvpool.vllm.scheduler import SchedulerHalf
from kvpool.vllm.worker import WorkerHalf
from tests.support.deadlines import eventually
from tests.support.scheduler import (
    BLOCK_TOKENS,
    FACTS,
    TABLE,
    TOKENS,
    answer,
    computed,
    half,
    output,
    request_with,
)

pytestmark = [pytest.mark.vllm]

LORA = ("adapter", "/adapters/a")


def model(number: int, seed: int = 1, scaling: float = 2.0, module: str = "q_proj") -> LoRAModel:
    """An adapter as vLLM's loaders make it."""
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=draw) for shape in ((8, 64), (64, 8)))
    return LoRAModel(number, 8, {module: LoRALayerWeights(module, 8, 16, a, b, scaling)})


class Memory(LRUCacheLoRAModelManager):
    """What of vLLM's holds the adapters that are loaded, two at a time."""

    capacity = 2  # type: ignore[assignment]

    def __init__(self) -> None:
        self._registered_adapters: dict[int, Any] = {}  # type: ignore[assignment]
        self._active_adapters: dict[int, Any] = {}  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._registered_adapters)

    def list_adapters(self) -> dict[int, Any]:
        return self._registered_adapters

    def get_adapter(self, adapter_id: int) -> Any:
        return self._registered_adapters.get(adapter_id)

    def add_adapter(self, lora: Any) -> bool:
        self._add_adapter(lora)
        return True

    def deactivate_adapter(self, adapter_id: int) -> bool:
        return True

    def remove_oldest_adapter(self) -> bool:
        self._registered_adapters.pop(next(iter(self._registered_adapters)))
        return True

    def activate_adapter(self, lora_id: int) -> bool:
        return True


class Vllm:
    """vLLM's manager of a worker's adapters. ``files``: what is to be loaded, by path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, Callable[[int], LoRAModel]] = {}
        self.loaded = 0

        def load(manager: Any, lora_request: LoRARequest) -> LoRAModel:
            self.loaded += 1
            return self.files[lora_request.lora_path](lora_request.lora_int_id)

        def take_in(manager: Any, lora: LoRAModel) -> None:
            manager._registered_adapters[lora.id] = lora

        monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
        monkeypatch.setattr("vllm.lora.model_manager.LoRAModelManager._add_adapter", take_in)
        self.loads = AdapterLoads(0)
        self.manager: Any = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
        self.manager._adapter_manager = Memory()
        self.loads.reader = lambda request: internals._read_adapter(lambda: self.manager, request)  # type: ignore[arg-type,return-value]

    def put(self, path: str = LORA[1], **of_model: Any) -> None:
        self.files[path] = lambda number: model(number, **of_model)

    def add(
        self, number: int = 1, name: str = LORA[0], path: str = LORA[1], *, in_place: bool = False
    ) -> None:
        self.manager.add_adapter(LoRARequest(name, number, path, load_inplace=in_place))

    def weights(self, number: int = 1) -> AdapterWeights:
        """What is held now."""
        return AdapterWeights(number, *LORA, (self.loads._digests[number],))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    made = Vllm(monkeypatch)
    made.put()
    return made


def test_equal_tensors_have_one_digest_whatever_they_are_called(vllm: Vllm) -> None:
    vllm.put("/adapters/copy")
    vllm.add()
    vllm.add(2, "other", "/adapters/copy")
    assert vllm.weights(1).digests == vllm.weights(2).digests
    assert set(vllm.loads.news) == {1, 2}


@pytest.mark.parametrize("other", [{"seed": 2}, {"scaling": 1.0}, {"module": "v_proj"}], ids=str)
def test_all_that_is_computed_with_is_in_the_digest(vllm: Vllm, other: dict[str, Any]) -> None:
    vllm.add()
    one = vllm.weights()
    vllm.put(**other)
    vllm.add(in_place=True)
    assert vllm.weights() != one
    assert not vllm.loads.has(one)
    assert not vllm.loads.may_have(one)


def test_layers_that_an_adapter_replaces_are_in_its_digest(vllm: Vllm) -> None:
    for number in (1, 2):
        made = model(number)
        made.modules_to_save = {"score": SimpleNamespace(weight=torch.full((2, 64), float(number)))}
        vllm.files[f"/adapters/{number}"] = lambda _, made=made: made
        vllm.add(number, f"adapter {number}", f"/adapters/{number}")
    assert vllm.weights(1).digests != vllm.weights(2).digests


def test_a_single_element_of_a_large_adapter_is_in_the_digest(vllm: Vllm) -> None:
    large = torch.zeros(2_000_003)
    before = adapter_loads._digest(1, [("a", large)])
    large[1_234_567] = 1
    assert adapter_loads._digest(1, [("a", large)]) != before


def test_tensors_that_a_trainer_brings_are_measured_as_those_of_files(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks put a method of their own in the place of vLLM's."""
    monkeypatch.setattr(LRUCacheWorkerLoRAManager, "_load_adapter", lambda manager, request: model(1, seed=3))
    vllm.add()
    from_memory = vllm.weights()
    monkeypatch.undo()
    assert vllm.loads.has(from_memory)


def test_what_vllm_has_dropped_may_be_loaded_and_what_was_removed_stands_for_nothing(vllm: Vllm) -> None:
    vllm.add()
    one = vllm.weights()
    for number in (2, 3):
        vllm.put(f"/adapters/{number}", seed=number)
        vllm.add(number, f"adapter {number}", f"/adapters/{number}")
    assert vllm.loads.has(one), "it was dropped for want of room, and comes back when it is asked for"
    vllm.manager.remove_adapter(3)
    assert vllm.loads.news[3] == GONE
    assert vllm.loads.may_have(AdapterWeights(3, *LORA, ("any",)))


def test_dummies_of_a_warm_up_are_no_adapters(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        vllm.manager._adapter_manager, "create_dummy_lora", lambda *_: model(1, seed=9), raising=False
    )
    vllm.manager._cached_dummy_lora, vllm.manager.embedding_modules = None, {}
    vllm.manager.add_dummy_lora(LoRARequest("warmup", 1, "/nowhere"), 8)
    assert vllm.manager.list_adapters() == {1}
    assert vllm.loads.news == {}
    vllm.manager.remove_adapter(1)
    assert vllm.loads.news == {}


def test_an_adapter_that_is_asked_for_is_read_once(vllm: Vllm) -> None:
    asked = LoRARequest(LORA[0], 1, LORA[1])
    vllm.loads.look(asked)
    ahead = vllm.loads.news.pop(1)
    vllm.put(seed=2)  # replaced between both
    vllm.add()
    assert (vllm.loads.news.pop(1), vllm.loaded) == (ahead, 1), "what was read is what is used"
    vllm.loads.look(asked)
    assert (vllm.loads.news, vllm.loaded) == ({1: ahead}, 1)


def test_what_is_read_ahead_is_bounded(vllm: Vllm) -> None:
    for number in range(1, 8):
        vllm.put(f"/adapters/{number}", seed=number)
        vllm.loads.look(LoRARequest(f"adapter {number}", number, f"/adapters/{number}"))
    assert len(internals._read_ahead) == internals.MAX_READ_AHEAD
    internals._read_ahead.clear()


def test_an_adapter_that_cannot_be_read_is_said_to_be_so(
    vllm: Vllm, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvpool"):
        vllm.loads.look(LoRARequest("missing", 1, "/adapters/missing"))
    assert vllm.loads.news == {1: UNREADABLE}
    assert "missing cannot be read" in caplog.text
    with pytest.raises(KeyError):
        vllm.add(1, "missing", "/adapters/missing")
    assert vllm.loads._digests == {}


def test_a_tensor_that_cannot_be_measured_keeps_its_adapter_from_the_pool_and_vllm_goes_on(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(tensors: Any) -> str:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(adapter_loads, "digest_of_all", planted)
    vllm.add()
    assert vllm.manager.list_adapters() == {1}
    assert vllm.loads.news == {1: UNREADABLE}


def test_what_was_loaded_stays_when_its_file_is_written_over(vllm: Vllm, tmp_path: Path) -> None:
    """Tensors of safetensors are views of their file, which vLLM reads again and again."""
    file = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.ones(8, 64)}, file)
    loaded = model(1)
    with safe_open(file, framework="pt") as opened:
        loaded.loras["q_proj"].lora_a = opened.get_tensor("a")
    vllm.files[LORA[1]] = lambda number: loaded
    vllm.add()
    content = bytearray(file.read_bytes())
    content[-8 * 64 * 4 :] = bytes(8 * 64 * 4)
    with file.open("r+b") as written:
        written.write(content)
    held = vllm.manager._adapter_manager.get_adapter(1).loras["q_proj"].lora_a
    assert torch.equal(held, torch.ones(8, 64))


def test_a_version_that_does_not_show_its_adapters_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.lora.model_manager.LoRAModelManager._add_adapter")
    loads = AdapterLoads(0)
    assert not loads.may_have(AdapterWeights(1, *LORA, ("any",)))
    loads.look(LoRARequest(LORA[0], 1, LORA[1]))
    assert loads.news == {1: UNREADABLE}


def test_beyond_the_adapters_that_are_remembered_the_oldest_is_forgotten(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_loads, "MAX_ADAPTERS", 1)
    vllm.add()
    one = vllm.weights()
    vllm.put("/adapters/b", seed=2)
    vllm.add(2, "other", "/adapters/b")
    assert not vllm.loads.has(one)
    assert vllm.loads.has(vllm.weights(2))


def test_who_is_gone_is_told_nothing(vllm: Vllm) -> None:
    watchers = len(internals._adapter_watchers)
    vllm.loads.reader = None
    del vllm.loads
    gc.collect()
    assert len(internals._adapter_watchers) < watchers


# On both halves.


@pytest.fixture
def worker(tmp_path: Path, vllm: Vllm) -> Iterator[WorkerHalf]:
    config = PoolConfig(pool=f"file://{tmp_path}/pool")
    worker = WorkerHalf(config, Geometry((Group(16),), step_tokens=2048), rank=0, adapters=vllm.loads)
    worker.register([[torch.zeros(16, 4, 32, 8)]], dict(FACTS))
    yield worker
    worker.close()


def step_of(worker: WorkerHalf, scheduler: SchedulerHalf, step: PoolMetadata) -> None:
    """The worker takes a step, until all that it moves has ended; the scheduler hears of it."""
    worker.start_loads(step)
    worker.start_stores(step)
    wanted = {plan.request_id for plan in step.loads}
    ended: set[str] = set()
    failed: set[str] = set()

    def at_rest() -> bool:
        for of_all, of_poll in zip((ended, failed), worker.poll(idle=True), strict=True):
            of_all |= of_poll
        return wanted <= ended and not worker.slots_in_use

    assert eventually(at_rest)
    scheduler.update(worker.take_report(), ended, failed)


def idle(scheduler: SchedulerHalf) -> PoolMetadata:
    return scheduler.plan(output(request_with("x"), 0, TABLE))


def test_a_request_for_an_adapter_that_nobody_has_loaded_finds_what_another_engine_stored(
    worker: WorkerHalf, vllm: Vllm, store: Store
) -> None:
    vllm.loads.look(LoRARequest(LORA[0], 1, LORA[1]))
    computed(request_with("of another engine", LORA), store, vllm.loads.news.pop(1))
    scheduler, asked = half(store), request_with("asked", LORA)
    scheduler.seen(asked)
    assert scheduler.matched_tokens(asked, 0)[0] is None
    step_of(worker, scheduler, idle(scheduler))
    assert answer(scheduler, asked) == 96
    scheduler.close()


def test_blocks_of_replaced_weights_are_neither_stored_nor_loaded(
    worker: WorkerHalf, vllm: Vllm, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM loads an adapter again that it had dropped, of files that were replaced, behind the answer to a request."""
    vllm.add()
    digest = vllm.weights().digests[0]
    computed(request_with("of another engine", LORA), store, digest)
    scheduler = half(store)
    step_of(worker, scheduler, idle(scheduler))
    asked = request_with("asked", LORA)
    assert answer(scheduler, asked) == 96
    scheduler.allocated(asked, TABLE, 96)
    vllm.put(seed=2)
    vllm.add(in_place=True)
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        step_of(worker, scheduler, idle(scheduler))
        assert answer(scheduler, asked) == 0
        scheduler.allocated(asked, TABLE, 0)
        assert scheduler.plan(output(asked, len(TOKENS), TABLE)).stores == []
        later = request_with("later", LORA)
        scheduler.seen(later)
        assert answer(scheduler, later) == 0
    said = [record.getMessage() for record in caplog.records if "adapter" in record.getMessage()]
    assert len(said) == 1
    assert LORA[1] in said[0]
    for one in (asked, later):
        scheduler.finished(one)
    assert scheduler.counters.take()[f"{metrics.ADAPTER_REQUESTS.name}/changed"] == 2
    scheduler.reset()
    again = request_with("again", LORA)
    scheduler.seen(again)
    assert scheduler._requests["again"].asked.identified, "the engine's cache holds nothing of before"
    scheduler.close()


def test_blocks_of_weights_that_are_loaded_again_in_their_step_are_not_stored_and_none_later(
    worker: WorkerHalf, vllm: Vllm, store: Store
) -> None:
    vllm.add()
    scheduler, asked = half(store), request_with("asked", LORA)
    step_of(worker, scheduler, idle(scheduler))
    pool = BlockPool(32, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(pool)
    blocks = pool.get_new_blocks(6)
    pool.cache_full_blocks(asked, blocks, 0, 6, BLOCK_TOKENS, 0)
    table = ([block.block_id for block in blocks] + [30],)
    scheduler.seen(asked)
    scheduler.allocated(asked, table, 0)
    step = scheduler.plan(output(asked, len(TOKENS), table))
    assert len(step.stores) == 6
    vllm.put(seed=2)
    vllm.add(in_place=True)
    step_of(worker, scheduler, step)
    assert metrics.STORED_BLOCKS.name not in worker.counters.take()
    waiting = scheduler._store_planner._queue._waiting
    assert len(waiting) == 6, "as what a full staging dropped"
    again: list[BlockRef] = []

    def gives_up() -> bool:
        again.extend(idle(scheduler).stores)
        return not waiting

    assert eventually(gives_up)
    assert again == []
    assert scheduler.counters.take()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/adapter"] == 6
    scheduler.close()


def test_blocks_of_an_adapter_go_to_the_pool_and_come_from_it(
    worker: WorkerHalf, vllm: Vllm, store: Store
) -> None:
    vllm.add()
    scheduler, asked = half(store), request_with("asked", LORA)
    step_of(worker, scheduler, idle(scheduler))
    scheduler.seen(asked)
    scheduler.allocated(asked, TABLE, 0)
    step_of(worker, scheduler, scheduler.plan(output(asked, len(TOKENS), TABLE)))
    again = request_with("again", LORA)
    scheduler.seen(again)
    assert answer(scheduler, again) == 96
    scheduler.allocated(again, TABLE, 96)
    step_of(worker, scheduler, idle(scheduler))
    assert not scheduler._requests["again"].refused
    scheduler.close()


def test_a_worker_that_knows_of_no_adapters_moves_none(tmp_path: Path) -> None:
    config = PoolConfig(pool=f"file://{tmp_path}/pool")
    worker = WorkerHalf(config, Geometry((Group(16),), step_tokens=2048), rank=0)
    worker.register([[torch.zeros(16, 4, 32, 8)]], dict(FACTS))
    block = BlockRef(bytes(32), 0, (1,), AdapterWeights(1, *LORA, ("one",)))
    step = PoolMetadata(
        stores=[block],
        tags=[7],
        loads=[LoadPlan("a", [block], 60.0)],
        adapters=[LoRARequest(LORA[0], 1, LORA[1])],
    )
    worker.start_loads(step)
    worker.start_stores(step)
    assert worker.poll(idle=True) == ({"a"}, {"a"})
    report = worker.take_report()
    assert report is not None
    assert (report.dropped, report.other_adapters, report.adapters) == ({7: 1}, {LORA}, {(0, 1): UNREADABLE})
    worker.close()
