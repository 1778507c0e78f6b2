"""Workers of engines of several sizes on one pool: each record's parts are stored, loaded and counted together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.config import PoolConfig
from kvpool.key.key import Fact, Namespace
from kvpool.store import open_store
from kvpool.vllm.engine.part_tags import PartTags
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import BlockRef, LoadPlan, PoolMetadata
from kvpool.vllm.worker import WorkerHalf
from tests.support.deadlines import eventually
from tests.support.heads import BLOCKS, HEADS, LAYERS, SIZES, TOKENS, model_cache, of_rank

pytestmark = [pytest.mark.vllm]

FACTS: dict[str, Fact] = {"model": "of any size"}


def worker_of(pool: str, ranks: int, rank: int, model: list[torch.Tensor]) -> tuple[WorkerHalf, Any]:
    groups = [Group(TOKENS, parts=HEADS // ranks), Group(TOKENS, latent=True, copies=ranks)]
    worker = WorkerHalf(PoolConfig(pool=pool), Geometry(tuple(groups), step_tokens=64), rank=rank)
    layers = [of_rank(model, ranks, rank), [torch.full((BLOCKS, 16), 3.0)]]
    worker.register(layers, FACTS, shared=groups)
    return worker, layers[0]


def polled(worker: WorkerHalf, *tags: int) -> dict[str, dict[int, int]]:
    """Poll until these tags have ended; what was reported of each, in all."""
    seen: dict[str, dict[int, int]] = {"staged": {}, "stored": {}, "dropped": {}}

    def over() -> bool:
        worker.poll(idle=True)
        if (report := worker.take_report()) is not None:
            for name, counts in seen.items():
                for tag, count in getattr(report, name).items():
                    counts[tag] = counts.get(tag, 0) + count
        return {*seen["stored"], *seen["dropped"]} >= set(tags)

    assert eventually(over)
    return seen


def loaded(worker: WorkerHalf, *refs: BlockRef) -> tuple[set[str], set[str]]:
    worker.start_loads(PoolMetadata(loads=[LoadPlan("a", refs, 60.0)]))
    ended: set[str] = set()
    failed: set[str] = set()

    def over() -> bool:
        for into, now in zip((ended, failed), worker.poll(idle=True), strict=True):
            into |= now
        return bool(ended)

    assert eventually(over)
    return ended, failed


def hashed(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize(("stores", "loads"), list(itertools.permutations(SIZES, 2)))
def test_what_ranks_of_one_size_store_ranks_of_another_one_load(
    tmp_path: Path, stores: int, loads: int
) -> None:
    pool, model = f"file://{tmp_path}/pool", model_cache()
    refs = [BlockRef(hashed(1), 0, (3,)), BlockRef(hashed(2), 0, (4,)), BlockRef(hashed(1), 1, (3,))]
    for rank in range(stores):
        worker, _ = worker_of(pool, stores, rank, model)
        report = worker.take_report()
        assert report is not None
        assert report.parts == {0: HEADS // stores, 1: 1}
        worker.start_stores(PoolMetadata(stores=list(refs), tags=[10, 11, 12]))
        seen = polled(worker, 10, 11, 12)
        assert seen == {"staged": {10: 1, 11: 1, 12: 1}, "stored": {10: 1, 11: 1, 12: 1}, "dropped": {}}
        worker.close()
    namespace = Namespace("default", FACTS)
    keys = [namespace.key(hashed(1), 0, part) for part in range(HEADS)] + [namespace.key(hashed(1), 1, 0)]
    beyond = [namespace.key(hashed(1), 0, HEADS), namespace.key(hashed(1), 1, 1)]
    with open_store(pool) as store:
        assert store.contains_many([*keys, *beyond]) == [True] * (HEADS + 1) + [False] * 2
    for rank in range(loads):
        worker, layers = worker_of(pool, loads, rank, [torch.zeros_like(layer) for layer in model])
        assert loaded(worker, refs[0]._replace(block_ids=(6,)), refs[1]._replace(block_ids=(7,))) == (
            {"a"},
            set(),
        )
        for here, whole in zip(layers, of_rank(model, loads, rank), strict=True):
            assert torch.equal(here[6:8], whole[3:5])
            assert not here[:6].any()
        worker.close()


def test_a_lost_part_fails_the_load_and_names_the_record(tmp_path: Path) -> None:
    pool, model = f"file://{tmp_path}/pool", model_cache()
    worker, _ = worker_of(pool, 1, 0, model)
    refs = [BlockRef(hashed(number), 0, (number,)) for number in (1, 2)]
    worker.start_stores(PoolMetadata(stores=refs, tags=[1, 2]))
    polled(worker, 1, 2)
    with open_store(pool) as store:
        store.delete_many([Namespace("default", FACTS).key(hashed(2), 0, 2)])
    assert loaded(worker, *refs) == ({"a"}, {"a"})
    report = worker.take_report()
    assert report is not None
    assert report.missing == {(hashed(2), 0)}
    worker.close()


def test_staging_holds_two_whole_records_however_small_it_was_set(tmp_path: Path) -> None:
    group = Group(TOKENS, parts=HEADS)
    config = PoolConfig(pool=f"file://{tmp_path}/pool", staging_nbytes=1 << 20)
    wide = [torch.zeros(BLOCKS, HEADS, TOKENS, 1 << 12) for _ in range(LAYERS)]  # parts of 1 MiB
    worker = WorkerHalf(config, Geometry((group,), step_tokens=64), rank=0)
    worker.register([wide], FACTS, shared=[group])
    report = worker.take_report()
    assert report is not None
    assert report.store_slots >= 1
    assert report.part_nbytes == {(0, part): 1 << 20 for part in range(HEADS)}
    worker.start_stores(PoolMetadata(stores=[BlockRef(hashed(1), 0, (1,))], tags=[1]))
    assert polled(worker, 1)["stored"] == {1: 1}
    worker.close()


def test_a_record_is_staged_when_all_its_parts_are_and_stored_if_all_are() -> None:
    tags = PartTags(4)
    numbers = tags.begin({7: 4, 8: 1})
    assert len(set(numbers)) == 5
    assert list(tags.staged(numbers[:3])) == []
    assert list(tags.staged(numbers[3:])) == [7, 8]
    assert list(tags.ended([(numbers[0], True), (numbers[4], True), (numbers[2], False)])) == [(8, True)]
    assert len(tags) == 1
    assert list(tags.ended([(numbers[1], True), (numbers[3], True)])) == [(7, False)]
    assert not tags
    numbers = tags.begin({9: 2, 10: 2})
    assert list(tags.staged(numbers[:3])) == [9]
    assert tags.give_up() == ([10], [9, 10])
    assert not tags
