"""``Engine``: one worker of ``python -m benchmarks agents``, as vLLM schedules. Simulated time; one thread.

Requests are admitted in order, while no prompt is being computed and memory has room for all blocks of the next. What
the memory lacks of the prompt is looked up in the pool, and loaded over the worker's link; meanwhile others are
computed. Prompts are computed one after the other in steps that also decode: a step that computes makes an answer's
next token as late as it is long. Answers' blocks take memory and are not found again, as traces do not name them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.agents_cache import DeviceCache
from benchmarks.agents_model import MAX_RUNNING, EngineModel
from benchmarks.agents_traffic import Turn

LOOK_S = 1.0  # between two readings of a worker's load, as an index reads it


class Clock:
    """Simulated seconds, and what happens at which of them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def after(self, pause_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + pause_s, next(self._number), act))

    def step(self) -> bool:
        """False: nothing is left to happen."""
        if not self._due:
            return False
        self.now_s, _, act = heapq.heappop(self._due)
        act()
        return True


@dataclass(eq=False)
class Job:
    """A turn at a worker. ``ideal``: leading blocks that an endless cache would have; ``device``, ``pool``: those that
    came from there. ``first_s``: of its first token.
    """

    turn: Turn
    findable: Sequence[int]  # leading blocks that could be found: one token is always computed
    ideal: int
    came_s: float
    device: int = 0
    pool: int = 0
    first_s: float | None = None
    blocks: int = 0
    named: list[int] = field(default_factory=list)


class Pool(Protocol):
    def leading(self, blocks: Sequence[int]) -> int: ...
    def put(self, blocks: Sequence[int]) -> None: ...


class Watcher(Protocol):
    """What an engine tells."""

    def changed(
        self, engine: Engine, stored: Sequence[int], evicted: Sequence[int], after: int | None
    ) -> None:
        """``after``: the block before the first one stored."""

    def put(self, engine: Engine, stored: Sequence[int]) -> None:
        """Blocks are in the pool now."""

    def ended(self, engine: Engine, job: Job) -> None: ...


class Look(NamedTuple):
    """A worker's gauges."""

    running: int
    waiting: int
    usage: float


@dataclass
class Moved:
    """Sums of an engine. The first four are what the connector's cost gate measures."""

    load_tokens: float = 0.0
    load_s: float = 0.0
    prefill_tokens: float = 0.0
    prefill_s: float = 0.0
    loaded_blocks: int = 0
    put_blocks: int = 0


class Engine:
    """``pool``: None: it has none. ``moved``: sums."""

    def __init__(
        self, name: str, model: EngineModel, clock: Clock, pool: Pool | None, watcher: Watcher
    ) -> None:
        self.name, self.moved = name, Moved()
        self.cache = DeviceCache(model.blocks)
        self._model, self._clock, self._pool, self._watcher = model, clock, pool, watcher
        self._is_dead = False
        self._waiting: deque[Job] = deque()
        self._loading: dict[Job, None] = {}
        self._loaded: deque[Job] = deque()
        self._computed: Job | None = None  # now
        self._compute_step_s = 0.0
        self._decoding: list[tuple[float, int, Job]] = []  # by the step of their last token
        self._decoding_tokens = 0
        self._steps, self._steps_at_s, self._steps_a_s = 0.0, 0.0, 0.0
        self._waits = 0  # for the end of an answer; another number: the time has changed
        self._number = itertools.count()
        self._load_free_s = self._put_free_s = 0.0
        self._looked, self._before = -1.0, Look(0, 0, 0.0)

    def submit(self, job: Job) -> None:
        self._note()
        job.blocks = self._model.blocks_of(job.turn.tokens + job.turn.answer_tokens)
        assert job.blocks <= self.cache.blocks
        self._waiting.append(job)
        self._admit()

    def kill(self) -> list[Job]:
        """Lose everything. Returns the jobs that it had."""
        self._is_dead = True
        computed = [self._computed] if self._computed else []
        return [*self._waiting, *self._loading, *self._loaded, *computed, *(one[2] for one in self._decoding)]

    def look(self) -> Look:
        """The gauges at the last whole ``LOOK_S``."""
        return self._before if self._looked == self._clock() // LOOK_S else self._look()

    def _look(self) -> Look:
        running = len(self._decoding) + (self._computed is not None)
        waiting = len(self._waiting) + len(self._loading) + len(self._loaded)
        return Look(running, waiting, min(1.0, self.cache.usage))

    def _note(self) -> None:
        """Before each change."""
        if (tick := self._clock() // LOOK_S) != self._looked:
            self._before, self._looked = self._look(), tick

    def _after(self, pause_s: float, act: Callable[[], None]) -> None:
        def unless_dead() -> None:
            if not self._is_dead:
                self._note()
                act()

        self._clock.after(pause_s, unless_dead)

    # ---- a request

    def _admit(self) -> None:
        while self._computed is None:
            if self._loaded:
                self._compute(self._loaded.popleft())
                return
            if not self._waiting or self._look().running + len(self._loading) >= MAX_RUNNING:
                return
            job = self._waiting[0]
            admitted = self.cache.admit(job.findable, job.blocks)
            if admitted is None:
                return
            self._waiting.popleft()
            job.device, job.pool = admitted.hit, 0
            job.named = list(job.findable[: admitted.hit])
            if admitted.evicted:
                self._watcher.changed(self, (), admitted.evicted, None)
            rest = job.findable[admitted.hit :]
            if self._pool is not None and rest:
                job.pool = self._pool.leading(rest)
            if job.pool:
                self._load(job)
            else:
                self._compute(job)

    def _load(self, job: Job) -> None:
        takes_s = self._model.move_s(job.pool)
        self._load_free_s = max(self._clock(), self._load_free_s) + takes_s
        self.moved.load_tokens += job.pool * self._model.block_tokens
        self.moved.load_s += takes_s
        self.moved.loaded_blocks += job.pool
        self._loading[job] = None

        def loaded() -> None:
            del self._loading[job]
            self._fill(job, job.findable[job.device : job.device + job.pool])
            self._loaded.append(job)
            self._admit()

        self._after(self._load_free_s - self._clock(), loaded)

    def _compute(self, job: Job) -> None:
        cached = (job.device + job.pool) * self._model.block_tokens
        tokens = job.turn.tokens - cached
        steps = self._model.steps_of(tokens)
        alone_s = self._model.compute_s(cached, tokens)
        takes_s = alone_s
        if self._decoding:
            takes_s += steps * self._model.decode_s(len(self._decoding), self._decoding_tokens)
        self._decode()
        self._computed, self._compute_step_s = job, takes_s / steps
        self._pace()
        self.moved.prefill_tokens += tokens
        self.moved.prefill_s += alone_s

        def computed() -> None:
            self._decode()
            self._computed = None
            if job.first_s is None:  # of a request that failed elsewhere: its caller had one
                job.first_s = self._clock()
            fresh = job.turn.blocks[job.device + job.pool :].tolist()
            stored = self._fill(job, fresh)
            if self._pool is not None and stored:
                self._put(stored)
            if job.turn.answer_tokens > 1:
                heapq.heappush(
                    self._decoding, (self._steps + job.turn.answer_tokens - 1, next(self._number), job)
                )
                self._decoding_tokens += job.turn.tokens
                self._pace()
            else:
                self._pace()
                self._end(job)
            self._admit()

        self._after(takes_s, computed)

    def _fill(self, job: Job, blocks: Sequence[int]) -> list[int]:
        after = job.named[-1] if job.named else None
        stored = self.cache.fill(blocks)
        job.named += stored
        if stored:
            self._watcher.changed(self, stored, (), after)
        return stored

    def _put(self, blocks: list[int]) -> None:
        self._put_free_s = max(self._clock(), self._put_free_s) + self._model.move_s(len(blocks))
        self.moved.put_blocks += len(blocks)

        def put() -> None:
            assert self._pool is not None
            self._pool.put(blocks)
            self._watcher.put(self, blocks)

        self._after(self._put_free_s - self._clock(), put)

    def _end(self, job: Job) -> None:
        self.cache.release(job.named, job.blocks)
        self._watcher.ended(self, job)

    # ---- answers: all advance by a token a step

    def _decode(self) -> None:
        """Count the steps until now."""
        now_s = self._clock()
        self._steps += (now_s - self._steps_at_s) * self._steps_a_s
        self._steps_at_s = now_s

    def _pace(self) -> None:
        """How fast steps are from now on, and so when the next answer ends."""
        self._waits += 1
        self._steps_a_s = 0.0
        if not self._decoding:
            return
        step_s = self._model.decode_s(len(self._decoding), self._decoding_tokens)
        self._steps_a_s = 1 / (self._compute_step_s if self._computed is not None else step_s)
        left = max(0.0, self._decoding[0][0] - self._steps)
        self._after(left / self._steps_a_s, lambda waits=self._waits: self._answer(waits))  # type: ignore[misc]

    def _answer(self, waits: int) -> None:
        if waits != self._waits:
            return
        self._decode()
        last = self._decoding[0][0]
        self._steps = max(self._steps, last)
        while self._decoding and self._decoding[0][0] <= math.nextafter(last, math.inf):
            _, _, job = heapq.heappop(self._decoding)
            self._decoding_tokens -= job.turn.tokens
            self._end(job)
        self._pace()
        self._admit()
