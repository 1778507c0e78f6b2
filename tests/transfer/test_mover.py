"""The transfer engine on a real file store, and on a store that stalls on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool import metrics
from kvpool.errors import ConfigError
from kvpool.metrics import Counters
from kvpool.store import Batch, Store, open_store
from kvpool.transfer import BlockCopier, KVCacheMover
from kvpool.transfer.kv_memory import ABANDON_AFTER_S, Block
from tests.support.deadlines import ends_within, eventually
from tests.support.mover import run
from tests.support.scripted_store import ScriptedStore, key

BLOCKS = 40


def layers(groups: int = 2) -> list[list[torch.Tensor]]:
    """KV caches of a few groups: contiguous, strided and of several element types."""
    made = []
    for group in range(groups):
        contiguous = torch.zeros((BLOCKS, 4, 32, 16), dtype=torch.bfloat16)
        strided = torch.zeros((BLOCKS, 2, 32, 4, 16), dtype=torch.float32).transpose(2, 3)
        made.append(
            [contiguous, strided] if group % 2 == 0 else [torch.zeros((BLOCKS, 48), dtype=torch.int8)]
        )
    return made


def fill(caches: list[list[torch.Tensor]], seed: int) -> None:
    torch.manual_seed(seed)
    for group in caches:
        for layer in group:
            layer.copy_(torch.randint(-100, 100, layer.shape).to(layer.dtype))


def engine_on(
    store: Store,
    caches: list[list[torch.Tensor]],
    slots: int = 16,
    cap: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> KVCacheMover:
    copiers = [BlockCopier(group) for group in caches]
    slot_nbytes = max(copier.payload_nbytes for copier in copiers)
    return KVCacheMover(
        store,
        copiers,
        staging_nbytes=slots * slot_nbytes,
        max_store_nbytes_per_s=cap,
        counters=Counters(),
        clock=SimpleNamespace(monotonic=clock, sleep=time.sleep),
    )


def scripted() -> ScriptedStore:
    """A store that has all blocks of the first group, and ends its batches when the test says so."""
    store = ScriptedStore()
    store.records |= {key(n, 0): bytes(BlockCopier(layers(1)[0]).payload_nbytes) for n in range(BLOCKS)}
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"file://{tmp_path}/pool") as store:
        yield store


def blocks(numbers: Sequence[int], groups: int = 2, shift: int = 0) -> list[Block]:
    return [Block(key(n, g), g, (1 + (n + shift) % (BLOCKS - 1),)) for g in range(groups) for n in numbers]


def test_blocks_come_back_byte_for_byte_in_other_places(store: Store) -> None:
    source, target = layers(), layers()
    fill(source, 1)
    fill(target, 2)
    writer, reader = engine_on(store, source, slots=128), engine_on(store, target, slots=5)
    numbers = range(20)
    writer.stage(blocks(numbers), tags=list(range(40)))
    assert sorted(run(writer).stored) == [(tag, True) for tag in range(40)]
    untouched = [[layer.clone() for layer in group] for group in target]
    reader.load("job", blocks(numbers, shift=7), timeout_s=60, max_s=60)
    assert [(load.job, load.ok) for load in run(reader).loads] == [("job", True)]
    for group, (ours, theirs, before) in enumerate(zip(target, source, untouched, strict=True)):
        written = {block.block_ids[0] for block in blocks(numbers, shift=7) if block.group == group}
        for mine, other, old in zip(ours, theirs, before, strict=True):
            for n in numbers:
                assert torch.equal(mine[1 + (n + 7) % (BLOCKS - 1)], other[1 + n % (BLOCKS - 1)])
            for index in set(range(BLOCKS)) - written:
                assert torch.equal(mine[index], old[index])
    assert writer.slots_in_use == reader.slots_in_use == 0


def test_a_load_of_a_lower_number_gets_the_next_slots(store: Store) -> None:
    caches = layers(1)
    writer = engine_on(store, caches, slots=64)
    writer.stage(blocks(range(24), groups=1), tags=list(range(24)))
    run(writer)
    engine = engine_on(store, caches, slots=2)
    engine.load("first", blocks(range(8), groups=1), timeout_s=60, max_s=60)  # takes both slots
    engine.load("late", blocks(range(8, 16), groups=1), timeout_s=60, max_s=60, priority=1)
    engine.load("soon", blocks(range(16, 24), groups=1), timeout_s=60, max_s=60, priority=-1)
    assert [(load.job, load.ok) for load in run(engine).loads] == [
        ("soon", True),
        ("first", True),
        ("late", True),
    ]


def test_a_load_with_one_missing_block_fails_and_names_it(store: Store) -> None:
    caches = layers(1)
    engine = engine_on(store, caches)
    engine.stage(blocks(range(6), groups=1), tags=list(range(6)))
    run(engine)
    store.delete_many([key(4, 0)])
    fill(caches, 9)
    before = [layer.clone() for layer in caches[0]]
    engine.load("job", blocks(range(6), groups=1), timeout_s=60, max_s=60)
    (load,) = run(engine).loads
    assert not load.ok
    assert load.missing == [4]
    assert engine.slots_in_use == 0
    assert all(torch.equal(layer, old) for layer, old in zip(caches[0], before, strict=True)), (
        "nothing is copied"
    )


def test_the_cap_on_store_bandwidth_holds(store: Store) -> None:
    caches = layers(1)
    payload = BlockCopier(caches[0]).payload_nbytes
    engine = engine_on(store, caches, slots=64, cap=3 * payload)
    engine.stage(blocks(range(20), groups=1), tags=list(range(20)))
    assert sum(ok for _, ok in run(engine).stored) == 3


@pytest.mark.parametrize("seconds_a_record", [0.9, 1.0, 1.1, 7.0])
def test_records_that_the_cap_takes_seconds_for_are_stored_at_its_rate(
    store: Store, seconds_a_record: float
) -> None:
    caches, now = layers(1), [0.0]
    payload = BlockCopier(caches[0]).payload_nbytes
    cap = int(payload / seconds_a_record)
    engine = engine_on(store, caches, slots=64, cap=cap, clock=lambda: now[0])
    stored, ends_s = 0, 20 * seconds_a_record
    while now[0] < ends_s:
        engine.stage(blocks([stored], groups=1), tags=[stored])
        stored += sum(ok for _, ok in run(engine).stored)
        now[0] += 0.25
    assert stored == pytest.approx(20, abs=2), "one more at the start, and one more that went into debt"


def test_large_records_pass_the_cap_beside_small_ones_that_empty_it(store: Store) -> None:
    caches, now = layers(2), [0.0]
    first, second = (BlockCopier(group).payload_nbytes for group in caches)
    small, large = (0, 1) if first < second else (1, 0)
    engine = engine_on(store, caches, slots=64, cap=max(first, second) // 2, clock=lambda: now[0])
    stored = [0, 0]
    for step in range(600):
        some = [Block(key(step, small), small, (1,)), Block(key(stored[large], large), large, (2,))]
        engine.stage(some, tags=[small, large])
        for tag, ok in run(engine).stored:
            stored[tag] += ok
        now[0] += 0.1
    assert stored[large] >= 5
    assert stored[small] >= 5


def test_ranks_whose_caps_are_out_of_step_store_a_record_in_the_end(tmp_path: Path) -> None:
    caches, now = layers(1), [0.0]
    cap = BlockCopier(caches[0]).payload_nbytes // 10  # a record in 10 s
    with (
        open_store(f"file://{tmp_path}/a") as ours,
        open_store(f"file://{tmp_path}/b") as theirs,
    ):
        ranks = [engine_on(store, caches, cap=cap, clock=lambda: now[0]) for store in (ours, theirs)]
        ranks[0].stage(blocks([0], groups=1), tags=[0])  # 5 s before the other's
        run(ranks[0])
        now[0] += 5
        ranks[1].stage(blocks([1], groups=1), tags=[1])
        run(ranks[1])
        attempts = []
        while now[0] < 120 and not any(map(all, attempts)):
            now[0] += 5  # the pause of a queue whose records are dropped
            for rank in ranks:
                rank.stage(blocks([2], groups=1), tags=[2])
            attempts.append([ok for rank in ranks for _, ok in run(rank).stored])
        assert all(attempts[-1]), f"one of them drops it each time: {attempts}"


@pytest.mark.parametrize("cause", ["bandwidth_cap", "staging_full"])
def test_what_is_joined_is_staged_together_or_not_at_all(store: Store, cause: str) -> None:
    """Staging has room for two records and one part; the cap for one and one part, whose record goes into debt whole.

    Else each step would send all first parts, and no record whole.
    """
    caches = layers(2)
    first, second = (BlockCopier(group).payload_nbytes for group in caches)
    room = {"cap": 2 * first + second} if cause == "bandwidth_cap" else {"slots": 6}  # one is for loads
    engine = engine_on(store, caches, **{"slots": 64, **room})
    parts = [Block(key(n, g), g, (1 + n,), joined=g > 0) for n in range(4) for g in range(2)]
    engine.stage(parts, tags=list(range(8)))
    assert sorted(run(engine).stored) == [(tag, tag < 4) for tag in range(8)]
    assert engine._counters.take()[f"{metrics.STORE_SKIPPED_BLOCKS.name}/{cause}"] == 4


def test_a_load_that_the_store_never_ends_fails_in_time_and_late_bytes_go_nowhere() -> None:
    store, caches = scripted(), layers(1)
    fill(caches, 5)
    before = [layer.clone() for layer in caches[0]]
    engine = engine_on(store, caches, slots=4)
    with ends_within(0.2 + ABANDON_AFTER_S):  # the budget, and the grace for a batch that is stopping
        engine.load("job", blocks(range(4), groups=1), timeout_s=0.2, max_s=5)
        (load,) = run(engine).loads
    assert not load.ok
    assert engine.slots_in_use == 4, "the store may still write into them"
    for batch in store.under_way:
        assert batch.cancelled
        for view in batch.views:
            view[:] = b"\xff" * view.nbytes
    store.end_all()
    engine.poll()
    assert engine.slots_in_use == 0
    assert all(torch.equal(layer, old) for layer, old in zip(caches[0], before, strict=True))
    store.close()


def test_a_slow_load_ends_at_its_cap_however_much_progress_it_makes() -> None:
    store, caches = scripted(), layers(1)
    engine = engine_on(store, caches, slots=2)
    engine.load("job", blocks(range(30), groups=1), timeout_s=60, max_s=0.3)
    ended: list[bool] = []

    def one_more_block() -> bool:
        if store.under_way:
            store.end(-1)
        ended.extend(load.ok for load in engine.poll().loads)
        time.sleep(0.02)
        return bool(ended)

    assert eventually(one_more_block)
    assert ended == [False]
    store.close()


def refuse(*_: object, **__: object) -> Batch:
    raise ConfigError("planted")


def test_a_batch_of_stores_that_is_refused_costs_those_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(store, layers())
    with monkeypatch.context() as broken:
        broken.setattr(store, "submit_put_absent", refuse)
        engine.stage(blocks(range(2)), tags=[0, 1, 2, 3])
        assert sorted(run(engine).stored) == [(tag, False) for tag in range(4)]
    assert engine.slots_in_use == 0
    engine.stage(blocks(range(2)), tags=[4, 5, 6, 7])
    assert sorted(run(engine).stored) == [(tag, True) for tag in range(4, 8)]


def test_a_batch_of_a_load_that_is_refused_costs_that_load_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(store, layers())
    engine.stage(blocks(range(2)), tags=[0, 1, 2, 3])
    run(engine)
    with monkeypatch.context() as broken:
        broken.setattr(store, "submit_get", refuse)
        engine.load("refused", blocks(range(2)), timeout_s=60, max_s=60)
        assert [(load.job, load.ok) for load in run(engine).loads] == [("refused", False)]
    assert engine.slots_in_use == 0
    engine.load("again", blocks(range(2)), timeout_s=60, max_s=60)
    assert [(load.job, load.ok) for load in run(engine).loads] == [("again", True)]


def test_cancel_ends_a_load_and_returns_its_slots() -> None:
    store, caches = scripted(), layers(1)
    engine = engine_on(store, caches, slots=4)
    engine.load("job", blocks(range(30), groups=1), timeout_s=60, max_s=60)
    engine.cancel("job")
    assert all(batch.cancelled for batch in store.under_way)
    assert engine.poll().loads == [], "its slots are still the store's"
    store.end_all()
    assert [load.ok for load in engine.poll().loads] == [False]
    assert not store.under_way, "a cancelled load submits no further part"
    assert engine.slots_in_use == 0
    store.close()


def test_close_ends_everything() -> None:
    store, caches = scripted(), layers(1)
    engine = engine_on(store, caches, slots=4)
    engine.load("job", blocks([1, 2], groups=1), timeout_s=60, max_s=60)
    engine.stage(blocks([5], groups=1), tags=[5])
    engine.close()
    assert all(batch.cancelled for batch in store.under_way)
    assert not engine._parts
    store.close()


def test_a_fault_while_parts_arrive_releases_each_slot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, caches = scripted(), layers(1)
    engine = engine_on(store, caches, slots=4)
    engine.load("job", blocks(range(4), groups=1), timeout_s=60, max_s=60)
    assert len(store.under_way) == 2

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(BlockCopier, "scatter", broken)
    store.end_all()
    with pytest.raises(ZeroDivisionError):
        engine.poll()
    engine.close()
    assert engine.slots_in_use == 0
    store.close()


def test_a_load_that_ended_in_time_is_good_however_late_it_is_polled() -> None:
    """An engine that is paused polls nothing for minutes."""
    store, caches = scripted(), layers(1)
    engine = engine_on(store, caches, slots=8)
    engine.load("job", blocks([1, 2], groups=1), timeout_s=60, max_s=0.01)
    store.end()
    started = time.monotonic()
    assert eventually(lambda: time.monotonic() > started + 0.02)
    assert [load.ok for load in engine.poll().loads] == [True]
    store.close()
