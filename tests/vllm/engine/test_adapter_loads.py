"""No block is moved of an adapter whose files may have changed since vLLM loaded it, whatever loads it.

Over 400 lines because files are replaced in each way at each time, on vLLM's manager and on both halves.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.v1.core.block_pool import BlockPool

from kvpool import metrics
from kvpool.config import PoolConfig
from kvpool.store import Store
from kvpool.vllm.engine import adapter_loads, internals
from kvpool.vllm.engine.adapter_loads import AdapterLoads
from kvpool.vllm.engine.adapters import Adapters
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import AdapterFiles, BlockRef, LoadPlan, PoolMetadata
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
    planted,
    request_with,
)

pytestmark = [pytest.mark.vllm]

WEIGHTS = "adapter_model.safetensors"


def write(folder: Path, weights: bytes) -> Path:
    """An adapter whose files are so old that a later write shows."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (folder / WEIGHTS).write_bytes(_safetensors(weights))
    return folder


def _safetensors(data: bytes) -> bytes:
    header = b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(data), len(data))
    return len(header).to_bytes(8, "little") + header + data


def renamed(path: Path) -> None:
    new = write(path.with_name("new"), b"two")
    (new / WEIGHTS).replace(path / WEIGHTS)


def in_place(path: Path) -> None:
    (path / WEIGHTS).write_bytes(_safetensors(b"two"))


def in_place_with_its_old_times(path: Path) -> None:
    before = (path / WEIGHTS).stat()
    in_place(path)
    os.utime(path / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))


def another_folder(path: Path) -> None:
    new = write(path.with_name("new"), b"two")
    path.rename(path.with_name("old"))
    new.rename(path)


def another_configuration(path: Path) -> None:
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 32}')


def through_a_link(path: Path) -> None:
    """As a hub's cache, or a volume of Kubernetes, goes to another version."""
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).symlink_to(write(path.with_name("new"), b"two") / WEIGHTS)


WAYS: list[Callable[[Path], None]] = [
    renamed, in_place, in_place_with_its_old_times, another_folder, another_configuration, through_a_link,
]  # fmt: skip


class Memory(LRUCacheLoRAModelManager):
    """What of vLLM's holds the adapters that are loaded, two at a time."""

    capacity = 2  # type: ignore[assignment]

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.held)

    def list_adapters(self) -> dict[int, Any]:
        return self.held

    def get_adapter(self, adapter_id: int) -> Any:
        return self.held.get(adapter_id)

    def add_adapter(self, adapter: Any) -> bool:
        self.held[adapter.id] = adapter
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        return self.held.pop(adapter_id, None) is not None

    def remove_oldest_adapter(self) -> bool:
        return self.remove_adapter(next(iter(self.held)))

    def activate_adapter(self, lora_id: int) -> bool:
        self.held[lora_id] = self.held.pop(lora_id)
        return True


class Vllm:
    """vLLM's manager of a worker's adapters, which all ways to load one come to; it keeps their files' bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.while_loading: Callable[[], None] = lambda: None

        def load(manager: Any, lora_request: LoRARequest) -> Any:
            content = (Path(lora_request.lora_path) / WEIGHTS).read_bytes()
            self.while_loading()
            return SimpleNamespace(id=lora_request.lora_int_id, content=content)

        monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
        monkeypatch.setattr(internals, "_is_vllms_own", lambda method: method is load)
        self.loads = AdapterLoads()
        self.manager: Any = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
        self.manager._adapter_manager = Memory()

    def add(self, path: Path, number: int = 1, name: str = "adapter", *, in_place: bool = False) -> None:
        self.manager.add_adapter(LoRARequest(name, number, str(path), load_inplace=in_place))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch)


@pytest.fixture
def files() -> Iterator[Callable[..., AdapterFiles]]:
    """What an engine's scheduler takes an adapter's files for, asked for the first time."""
    started: list[Adapters] = []

    def look(path: Path, number: int = 1, name: str = "adapter") -> AdapterFiles:
        started.append(Adapters())
        check = started[-1].check(LoRARequest(name, number, str(path)))
        assert eventually(lambda: check.done)
        assert check.files is not None
        return check.files

    yield look
    for one in started:
        one.close()


Files = Callable[..., AdapterFiles]


def test_files_that_stay_as_they_were_are_shared(vllm: Vllm, files: Files, tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"one")
    assert vllm.loads.may_have(files(path)), "vLLM loads it when it is first computed for"
    assert not vllm.loads.has(files(path))
    vllm.add(path)
    (path / "training.log").write_text("step 1000")
    (path / "README.md").write_text("read by nobody")
    assert vllm.loads.has(files(path))
    assert vllm.loads.may_have(files(path))
    for number in range(2, 5):  # it is dropped, and loaded again
        vllm.add(write(tmp_path / f"{number}", b"other"), number, f"{number}")
    vllm.add(path)
    assert vllm.loads.has(files(path))


@pytest.mark.parametrize("replace", WAYS)
def test_files_that_are_replaced_before_the_first_request(
    vllm: Vllm, files: Files, tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    path = write(tmp_path / "a", b"one")
    vllm.add(path)
    replace(path)
    assert not vllm.loads.has(files(path))
    assert not vllm.loads.may_have(files(path))


@pytest.mark.parametrize("replace", WAYS)
def test_files_that_are_replaced_while_vllm_has_dropped_them(
    vllm: Vllm, files: Files, tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    """It loads them again for the next request, and its own cache may have blocks of both."""
    path = write(tmp_path / "a", b"one")
    vllm.add(path)
    first = files(path)
    for number in (2, 3):
        vllm.add(write(tmp_path / f"{number}", b"other"), number, f"{number}")
    replace(path)
    assert vllm.loads.has(first), "what was computed is not stored yet"
    vllm.add(path)
    assert not vllm.loads.has(first)
    assert not vllm.loads.has(files(path))


@pytest.mark.parametrize("replace", WAYS)
def test_files_that_are_replaced_while_vllm_reads_them(
    vllm: Vllm, files: Files, tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    path = write(tmp_path / "a", b"one")
    before = files(path)
    vllm.while_loading = lambda: replace(path)
    vllm.add(path)
    assert not vllm.loads.has(before)
    assert not vllm.loads.has(files(path))


def test_another_adapter_in_the_place_of_one_spoils_both(vllm: Vllm, files: Files, tmp_path: Path) -> None:
    """``load_inplace`` from another path: requests of the former compute with the new one's weights."""
    path, other = write(tmp_path / "a", b"one"), write(tmp_path / "b", b"two")
    vllm.add(path)
    former = files(path)
    vllm.add(other, in_place=True)
    assert not vllm.loads.has(former)
    assert vllm.loads.has(files(other))
    vllm.add(path, in_place=True)
    assert not vllm.loads.has(former), "vLLM's cache has blocks of both under its hashes"
    third = write(tmp_path / "c", b"three")
    vllm.add(third)
    assert not vllm.loads.may_have(files(third)), "vLLM has another one under its number"


def test_a_load_that_fails_leaves_what_was_loaded(vllm: Vllm, files: Files, tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"one")
    vllm.add(path)
    first = files(path)
    vllm.while_loading = planted
    with pytest.raises(ZeroDivisionError):
        vllm.add(path, in_place=True)
    assert vllm.loads.has(first)
    with pytest.raises(FileNotFoundError):
        vllm.add(tmp_path / "nowhere", 2)


def test_what_was_loaded_stays_when_its_file_is_written_over(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM keeps the tensors in main memory: as views of the file, where they are not pinned."""
    path = tmp_path / "a"
    path.mkdir()
    first, second = (torch.full((256, 64), float(number)) for number in (1, 2))
    save_file({"a": first, "b": first.clone()}, path / WEIGHTS)

    def load(manager: Any, lora_request: LoRARequest) -> Any:
        with safe_open(path / WEIGHTS, framework="pt") as opened:
            layer = SimpleNamespace(lora_a=opened.get_tensor("a"), lora_b=opened.get_tensor("b"))
        return SimpleNamespace(id=lora_request.lora_int_id, loras={"q_proj": layer})

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    monkeypatch.setattr(internals, "_is_vllms_own", lambda method: method is load)
    assert internals.watch_adapter_loads(vllm.loads)
    vllm.add(path)
    new = tmp_path / "new"
    save_file({"a": second, "b": second.clone()}, new)
    (path / WEIGHTS).write_bytes(new.read_bytes())
    held = vllm.manager._adapter_manager.held[1].loras["q_proj"]
    assert torch.equal(held.lora_a, first)
    assert torch.equal(held.lora_b, first)


@pytest.mark.parametrize(
    ("age_s", "whole_seconds", "settles"),
    [(10, False, True), (0, False, True), (-30, False, False), (10, True, True), (0, True, False)],
)
def test_files_are_loaded_when_a_later_write_would_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, age_s: int, whole_seconds: bool, settles: bool
) -> None:
    """A negative age: the file system's clock is ahead."""
    now_ns = [1_000_000_000_000 + 123_000_000 * (not whole_seconds)]
    changed_ns = now_ns[0] - age_s * 1_000_000_000
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_ns[0] += int(seconds * 1e9)

    monkeypatch.setattr(adapter_loads, "files_state", lambda path: (b"state", changed_ns))
    monkeypatch.setattr(adapter_loads.time, "time_ns", lambda: now_ns[0])
    assert (adapter_loads._settled_state(tmp_path, sleep) is not None) is settles
    assert sum(slept) <= 2 * adapter_loads.MIN_AGE_S


def test_a_version_that_does_not_show_its_loads_shares_no_adapters(
    monkeypatch: pytest.MonkeyPatch, files: Files, tmp_path: Path
) -> None:
    monkeypatch.delattr(WorkerLoRAManager, "_load_adapter")
    assert not AdapterLoads().may_have(files(write(tmp_path / "a", b"one")))


@pytest.mark.parametrize("manager", [WorkerLoRAManager, LRUCacheWorkerLoRAManager])
def test_adapters_that_code_from_outside_loads_go_without_the_pool(
    vllm: Vllm, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: Any
) -> None:
    """Trainers' workers take tensors from memory, and the path says nothing. A copied name does not hide them."""
    path, other = write(tmp_path / "a", b"one"), write(tmp_path / "b", b"one")
    vllm.add(path)
    assert vllm.loads.has(files(path))
    own = manager._load_adapter

    @functools.wraps(own)
    def from_memory(manager: Any, lora_request: LoRARequest) -> Any:
        return SimpleNamespace(id=lora_request.lora_int_id)

    monkeypatch.setattr(manager, "_load_adapter", from_memory)
    for loads in (vllm.loads, AdapterLoads()):
        vllm.add(path, in_place=True)
        assert not loads.has(files(path))
        assert not loads.may_have(files(path))
        assert not loads.may_have(files(other, 2, "other"))


def test_a_folder_of_too_many_files_has_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.vllm.engine.adapters.MAX_ENTRIES", 2)
    path = write(tmp_path / "a", b"one")
    loads = AdapterLoads()
    assert loads.begins("adapter", str(path)) is not None
    (path / "more").touch()
    assert loads.begins("adapter", str(path)) is None


def test_beyond_the_adapters_that_are_remembered_none_is_taken_for_not_loaded(
    vllm: Vllm, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_loads, "MAX_ADAPTERS", 1)
    first, second = write(tmp_path / "a", b"one"), write(tmp_path / "b", b"one")
    vllm.add(first)
    vllm.add(second, 2, "second")
    renamed(second)
    assert not vllm.loads.may_have(files(second, 2, "second")), "vLLM has the files before"
    assert vllm.loads.has(files(first))


def test_who_is_gone_is_told_nothing(vllm: Vllm) -> None:
    watchers = len(internals._adapter_watchers)
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


def test_blocks_of_replaced_files_are_neither_stored_nor_loaded(
    worker: WorkerHalf, vllm: Vllm, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a", b"one")
    vllm.add(path)
    in_place(path)
    lora = ("adapter", str(path))
    computed(request_with("of another engine", lora), store)
    scheduler = half(store)
    asked = request_with("asked", lora)
    assert answer(scheduler, asked) == 96, "the pool has blocks of the files that are there now"
    scheduler.allocated(asked, TABLE, 96)
    with caplog.at_level(logging.WARNING, "vllm.kvpool"):
        step_of(worker, scheduler, scheduler.plan(output(request_with("x"), 0, TABLE)))
        assert answer(scheduler, asked) == 0
        scheduler.allocated(asked, TABLE, 0)
        assert scheduler.plan(output(asked, len(TOKENS), TABLE)).stores == []
        later = request_with("later", lora)
        scheduler.seen(later)
        assert answer(scheduler, later) == 0
    said = [record.getMessage() for record in caplog.records if "adapter" in record.getMessage()]
    assert len(said) == 1
    assert str(path) in said[0]
    for one in (asked, later):
        scheduler.finished(one)
    counted = scheduler.counters.take()
    assert counted[f"{metrics.ADAPTER_REQUESTS.name}/changed"] == 2
    scheduler.close()


def test_blocks_of_files_that_are_loaded_again_in_their_step_are_not_stored_and_none_later(
    worker: WorkerHalf, vllm: Vllm, store: Store, tmp_path: Path
) -> None:
    """Replaced behind the check, and before vLLM needs an adapter that it had dropped."""
    path = write(tmp_path / "a", b"one")
    vllm.add(path)
    scheduler, asked = half(store), request_with("asked", ("adapter", str(path)))
    pool = BlockPool(32, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(pool)
    blocks = pool.get_new_blocks(6)
    pool.cache_full_blocks(asked, blocks, 0, 6, BLOCK_TOKENS, 0)
    table = ([block.block_id for block in blocks] + [30],)
    scheduler.seen(asked)
    assert eventually(lambda: scheduler._requests["asked"].asked.checked)
    scheduler.allocated(asked, table, 0)
    step = scheduler.plan(output(asked, len(TOKENS), table))
    assert len(step.stores) == 6
    in_place(path)
    vllm.add(path, in_place=True)
    step_of(worker, scheduler, step)
    assert metrics.STORED_BLOCKS.name not in worker.counters.take()
    waiting = scheduler._store_planner._queue._waiting
    assert len(waiting) == 6, "as what a full staging dropped"
    again: list[BlockRef] = []

    def gives_up() -> bool:
        again.extend(scheduler.plan(output(request_with("x"), 0, TABLE)).stores)
        return not waiting

    assert eventually(gives_up)
    assert again == []
    assert scheduler.counters.take()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/adapter"] == 6
    scheduler.close()


def test_blocks_of_an_adapter_go_to_the_pool_and_come_from_it(
    worker: WorkerHalf, vllm: Vllm, store: Store, tmp_path: Path
) -> None:
    path = write(tmp_path / "a", b"one")
    vllm.add(path)
    lora = ("adapter", str(path))
    scheduler, asked = half(store), request_with("asked", lora)
    scheduler.seen(asked)
    assert eventually(lambda: scheduler._requests["asked"].asked.checked)
    scheduler.allocated(asked, TABLE, 0)
    step_of(worker, scheduler, scheduler.plan(output(asked, len(TOKENS), TABLE)))
    again = request_with("again", lora)
    scheduler.seen(again)
    assert answer(scheduler, again) == 96
    scheduler.allocated(again, TABLE, 96)
    step_of(worker, scheduler, scheduler.plan(output(request_with("x"), 0, TABLE)))
    assert not scheduler._requests["again"].refused
    shutil.rmtree(path)
    scheduler.close()


def test_a_worker_that_knows_of_no_adapters_moves_none(tmp_path: Path) -> None:
    config = PoolConfig(pool=f"file://{tmp_path}/pool")
    worker = WorkerHalf(config, Geometry((Group(16),), step_tokens=2048), rank=0)
    worker.register([[torch.zeros(16, 4, 32, 8)]], dict(FACTS))
    block = BlockRef(bytes(32), 0, (1,), AdapterFiles(1, "adapter", "path", b"state"))
    step = PoolMetadata(stores=[block], tags=[7], loads=[LoadPlan("a", [block], 60.0)])
    worker.start_loads(step)
    worker.start_stores(step)
    assert worker.poll(idle=True) == ({"a"}, {"a"})
    report = worker.take_report()
    assert report is not None
    assert (report.dropped, report.other_files) == ({7: 1}, {("adapter", "path")})
    worker.close()
