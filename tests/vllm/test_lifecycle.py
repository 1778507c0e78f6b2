"""The connector's life on scripted engines, in random order: no block freed while a load writes it, every request
reported once, no load offered again that failed, no byte but the right one, nothing left.

Over 400 lines because it is one state machine, and what it once found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvpool import BlockHasher, metrics
from kvpool.config import PoolConfig
from kvpool.errors import ConfigError
from kvpool.key.key import Fact, parse_key
from kvpool.vllm import connector
from kvpool.vllm.engine.measure import LOOKED_AT
from kvpool.vllm.worker import LOOK_EVERY_S
from tests.support.lifecycle import (
    BLOCK_TOKENS,
    HEADS,
    MOODS,
    STEP_S,
    TENSORS,
    Configured,
    LateDevice,
    ScriptedEngine,
    Shape,
    World,
)
from tests.support.soak import ENGINES, LONG_SOAK, NUMBERS, RARELY, SEARCH_S, Life, live, live_long

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

SHAPES = [
    Shape(ranks, overlapping, windowed, slots, blocks_per_record, latent)
    for ranks, latent in ((1, False), (2, False), (2, True))
    for overlapping in (False, True)
    for windowed in (False, True)
    for slots in (4, 24)
    for blocks_per_record in (1, 2, 3)
]
SHAPES += [Shape(overlapping=overlapping, windowed=True, slots=24, drafts=3) for overlapping in (False, True)]
SHAPES += [
    Shape(ranks, overlapping, windowed=True, slots=slots, latent=latent, stages=2)
    for ranks, latent in ((2, False), (4, True))
    for overlapping in (False, True)
    for slots in (4, 24)
]
SHAPES += [
    Shape(ranks, overlapping, windowed, slots, blocks_per_record, late=True)
    for ranks in (1, 2)
    for overlapping in (False, True)
    for windowed in (False, True)
    for slots in (4, 24)
    for blocks_per_record in (1, 2)
]
SHAPES += [
    Shape(
        ranks, overlapping, windowed, states=True, slots=slots, blocks_per_record=blocks_per_record, late=late
    )
    for ranks in (1, 2)
    for overlapping in (False, True)
    for windowed in (False, True)
    for slots in (4, 24)
    for blocks_per_record in (1, 2)
    for late in (False, True)
]
SHAPES += [
    Shape(
        ranks,
        overlapping,
        small=True,
        latent=True,
        slots=slots,
        blocks_per_record=blocks_per_record,
        late=late,
    )
    for ranks in (1, 2)
    for overlapping in (False, True)
    for slots in (4, 24)
    for blocks_per_record in (1, 2)
    for late in (False, True)
]
# Kimi-Linear: states beside latent vectors. DeepSeek V3.2: an indexer beside them.
SHAPES += [
    Shape(
        2, overlapping, windowed, slots=slots, latent=True, states=states, indexed=not states,
        blocks_per_record=blocks_per_record, late=late,
    )
    for states in (False, True)
    for overlapping in (False, True)
    for windowed in (False, True)
    for slots in (4, 24)
    for blocks_per_record in (1, 2)
    for late in (False, True)
]  # fmt: skip
# With --prefix-match-unit.
SHAPES += [
    Shape(
        ranks, overlapping, slots=slots, latent=latent, ring=ring, states=True, tails=True, late=late,
    )
    for ranks, latent in ((1, False), (2, True))
    for overlapping in (False, True)
    for ring in (False, True)
    for slots in (4, 24)
    for late in (False, True)
]  # fmt: skip
# Rings beside latent vectors: GLM-5.3-Flash; with a window that is filled again: DeepSeek V4.1.
SHAPES += [
    Shape(
        ranks, overlapping, slots=slots, latent=True, ring=True, refilled=refilled, states=states,
        blocks_per_record=blocks_per_record, late=late,
    )
    for ranks in (1, 2)
    for overlapping in (False, True)
    for refilled, states in ((False, False), (True, False), (False, True))
    for slots in (4, 24)
    for blocks_per_record in (1, 2)
    for late in (False, True)
]  # fmt: skip
SHAPES += [
    Shape(overlapping=overlapping, latent=True, ring=True, refilled=refilled, slots=24, drafts=3)
    for overlapping in (False, True)
    for refilled in (False, True)
]
# Cut by heads: the other engine has another number of ranks.
SHAPES += [
    Shape(
        ranks, overlapping, windowed, slots=slots, blocks_per_record=blocks_per_record, late=late, cut=True,
    )
    for ranks in (1, 2, 4)
    for overlapping in (False, True)
    for windowed in (False, True)
    for slots in (4, 24)
    for blocks_per_record in (1, 2)
    for late in (False, True)
]  # fmt: skip
AUDITED = [dataclasses.replace(shape, audited=True) for shape in SHAPES if shape.slots == 24]
CAPACITIES = (3_000, 1 << 20)  # bytes of the pool: a dozen blocks, and all there are

WAYS_TO_LOAD_WEIGHTS = (
    {"seen": True},
    {"seen": True, "reset_before": True},
    {"seen": True, "connector": False},  # then it goes without the pool until its next reset
    {"seen": False},
    {"seen": False, "reset_before": True},
)


class EngineLife(Life):
    """Two engines on one pool."""

    configured: Configured

    @initialize(
        shape=st.sampled_from(SHAPES),
        seed=st.integers(0, 1 << 16),
        capacity=st.sampled_from(CAPACITIES),
    )
    def start(self, shape: Shape, seed: int, capacity: int) -> None:
        self.world = World(seed, capacity)
        self.shape, self.is_steady = shape, seed % 4 > 0
        self.names = 0
        self.engines = [self._engine(at) for at in range(2)]

    def _engine(self, at: int, without_pool: int | None = None) -> ScriptedEngine:
        shape = self.shape
        if shape.cut and at:
            shape = dataclasses.replace(shape, ranks={1: 2, 2: 4, 4: 1}[shape.ranks])
        return ScriptedEngine(self.world, type(self).configured(shape), shape, without_pool)

    @rule(
        at=ENGINES,
        family=st.integers(0, 5),
        common=st.sampled_from((30, 21, 16, 9, 1)),
        own=st.integers(0, 6),
        more=st.integers(1, 12),
        steps=st.sampled_from((0, 0, 2, 12)),
    )
    def arrives(self, at: int, family: int, common: int, own: int, more: int, steps: int) -> None:
        self._arrive(at, family, common, own, more)
        self.steps(at, steps)

    @rule(
        at=ENGINES,
        family=st.integers(0, 5),
        steps=st.integers(0, 20),
        begun=st.sampled_from((0, 0, 6, 14, 22)),
        rank=st.integers(0, 1),
        mood=st.sampled_from((None, None, *MOODS)),
    )
    def arrives_at_both(
        self, at: int, family: int, steps: int, begun: int, rank: int, mood: str | None
    ) -> None:
        """What one engine computes the other one loads, perhaps behind what it has, perhaps over a bad line."""
        if begun:
            self._arrive(1 - at, family, begun, 2, 1)
            self.steps(1 - at, 5)
        self._arrive(at, family, 28, 0, 3)
        self.steps(at, steps)
        clients = self._clients(1 - at)[1:]
        if mood is not None and clients:
            clients[rank % len(clients)].be(mood, 0.5)
        self._arrive(1 - at, family, 28, 0, 3)
        self.steps(1 - at, steps)

    def _arrive(self, at: int, family: int, common: int, own: int, more: int) -> None:
        self.names += 1
        prompt = [(family * 17 + index * 7) % 40 for index in range(common)]
        prompt += [41 + (self.names + index) % 9 for index in range(own)]
        self.engines[at].add(f"r{self.names}", prompt, more)

    @rule(at=ENGINES, which=NUMBERS)
    def is_aborted(self, at: int, which: int) -> None:
        if live := self.engines[at].live():
            self.engines[at].abort(live[which % len(live)])

    @rule(at=ENGINES)
    def plans(self, at: int) -> None:
        self.engines[at].plan()

    @rule(at=ENGINES)
    def executes(self, at: int) -> None:
        self.engines[at].execute()

    @rule(at=ENGINES)
    def takes(self, at: int) -> None:
        self.engines[at].take()

    @rule(at=ENGINES, steps=st.sampled_from((1, 3, 10, 30)))
    def steps(self, at: int, steps: int) -> None:
        for _ in range(steps):
            self.engines[at].step()

    @rule(seconds=st.sampled_from((0.001, 0.05, 0.3, 3.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(
        at=ENGINES,
        client=st.integers(0, 2),
        mood=st.sampled_from(MOODS),
        seconds=st.sampled_from((0.1, 0.5, 2.0)),
    )
    def pool_is_bad_for_one(self, at: int, client: int, mood: str, seconds: float) -> None:
        clients = self._clients(at)
        clients[client % len(clients)].be(mood, seconds)

    @rule(mood=st.sampled_from(("refusing", "faulting", "stuck")), seconds=st.sampled_from((0.1, 1.0, 180.0)))
    def pool_goes_away(self, mood: str, seconds: float) -> None:
        for client in self._clients(0) + self._clients(1):
            client.be(mood, seconds)

    @rule()
    def pool_is_back(self) -> None:
        for client in self._clients(0) + self._clients(1):
            client.be("good", 0)

    @rule(part=st.sampled_from((0.0, 0.1, 0.1, 1.0)))
    def pool_loses_blocks(self, part: float) -> None:
        self.world.lose(part)

    @rule(at=ENGINES, running=st.booleans(), connector=st.booleans())
    def cache_is_reset(self, at: int, running: bool, connector: bool) -> None:
        self.engines[at].reset(running=running, connector=connector)

    @rule(at=ENGINES, really=RARELY, drained=st.booleans(), steps=st.integers(0, 3))
    def sleeps_and_wakes(self, at: int, really: bool, drained: bool, steps: int) -> None:
        if really:
            self.engines[at].sleep(drained=drained, steps=steps)
            self.add("sleeps")

    @rule(at=ENGINES, really=RARELY, how=st.sampled_from(WAYS_TO_LOAD_WEIGHTS))
    def weights_change(self, at: int, really: bool, how: dict[str, bool]) -> None:
        if really and not self.is_steady:
            self.engines[at].load_weights(**how)

    @rule(
        at=ENGINES,
        really=RARELY,
        to=st.sampled_from(("new", "first", "the other's")),
        rank=st.sampled_from((None, None, 0, 1)),
        reset=st.booleans(),
    )
    def weights_are_written(self, at: int, really: bool, to: str, rank: int | None, reset: bool) -> None:
        """Of all ranks, or of one, as by an update that fails; under the requests that run, or behind a reset."""
        engine = self.engines[at]
        if not really or self.is_steady:
            return
        if reset:
            engine.reset(running=True, connector=True)
        engine.write_weights(self._weights(at, to), () if rank is None else (rank % len(engine.ranks),))
        self.add("written")

    def _weights(self, at: int, to: str) -> int:
        if to == "new":
            self.world.newest_weights += 1
        return {"new": self.world.newest_weights, "first": 0}.get(to, self.engines[1 - at].held[0])

    @rule(
        at=ENGINES, method=st.sampled_from(("nothing", "reload_weights", "wake_up")), times=st.integers(1, 3)
    )
    def calls_change_nothing(self, at: int, method: str, times: int) -> None:
        for _ in range(times):
            self.engines[at].told(method)

    @rule(at=ENGINES, really=st.booleans(), rank=st.sampled_from((None, 0, 1)), family=st.integers(0, 5))
    def weights_change_silently(self, at: int, really: bool, rank: int | None, family: int) -> None:
        """What is stored and loaded until the watch finds it may be wrong: this engine is alone meanwhile."""
        engine = self.engines[at]
        namespace = engine.planner._namespace
        if not really or self.is_steady:
            return
        self.pool_is_back()
        for one in self.engines:
            one.drain()
        if engine.planner._broken or namespace.current is None or any(r.fault for r in engine.ranks):
            return
        found = finds_silent_change(engine, self._weights(at, "new"), rank, family)
        self.add("found", found)

    @rule(at=ENGINES, seconds=st.sampled_from((0.1, 15.0)))
    def pauses(self, at: int, seconds: float) -> None:
        self.engines[at].pause(seconds)

    @rule(at=ENGINES, really=RARELY, rank=st.integers(0, 1), where=st.sampled_from(("gather", "scatter")))
    def one_rank_will_stumble(self, at: int, really: bool, rank: int, where: str) -> None:
        ranks = self.engines[at].ranks
        if really and not self.shape.late:  # there it would stumble when it is launched
            ranks[rank % len(ranks)].fault = where

    @rule(at=ENGINES, really=RARELY, without_pool=st.sampled_from((None, None, None, 0, 1)))
    def is_shut_down_and_starts_again(self, at: int, really: bool, without_pool: int | None) -> None:
        if not really:
            return
        self._count(self.engines[at])
        self.engines[at].shut_down()
        self.engines[at] = self._engine(at, without_pool)

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        try:
            self.pool_is_back()
            self.world.pass_time(0.5)
            for engine in self.engines:
                engine.rest()
                self._count(engine)
            self._lose_all_and_ask_again(self.engines[0])
            for engine in self.engines:
                engine.shut_down()
        finally:
            self.world.close()

    def _lose_all_and_ask_again(self, engine: ScriptedEngine) -> None:
        """Whatever of a prompt the engine has in its own cache: the pool has all of it afterwards."""
        prompt = [index * 7 % 40 for index in range(28)]
        if engine.planner._broken:
            return
        if engine.planner._namespace.is_off:  # for requests ran when its cache was to be reset
            engine.reset(running=False, connector=True)
        # What was dropped once and stored later is no gap, which ``put`` does not say any more.
        engine.dropped.difference_update([one for one in engine.dropped if engine.in_pool(*one)])
        self.world.put.clear()
        self.world.lose(1.0)
        first = self.shape.first
        step = self.shape.record_tokens(first) // self.shape.hash_tokens
        hashes = BlockHasher(self.shape.hash_tokens).hashes(prompt)[step - 1 :: step]
        # What comes behind a record that was given up is given up with it, also where a late answer to this request's
        # lookup then brings that one back: the next request brings the rest.
        for attempt in range(2 if engine.stores._queue.gave_up else 1):
            engine.add(f"asked again{attempt}", prompt, 1)
            engine.drain()
            engine.rest()
            missing = [i for i, block_hash in enumerate(hashes) if not engine.in_pool(block_hash, first)]
            if not missing:
                break
        assert not missing or engine.planner._broken, f"{missing} of {len(hashes)} records were not stored"
        self.add("asked_again")

    def _clients(self, at: int) -> list[Any]:
        engine = self.engines[at]
        return [engine.connector._store] + [rank.store for rank in engine.ranks if rank.store is not None]

    def _count(self, engine: ScriptedEngine) -> None:
        for name in ("steps", "loads", "loads_failed", "hits", "begun_inside", "starved", "stored_again"):
            self.add(name, getattr(engine, name))
        for sample, amount in engine.counters().items():
            self.add(sample, amount)
        self.add("broken", engine.planner._broken)


def finds_silent_change(engine: ScriptedEngine, weights: int, rank: int | None, seed: int) -> bool:
    """Weights change and nothing says so: within two periods of the watch the engine leaves its namespace, and what it
    stored meanwhile is deleted. False: a fault has taken the pool from it.
    """
    world, namespace = engine.world, engine.planner._namespace
    before, world.doubtful = namespace.current, set()
    engine.write_weights(weights, () if rank is None else (rank % len(engine.ranks),), told="")
    if engine.silent is None:  # it has had them all along
        return False
    looks = -(-(TENSORS + 1) // LOOKED_AT)
    ends_s = world.clock.now_s + 2 * looks * (LOOK_EVERY_S + STEP_S)
    asked = 0
    while namespace.current is before and not engine.planner._broken:
        assert world.clock.now_s < ends_s, "the watch has not found it"
        if not engine.live():
            asked += 1
            engine.add(f"silent{seed}-{engine.steps}", [seed, asked % 7, *range(20)], 8)
        engine.step()
    engine.drain()
    engine.silent = None
    wrong = sorted(world.doubtful)
    world.doubtful = None
    assert not any(world.records.contains_many(wrong)), "what was stored of unknown weights is still there"
    return not engine.planner._broken


class AuditedLife(EngineLife):
    """Each hit is audited whose last block can be: no honest one is found wrong, and every audit ends."""

    @initialize(
        shape=st.sampled_from(AUDITED),
        seed=st.integers(0, 1 << 16),
        capacity=st.sampled_from(CAPACITIES),
    )
    def start(self, shape: Shape, seed: int, capacity: int) -> None:
        super().start(shape, seed, capacity)


def of(configured: Configured, kind: type[EngineLife] = EngineLife) -> type[Life]:
    return type("ConfiguredLife", (kind,), {"configured": staticmethod(configured)})


PROMPT = list(range(30))
SHAPE = Shape(slots=24)
STEADY = Shape(slots=24)


def generated(engine: ScriptedEngine, name: str, prompt: list[int] = PROMPT, tokens: int = 3) -> int:
    """Run one request to its end; how many loads of it were good."""
    before = engine.loads - engine.loads_failed
    engine.add(name, prompt, tokens)
    engine.drain()
    return engine.loads - engine.loads_failed - before


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("asleep", [False, True])
def test_after_a_reset_an_engine_with_the_same_weights_goes_on_sharing(
    world: World,
    engine: Callable[..., ScriptedEngine],
    asleep: bool,
    ranks: int,
    stages: int,
    overlapping: bool,
) -> None:
    shape = Shape(ranks, overlapping, slots=24, stages=stages)
    first, second = engine(shape), engine(shape)
    generated(first, "stored")
    assert generated(second, "loaded") == 1
    for round_trip in range(2):
        second.sleep() if asleep else second.reset(running=False, connector=True)
        assert generated(second, f"loaded{round_trip}") == 1
    assert len({parse_key(key).fingerprint for key in world.put}) == 1


SLEEPY = [
    Shape(ranks, overlapping, slots=24, late=late)
    for ranks in (1, 2)
    for overlapping in (False, True)
    for late in (False, True)
]


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("shape", SLEEPY)
def test_an_engine_that_wakes_up_has_its_hits_back_within_a_second(
    world: World, engine: Callable[..., ScriptedEngine], shape: Shape, drained: bool
) -> None:
    first, second = engine(shape), engine(shape)
    generated(first, "stored")
    for night in range(2):
        second.sleep(drained=drained, steps=2)
        woke_s, loads = world.clock.now_s, second.loads
        second.add(f"loads{night}", PROMPT, 1)
        while second.loads == loads:
            second.step()
        assert world.clock.now_s - woke_s < 1
        second.drain()
    assert second.loads_failed == 0
    assert len({parse_key(key).fingerprint for key in world.put}) == 1


@pytest.mark.parametrize("shape", [shape for shape in SLEEPY if shape.late])
def test_what_is_copied_when_the_memory_goes_is_in_staging_before(
    engine: Callable[..., ScriptedEngine], shape: Shape
) -> None:
    first, second = engine(shape), engine(shape)
    set_halted(first, True)
    first.add("stored", PROMPT, 1)
    while first.live():
        first.step()
    assert all(copies_left(first))
    set_halted(first, False)
    first.sleep(drained=False, steps=2)
    first.rest()
    assert generated(second, "loaded") == 1


@pytest.mark.parametrize(
    ("shape", "arrived"), [(shape, arrived) for shape in SLEEPY for arrived in {False, shape.late}]
)
def test_a_load_under_way_when_the_memory_goes_is_computed(
    engine: Callable[..., ScriptedEngine], shape: Shape, arrived: bool
) -> None:
    """``arrived``: its copies into the KV cache are under way."""
    first, second = engine(shape), engine(shape)
    generated(first, "stored")
    for rank in second.ranks:
        assert rank.store is not None
        rank.store.be("good" if arrived else "late", 5.0)
    set_halted(second, True)
    second.add("loading", PROMPT, 3)
    while not all(copies_left(second) if arrived else (rank.loading for rank in second.ranks)):
        second.step()
    set_halted(second, False)
    second.fall_asleep(drained=False)
    second.world.pass_time(1)
    second.wake_up()
    second.drain()
    assert (second.loads, second.loads_failed) == (1, 1)
    assert second.scheduler.reset_prefix_cache(True, True)
    assert generated(second, "loaded") == 1


def test_blocks_whose_bytes_a_sleep_has_taken_are_not_stored(
    world: World, engine: Callable[..., ScriptedEngine]
) -> None:
    """The workers were put to sleep by themselves, so vLLM has reset no cache. What is stored is looked at."""
    one = engine(Shape(slots=4))
    one.add("waits for staging", PROMPT, 1)
    while not one.stores._queue._waiting:
        one.step()
    one.abort("waits for staging")
    one.fall_asleep(drained=False)
    one.wake_up()
    one.drain()
    assert one.planner._namespace.is_off
    assert one.scheduler.reset_prefix_cache(True, True)
    generated(one, "stored")
    one.rest()
    assert generated(engine(Shape(slots=4)), "loaded") == 1


def set_halted(engine: ScriptedEngine, halted: bool) -> None:
    for rank in engine.ranks:
        if rank.device is not None:
            rank.device.halted = halted


def copies_left(engine: ScriptedEngine) -> list[int]:
    """By rank: launched, and not begun."""
    assert all(rank.device is not None for rank in engine.ranks)
    return [sum(len(one.stream) for one in rank.device.streams) for rank in engine.ranks if rank.device]


def test_weights_are_measured_when_their_memory_is_back(engine: Callable[..., ScriptedEngine]) -> None:
    """Nothing tells the scheduler's half that the workers were put to sleep by themselves."""
    one = engine(Shape(ranks=2, slots=24))
    generated(one, "stored")
    one.fall_asleep(drained=False)
    for _ in range(5):
        one.step()
    assert one.planner._namespace.asks
    one.wake_up()
    one.drain()
    assert not one.planner._namespace.asks
    assert one.scheduler.reset_prefix_cache(True, True)
    assert generated(one, "loaded") == 1


@pytest.mark.parametrize("how", WAYS_TO_LOAD_WEIGHTS, ids=str)
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (4, 2)])
def test_blocks_of_other_weights_are_never_taken_for_these(
    world: World, engine: Callable[..., ScriptedEngine], how: dict[str, bool], ranks: int, stages: int
) -> None:
    """Each engine looks at every byte that it stores, loads or reads."""
    shape = Shape(ranks, slots=24, stages=stages)
    old, new = engine(shape), engine(shape)
    generated(old, "stored")
    assert generated(new, "loaded") == 1
    new.load_weights(**how)
    stored = set(world.put)
    assert generated(new, "computed") == 0
    generated(new, "more", [7, *PROMPT])
    in_pool = how.get("connector", True)
    assert bool(world.put - stored) == in_pool
    assert generated(old, "more", [7, *PROMPT]) == 0
    new.reset(running=False, connector=not in_pool)
    generated(new, "again", [7, *PROMPT])
    new.reset(running=False, connector=False)
    assert generated(new, "once more", [7, *PROMPT]) == 1


@pytest.mark.parametrize("overlapping", [False, True])
def test_weights_that_are_loaded_under_running_requests_keep_the_engine_from_the_pool(
    world: World, engine: Callable[..., ScriptedEngine], overlapping: bool
) -> None:
    """What such a request computes is of neither weights. Here they stay the same, so that it may be run at all."""
    first, second = (
        engine(Shape(ranks=2, overlapping=overlapping, slots=24)),
        engine(Shape(ranks=2, slots=24)),
    )
    first.add("runs", PROMPT, 20)
    for _ in range(4):
        first.step()
    generated(second, "stored", [7, *PROMPT])
    stored, first.memory = set(world.put), 1
    first.told("reload_weights")
    generated(first, "not loaded", [7, *PROMPT])
    assert first.loads == 0
    assert first.planner._namespace.is_off
    # Of what was planned before, the bytes are of before.
    assert world.put == stored
    first.reset(running=False, connector=True)
    generated(first, "stored for itself")
    assert len({parse_key(key).fingerprint for key in world.put}) == 2


UPDATES = 20
ORDERS = {
    "equal": list(range(1, UPDATES + 1)),
    "unequal": [(7 * number) % (UPDATES + 1) for number in range(1, UPDATES + 1)],
    "there and back": [number % 4 for number in range(1, UPDATES + 1)],
}


# Each order, and each way to reset, once; all others in a long search.
TOLD = (
    ("equal", "before"),
    ("equal late", "after"),
    ("unequal", "under requests"),
    ("there and back", "after"),
)
LATER = {"equal": (0, True), "equal late": (3, False), "unequal": (0, False), "there and back": (2, True)}


@pytest.mark.parametrize(
    ("order", "reset"),
    [
        pytest.param(order, reset, marks=() if (order, reset) in TOLD else (pytest.mark.soak, LONG_SOAK))
        for order in LATER
        for reset in ("before", "after", "under requests")
    ],
)
def test_engines_that_are_updated_share_what_is_of_the_same_weights_and_nothing_else(
    engine: Callable[..., ScriptedEngine], order: str, reset: str
) -> None:
    """Twenty times each; the first takes them in order, the other one in another, or later. One update of it fails."""
    lag, overlapping = LATER[order]
    shape = Shape(2, overlapping, slots=24)
    engines = engine(shape), engine(shape)
    stored: set[tuple[int, int]] = set()  # weights and prompt
    hits = ideal = 0
    for number in range(UPDATES + lag):
        for at, one in enumerate(engines):
            step = number - at * lag
            if not 0 <= step < UPDATES:
                continue
            weights = (ORDERS[order.removesuffix(" late")] if at else ORDERS["equal"])[step]
            if at and step == UPDATES // 2:  # it has reached one rank
                updated(one, -weights, reset, f"fails{step}", (0,))
                assert generated(one, f"half{step}", [1, *PROMPT]) == 0
            updated(one, weights, reset, f"runs{at}-{step}")
            for asked in range(3):
                expected = (weights, asked) in stored
                good = generated(one, f"r{at}-{step}-{asked}", [asked, *PROMPT])
                assert expected or not good
                hits, ideal = hits + good, ideal + expected
                stored.add((weights, asked))
    assert ideal >= UPDATES
    assert hits >= 0.9 * ideal


def updated(one: ScriptedEngine, weights: int, reset: str, name: str, ranks: Sequence[int] = ()) -> None:
    if reset == "under requests":
        for number in range(2):
            one.add(f"{name}-{number}", [40 + number, *PROMPT], 12)
        for _ in range(4):
            one.step()
    if reset == "before":
        one.reset(running=False, connector=True)
    one.write_weights(weights, ranks)
    for _ in range(3 * (reset == "under requests")):
        one.step()
    while reset != "before" and (one.mixed is not None or one.planner._namespace.is_off):
        one.reset(running=True, connector=True)
        one.step()
    one.drain()


def test_an_engine_that_wakes_has_its_hits_back_with_its_first_request(
    engine: Callable[..., ScriptedEngine],
) -> None:
    one = engine(Shape(2, slots=24))
    for number in range(3):
        generated(one, f"stored{number}", [number, *PROMPT])
    one.sleep()
    woke_s = one.world.clock.now_s
    assert [generated(one, f"again{number}", [number, *PROMPT]) for number in range(3)] == [1, 1, 1]
    assert one.world.clock.now_s - woke_s < 1


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["all ranks", "the first", "the second"])
@pytest.mark.parametrize("overlapping", [False, True])
def test_weights_that_change_and_nothing_says_so_are_found_and_what_was_stored_of_them_is_deleted(
    world: World, engine: Callable[..., ScriptedEngine], rank: int | None, overlapping: bool
) -> None:
    """By all ranks, also where one alone has other weights: what the others computed depends on those, too."""
    first, second = (engine(Shape(2, overlapping, slots=24)) for _ in range(2))
    generated(first, "stored")
    generated(first, "meanwhile it is looked at", [8], 60)
    assert finds_silent_change(first, 1, rank, 9)
    counters = first.counters()
    assert counters["kvpool_weights_measured_total/silent"] == 1
    assert first.planner._namespace.is_off
    assert generated(second, "loaded") == 1, "what was stored before is there"
    generated(second, "stored, and right", [9, 1, *range(20)])
    first.reset(running=False, connector=True)
    assert generated(first, "of other weights") == 0


def test_a_reset_that_finds_other_weights_deletes_what_was_stored_of_them(
    world: World, engine: Callable[..., ScriptedEngine]
) -> None:
    """No call has written them, so that they may have changed at any time since they were last looked at."""
    first, second = engine(Shape(2, slots=24)), engine(Shape(2, slots=24))
    generated(first, "of what was there", [8])
    world.doubtful = set()
    first.write_weights(1, told="")
    generated(first, "wrong", tokens=1)
    assert world.doubtful
    first.reset(running=False, connector=True)
    generated(first, "right")
    first.silent, wrong, world.doubtful = None, sorted(world.doubtful), None
    assert not any(world.records.contains_many(wrong))
    assert generated(second, "of the first") == 0


@pytest.mark.parametrize("calls", [1, 5])
def test_calls_that_change_nothing_cost_loads_under_way_and_no_other_hit(
    engine: Callable[..., ScriptedEngine], calls: int
) -> None:
    first, second = engine(Shape(2, slots=24)), engine(Shape(2, slots=24))
    generated(first, "stored")
    second.add("runs", [7, *PROMPT], 20)
    for _ in range(3):
        second.step()
    for _ in range(calls):
        second.told("collects_something")
        second.step()
    assert generated(second, "loaded") == 1


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_a_load_under_way_when_the_caches_are_reset_is_computed(
    engine: Callable[..., ScriptedEngine], changed: bool, overlapping: bool
) -> None:
    shape = Shape(ranks=2, overlapping=overlapping, slots=24)
    first, second = engine(shape), engine(shape)
    generated(first, "stored")
    for rank in second.ranks:
        assert rank.store is not None
        rank.store.be("late", 5.0)
    second.add("loading", PROMPT, 3)
    while not second.ranks[0].loading:
        second.step()
    second.reset(running=False, connector=True)
    second.memory += changed
    second.drain()
    assert (second.loads, second.loads_failed) == (1, 1)
    assert second.planner._namespace.is_off == changed, (
        "vLLM says that it could not reset what the load holds"
    )


def test_what_is_stored_while_the_caches_are_reset_goes_where_it_belongs(
    world: World, engine: Callable[..., ScriptedEngine]
) -> None:
    one = engine()
    assert one.ranks[0].store is not None
    one.add("slowly", [7, *PROMPT], 1)
    while not one.ranks[0].store.under_way():
        one.plan()
        one.execute()
        one.take()
    before = one.planner._namespace.current
    one.abort("slowly")
    assert one.scheduler.reset_prefix_cache(False, True)
    one.weights = one.world.newest_weights = 1
    assert one.planner._store_planner._queue._pending
    assert one.ranks[0].store.under_way()
    generated(one, "new weights", [8, *PROMPT])
    one.rest()
    after = one.planner._namespace.current
    assert before is not None
    assert after is not None
    assert {parse_key(key).fingerprint for key in world.put} == {before.fingerprint, after.fingerprint}


def test_weights_that_never_change_are_shared_after_a_reset(
    world: World, engine: Callable[..., ScriptedEngine]
) -> None:
    first, second = engine(STEADY), engine(STEADY)
    generated(first, "stored")
    second.reset(running=False, connector=True)
    second.told("reload_weights")
    assert generated(second, "loaded") == 1
    second.sleep()
    assert generated(second, "loaded again") == 1
    assert len({parse_key(key).fingerprint for key in world.put}) == 1


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("mood", MOODS)
def test_a_rank_whose_load_fails_alone_fails_it_for_all_and_the_pool_is_used_again(
    engine: Callable[..., ScriptedEngine], mood: str, stages: int
) -> None:
    shape = Shape(ranks=2, slots=24, stages=stages)
    first, second = engine(shape), engine(shape)
    generated(first, "stored")
    assert second.ranks[1].store is not None
    second.ranks[1].store.be(mood, 0.5)
    generated(second, "over a bad line")
    if mood in ("stuck", "faulting", "refusing", "losing"):
        assert second.loads_failed == 1
    second.world.pass_time(1)
    second.reset(running=False, connector=True)
    generated(first, "again", [7, *PROMPT])
    assert generated(second, "over a good line", [7, *PROMPT]) == 1


def test_a_stage_with_other_layers_is_another_engine(
    world: World, engine: Callable[..., ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(ranks=2, slots=24, stages=2)
    generated(engine(shape), "stored")
    stored = set(world.put)
    stages = connector.engine_facts

    def other_facts(config: Any, cache: KVCacheConfig, *rest: Any) -> dict[str, Fact]:
        facts = stages(config, cache, *rest)
        return facts if "group0.layer0" in cache.kv_cache_groups[0].layer_names else {**facts, "other": True}

    monkeypatch.setattr(connector, "engine_facts", other_facts)
    assert generated(engine(shape), "computed") == 0
    assert len(world.put) == 2 * len(stored)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_that_its_own_host_configures_wrongly_costs_its_engine_the_pool_and_no_block(
    engine: Callable[..., ScriptedEngine], monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    shape = Shape(ranks=2, slots=24, stages=stages)
    generated(engine(shape), "stored")
    load, halves = PoolConfig.load, iter(("scheduler", "rank 0", "rank 1"))

    def loaded(*arguments: Any) -> PoolConfig:
        if next(halves) == "rank 1":
            raise ConfigError("KVPOOL_LOOKUP_TIMEOUT_S is wrong here")
        return load(*arguments)

    monkeypatch.setattr(PoolConfig, "load", loaded)
    second = engine(shape)
    second.planner._loads = False  # so that its first step stores, before it has heard of any rank
    assert generated(second, "computed") == 0
    assert second.planner._broken
    assert second.stores._queue._next_tag, "nothing was to be stored"


@pytest.mark.parametrize("mood", ["refusing", "faulting", "stuck"])
def test_a_pool_that_is_away_for_minutes_costs_no_request_and_is_used_when_it_is_back(
    world: World, engine: Callable[..., ScriptedEngine], mood: str
) -> None:
    first, second = engine(), engine()
    generated(first, "stored")
    clients = [one.store for one in second.ranks] + [second.connector._store]
    for client in clients:
        client.be(mood, 180)
    for number in range(10):
        generated(second, f"away{number}", [number, *PROMPT])
        world.pass_time(10)
    assert second.loads == 0
    world.pass_time(180)
    assert generated(second, "back") == 1


LONG_PROMPT = [index * 3 % 47 for index in range(58)]  # three steps, the first of them of six blocks


def test_an_idle_engine_does_not_step_on_for_a_pool_that_is_away(
    engine: Callable[..., ScriptedEngine],
) -> None:
    one = engine()
    assert one.ranks[0].store is not None
    one.ranks[0].store.be("refusing", 600)
    one.add("a", LONG_PROMPT, 1)
    started_s = one.world.clock.now_s
    one.drain()
    assert one.stores._queue._waiting
    assert one.world.clock.now_s - started_s < 6
    one.ranks[0].store.be("good", 0)


def test_an_engine_out_of_blocks_waits_for_those_that_are_copied_and_preempts_nobody(
    engine: Callable[..., ScriptedEngine],
) -> None:
    one = engine(Shape(slots=24, late=True))
    (rank,) = one.ranks
    assert rank.device is not None
    started(one, rank.device)
    for _ in range(60):  # 0.6 s
        one.step()
    stuck = [one.scheduler.requests[name].num_tokens for name in ("b", "c")]
    one.step()
    assert [one.scheduler.requests[name].num_tokens for name in ("b", "c")] == stuck, "nothing to wait for"
    assert one.connector is not None
    assert one.connector.has_pending_block_frees()
    rank.device.halted = False
    preempted = set()
    while one.live():
        one.step()
        preempted |= {name for name, request in one.scheduler.requests.items() if request.num_preemptions}
    assert not preempted


def test_an_engine_out_of_blocks_does_not_wait_for_ever(engine: Callable[..., ScriptedEngine]) -> None:
    one = engine(Shape(slots=24, late=True))
    (rank,) = one.ranks
    assert rank.device is not None
    started(one, rank.device)
    preempted = set()
    for _ in range(200):  # 2 s, twice as long as it waits
        one.step()
        preempted |= {name for name, request in one.scheduler.requests.items() if request.num_preemptions}
    assert preempted
    rank.device.halted = False


def started(one: ScriptedEngine, device: LateDevice) -> None:
    """A request is over, its 7 blocks are still copied; two others run that will fill all 25 of the engine."""
    device.halted = True
    one.add("a", PROMPT[:28], 1)
    while one.live():
        one.step()
    one.add("b", [40, *PROMPT[:27]], 36)
    one.add("c", [41, *PROMPT[:15]], 20)


def test_what_a_long_pause_has_held_back_is_over_before_a_reset(configured: Configured) -> None:
    """The steps that tell of copies come behind the pause, also where no request is left that would ask for them."""
    life: Any = type("AfterAPause", (of(configured),), {"counts": {}})()
    shape = Shape(ranks=2, overlapping=True, windowed=True, slots=4, blocks_per_record=2, late=True)
    life.start(shape=shape, seed=0, capacity=3000)
    life.arrives_at_both(at=1, begun=6, family=0, mood=None, rank=0, steps=0)
    life.pauses(at=0, seconds=15.0)
    life.weights_change(at=0, how={"seen": True}, really=True)
    life.teardown()


def test_a_rank_without_a_pool_any_more_leaves_the_namespace_of_earlier_weights(
    configured: Configured,
) -> None:
    """It moves nothing, but it announces its engine, which has nothing of those weights."""
    life: Any = type("AfterAFault", (of(configured),), {"counts": {}})()
    life.start(shape=Shape(slots=4), seed=0, capacity=3000)
    life.one_rank_will_stumble(at=0, rank=0, really=True, where="gather")
    life.arrives(at=0, common=30, family=0, more=1, own=0, steps=12)
    life.weights_change(at=0, how={"seen": True}, really=True)
    life.teardown()


@pytest.mark.parametrize("overlapping", [False, True])
def test_of_drafted_tokens_only_those_that_were_accepted_are_in_the_pool(
    engine: Callable[..., ScriptedEngine], overlapping: bool
) -> None:
    """The bytes of a wrong draft lie in a block until the next step; the world looks at every byte that is sent."""
    shape = Shape(overlapping=overlapping, windowed=True, slots=24, drafts=3)
    one, other = engine(shape), engine(shape)
    for number in range(3):
        generated(one, f"drafted{number}", [number, *PROMPT], 28)
    assert one.accepted > 10
    assert one.rejected > 10
    text = one.texts["drafted0"].tokens[: len(PROMPT) + 24]
    assert one.planner._namespace.current is not None
    for group in range(2):
        keys = one.planner._namespace.current.keys(BlockHasher(BLOCK_TOKENS).hashes(text), group, 0)
        assert len(keys) == 13
        assert one.world.put >= set(keys)
    assert generated(other, "follows", text) == 1


def beside_one_that_stored(
    world: World, configured: Configured, mood: str
) -> tuple[ScriptedEngine, ScriptedEngine]:
    """An engine that has stored a prompt, and one that was asked for it while its store is in this mood."""
    first, second = (ScriptedEngine(world, configured(SHAPE), SHAPE) for _ in range(2))
    generated(first, "stored")
    assert second.ranks[0].store is not None
    second.ranks[0].store.be(mood, 60)
    second.add("loading", PROMPT, 3)
    return first, second


def test_a_shut_down_with_transfers_in_flight_ends_them(world: World, configured: Configured) -> None:
    first, second = beside_one_that_stored(world, configured, "stuck")
    second.add("storing", [5, *PROMPT], 3)
    for _ in range(4):
        second.step()
    assert second.ranks[0].loading
    assert len(second.ranks[0].store.under_way()) > 1
    second.shut_down()
    first.shut_down()


def test_a_shut_down_with_a_fault_in_its_last_copies_releases_all(
    world: World, configured: Configured
) -> None:
    """A load goes on while a shut-down waits for stores; a fault in it is still none of the engine's."""
    first, second = beside_one_that_stored(world, configured, "late")
    while not second.ranks[0].loading:
        second.step()
    second.add("storing", [5, *PROMPT], 3)
    for _ in range(2):
        second.step()
    second.ranks[0].fault = "scatter"
    second.shut_down()
    assert not second.ranks[0].fault, "there was nothing to copy"
    first.shut_down()


def test_a_short_life(configured: Configured) -> None:
    live(of(configured), check_counts, examples=40, steps=40)


def check_counts(counts: dict[str, float]) -> None:
    print(counts)
    assert counts["loads"] > counts["loads_failed"] > 0, counts
    assert counts["begun_inside"] > 0, counts
    assert counts["stored_again"] > 0, counts
    assert counts["asked_again"] > 0, counts
    assert counts["sleeps"] > 0, counts
    assert counts["kvpool_weights_measured_total/same"] > 0, counts
    assert counts["kvpool_weights_measured_total/other"] > 0, counts
    assert counts["found"] > 0, counts


def test_a_short_life_with_audits(configured: Configured) -> None:
    live(of(configured, AuditedLife), check_audits, examples=25, steps=40)


def check_audits(counts: dict[str, float]) -> None:
    print(counts)
    assert counts[f"{metrics.AUDITS.name}/same"] > 0, counts
    assert counts[f"{metrics.AUDITS.name}/gone"] > 0, counts


@pytest.mark.soak
@pytest.mark.timeout(SEARCH_S + 600)
def test_a_long_life(configured: Configured) -> None:
    live_long(of(configured), check_counts)


@pytest.mark.soak
@pytest.mark.timeout(SEARCH_S + 600)
def test_a_long_life_with_audits(configured: Configured) -> None:
    live_long(of(configured, AuditedLife), check_audits)


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_burst_with_one_prefix_loads_it_once(
    world: World, engine: Callable[..., ScriptedEngine], overlapping: bool, windowed: bool
) -> None:
    """On a cold engine without room for three copies of the prefix; groups of two kinds take twice the blocks."""
    shape = Shape(overlapping=overlapping, windowed=windowed, slots=24)
    common = list(range(40))
    generated(engine(shape), "stored", [*common, 45])
    prompts = [[*common, number, number] for number in range(16)]
    cold, computing = arriving_at_once(engine, shape, prompts)
    loaded = cold.counters()[metrics.LOADED_TOKENS.name]
    assert len(common) <= loaded <= 1.2 * len(common)
    assert cold.steps <= 1.4 * computing.steps


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("own", [2, 3])
def test_loads_leave_each_other_room_to_go_on(
    world: World, engine: Callable[..., ScriptedEngine], overlapping: bool, own: int
) -> None:
    """With a window, vLLM admits two loads that fill its memory; each then waited for blocks of the other for ever."""
    shape = Shape(overlapping=overlapping, windowed=True, slots=24)
    prompts = [[number, *range(39), *[number] * own] for number in range(8)]
    stored = engine(shape)
    for number, prompt in enumerate(prompts):
        generated(stored, f"stored{number}", prompt)
    cold, computing = arriving_at_once(engine, shape, prompts)
    assert cold.loads == len(prompts)
    assert cold.starved == 0
    assert cold.steps <= 1.4 * computing.steps


def arriving_at_once(
    engine: Callable[..., ScriptedEngine], shape: Shape, prompts: list[list[int]]
) -> tuple[ScriptedEngine, ScriptedEngine]:
    """A cold engine on the pool, and one without it, that have answered all ``prompts``."""
    engines = engine(shape), engine(shape, without_pool=0)
    for one in engines:
        for number, prompt in enumerate(prompts):
            one.add(f"burst{number}", prompt, 6)
        one.drain()
    return engines


def shared(
    engine: Callable[..., ScriptedEngine], shape: Shape, prompt: list[int]
) -> tuple[ScriptedEngine, ScriptedEngine]:
    """One engine has answered a prompt, and behind it another one, which may load."""
    first, second = engine(shape), engine(shape)
    first.add("a", prompt, 3)
    first.rest()
    second.add("b", prompt, 3)
    second.drain()
    return first, second


HYBRIDS = [
    Shape(states=True, slots=24),
    Shape(2, latent=True, states=True, slots=24),
    Shape(latent=True, indexed=True, slots=24),
]


@pytest.mark.parametrize("shape", HYBRIDS, ids=["states", "states and latent vectors", "an indexer"])
def test_a_hybrids_blocks_are_loaded_and_what_is_behind_them_computed(
    shape: Shape, engine: Callable[..., ScriptedEngine]
) -> None:
    prompt = list(range(1, 30))
    _, second = shared(engine, shape, prompt)
    assert (second.hits, second.loads, second.loads_failed) == (1, 1, 0)


RINGS = [
    Shape(latent=True, ring=True, slots=24),
    Shape(2, latent=True, ring=True, refilled=True, slots=24),
    Shape(latent=True, ring=True, states=True, slots=24),
    Shape(latent=True, ring=True, refilled=True, slots=24, drafts=3),
]


@pytest.mark.parametrize("shape", RINGS, ids=["ring", "ring and window", "ring and states", "drafts"])
def test_what_is_one_requests_alone_is_not_stored_and_hits_stand_without_it(
    shape: Shape, engine: Callable[..., ScriptedEngine]
) -> None:
    prompt = list(range(1, 30))
    first, second = shared(engine, shape, prompt)
    groups = {parse_key(key).group for key in first.world.put}
    assert groups == {shape.first, shape.first + 2}
    assert (second.hits, second.loads, second.loads_failed) == (1, 1, 0)
    hit = (len(prompt) - 1) // shape.align_tokens * shape.align_tokens
    assert second.counters()[metrics.LOADED_TOKENS.name] == hit
    behind = (len(prompt) + 2) // BLOCK_TOKENS - hit // BLOCK_TOKENS
    stored = [group for _, group in second.tags.values() if not shape.is_state(group)]
    assert len(stored) == (1 if shape.states else 2) * behind, "what is computed again is not stored again"


TAILS = [
    Shape(states=True, tails=True, slots=24),
    Shape(2, overlapping=True, states=True, tails=True, slots=40, late=True),
    Shape(latent=True, ring=True, states=True, tails=True, slots=24),
]


@pytest.mark.parametrize("shape", TAILS, ids=["tails", "late", "ring"])
def test_a_hit_ends_inside_of_a_block_and_what_is_behind_it_is_computed(
    shape: Shape, engine: Callable[..., ScriptedEngine]
) -> None:
    prompt = list(range(1, 29))
    _, second = shared(engine, shape, prompt)
    assert (second.loads, second.loads_failed) == (1, 0)
    assert second.counters()[metrics.LOADED_TOKENS.name] == 26


SMALL = Shape(small=True, latent=True, slots=24)


def test_of_small_windows_what_hits_need_is_stored_and_loaded(engine: Callable[..., ScriptedEngine]) -> None:
    first, second = engine(SMALL), engine(SMALL)
    first.add("a", list(range(1, 30)), 3)
    first.rest()
    groups = [parse_key(key).group for key in first.world.put]
    assert groups.count(0) == groups.count(1) > 0, (
        "half of the small blocks: those in front of a large one's end"
    )
    second.add("b", list(range(1, 30)), 3)
    second.drain()
    assert (second.hits, second.loads, second.loads_failed) == (1, 1, 0)


SIZES = [(1, 2), (2, 1), (1, 4), (4, 2), (2, 4)]


@pytest.mark.parametrize(("stores", "loads"), SIZES)
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("blocks_per_record", [1, 2])
def test_an_engine_loads_what_one_with_another_number_of_ranks_has_stored(
    engine: Callable[..., ScriptedEngine],
    world: World,
    stores: int,
    loads: int,
    windowed: bool,
    blocks_per_record: int,
) -> None:
    """All that its like would load; the bytes of each head are checked wherever one is read."""
    of_one, of_other = (
        Shape(
            ranks,
            windowed=windowed,
            slots=24,
            blocks_per_record=blocks_per_record,
            cut=True,
        )
        for ranks in (stores, loads)
    )
    first, second, like = engine(of_one), engine(of_other), engine(of_one)
    assert generated(first, "stored") == 0
    assert [generated(one, "loaded") for one in (second, like)] == [1, 1]
    loaded, expected = (one.counters()[metrics.LOADED_TOKENS.name] for one in (second, like))
    assert (
        loaded
        == expected
        == len(PROMPT) // (BLOCK_TOKENS * blocks_per_record) * BLOCK_TOKENS * blocks_per_record
    )
    assert {parse_key(key).rank for key in world.put} == set(range(HEADS))
    assert len({parse_key(key).fingerprint for key in world.put}) == 1


def test_a_lost_part_ends_the_hit_before_it(engine: Callable[..., ScriptedEngine], world: World) -> None:
    shapes = [Shape(ranks, slots=24, cut=True) for ranks in (2, 1)]
    first, second = (engine(shape) for shape in shapes)
    generated(first, "stored")
    third = first.planner._namespace.current.keys(  # type: ignore[union-attr]
        [BlockHasher(BLOCK_TOKENS).hashes(PROMPT)[2]], 0, HEADS - 1
    )
    world.records.delete_many(third)
    assert generated(second, "loaded") == 1
    assert second.counters()[metrics.LOADED_TOKENS.name] == 2 * BLOCK_TOKENS


def test_of_a_part_that_is_lost_under_way_the_whole_load_is_computed(
    engine: Callable[..., ScriptedEngine],
) -> None:
    shapes = [Shape(ranks, slots=24, cut=True) for ranks in (2, 1)]
    first, second = (engine(shape) for shape in shapes)
    generated(first, "stored")
    assert second.ranks[0].store is not None
    second.ranks[0].store.be("losing", 0.5)
    generated(second, "computed")
    assert second.loads_failed == 1
