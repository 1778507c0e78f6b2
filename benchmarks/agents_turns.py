"""``SimulatedTurns``: turns of sessions come, go to an engine, and end. Simulated time; one thread.

What places them, and what befalls the fleet, is the subclass's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from functools import partial

import numpy as np

from benchmarks.agents_engine import Clock, Engine, Job
from benchmarks.agents_index import EventLog
from benchmarks.agents_traffic import Traffic, Turn

RETRY_S = 1.0  # until a caller asks again
AWAY_S = 120.0  # of a worker that dies


class SimulatedTurns(ABC):
    """``ideal``, ``hits``: leading blocks, of one endless cache and from device or pool. ``moves``: by session."""

    def __init__(self, workers: int, traffic: Traffic) -> None:
        self.traffic = traffic
        self.clock = Clock()
        self.names = [f"{number:02}" for number in range(workers)]
        self.engines: dict[str, Engine] = {}
        self.logs: dict[str, EventLog] = {}
        self.at: dict[Job, str] = {}
        self.came = self.ideal = self.hits = 0
        self.moves: Counter[int] = Counter()
        self.ttfts: list[float] = []
        self._last: dict[int, str] = {}  # a session's worker
        self._seen = np.zeros(len(traffic.hashes), bool)

    @abstractmethod
    def new_engine(self, name: str) -> Engine: ...

    @abstractmethod
    def place(self, job: Job) -> str:
        """The name of a worker, one of ``engines``, of which there are some."""

    @abstractmethod
    def left(self, job: Job, name: str) -> None:
        """A placed turn was answered, or its worker died."""

    @abstractmethod
    def half_came(self) -> None:
        """Half of the turns have come."""

    def play(self) -> None:
        for session in self.traffic.sessions:
            self.clock.after(session[0].pause_s, partial(self.come, session[0]))
        while self.clock.step():
            pass
        assert not self.at

    def start(self, name: str) -> None:
        self.logs[name] = EventLog(self.traffic)
        self.engines[name] = self.new_engine(name)

    def come(self, turn: Turn) -> None:
        self.came += 1
        findable = turn.blocks[: (turn.tokens - 1) // self.traffic.block_tokens]
        seen = self._seen[findable]
        ideal = len(findable) if seen.all() else int(np.argmin(seen))
        self.ideal += ideal
        self._seen[turn.blocks] = True
        self._send(Job(turn, findable.tolist(), ideal, self.clock()))
        if self.came == self.traffic.turns // 2:
            self.half_came()

    def ended(self, engine: Engine, job: Job) -> None:
        self.left(job, self.at.pop(job))
        self.hits += min(job.ideal, job.device + job.pool)  # a turn that asks again may find its own blocks
        assert job.first_s is not None
        self.ttfts.append(job.first_s - job.came_s)
        session = self.traffic.sessions[job.turn.session]
        if (number := job.turn.number + 1) < len(session):
            self.clock.after(session[number].pause_s, partial(self.come, session[number]))

    def kill_busiest(self) -> Engine:
        """Its memory is lost, and callers ask again; it starts anew after ``AWAY_S``."""
        busy = Counter(self.at.values())
        name = max(self.names, key=lambda one: busy[one])
        engine = self.engines.pop(name)
        for job in engine.kill():
            self.left(job, self.at.pop(job))
            self.clock.after(RETRY_S, partial(self._send, job))
        self.clock.after(AWAY_S, partial(self.start, name))
        return engine

    def _send(self, job: Job) -> None:
        if not self.engines:
            self.clock.after(RETRY_S, partial(self._send, job))
            return
        name = self.place(job)
        if self._last.setdefault(job.turn.session, name) != name:
            self.moves[job.turn.session] += 1
            self._last[job.turn.session] = name
        self.at[job] = name
        self.engines[name].submit(job)
