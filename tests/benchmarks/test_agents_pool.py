"""The pools of ``python -m benchmarks agents``: what they evict, and where they find blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.agents_index import NEAR, POOL, EventLog, RealIndex
from benchmarks.agents_pool import Found, Held, HostPool, RealPool
from benchmarks.agents_traffic import Traffic, made_up
from kvpool.discovery.reuse import ReuseCurve
from kvpool.discovery.trace import prompts
from kvpool.store import Store, open_store

BLOCKS = 40
TRAFFIC = Traffic([], np.arange(1, BLOCKS + 1, dtype=np.uint64) << np.uint64(40), 64, are_sessions=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"file://{tmp_path}/pool?capacity=16MiB") as opened:
        yield opened


def test_a_bounded_pool_evicts_as_kvpool_size_counts() -> None:
    trace = made_up(3, seed=3)
    asked = list(prompts(trace, apart_s=60))
    curve = ReuseCurve()
    for one in asked:
        curve.ask(one)
    points = curve.points()
    for at in (len(points) // 2, len(points) * 3 // 4, len(points) - 1):
        held, hits = Held(points[at].blocks), 0
        for one in asked:
            hits += next((place for place, block in enumerate(one) if block not in held), len(one))
            held.add(one)
        assert hits / sum(map(len, asked)) == pytest.approx(points[at].hit_rate)
    assert 0 < points[len(points) * 3 // 4].hit_rate < points[-1].hit_rate


def test_what_a_bounded_pool_evicts_leaves_its_store(store: Store) -> None:
    pool = RealPool(store, TRAFFIC, most_blocks=6)
    assert pool.put([0, 1, 2, 3]) == []
    assert pool.put([2, 4]) == []
    pool.use([0, 9, 1])  # 1 is behind a gap
    assert pool.count_absent([0, 1, 9]) == 1
    assert pool.put([5, 6, 7]) == [1, 3]
    assert [pool.leading([block]) for block in range(8)] == [1, 0, 1, 0, 1, 1, 1, 1]
    assert pool.leading([0, 2, 1, 4]) == 2


def test_far_is_asked_for_what_near_lacks(store: Store) -> None:
    near, far = Held(8), RealPool(store, TRAFFIC)
    far.put([0, 1, 2, 5])
    near.add([1, 3, 6])
    assert HostPool(near, far).find([0, 1, 2, 3, 4, 5]) == Found([1, 3], [0, 2])
    assert HostPool(None, far).find([0, 1, 2, 3, 4, 5]) == Found([], [0, 1, 2])
    assert HostPool(Held(1), far).find([4, 0]) == Found([], [])
    store.close()
    assert HostPool(near, far).find([1, 3]) == Found([1, 3], [])  # asks far nothing


def test_the_index_forgets_what_the_pool_evicted(store: Store) -> None:
    pool = RealPool(store, TRAFFIC)
    index = RealIndex(lambda: 0.0, TRAFFIC, pool.namespace.hex, {}, 1000)
    index.join("00", ())
    log = EventLog(TRAFFIC)
    index.tell("00", log.write(0.0, POOL, [0, 1, 2, 3], (), None))
    index.pool_lost([2])
    [row] = index._fleet.lookup("agents", hashes64=TRAFFIC.hashes[:4].tobytes())
    assert row.pool_blocks == 2


def test_the_index_knows_what_each_host_has_near(store: Store) -> None:
    nears = {"00": "0" * 32, "01": "0" * 32, "02": "1" * 32}
    index = RealIndex(lambda: 0.0, TRAFFIC, RealPool(store, TRAFFIC).namespace.hex, nears, 1000)
    for name in nears:
        index.join(name, ())
    log = EventLog(TRAFFIC)
    index.tell("00", log.write(0.0, NEAR, [0, 1, 2, 3], (), None))
    index.tell("00", log.write(1.0, NEAR, (), [3], None))
    rows = index._fleet.lookup("agents", hashes64=TRAFFIC.hashes[:4].tobytes())
    assert [row.local_blocks for row in rows] == [3, 3, 0]
