"""Random lives of adapters, beside a model that knows what each block was computed with.

An engine of two ranks, whose steps report at once or a step late. Adapters are loaded, in place, too, and dropped for
want of room, by calls and all at once; files are written over or cannot be read; two numbers stand for one name and
path; requests leave, wait for their adapter or do not, have the pool or not; caches are reset. The engine's cache finds
blocks by name and path alone, as vLLM's does. No block may be called by another digest than that of what computed it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvpool.vllm.engine import adapters
from kvpool.vllm.engine.adapter_loads import AdapterLoads
from kvpool.vllm.engine.adapters import AdapterCheck, Adapters
from kvpool.vllm.plan import AdapterWeights, PoolMetadata

pytestmark = [pytest.mark.vllm]

RANKS, BLOCKS, ROOM, STEPS = 2, 3, 2, 80
MIXED = "mixed"  # of a block behind blocks of other weights
CALLED = [(1, ("a", "/a")), (2, ("b", "/b")), (3, ("a", "/a"))]  # numbers with names and paths
EVENTS = {
    "ask": 8, "leave": 1, "add": 1, "add in place": 1, "remove": 1, "remove all": 0.3, "write": 1, "fail": 0.3,
    "reset": 1, "nothing": 4,
}  # fmt: skip


class Held:
    """What a rank's vLLM holds: as ``internals.HeldAdapters``."""

    def __init__(self, files: dict[str, str], failing: set[str]) -> None:
        self.files, self._failing = files, failing
        self.of_number: dict[int, str] = {}
        self._ahead: dict[tuple[int, str, str], str] = {}

    def digests(self) -> dict[int, str]:
        return dict(self.of_number)

    def ahead(self, number: int, name: str, path: str) -> str | None:
        return self._ahead.get((number, name, path))

    def read(self, asked: LoRARequest) -> str:
        if asked.lora_path in self._failing:
            raise OSError("planted")
        self._ahead[asked.lora_int_id, asked.lora_name, asked.lora_path] = self.files[asked.lora_path]
        return self.files[asked.lora_path]

    def load(self, asked: LoRARequest, in_place: bool, needed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        number = asked.lora_int_id
        if number in self.of_number and not in_place:
            return
        ahead = self._ahead.pop((number, asked.lora_name, asked.lora_path), None)
        self.of_number.pop(number, None)
        if len(self.of_number) >= ROOM:
            del self.of_number[next(one for one in self.of_number if one not in needed)]
        self.of_number[number] = self.files[asked.lora_path] if ahead is None or in_place else ahead


@dataclass(eq=False)
class Cell:
    """A block of the engine's cache."""

    of: str = ""


@dataclass(eq=False)
class Asking:
    lora: LoRARequest
    check: AdapterCheck
    has_pool: bool
    steps: int
    waited: int = 0
    is_loading: bool = False
    has_loaded: bool = False
    is_planned: bool = False


@dataclass
class Store:
    tag: bytes
    block: int
    weights: AdapterWeights
    cell: Cell


@dataclass
class Load:
    asking: Asking
    blocks: range
    tag: bytes
    weights: AdapterWeights
    ok: bool = True


@dataclass
class Report:
    news: dict[tuple[int, int], str] = field(default_factory=dict)
    ended: list[Asking] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


class Life:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.late = self.draw.choice([0, 1])  # steps between a report and its reading
        self.patience = self.draw.choice([0, 1, 4])  # steps that a request waits for its adapter
        self.files, self.failing = {"/a": "a0", "/b": "b0"}, set[str]()
        self.adapters = Adapters(RANKS)
        self.held = [Held(self.files, self.failing) for _ in range(RANKS)]
        self.workers = [AdapterLoads(rank) for rank in range(RANKS)]
        for worker, held in zip(self.workers, self.held, strict=True):
            worker.held = held  # type: ignore[assignment]
        self.waiting: list[Asking] = []
        self.running: list[Asking] = []
        self.cache: dict[tuple[tuple[str, str], int], Cell] = {}
        self.pool: dict[tuple[bytes, int], str] = {}
        self.queue: list[Store] = []
        self.reports: list[Report] = []
        self.hits = self.versions = 0

    def event(self) -> None:
        [what] = self.draw.choices(list(EVENTS), list(EVENTS.values()))
        number, (name, path) = self.draw.choice(CALLED)
        lora = LoRARequest(name, number, path)
        self.failing.clear()
        if what == "ask":
            has_pool = self.draw.random() < 0.8
            self.waiting.append(
                Asking(lora, self.adapters.check(lora), has_pool, self.draw.choice([1, 1, 2, 4]))
            )
        elif what == "leave" and self.waiting:
            self.end(self.draw.choice(self.waiting))
        elif what in ("add", "add in place"):
            for held in self.held:
                held.load(lora, what == "add in place")
        elif what == "remove":
            for held in self.held:
                held.of_number.pop(number, None)
        elif what == "remove all":
            for held in self.held:
                held.of_number.clear()
        elif what == "write":
            self.versions += 1
            self.files[path] = self.draw.choice([f"{name}{self.versions}", "a0", "b0"])
        elif what == "fail":
            self.failing.add(path)
        elif what == "reset" and not self.running and not any(one.is_loading for one in self.waiting):
            self.reset()

    def reset(self) -> None:
        self.cache.clear()
        self.queue.clear()
        self.adapters.reset()

    def end(self, asking: Asking) -> None:
        for requests in (self.waiting, self.running):
            if asking in requests:
                requests.remove(asking)
        self.adapters.end(asking.check)

    def step(self) -> None:
        step, report = PoolMetadata(), Report()
        for asking in list(self.waiting):
            self.schedule(asking, report)
        self.adapters.add_to(step)
        stores, computed = self.plan()
        for worker in self.workers:
            if step.tell_adapters:
                worker.tell_all()
            for asked in step.adapters:
                worker.look(asked)
        for load in report.loads:
            load.ok = all(worker.may_have(load.weights) for worker in self.workers)
        needed = {asking.lora.lora_int_id for asking in self.running}
        for asking, cells in computed:
            for held in self.held:
                held.load(asking.lora, False, needed)
            now = self.held[0].of_number[asking.lora.lora_int_id]
            for place, cell in enumerate(cells):
                cell.of = cell.of or (now if {one.of for one in cells[:place]} <= {now} else MIXED)
        for store in stores:
            self.send(store)
        for rank, worker in enumerate(self.workers):
            report.news |= {(rank, number): one for number, one in worker.take_news().items()}
        for load in report.loads:
            load.ok &= all(worker.may_have(load.weights) for worker in self.workers)
        for asking in self.running:
            asking.steps -= 1
        report.ended = [asking for asking in self.running if asking.steps == 0]
        self.reports.append(report)
        while len(self.reports) > self.late:
            self.read(self.reports.pop(0))

    def schedule(self, asking: Asking, report: Report) -> None:
        """Begin it, or its load, or leave it waiting."""
        check = asking.check
        numbers = {one.lora.lora_int_id for one in self.running} | {asking.lora.lora_int_id}
        if asking.is_loading or len(numbers) > ROOM:
            return
        if asking.has_pool:
            self.adapters.want(check)
            if not check.done and asking.waited < self.patience:
                asking.waited += 1
                return
        held = next((one for one in range(BLOCKS) if (check.key, one) not in self.cache), BLOCKS)
        if asking.has_pool and check.tag is not None and check.weights is not None and not asking.has_loaded:
            found = next((one for one in range(held, BLOCKS) if (check.tag, one) not in self.pool), BLOCKS)
            if found > held:
                asking.is_loading = asking.has_loaded = True
                report.loads.append(Load(asking, range(held, found), check.tag, check.weights))
                return
        self.waiting.remove(asking)
        self.running.append(asking)

    def plan(self) -> tuple[list[Store], list[tuple[Asking, list[Cell]]]]:
        """Stores of this step, and who computes with which blocks."""
        kept = [one for one in self.queue if self.cache.get((one.weights.key, one.block)) is one.cell]
        stores = [one for one in kept if not self.adapters.has_changed(one.weights.key)]
        self.queue.clear()
        computed = []
        for asking in self.running:
            check = asking.check
            cells = [self.cache.setdefault((check.key, block), Cell()) for block in range(BLOCKS)]
            computed.append((asking, cells))
            if (
                asking.has_pool
                and check.tag is not None
                and check.weights is not None
                and not asking.is_planned
            ):
                asking.is_planned = True
                for block, cell in enumerate(cells):
                    to = stores if self.draw.random() < 0.7 else self.queue  # staging is full
                    to.append(Store(check.tag, block, check.weights, cell))
        return stores, computed

    def send(self, store: Store) -> None:
        if all(worker.has(store.weights) for worker in self.workers):
            assert store.tag == tag_of(store.cell.of), (store, self.late)
            self.pool.setdefault((store.tag, store.block), store.cell.of)
        else:
            self.queue.append(store)

    def read(self, report: Report) -> None:
        for asking in report.ended:  # as vLLM does, before the connector's news
            self.end(asking)
        for load in report.loads:
            load.asking.is_loading = False
            if load.ok and load.asking in self.waiting:
                self.hits += len(load.blocks)
                for block in load.blocks:
                    cell = Cell(self.pool[load.tag, block])
                    self.cache.setdefault((load.weights.key, block), cell)
        self.adapters.learn(report.news)


def tag_of(digest: str) -> bytes | None:
    one = Adapters(1)
    one.learn({(0, 1): digest})
    return one.check(LoRARequest("any", 1, "/any")).tag


@pytest.mark.parametrize("first", range(0, 600, 150))
def test_no_block_is_stored_under_other_weights_than_those_that_computed_it(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters.logger, "warning", lambda *_: None)
    hits = stored = 0
    for seed in range(first, first + 150):
        life = Life(seed)
        for _ in range(STEPS):
            life.event()
            life.step()
        hits, stored = hits + life.hits, stored + len(life.pool)
        at_rest(life)
    assert hits > 200
    assert stored > 400


def at_rest(life: Life) -> None:
    """When all have left, and the caches are reset, adapters are known in a step or two."""
    life.failing.clear()
    for asking in life.waiting + life.running:
        life.end(asking)
    life.reset()
    asked: Sequence[tuple[int, Any]] = CALLED[:2]
    checks = [life.adapters.check(LoRARequest(name, number, path)) for number, (name, path) in asked]
    for _ in range(3):
        for check in checks:
            life.adapters.want(check)
        life.step()
    assert all(check.tag is not None for check in checks)
    for check in checks:
        life.adapters.end(check)
    assert not life.adapters._live
    assert not life.adapters._wanted
