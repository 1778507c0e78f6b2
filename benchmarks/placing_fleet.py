"""``simulate``: one run of ``python -m benchmarks placing``. Simulated time; one thread.

Engines are those of ``python -m benchmarks agents``; the index is kvpool's own, told of every event; the fleet's pool
has room for all and is a set in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal, NamedTuple

from benchmarks.agents_engine import Engine, Job
from benchmarks.agents_index import DEVICE, POOL, RealIndex
from benchmarks.agents_model import EngineModel
from benchmarks.agents_pool import Found, Held
from benchmarks.agents_traffic import Traffic
from benchmarks.agents_turns import SimulatedTurns
from benchmarks.contest import percentile
from benchmarks.placing_policies import Bounded, Fewest, Hashed, Kvpool, LeastLoad, Policy
from kvpool.index.cost.router import Costs

SLOW = 10.0  # times as long as others takes a slow worker

PolicyName = Literal["kvpool", "hash", "fewest", "bounded", "precise", "load"]
POLICIES: tuple[PolicyName, ...] = ("kvpool", "hash", "fewest", "bounded", "precise", "load")
Befalls = Literal["nothing", "death", "slow", "small"]
BEFALLS: tuple[Befalls, ...] = ("nothing", "death", "slow", "small")
# All caches of a fleet, over the tokens of its live sessions.
ROOM, SMALL_ROOM = 1.25, 0.5


class Result(NamedTuple):
    """``hits_of_ideal``: leading blocks found in device or pool, over those of one endless cache. ``ttft_*``: seconds
    to the first token. ``moves``: of a session, on average.
    """

    turns: int
    hits_of_ideal: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    moves: float


class _SharedPool:
    """A pool that holds all; the ``Pool`` of an engine."""

    near: Held | None = None

    def __init__(self) -> None:
        self._held: set[int] = set()

    def use(self, blocks: Sequence[int]) -> None: ...

    def find(self, blocks: Sequence[int]) -> Found:
        return Found((), list(takewhile(self._held.__contains__, blocks)))

    def count_absent(self, blocks: Sequence[int]) -> int:
        return sum(block not in self._held for block in blocks)

    def put(self, blocks: Sequence[int]) -> list[int]:
        self._held.update(blocks)
        return []


def simulate(
    policy: PolicyName, workers: int, traffic: Traffic, cache_tokens: int, befalls: Befalls, *, has_pool: bool,
    costs: Costs | None = None,
) -> Result:  # fmt: skip
    """``cache_tokens``: of each worker. Takes seconds."""
    return _Fleet(policy, workers, traffic, cache_tokens, befalls, has_pool, costs).run()


class _Fleet(SimulatedTurns):
    def __init__(
        self, policy: PolicyName, workers: int, traffic: Traffic, cache_tokens: int, befalls: Befalls, has_pool: bool,
        costs: Costs | None,
    ) -> None:  # fmt: skip
        super().__init__(workers, traffic)
        self._befalls = befalls
        model = EngineModel(block_tokens=traffic.block_tokens)
        self._model = replace(model, cache_nbytes=cache_tokens // traffic.block_tokens * model.block_nbytes)
        self._pool = _SharedPool() if has_pool else None
        self._index: RealIndex | None = None
        if policy in ("kvpool", "precise"):
            tokens = self._model.blocks * traffic.block_tokens
            self._index = RealIndex(self.clock, traffic, "0" * 32 if has_pool else "", {}, tokens, costs)
        self._policy = self._chosen(policy)
        for name in self.names:
            self.start(name)

    def _chosen(self, name: PolicyName) -> Policy:
        if self._index is not None:
            return Kvpool(self._index, by_session=name == "kvpool")
        if name == "fewest":
            return Fewest(self.clock)
        return {"hash": Hashed, "bounded": Bounded, "load": LeastLoad}[name]()

    def run(self) -> Result:
        self.play()
        ttfts = sorted(self.ttfts)
        return Result(
            len(ttfts), self.hits / max(1, self.ideal), percentile(ttfts, 0.5), percentile(ttfts, 0.9),
            percentile(ttfts, 0.99), self.moves.total() / len(self.traffic.sessions),
        )  # fmt: skip

    def new_engine(self, name: str) -> Engine:
        is_slow = self._befalls == "slow" and name == self.names[0]
        model = replace(self._model, slowness=SLOW) if is_slow else self._model
        if self._index is not None:
            self._index.join(name, ())
        return Engine(name, model, self.clock, self._pool, self)

    def place(self, job: Job) -> str:
        return self._policy.place(job.turn, self.engines)

    def left(self, job: Job, name: str) -> None:
        self._policy.ended(job.turn, name)

    def half_came(self) -> None:
        if self._befalls == "death":
            killed = self.kill_busiest()
            if self._index is not None:
                self._index.leave(killed.name)

    # ---- what engines tell

    def changed(
        self, engine: Engine, stored: Sequence[int], evicted: Sequence[int], after: int | None
    ) -> None:
        self._tell(engine, DEVICE, stored, evicted, after)

    def put(self, engine: Engine, stored: Sequence[int]) -> None:
        self._tell(engine, POOL, stored, (), None)

    def near_changed(self, engine: Engine, stored: Sequence[int], evicted: Sequence[int]) -> None: ...

    def far_evicted(self, blocks: Sequence[int]) -> None: ...

    def _tell(
        self, engine: Engine, medium: str, stored: Sequence[int], removed: Sequence[int], after: int | None
    ) -> None:
        if self._index is not None:
            batch = self.logs[engine.name].write(self.clock(), medium, stored, removed, after)
            self._index.tell(engine.name, batch)
