"""Engines in their namespaces: what their workers hold is what their names stand for, whatever happens to them.

Over 400 lines because one scripted engine lives in all of them.
"""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool import metrics
from kvpool.key.key import EPOCH_FACT, MEMORY_FACT, Fact, Namespace
from kvpool.metrics import Counters
from kvpool.vllm.engine.namespace import EngineNamespace, facts_of_weights
from kvpool.vllm.geometry import Geometry, Group
from kvpool.vllm.plan import LoadPlan, Measured, PoolMetadata

pytestmark = [pytest.mark.vllm]

NAN = 9  # weights that are no numbers
WRITES, OTHERS = ("reload_weights", "update_weights"), ("profile", "a method of their own")
WEIGHTS = st.sampled_from((0, 1, 2, 3, NAN))


class Rank:
    """A worker. What it reports is on its way for a while."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine, self.rank = engine, rank
        self.measurable, self.awaits_weights, self.off = True, False, False
        self.facts: dict[str, Fact] = dict(engine.facts) if engine.stages == 1 else {}
        self.named: dict[str, Fact] = {}
        self.reports: deque[tuple[dict[int, dict[str, Fact]], dict[tuple[int, int], Measured]]] = deque()

    def measured(self) -> Measured:
        weights = self.engine.weights
        if not self.measurable:
            return Measured(why="it does not show")
        return Measured(f"{self.rank} of {weights}", nan=weights == NAN and self.rank == 0)

    def step(self, step: PoolMetadata) -> None:
        self.facts = step.facts or self.facts
        self.off = self.off or step.off
        if step.weights is not None:
            self.named, self.awaits_weights, self.off = step.weights, False, False
        said = {}
        if step.measure:
            self.awaits_weights = True
            said[self.rank, step.measure] = self.measured()
        self.reports.append(({}, said))

    @property
    def namespace(self) -> str:
        if not self.facts or self.awaits_weights:
            return ""
        return Namespace("default", facts_of_weights(self.facts, self.named)).hex


class Engine:
    """What EngineNamespace is told of, and what is true."""

    def __init__(self, files: str, weights: int, ranks: int, stages: int, measurable: bool) -> None:
        self.facts: dict[str, Fact] = {"model": "test", "weights": files, "tensor_parallel": ranks // stages}
        self.weights = self.at_start = weights
        self.stages = stages
        self.cached: set[object] = set()  # of what weights the cache has blocks
        self.guessed = False  # some of its blocks are of weights that nobody could measure in time
        self.computed = False  # since the last question
        self.asleep = False
        self.leaves = 0
        self.counters = Counters()
        groups, geometry = (Group(16),), {"ranks": ranks, "pipeline_parallel": stages}
        self.namespace = EngineNamespace(
            "default",
            Geometry(groups, step_tokens=64, **geometry),
            self.counters,
            is_asleep=lambda: self.asleep,
            leave=self._leave,
        )
        self.ranks = [Rank(self, rank) for rank in range(ranks)]
        self.ranks[-1].measurable = self.measured = measurable
        for rank in self.ranks:
            rank.reports.append(({rank.rank: self.facts}, {(rank.rank, 0): rank.measured()}))

    def _leave(self) -> None:
        self.leaves += 1

    @property
    def name(self) -> str:
        current = self.namespace.current
        return "" if current is None else current.hex

    def step(self, kind: str = "idle") -> PoolMetadata:
        step = PoolMetadata(idle=kind != "compute")
        if kind == "load" and self.name:
            step.loads = [LoadPlan("a", [], 1.0)]
        self.namespace.add_to(step)
        assert not (self.asleep and (step.measure or step.watch)), "the memory is away"
        for rank in self.ranks:
            rank.step(step)
            if self.name:
                assert rank.namespace == self.name, "a worker is elsewhere"
        if kind == "compute" or step.loads:
            self.cached.add(self.weights)
            self.computed = self.computed or self.namespace.asks
        return step

    def hear(self, rank: int) -> None:
        """The scheduler hears one report of a rank."""
        if (reports := self.ranks[rank % len(self.ranks)].reports) and not self.namespace.learn(
            *reports.popleft()
        ):
            self.computed = self.computed and self.namespace.asks

    def settle(self) -> None:
        """Nothing happens until every question is answered."""
        for _ in range(3):
            self.step()
            for rank in self.ranks:
                while rank.reports:
                    self.hear(rank.rank)

    def asked(self) -> None:
        self.guessed, self.computed = self.guessed or self.computed, False

    def reset(self, in_use: bool) -> None:
        self.asked()
        if not in_use:
            self.cached, self.guessed = set(), False
        self.namespace.reset(in_use=in_use)

    def call(self, method: str, weights: int | None = None) -> None:
        if weights is not None:
            self.weights = weights
        self.asked()
        self.namespace.called(method)


class Lives(RuleBasedStateMachine):
    """Two engines with other files. Weights change in calls; where a rank shows none, in those known for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, int] = {}  # by name
        self.names: dict[object, str] = {}  # by weights, and by engine where its files name them

    @initialize(ranks=st.sampled_from((1, 2)), stages=st.sampled_from((1, 2)), measurable=st.booleans())
    def start(self, ranks: int, stages: int, measurable: bool) -> None:
        self.engines = [
            Engine("a", 0, ranks * stages, stages, measurable),
            Engine("b", 1, ranks * stages, stages, True),
        ]
        self.last = ["", ""]
        self.leaves = [0, 0]
        self.left: list[set[str]] = [set(), set()]  # by engines that are not measured

    ENGINES = st.sampled_from((0, 1))

    @rule(at=ENGINES, kind=st.sampled_from(("compute", "load", "idle")))
    def step(self, at: int, kind: str) -> None:
        if not self.engines[at].asleep:
            self.engines[at].step(kind)

    @rule(at=ENGINES, rank=st.integers(0, 3))
    def hear(self, at: int, rank: int) -> None:
        self.engines[at].hear(rank)

    @rule(at=ENGINES, in_use=st.booleans())
    def reset(self, at: int, in_use: bool) -> None:
        self._leaves_its_name(at)
        self.engines[at].reset(in_use)

    @rule(at=ENGINES, method=st.sampled_from(WRITES + OTHERS), weights=st.none() | WEIGHTS)
    def call(self, at: int, method: str, weights: int | None) -> None:
        engine = self.engines[at]
        if method in WRITES:
            self._leaves_its_name(at)
        elif not engine.measured:
            weights = None
        if not engine.asleep or method in WRITES:
            engine.call(method, weights)

    @rule(at=ENGINES, weights=st.none() | WEIGHTS)
    def sleep(self, at: int, weights: int | None) -> None:
        engine = self.engines[at]
        if engine.asleep:
            if engine.measured and weights is not None:
                engine.weights = weights
            engine.asleep = False
            engine.call("wake_up")
        else:
            self.reset(at, in_use=False)
            engine.asleep = True
            engine.call("sleep")

    @rule(at=ENGINES, weights=WEIGHTS)
    def change_silently(self, at: int, weights: int) -> None:
        """And a worker's watch finds it in the same step."""
        engine = self.engines[at]
        if engine.measured and engine.name and weights != engine.weights:
            engine.weights = weights
            engine.asked()
            engine.guessed = True
            engine.namespace.differs()

    @precondition(lambda self: self.engines[0].measured)
    @rule()
    def cannot_be_measured_any_more(self) -> None:
        self.engines[0].ranks[-1].measurable = self.engines[0].measured = False

    def _leaves_its_name(self, at: int) -> None:
        engine = self.engines[at]
        if not engine.measured:
            self.left[at] |= {self.last[at], Namespace("default", engine.facts).hex}

    @rule(at=ENGINES)
    def settle(self, at: int) -> None:
        engine = self.engines[at]
        if engine.asleep:
            return
        engine.settle()
        assert not engine.namespace.asks
        other = bool(engine.cached - {engine.weights})
        nan = engine.weights == NAN
        if engine.measured and not engine.guessed:
            assert bool(engine.name) == (not other and not nan), (
                "it goes without the pool only when it has to"
            )
            assert engine.namespace.is_off == (not engine.name)

    @invariant()
    def names_stand_for_weights(self) -> None:
        for at, engine in enumerate(getattr(self, "engines", ())):
            if not (name := engine.name):
                continue
            assert not engine.namespace.asks
            assert not engine.namespace.is_off
            assert engine.weights != NAN or not engine.measured
            weights = self.weights.setdefault(name, engine.weights)
            assert weights == engine.weights, "other weights than the name stands for"
            assert engine.cached <= {weights}, "the cache has blocks of other weights"
            if engine.measured:
                of = (at, weights) if weights == engine.at_start else weights
                assert self.names.setdefault(of, name) == name, "one name of the same weights"
            if self.last[at] not in ("", name):
                assert engine.leaves > self.leaves[at], "blocks under way are of other weights"
            self.last[at], self.leaves[at] = name, engine.leaves
            assert name not in self.left[at], "an engine that is not measured keeps its name"


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def started(
    files: str = "a", weights: int = 0, ranks: int = 1, stages: int = 1, measurable: bool = True
) -> Engine:
    engine = Engine(files, weights, ranks, stages, measurable)
    engine.settle()
    return engine


def counted(engine: Engine) -> dict[str, float]:
    name = f"{metrics.WEIGHTS.name}/"
    taken = engine.counters.take()
    return {key.removeprefix(name): value for key, value in taken.items() if isinstance(value, float | int)}


def test_engines_of_other_files_that_get_the_same_weights_have_one_name() -> None:
    engines = [started("a", 0), started("b", 1)]
    names = [engine.name for engine in engines]
    for engine in engines:
        engine.call("update_weights", 2)
        engine.settle()
        assert engine.namespace.current is not None
        facts = engine.namespace.current.facts
        assert "weights" not in facts
        assert MEMORY_FACT in facts
        assert EPOCH_FACT not in facts
    assert engines[0].name == engines[1].name
    for engine, name in zip(engines, names, strict=True):
        engine.call("update_weights", engine.at_start)
        engine.settle()
        assert engine.name == name
        assert counted(engine) == {"other": 2}


@pytest.mark.parametrize("stages", [1, 2])
def test_an_engine_asks_and_answers_before_it_is_anywhere(stages: int) -> None:
    engine = started(ranks=2, stages=stages)
    name, worker = engine.name, engine.ranks[0]
    assert not engine.namespace.wants_step
    step = engine.step()
    assert (step.measure, step.watch, step.weights, step.facts) == (0, True, None, {})
    engine.reset(in_use=False)
    assert (engine.name, engine.namespace.wants_step) == ("", True)
    assert [(step.measure, step.watch) for step in (engine.step(), engine.step())] == [(1, False), (0, False)]
    assert worker.awaits_weights
    for rank in engine.ranks:
        while len(rank.reports) > 2:
            rank.reports.popleft()
    engine.hear(0)
    engine.hear(0)
    engine.call("profile")  # what the other rank is to say of the first question counts no more
    engine.step()
    for rank in (1, 1, 0):
        engine.hear(rank)
        assert engine.name == ""
    engine.hear(1)
    assert (engine.name, engine.namespace.wants_step) == (name, True), "its workers are told, and announce it"
    assert engine.leaves == 0
    assert counted(engine) == {"same": 1}
    assert [engine.step().weights for _ in range(2)] == [{}, None]
    assert not engine.namespace.wants_step
    assert worker.namespace == name


def test_blocks_of_other_weights_keep_an_engine_from_the_pool_until_a_reset_that_answers_true() -> None:
    engine = started()
    for _ in range(2):
        engine.step("compute")
        engine.call("update_weights", 2 + engine.weights)
        engine.settle()
        assert (engine.name, engine.namespace.is_off) == ("", True)
        assert (engine.ranks[0].off, engine.namespace.wants_step) == (True, False), "it is told"
        engine.step("compute")
        engine.reset(in_use=True)
        assert not engine.namespace.is_off, "it asks"
        engine.settle()
        assert engine.namespace.is_off, "of both"
        engine.reset(in_use=False)
        engine.settle()
        assert engine.name
        assert not engine.ranks[0].off
        assert counted(engine) == {"off": 2, "other": 1}, "it shares under other weights than before"
    assert engine.leaves == 2


def test_what_is_computed_between_two_questions_is_of_no_known_weights() -> None:
    engine = started()
    engine.call("update_weights", 2)
    engine.step("compute")
    engine.call("update_weights", 0)
    engine.settle()
    assert engine.namespace.is_off
    engine.reset(in_use=False)
    engine.settle()
    assert engine.name == started().name


def test_what_is_computed_under_a_question_is_of_what_its_answer_says() -> None:
    engine = started()
    for _ in range(2):
        engine.call("profile")
        engine.step("compute")
        engine.settle()
        assert engine.name == started().name
    engine.call("update_weights", 2)
    engine.settle()
    assert engine.namespace.is_off


def test_what_is_loaded_is_in_the_cache_too() -> None:
    engine = started()
    engine.step("load")
    engine.call("update_weights", 2)
    engine.settle()
    assert engine.namespace.is_off


def test_of_blocks_before_a_reset_nothing_is_left() -> None:
    engine = started()
    engine.call("update_weights", 2)
    engine.step("compute")
    engine.reset(in_use=False)
    engine.call("update_weights", 0)
    engine.settle()
    assert engine.name == started().name


def test_what_is_called_before_the_first_report_is_asked_for_when_the_workers_step() -> None:
    engine = Engine("a", 0, 1, 1, measurable=True)
    engine.call("a method of their own", 2)
    assert not engine.namespace.wants_step, "nobody has begun"
    engine.hear(0)
    assert (engine.name, engine.namespace.wants_step) == ("", True)
    engine.settle()
    other = started("b", 1)
    other.call("update_weights", 2)
    other.settle()
    assert engine.name == other.name != ""


def test_memory_says_what_files_say_of_weights_and_no_more() -> None:
    files: dict[str, Fact] = {
        "weights": "a",
        "stage1.revision": "b",
        "drafts_weights": "c",
        "stage0.fp8_scales": "d",
    }
    model: dict[str, Fact] = {"model": "m", "stage1.drafts": "n"}
    assert facts_of_weights(files | model, {}) == files | model
    for named in ({EPOCH_FACT: "one"}, {MEMORY_FACT: "one"}):
        expected = model if MEMORY_FACT in named else files | model
        assert facts_of_weights(files | model, named) == expected | named


def test_a_silent_change_is_counted_once_and_told_to_all_ranks() -> None:
    """Also of an engine whose cache seems empty: what it computed may be of either weights."""
    engine = started()
    engine.weights = 2
    for _ in range(2):
        engine.namespace.differs()
    assert [engine.step().silent for _ in range(2)] == [True, False]
    engine.settle()
    assert engine.namespace.is_off
    engine.reset(in_use=False)
    engine.settle()
    assert engine.name not in ("", started().name)
    assert counted(engine) == {"silent": 1, "off": 1, "other": 1}
    assert not engine.step().silent


@pytest.mark.parametrize("told", [False, True])
def test_a_reset_that_finds_other_weights_tells_the_ranks_unless_a_call_has_written_them(told: bool) -> None:
    engine = started()
    engine.weights = 2
    engine.reset(in_use=False)
    if told:
        engine.call("update_weights")
    engine.step()
    for _ in range(2):
        engine.hear(0)
    assert engine.name
    assert engine.step().silent == (not told)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_is_not_measured_is_alone_after_each_reset_and_reload(ranks: int) -> None:
    engine = started(ranks=ranks, measurable=False)
    names = [engine.name]
    engine.call("profile")
    assert engine.name == names[0], "nobody can say more"
    assert counted(engine) == {}
    for method in ("", *WRITES):
        engine.step("compute")
        engine.reset(in_use=False)
        if method:
            engine.call(method)
        names.append(engine.name)
        engine.step()
        assert engine.namespace.current is not None
        assert EPOCH_FACT in engine.namespace.current.facts
    assert len(set(names)) == len(names)
    engine.step("compute")
    engine.call(WRITES[0])
    assert engine.namespace.is_off


def test_an_engine_that_can_measure_no_more_is_alone() -> None:
    engine = started()
    engine.ranks[0].measurable = False
    engine.call("profile")
    engine.settle()
    assert engine.namespace.current is not None
    assert EPOCH_FACT in engine.namespace.current.facts
    step = PoolMetadata()
    engine.namespace.add_to(step)
    assert not step.watch


def test_a_reload_before_the_first_step_is_remembered_over_other_calls() -> None:
    engine = Engine("a", 0, 1, 1, measurable=False)
    engine.call("reload_weights", 2)
    engine.call("profile")
    engine.settle()
    assert engine.name not in ("", started().name)


def test_a_model_that_sleeps_is_not_asked_nor_watched() -> None:
    engine = started()
    engine.asleep = True
    step = PoolMetadata(idle=True)
    engine.namespace.add_to(step)
    assert not step.watch
    engine.call("sleep")
    assert not engine.namespace.wants_step
    for awake in (False, True):
        engine.asleep = not awake
        step = PoolMetadata(idle=True)
        engine.namespace.add_to(step)
        assert (bool(step.measure), step.watch) == (awake, False)


def test_ranks_of_a_stage_that_differ_have_no_name() -> None:
    engine = Engine("a", 0, 2, 1, measurable=True)
    engine.ranks[1].reports[0][0][1] = {**engine.facts, "model": "other"}
    namespace = engine.namespace
    assert namespace.learn(*engine.ranks[0].reports.popleft()) == ""
    assert "its ranks differ: model" in namespace.learn(*engine.ranks[1].reports.popleft())
    assert namespace.current is None


def test_blocks_of_the_first_steps_are_of_the_weights_at_the_start() -> None:
    """They are computed before a worker has said what it holds."""
    engine = Engine("a", 0, 1, 1, measurable=True)
    engine.step("compute")
    for _ in range(2):
        engine.hear(0)
    assert engine.step("compute").weights is None, "the workers are there already"
    name = engine.name
    engine.call("profile")
    engine.settle()
    assert engine.name == name != ""


def test_weights_that_are_no_numbers_are_so_after_a_reset_too() -> None:
    engine = started()
    engine.call("update_weights", NAN)
    for _ in range(2):
        engine.settle()
        assert (engine.name, engine.namespace.is_off) == ("", True)
        engine.reset(in_use=False)
    engine.call("update_weights", 0)
    engine.settle()
    assert engine.name == started().name
