"""An engine whose tenant is over its quota stores nothing, loads what is there, and stores again when there is room."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import metrics, open_store
from kvpool.discovery.quota import write_held, write_quota
from kvpool.errors import StoreUnavailable
from kvpool.index.follow.quota_keeper import QuotaKeeper
from kvpool.key.key import Namespace, tenant_prefix
from kvpool.metrics import Counters
from kvpool.store import LookupGroup, Store
from kvpool.vllm.plan import PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.save.retention import TOUCH_EVERY_S, Prefix, Retention
from kvpool.vllm.scheduler import SchedulerHalf
from tests.support.command_line import kvpool
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore
from tests.support.records import HEADER_NBYTES
from tests.support.scheduler import FACTS, TABLE, answer, half, output, request

pytestmark = [pytest.mark.vllm]

NBYTES = 1000
RECORD_NBYTES = NBYTES + HEADER_NBYTES
BLOCKS = 6  # full ones of a prompt of 100 tokens


class Fleet:
    """Engines of two tenants, and an index that counts; all turn by hand."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self.store = store
        self.engines = {tenant: half(store, tenant=tenant, **settings) for tenant in ("a", "b")}
        self.keeper = QuotaKeeper(store, lambda: ["a", "b"])
        self.keeper.close()  # its thread
        self.keeper._closing = False
        self.prompts = 0

    def turn(self) -> None:
        """The index counts, and workers read."""
        self.keeper.turn()
        for engine in self.engines.values():
            engine._quota.turn()

    def serves(self, tenant: str, first: int | None = None) -> PoolMetadata:
        """An engine computes a prompt, another one each time, and its workers store what the step says."""
        engine = self.engines[tenant]
        self.prompts += 1
        begins = 1000 * self.prompts if first is None else first
        asked = request(f"r{self.prompts}", first=begins)
        assert answer(engine, asked) == 0 if first is None else True
        engine.allocated(asked, TABLE, 0)
        step = engine.plan(output(asked, 100, TABLE))
        keys = Namespace(tenant, FACTS).keys([block.block_hash for block in step.stores], 0, 0)
        assert all(self.store.submit_put_absent(keys, [bytes(NBYTES)] * len(keys)).wait())
        everywhere = dict.fromkeys(step.tags, 1)
        engine.update(PoolWorkerMetadata(staged=everywhere, stored=everywhere), (), ())
        engine.finished(asked)
        return step

    def loads(self, tenant: str, first: int) -> int:
        """The tokens that the pool has of a prompt."""
        self.prompts += 1
        asked = request(f"r{self.prompts}", first=first)
        tokens = answer(self.engines[tenant], asked)
        self.engines[tenant].finished(asked)
        return tokens

    def held_nbytes(self, tenant: str) -> int:
        return sum(block.nbytes for blocks in self.store.scan(tenant_prefix(tenant)) for block in blocks)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    opened: list[Fleet] = []
    with open_store(f"file://{tmp_path}/pool?capacity=64MiB") as store:

        def start(own: Store | None = None, **settings: Any) -> Fleet:
            opened.append(Fleet(own or store, **settings))
            return opened[-1]

        yield start
        for one in opened:
            one.close()


def skipped(engine: SchedulerHalf) -> float:
    return engine.counters.take().get(f"{metrics.STORE_SKIPPED_BLOCKS.name}/quota", 0)  # type: ignore[return-value]


def test_an_engine_over_its_quota_loads_and_stores_again_after_a_purge(
    fleet: Callable[..., Fleet], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvpool")
    world = fleet()
    engine = world.engines["a"]
    write_quota(world.store, "a", 10 * RECORD_NBYTES)
    world.turn()
    first = 1000 * (world.prompts + 1)
    assert len(world.serves("a").stores) == BLOCKS
    world.turn()
    assert len(world.serves("a").stores) == BLOCKS, "below it, and beyond it for as long as nobody counted"
    world.turn()
    assert skipped(engine) == 0
    for _ in range(3):
        assert world.serves("a").stores == []
    assert skipped(engine) == 3 * BLOCKS
    assert world.held_nbytes("a") == 2 * BLOCKS * RECORD_NBYTES
    assert world.loads("a", first) == BLOCKS * 16, "what is there is loaded"
    assert len(world.serves("b").stores) == BLOCKS, "another tenant's are stored"
    assert not engine.wants_steps(), "nothing waits"
    pool = f"file://{tmp_path}/pool"
    assert kvpool("purge", "--pool", pool, "--tenant", "a", "--yes").returncode == 0
    assert world.serves("a").stores == [], "until it is counted"
    world.turn()
    assert len(world.serves("a").stores) == BLOCKS
    again = world.serves("a", first=first)
    assert len(again.stores) == BLOCKS, "also what was given up"
    told = [text for text in caplog.messages if "quota" in text]
    assert len(told) == 2, "its end, and that it goes on"
    assert told[0].startswith("kvpool: tenant a holds ")


def test_what_was_given_up_is_stored_with_the_next_request_that_lacks_it(fleet: Callable[..., Fleet]) -> None:
    world = fleet()
    write_quota(world.store, "a", 0)
    world.turn()
    first = 5000
    assert world.serves("a", first=first).stores == []
    write_quota(world.store, "a", None)
    world.turn()
    assert len(world.serves("a", first=first).stores) == BLOCKS


def test_records_that_wait_for_room_are_given_up_too(fleet: Callable[..., Fleet]) -> None:
    world = fleet()
    engine, queue = world.engines["a"], world.engines["a"]._store_planner._queue
    queue._room = 2
    asked = request("waits", first=9000)
    answer(engine, asked)
    engine.allocated(asked, TABLE, 0)
    engine._block_pool.cache_full_blocks(  # type: ignore[union-attr]
        asked,
        [engine._block_pool.blocks[block_id] for block_id in TABLE[0][:BLOCKS]],
        0,
        BLOCKS,
        16,
        0,  # type: ignore[union-attr]
    )
    step = engine.plan(output(asked, 100, TABLE))
    assert (len(step.stores), len(queue._waiting)) == (2, BLOCKS - 2)
    write_quota(world.store, "a", 0)
    write_held(world.store, "a", 1, 60)
    engine._quota.turn()
    everywhere = dict.fromkeys(step.tags, 1)
    engine.update(PoolWorkerMetadata(staged=everywhere, stored=everywhere), (), ())
    asked.num_computed_tokens = 100
    assert engine.plan(output(asked, 1, TABLE)).stores == []
    assert not queue._waiting
    assert skipped(engine) == BLOCKS - 2


def test_a_tenant_over_its_quota_displaces_no_more_of_another_one(fleet: Callable[..., Fleet]) -> None:
    """A pool of 60 records: 24 of b, and as many as a's quota says of a."""
    with MemoryStore(60 * RECORD_NBYTES) as store:
        world = fleet(store)
        write_quota(store, "a", 24 * RECORD_NBYTES)
        for _ in range(4):
            world.serves("b")
        theirs = world.held_nbytes("b")
        for _ in range(30):
            world.turn()
            world.serves("a")
        assert world.held_nbytes("b") == theirs == 24 * RECORD_NBYTES
        assert world.held_nbytes("a") <= (24 + BLOCKS) * RECORD_NBYTES, "one prompt more than counted"
        write_quota(store, "a", None)
        world.turn()
        for _ in range(30):
            world.serves("a")
        assert world.held_nbytes("b") < theirs, "without it, it does"


def test_an_engine_follows_its_quota_by_itself(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.discovery.quota_watch.READ_S", 0.02)
    world = fleet()
    engine = world.engines["a"]
    write_quota(world.store, "a", 10)
    write_held(world.store, "a", 10, 60)
    assert len(world.serves("a").stores) == BLOCKS
    engine.start()
    assert eventually(engine._quota.is_over)
    assert world.serves("a").stores == []


def test_an_engine_that_stores_nothing_reads_no_quota(fleet: Callable[..., Fleet]) -> None:
    engine = fleet(stores=False).engines["a"]
    engine.start()
    assert engine._quota._thread.ident is None


# ---------------------------------------------------------------------- keeping


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Retention]:
    """An engine that keeps half of a pool of 100 records, turned by hand."""
    monkeypatch.setattr(Retention, "_send", lambda self, call: self._waiting.append(call))
    with MemoryStore(100 * RECORD_NBYTES) as store:
        now_s = itertools.count(0.0, TOUCH_EVERY_S)
        yield Retention(store, "default", share=0.5, counters=Counters(), clock=lambda: next(now_s))


def prompt(records: int) -> Prefix:
    hashes = [os.urandom(32) for _ in range(records)]
    group = LookupGroup(b"".join(hashes), 32, 0, 1, 16)
    return Prefix(Namespace("default", FACTS), [group], hashes, records * RECORD_NBYTES)


def test_what_is_kept_fits_a_share_of_the_quota(keeping: Retention) -> None:
    store, prompts = keeping._store, [prompt(10) for _ in range(4)]
    write_quota(store, "default", 40 * RECORD_NBYTES)
    for one in prompts:
        keeping.keep(one, 1e6)
    keeping.turn()
    assert keeping._ends == {one.hashes[-1] for one in prompts[:2]}, "half of 40 records, not of 100"
    assert keeping._counters.take()[metrics.KEEPS_REFUSED.name] == 2
    write_quota(store, "default", 20 * RECORD_NBYTES)
    keeping.turn()
    assert keeping._ends == {prompts[0].hashes[-1]}, "and is let go where the quota gets smaller"
    write_quota(store, "default", 1 << 60)
    keeping.turn()
    keeping.keep(prompts[1], 1e6)
    keeping.keep(prompt(45), 1e6)
    keeping.turn()
    assert len(keeping._ends) == 2, "a quota above the pool gives no more than the pool's share"


def test_a_quota_that_may_not_be_read_keeps_no_prompt_from_being_kept(
    keeping: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise StoreUnavailable("No permissions to access a key")

    monkeypatch.setattr(keeping._store, "announced_under", refused)
    keeping.keep(one := prompt(10), 1e6)
    keeping.turn()
    assert keeping._ends == {one.hashes[-1]}
