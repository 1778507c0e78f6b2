"""``Engine``: one worker of ``python -m benchmarks agents``, as vLLM schedules. Simulated time; one thread.

Requests are admitted in order, while no prompt is being computed and memory has room for all blocks of the next. What
the memory lacks of the prompt is looked up in the pool, and loaded over the worker's ways there; meanwhile others are
computed. Prompts are computed one after the other in steps that also decode: a step that computes makes an answer's
next token as late as it is long. Answers' blocks take memory and are not found again, as traces do not name them.

Loads have the connector's bounds: its cost gate, and a time for each. A load that fails is computed.
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
from benchmarks.agents_loads import Way, cost_gate
from benchmarks.agents_model import LINK_NBYTES_S, MAX_RUNNING, NEAR_NBYTES_S, EngineModel
from benchmarks.agents_pool import Found, Held
from benchmarks.agents_traffic import Turn
from kvpool import metrics
from kvpool.metrics import Counters

LOOK_S = 1.0  # between two readings of a worker's load, as an index reads it
# The connector's max_load_s: its default, or as long as the longest prompt's load takes. Here a load's wait for others
# does not count.
MIN_LOAD_S = 10.0
# Of a worker's stores as much is staged at once, two ranks' defaults, and is lost that has not gone by then.
STAGING_NBYTES, STORE_TIMEOUT_S = 4 << 30, 5.0


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
    """A turn at a worker. ``ideal``: leading blocks that an endless cache would have; ``device``, ``near``, ``far``:
    those that came from there. ``first_s``: of its first token.
    """

    turn: Turn
    findable: Sequence[int]  # leading blocks that could be found: one token is always computed
    ideal: int
    came_s: float
    device: int = 0
    near: int = 0
    far: int = 0
    first_s: float | None = None
    blocks: int = 0
    named: list[int] = field(default_factory=list)

    @property
    def pool(self) -> int:
        return self.near + self.far


class Pool(Protocol):
    """``HostPool`` has the meaning."""

    near: Held | None

    def use(self, blocks: Sequence[int]) -> None: ...
    def find(self, blocks: Sequence[int]) -> Found: ...
    def count_absent(self, blocks: Sequence[int]) -> int: ...
    def put(self, blocks: Sequence[int]) -> list[int] | None: ...


class Watcher(Protocol):
    """What an engine tells."""

    def changed(
        self, engine: Engine, stored: Sequence[int], evicted: Sequence[int], after: int | None
    ) -> None:
        """``after``: the block before the first one stored."""

    def put(self, engine: Engine, stored: Sequence[int]) -> None:
        """Blocks are in the pool now: near, where the host has a near pool."""

    def near_changed(self, engine: Engine, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """The near pool of the engine's host."""

    def far_evicted(self, blocks: Sequence[int]) -> None: ...

    def ended(self, engine: Engine, job: Job) -> None: ...


class Look(NamedTuple):
    """A worker's gauges."""

    running: int
    waiting: int
    usage: float


@dataclass
class Moved:
    """Sums of an engine. The first six are what the connector's cost gate measures, the others go over its link."""

    load_tokens: float = 0.0
    load_s: float = 0.0
    near_tokens: float = 0.0
    near_s: float = 0.0
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
        self._loading: dict[Job, float] = {}  # how long each takes alone
        self._loaded: deque[Job] = deque()
        self._computed: Job | None = None  # now
        self._compute_step_s = 0.0
        self._decoding: list[tuple[float, int, Job]] = []  # by the step of their last token
        self._decoding_tokens = 0
        self._steps, self._steps_at_s, self._steps_a_s = 0.0, 0.0, 0.0
        self._waits = 0  # for the end of an answer; another number: the time has changed
        self._number = itertools.count()
        self._from_far, self._to_far = (Way(clock, model, LINK_NBYTES_S) for _ in range(2))
        self._from_near, self._to_near = (Way(clock, model, NEAR_NBYTES_S) for _ in range(2))
        self._max_load_s = max(MIN_LOAD_S, self._from_far.takes_s(model.blocks))
        self._counters = Counters()
        self._gate = cost_gate(self._counters, clock)
        self._looked, self._before = -1.0, Look(0, 0, 0.0)

    def submit(self, job: Job) -> None:
        self._note()
        job.blocks = self._model.blocks_of(job.turn.tokens + job.turn.answer_tokens)
        assert job.blocks <= self.cache.blocks
        if self._pool is not None:
            self._pool.use(job.findable)
        self._waiting.append(job)
        self._admit()

    def slow_far(self, nbytes_s: float) -> None:
        self._from_far.nbytes_s = self._to_far.nbytes_s = nbytes_s

    def lose_far(self) -> None:
        """The far pool died: so do loads from there."""
        for job in [job for job in self._loading if job.far]:
            self._end_load(job, (), ok=False)

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
            job.device, job.near, job.far = admitted.hit, 0, 0
            job.named = list(job.findable[: admitted.hit])
            if admitted.evicted:
                self._watcher.changed(self, (), admitted.evicted, None)
            rest = job.findable[admitted.hit :]
            found = self._pool.find(rest) if self._pool is not None and rest else Found((), ())
            found = self._paid(rest, found)
            if found.near or found.far:
                self._load(job, found)
            else:
                self._compute(job)

    def _paid(self, blocks: Sequence[int], found: Found) -> Found:
        """What the cost gate admits of it: all, what near has before the rest, or nothing."""
        near = list(itertools.takewhile(set(found.near).__contains__, blocks))
        if near and not self._gate.admits("near"):
            return Found((), ())
        return found if found.far and self._gate.admits("pool") else Found(near, ())

    def _load(self, job: Job, found: Found) -> None:
        job.near, job.far = len(found.near), len(found.far)
        takes_s = max(self._from_near.takes_s(job.near), self._from_far.takes_s(job.far))
        ends_s = max(
            way.take(blocks, self._max_load_s)
            for way, blocks in ((self._from_near, job.near), (self._from_far, job.far))
            if blocks
        )
        self.moved.loaded_blocks += round(job.far * min(1.0, self._max_load_s / takes_s))
        self._loading[job] = takes_s

        def ended() -> None:
            if job in self._loading:  # else the far pool has died
                self._end_load(job, found.far, ok=takes_s <= self._max_load_s)

        self._after(ends_s, ended)

    def _end_load(self, job: Job, far: Sequence[int], *, ok: bool) -> None:
        """``far``: what the near pool lacked."""
        takes_s = min(self._loading.pop(job), self._max_load_s)
        tokens = job.pool * self._model.block_tokens if ok else 0
        self._gate.loaded(tokens, takes_s, job.near / job.pool if ok else float(not job.far))
        counted = {name: one for name, one in self._counters.take().items() if not isinstance(one, list)}
        self.moved.load_tokens += counted.get(metrics.GATE_LOAD_TOKENS.name, 0)
        self.moved.load_s += counted.get(metrics.GATE_LOAD_SECONDS.name, 0)
        self.moved.near_tokens += counted.get(metrics.GATE_NEAR_TOKENS.name, 0)
        self.moved.near_s += counted.get(metrics.GATE_NEAR_SECONDS.name, 0)
        if ok:
            self._fill(job, job.findable[job.device : job.device + job.pool])
            self._put_near(far)
        else:
            job.near = job.far = 0
        self._loaded.append(job)
        self._admit()

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
            self._gate.computed(tokens, takes_s)
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
        """Near at once, and far behind. Without a near pool far at once, where what is too slow is lost."""
        assert self._pool is not None
        near = self._pool.near
        if near is not None:

            def put_near() -> None:
                self._put_near(blocks)
                self._watcher.put(self, blocks)
                self._put_far(blocks)

            ends_s = self._to_near.take(sum(block not in near for block in blocks))
            self._after(ends_s, put_near)
            return
        goes = int(STORE_TIMEOUT_S * self._to_far.nbytes_s / self._model.block_nbytes)
        staged = STAGING_NBYTES // self._model.block_nbytes
        self._put_far([block for at, block in enumerate(blocks) if at % staged < goes])

    def _put_near(self, blocks: Sequence[int]) -> None:
        if blocks and self._pool is not None and self._pool.near is not None:
            self._watcher.near_changed(self, blocks, self._pool.near.add(blocks))

    def _put_far(self, blocks: Sequence[int]) -> None:
        """Only what is absent is sent."""
        pool = self._pool
        if pool is None or not blocks:
            return
        absent = pool.count_absent(blocks)

        def put() -> None:
            evicted = pool.put(blocks)
            if evicted is None:
                return
            self.moved.put_blocks += absent
            if evicted:
                self._watcher.far_evicted(evicted)
            if pool.near is None:
                self._watcher.put(self, blocks)

        ends_s = self._to_far.take(absent)
        self._after(ends_s, put)

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
