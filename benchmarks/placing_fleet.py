"""``simulate``: one run of ``python -m benchmarks placing``. Simulated time; one thread.

Engines are those of ``python -m benchmarks agents``; the index is kvpool's own, told of every event; the fleet's pool
has room for all and is a set in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Literal, NamedTuple

import numpy as np

from benchmarks.agents_engine import Clock, Engine, Job
from benchmarks.agents_index import DEVICE, POOL, EventLog, RealIndex
from benchmarks.agents_model import EngineModel
from benchmarks.agents_pool import Found, Held
from benchmarks.agents_traffic import Traffic, Turn
from benchmarks.contest import percentile
from benchmarks.placing_policies import Bounded, Fewest, Hashed, Kvpool, LeastLoad, Policy
from kvpool.index.place.router import Costs

RETRY_S, AWAY_S = 1.0, 120.0  # until a caller asks again; of a worker that dies
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


class _Fleet:
    def __init__(
        self, policy: PolicyName, workers: int, traffic: Traffic, cache_tokens: int, befalls: Befalls, has_pool: bool,
        costs: Costs | None,
    ) -> None:  # fmt: skip
        self._traffic, self._befalls = traffic, befalls
        self._clock = Clock()
        model = EngineModel(block_tokens=traffic.block_tokens)
        self._model = replace(model, cache_nbytes=cache_tokens // traffic.block_tokens * model.block_nbytes)
        self._pool = _SharedPool() if has_pool else None
        self._index: RealIndex | None = None
        if policy in ("kvpool", "precise"):
            tokens = self._model.blocks * traffic.block_tokens
            self._index = RealIndex(self._clock, traffic, "0" * 32 if has_pool else "", {}, tokens, costs)
        self._policy = self._chosen(policy)
        self._engines: dict[str, Engine] = {}
        self._logs: dict[str, EventLog] = {}
        self._names = [f"{number:02}" for number in range(workers)]
        for name in self._names:
            self._start(name)
        self._at: dict[Job, str] = {}
        self._last: dict[int, str] = {}
        self._seen = np.zeros(len(traffic.hashes), bool)
        self._came = self._moves = self._ideal = self._hits = 0
        self._ttfts: list[float] = []

    def _chosen(self, name: PolicyName) -> Policy:
        if self._index is not None:
            return Kvpool(self._index, by_session=name == "kvpool")
        if name == "fewest":
            return Fewest(self._clock)
        return {"hash": Hashed, "bounded": Bounded, "load": LeastLoad}[name]()

    def run(self) -> Result:
        for session in self._traffic.sessions:
            self._clock.after(session[0].pause_s, partial(self._come, session[0]))
        while self._clock.step():
            pass
        assert not self._at
        ttfts = sorted(self._ttfts)
        return Result(
            len(ttfts), self._hits / max(1, self._ideal), percentile(ttfts, 0.5), percentile(ttfts, 0.9),
            percentile(ttfts, 0.99), self._moves / len(self._traffic.sessions),
        )  # fmt: skip

    def _start(self, name: str) -> None:
        is_slow = self._befalls == "slow" and name == self._names[0]
        model = replace(self._model, slowness=SLOW) if is_slow else self._model
        self._logs[name] = EventLog(self._traffic)
        self._engines[name] = Engine(name, model, self._clock, self._pool, self)
        if self._index is not None:
            self._index.join(name, ())

    def _come(self, turn: Turn) -> None:
        self._came += 1
        findable = turn.blocks[: (turn.tokens - 1) // self._traffic.block_tokens]
        seen = self._seen[findable]
        ideal = len(findable) if seen.all() else int(np.argmin(seen))
        self._ideal += ideal
        self._seen[turn.blocks] = True
        self._send(Job(turn, findable.tolist(), ideal, self._clock()))
        if self._befalls == "death" and self._came == self._traffic.turns // 2:
            self._kill()

    def _send(self, job: Job) -> None:
        name = self._policy.place(job.turn, self._engines)
        self._moves += self._last.setdefault(job.turn.session, name) != name
        self._last[job.turn.session] = name
        self._at[job] = name
        self._engines[name].submit(job)

    def _kill(self) -> None:
        """Of the busiest worker: its memory is lost, and callers ask again."""
        busy = Counter(self._at.values())
        name = max(self._names, key=lambda one: busy[one])
        engine = self._engines.pop(name)
        for job in engine.kill():
            self._policy.ended(job.turn, self._at.pop(job))
            self._clock.after(RETRY_S, partial(self._send, job))
        if self._index is not None:
            self._index.leave(name)
        self._clock.after(AWAY_S, partial(self._start, name))

    # ---- what engines tell

    def changed(
        self, engine: Engine, stored: Sequence[int], evicted: Sequence[int], after: int | None
    ) -> None:
        self._tell(engine, DEVICE, stored, evicted, after)

    def put(self, engine: Engine, stored: Sequence[int]) -> None:
        self._tell(engine, POOL, stored, (), None)

    def near_changed(self, engine: Engine, stored: Sequence[int], evicted: Sequence[int]) -> None: ...

    def far_evicted(self, blocks: Sequence[int]) -> None: ...

    def ended(self, engine: Engine, job: Job) -> None:
        self._policy.ended(job.turn, self._at.pop(job))
        self._hits += min(job.ideal, job.device + job.pool)
        assert job.first_s is not None
        self._ttfts.append(job.first_s - job.came_s)
        session = self._traffic.sessions[job.turn.session]
        if (number := job.turn.number + 1) < len(session):
            self._clock.after(session[number].pause_s, partial(self._come, session[number]))

    def _tell(
        self, engine: Engine, medium: str, stored: Sequence[int], removed: Sequence[int], after: int | None
    ) -> None:
        if self._index is not None:
            batch = self._logs[engine.name].write(self._clock(), medium, stored, removed, after)
            self._index.tell(engine.name, batch)
