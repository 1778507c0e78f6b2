"""The tier's life under vLLM's manager of tiers, in random order: every job reported once, and only when nothing
touches its rows any more; no row written but for a load under way; no byte but the right one; no call that waits beyond
its bound; nothing left."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from vllm.v1.kv_offload.base import OffloadKey

from kvpool import metrics
from kvpool.errors import StoreUnavailable
from tests.support.lifecycle import MOODS, TroubledStore
from tests.support.soak import ENGINES, NUMBERS, RARELY, SEARCH_S, Life, live, live_long
from tests.support.tier_life import (
    COST_A_JOB,
    RECORD_NBYTES,
    ROW_NBYTES,
    STUMBLES,
    DirectoryPool,
    Pool,
    ScriptedPool,
    TieredEngine,
    check_records,
    chunks,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

# Bytes of the pool: room for no chunk, for a few, for all there are.
CAPACITIES = (2_000, 10 * RECORD_NBYTES, 1000 * RECORD_NBYTES)
PROMPT = chunks(0, 8)


class TierLife(Life):
    """Two engines on one pool; they compute the same, or keep apart what they compute."""

    folder: Path

    @initialize(
        real=st.sampled_from((False, False, False, True)),
        seed=st.integers(0, 1 << 16),
        capacity=st.sampled_from((*CAPACITIES, *3 * CAPACITIES[-1:])),
        rows=st.sampled_from((6, 16, 24)),
        apart=st.sampled_from((False, False, False, True)),
        changes=st.sampled_from((False, False, True)),
    )
    def start(self, real: bool, seed: int, capacity: int, rows: int, apart: bool, changes: bool) -> None:
        self.pool: Pool = (
            DirectoryPool(seed, capacity, type(self).folder) if real else ScriptedPool(seed, capacity)
        )
        self.rows, self.names = rows, 0
        self.models = ("model", "other" if apart else "model")
        self.changes = changes
        self.engines = [self._engine(0), self._engine(1)]
        self.add("lives")
        self.add("lives on files", real)

    def _engine(self, at: int) -> TieredEngine:
        return TieredEngine(self.pool, self.rows, self.models[at], self.changes)

    # What engines do.

    @rule(
        at=ENGINES,
        family=NUMBERS,
        common=st.sampled_from((8, 5, 3, 1, 0)),
        own=st.integers(0, 3),
        steps=st.sampled_from((0, 0, 2, 8)),
    )
    def arrives(self, at: int, family: int, common: int, own: int, steps: int) -> None:
        self._arrive(at, family, common, own)
        self.steps(at, steps)

    @rule(
        at=ENGINES,
        family=NUMBERS,
        common=st.sampled_from((8, 6, 3)),
        mood=st.sampled_from(("good", "good", *MOODS)),
        harm=st.sampled_from((None, None, "lose", "damage")),
        part=st.sampled_from((0.3, 1.0)),
        early=st.booleans(),
        steps=st.sampled_from((1, 8, 60)),
    )
    def arrives_at_both(
        self,
        at: int,
        family: int,
        common: int,
        mood: str,
        harm: str | None,
        part: float,
        early: bool,
        steps: int,
    ) -> None:
        """What one engine computes the other one loads, if nothing comes between: before its question, or after."""
        self.pool_is_back()
        self._arrive(at, family, common, 0)
        self.steps(at, 8)
        self.pool.pass_time(0.1)
        self._arrive(1 - at, family, common, 1)
        if not early:
            self.steps(1 - at, 1)
            self.pool.pass_time(0.1)
        self._be(1 - at, mood, 0.5)
        if harm is not None:
            getattr(self.pool, harm)(part)
        self.steps(1 - at, steps)

    def _arrive(self, at: int, family: int, common: int, own: int) -> None:
        self.names += 1
        keys = chunks(family, common, range(self.names * 4, self.names * 4 + own))
        self.engines[at].add(f"r{self.names}", keys)

    @rule(at=ENGINES, which=NUMBERS)
    def ends(self, at: int, which: int) -> None:
        if (name := self._request(at, which)) is not None:
            self.engines[at].finish(name)

    @rule(at=ENGINES, which=NUMBERS)
    def stores_again(self, at: int, which: int) -> None:
        if (name := self._request(at, which)) is not None:
            self.engines[at].store_again(name)

    @rule(at=ENGINES, steps=st.sampled_from((1, 3, 10, 50)))
    def steps(self, at: int, steps: int) -> None:
        for _ in range(steps):
            self.engines[at].step()

    @rule(at=ENGINES)
    def is_drained(self, at: int) -> None:
        self.engines[at].drain()

    @rule(at=ENGINES)
    def is_reset(self, at: int) -> None:
        self.engines[at].reset()

    @rule(at=ENGINES)
    def is_asked_for_its_statistics(self, at: int) -> None:
        for sample, amount in self.engines[at].tier.counters._samples.items():
            self.add(
                sample, len(amount) if isinstance(amount, list) else amount
            )  # what is told now is not told again
        self.engines[at].manager.get_stats()

    @rule(at=ENGINES, really=RARELY)
    def is_shut_down_and_starts_again(self, at: int, really: bool) -> None:
        if really:
            self._count(self.engines[at])
            self.engines[at].shut_down()
            self.engines[at] = self._engine(at)

    @rule(at=ENGINES, really=RARELY, where=st.sampled_from(STUMBLES))
    def will_stumble(self, at: int, really: bool, where: str) -> None:
        if really:
            self.engines[at].stumble(where)

    # What the pool does.

    @rule(seconds=st.sampled_from((0.001, 0.05, 0.3, 3.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.pool.pass_time(seconds)

    @rule(at=ENGINES, mood=st.sampled_from(MOODS), seconds=st.sampled_from((0.1, 0.5, 2.0, 8.0)))
    def pool_is_bad_for_one(self, at: int, mood: str, seconds: float) -> None:
        self._be(at, mood, seconds)

    @rule(mood=st.sampled_from(("refusing", "faulting", "stuck")), seconds=st.sampled_from((0.1, 1.0, 10.0)))
    def pool_goes_away(self, mood: str, seconds: float) -> None:
        for at in range(2):
            self._be(at, mood, seconds)

    @rule()
    def pool_is_back(self) -> None:
        for at in range(2):
            self._be(at, "good", 0)

    def _be(self, at: int, mood: str, seconds: float) -> None:
        if isinstance(store := self.engines[at].tier._store, TroubledStore):
            store.be(mood, seconds)

    @rule(part=st.sampled_from((0.1, 0.1, 1.0)))
    def pool_loses_chunks(self, part: float) -> None:
        self.pool.lose(part)

    @rule(part=st.sampled_from((0.1, 0.1, 1.0)))
    def chunks_are_damaged(self, part: float) -> None:
        self.pool.damage(part)

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        try:
            self.pool_is_back()
            for engine in self.engines:
                engine.rest()
                self._count(engine)
                engine.shut_down()
            self.add("records", check_records(self.pool))
        finally:
            for engine in self.engines:
                engine.abandon()
            self.pool.close()

    def _request(self, at: int, which: int) -> str | None:
        names = list(self.engines[at].requests)
        return names[which % len(names)] if names else None

    def _count(self, engine: TieredEngine) -> None:
        for name, amount in engine.counts.items():
            self.add(name, amount)
        for sample, amount in engine.tier.counters.take().items():
            self.add(sample, len(amount) if isinstance(amount, list) else amount)
        self.add("switched off", bool(engine.tier.reason))


def check_counts(counts: dict[str, float]) -> None:
    print(counts)
    for what in ("loads good", "stores good", "stores failed", "lives on files"):
        assert counts.get(what), f"no {what}"


def check_causes(counts: dict[str, float]) -> None:
    """All went wrong that can."""
    check_counts(counts)
    for what in ("loads in part", "loads failed"):
        assert counts.get(what), f"no {what}"
    for cause in ("missing", "store_unavailable"):
        assert counts.get(f"kvpool_load_requests_total/{cause}"), f"no load failed by {cause}"
    for cause in ("pool_full", "already_there", "store_unavailable", "too_slow"):
        assert counts.get(f"kvpool_store_skipped_blocks_total/{cause}"), f"no chunk was skipped by {cause}"
    assert counts.get("events removed")
    assert counts.get("switched off")
    assert counts.get("kvpool_lookup_failures_total/store_unavailable")


@pytest.fixture
def lives() -> Iterator[type[Life]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # where vLLM's region is, too
        yield type("TierLifeInFolder", (TierLife,), {"folder": Path(folder)})


def test_a_short_life(lives: type[Life]) -> None:
    live(lives, check_counts, examples=80, steps=40)


@pytest.mark.soak
@pytest.mark.timeout(SEARCH_S + 600)
def test_a_long_life(lives: type[Life]) -> None:
    live_long(lives, check_causes)


# ---------------------------------------------------------------------- what it found


@pytest.fixture
def pool() -> Iterator[ScriptedPool]:
    pool = ScriptedPool(1, 1 << 20)
    yield pool
    pool.close()


@pytest.fixture
def engine(pool: ScriptedPool) -> Iterator[Callable[[], TieredEngine]]:
    """A function that starts an engine on the pool."""
    started: list[TieredEngine] = []

    def start(*, changes: bool = False) -> TieredEngine:
        started.append(TieredEngine(pool, 24, changes=changes))
        return started[-1]

    yield start
    for one in started:
        one.abandon()


def computed(engine: TieredEngine, name: str, prompt: list[OffloadKey] = PROMPT) -> Counter[str]:
    """Run one request to its end; what was counted since the engine started."""
    engine.add(name, prompt)
    for _ in range(40):
        engine.step()
    engine.finish(name)
    return engine.counts


@pytest.mark.parametrize("where", STUMBLES)
def test_a_fault_of_ours_loses_no_job(where: str, engine: Callable[[], TieredEngine]) -> None:
    """A job that is never reported pins its rows for ever, and a request waits for it."""
    first, second = engine(), engine()
    computed(first, "stored")
    second.add("loads", PROMPT)
    second.add("stores", chunks(1, 4))
    second.step()  # they have asked
    second.stumble(where)
    for _ in range(40):
        second.step()
    assert second.tier.reason == ("" if where in COST_A_JOB else "ZeroDivisionError: planted")
    if where in COST_A_JOB:
        computed(first, "other", chunks(7, 8))
        assert computed(second, "after it", chunks(7, 8))["loads good"], "the tier gives nothing any more"
    for one in (first, second):
        one.rest()
        one.shut_down()


def test_a_fault_in_a_reset_announces_nothing_of_before_it(
    pool: ScriptedPool, engine: Callable[..., TieredEngine]
) -> None:
    """Under the namespace of the weights of now nobody has stored what was on its way."""
    changing = engine(changes=True)
    changing.add("stores", PROMPT)
    while not changing.jobs:
        changing.step()
    pool.pass_time(0.1)
    changing.stumble("_lookups.miss")
    changing.reset()
    assert changing.tier.reason == "ZeroDivisionError: planted"
    assert changing.counts["stores good"] == 1
    changing.step()
    assert changing.counts["events stored"] == 0
    changing.rest()
    changing.shut_down()


def test_a_shutdown_does_not_wait_for_ever(
    pool: ScriptedPool, engine: Callable[[], TieredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is stuck in the system may write for ever: then the memory is kept, and the engine is told."""
    first, second = engine(), engine()
    computed(first, "stored")
    second.add("loads", PROMPT)
    second.step()
    pool.pass_time(0.1)
    store = second.tier._store
    assert isinstance(store, TroubledStore)
    store.be("stuck", 60)
    second.step()

    def will_end(at_s: float) -> None:
        for batch in second.touched():
            batch.due_s = at_s

    will_end(float("inf"))

    def close(store: TroubledStore) -> None:  # as a store of native threads does
        pool.pass_time(5)
        if store.under_way():
            raise StoreUnavailable("a thread is stuck in the system; it was left behind")

    with monkeypatch.context() as patch:
        patch.setattr(TroubledStore, "_close", close)
        with pytest.raises(StoreUnavailable, match="stuck"):
            second.tier.shutdown()
    assert second.touched()
    assert second.tier._rows.nbytes, "memory is let go of that is still written"
    will_end(pool.now_s())
    for one in (first, second):
        one.shut_down()


def test_a_burst_with_one_prefix_loads_it_once(engine: Callable[[], TieredEngine]) -> None:
    """Requests share a chunk's question and its way into main memory, and vLLM its copy to the device."""
    computed(engine(), "stored")
    cold = engine()
    for number in range(16):
        cold.add(f"burst{number}", [*PROMPT, *chunks(0, 0, [number])])
    for _ in range(40):
        cold.step()
    counts = cold.tier.counters.take()
    assert counts[metrics.LOADED_BYTES.name] == len(PROMPT) * ROW_NBYTES
    assert counts[metrics.LOOKUP_BLOCKS.name] == len(PROMPT) + 16, "those of their own are asked for, too"
