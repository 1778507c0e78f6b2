"""The runs of ``python -m benchmarks route``: conversations, a restart midway, and requests at full speed.

Each blocks, and starts its own workers and front, with empty caches.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from benchmarks.contest import percentile
from benchmarks.route_caller import Answer, Caller, call_all
from benchmarks.route_fleet import RouteFleet, cpu_s
from benchmarks.route_fronts import Front, Running
from benchmarks.route_traffic import BLOCK_TOKENS, Traffic, Turn

TOKEN_S = 1e-4  # per prompt token: 10,000 a second
TALKERS = 48  # concurrent callers of the conversations
SETTLE_S = 1.0  # for KV events to arrive, and for a front's discovery
AWAY_S = 2.0  # of the restarted worker
SPARE = 1.3  # blocks in the fleet's caches per block of all conversations

_T = TypeVar("_T")


@dataclass(frozen=True)
class Talk:
    """Conversations. ``hit_ratio``: share of follow-ups' previously computed tokens that the chosen worker
    had cached. ``failed``: requests without a 200. ``returned_ratio``: share of a restarted worker's
    conversations whose first later request it received; None: no restart.
    """

    hit_ratio: float
    first_p50_ms: float
    failed: int
    returned_ratio: float | None = None


@dataclass(frozen=True)
class Speed:
    """``p50_ms``, ``p99_ms``: of one caller. The rest covers all callers: ``requests_s``, CPU per request in
    the front with its picker and in the workers, ``hit_ratio`` as in ``Talk``, ``failed``.
    """

    p50_ms: float
    p99_ms: float
    requests_s: float
    front_cpu_ms: float
    workers_cpu_ms: float
    hit_ratio: float
    failed: int


class _Tally:
    def __init__(self, traffic: Traffic) -> None:
        self._prompts = traffic.plan.prompts
        self.earlier = self.hit = self.failed = 0
        self.first_s: list[float] = []

    def add(self, turn: Turn, answer: Answer, *, follows: bool) -> None:
        if answer.status != 200:
            self.failed += 1
            return
        self.first_s.append(answer.first_s)
        if follows:
            earlier = self._prompts[turn.number].earlier * BLOCK_TOKENS
            self.earlier += earlier
            self.hit += min(answer.cached_tokens, earlier)

    @property
    def hit_ratio(self) -> float:
        return self.hit / max(1, self.earlier)

    @property
    def first_p50_ms(self) -> float:
        return percentile(sorted(self.first_s) or [0.0], 0.5) * 1e3


def run_talk(
    traffic: Traffic,
    conversations: Sequence[Sequence[Turn]],
    front: Front,
    replicas: int,
    *,
    workers: int,
    restarts: bool,
    seed: int,
) -> Talk:
    """Run many conversations at once; each request goes to a random replica. ``restarts``: after half of the
    turns, restart one worker while no request is in flight.
    """
    blocks = sum(segment.blocks for segment in traffic.plan.segments)
    draw = random.Random(seed)
    tally = _Tally(traffic)
    halves = [range(len(conversations[0]))]
    if restarts:
        middle = (len(conversations[0]) + 1) // 2
        halves = [range(middle), range(middle, len(conversations[0]))]
    worker_of: dict[int, str] = {}
    own = int(SPARE * blocks / workers)
    with stage(traffic, front, replicas, workers=workers, blocks=own, token_s=TOKEN_S) as (fleet, running):

        def talk(turns: range) -> dict[int, str]:
            """Run these turns; returns the worker of each conversation's first."""
            due = deque((number, turns.start) for number in range(len(conversations)))
            firsts: dict[int, str] = {}

            async def ask(caller: Caller) -> bool:
                if not due:
                    return False
                number, at = due.popleft()
                turn = conversations[number][at]
                answer = await caller.ask(draw.choice(running.urls), turn.body(stream=True))
                tally.add(turn, answer, follows=at > 0)
                firsts.setdefault(number, answer.worker)
                worker_of[number] = answer.worker
                if at + 1 in turns:
                    due.append((number, at + 1))
                return True

            in_loop(lambda: call_all(TALKERS, ask))
            return firsts

        talk(halves[0])
        if not restarts:
            return Talk(tally.hit_ratio, tally.first_p50_ms, tally.failed)
        held_by = dict(worker_of)
        # The worker of most conversations, for the largest count.
        name = max(fleet.names, key=list(held_by.values()).count)
        time.sleep(SETTLE_S)
        fleet.kill(name)
        time.sleep(AWAY_S)
        fleet.start_again(name)
        time.sleep(SETTLE_S)
        firsts = talk(halves[1])
        of_it = [number for number, worker in held_by.items() if worker == name]
        returned = sum(firsts.get(number) == name for number in of_it)
        return Talk(
            tally.hit_ratio,
            tally.first_p50_ms,
            tally.failed,
            returned / max(1, len(of_it)),
        )


def run_speed(
    traffic: Traffic,
    turns: Sequence[Turn],
    front: Front,
    *,
    workers: int,
    callers: int,
    warm: int,
    alone: int,
    most_s: float,
    every_s: float = 0.0,
) -> Speed:
    """Distinct requests: the first ``warm`` are not counted, then ``alone`` by one caller, one every ``every_s``
    seconds at most, the rest by all; each phase is cut after ``most_s`` seconds.
    """
    due = iter(turns)
    with stage(traffic, front, 1, workers=workers, blocks=1 << 30, token_s=0.0) as (fleet, running):
        sent = 0

        def ask_some(callers: int, count: int, seconds: float, every_s: float = 0.0) -> tuple[_Tally, float]:
            tally = _Tally(traffic)
            some = enumerate(islice(due, count))
            begun_s = time.monotonic()
            ends_s = begun_s + seconds

            async def ask(caller: Caller) -> bool:
                nonlocal sent
                number, turn = next(some, (count, None))
                if turn is None or time.monotonic() > ends_s:
                    return False
                await asyncio.sleep(max(0.0, begun_s + number * every_s - time.monotonic()))
                sent += 1
                answer = await caller.ask(running.urls[sent % len(running.urls)], turn.body(stream=False))
                tally.add(turn, answer, follows=True)
                return True

            return tally, in_loop(lambda: call_all(callers, ask))

        ask_some(4, warm, 10 * most_s)
        time.sleep(SETTLE_S)
        one, _ = ask_some(1, alone, most_s, every_s)
        before = cpu_s(running.pids), cpu_s(fleet.pids)
        many, seconds = ask_some(callers, len(turns), most_s)
        after = cpu_s(running.pids), cpu_s(fleet.pids)
    answered = max(1, len(many.first_s))
    alone_s = sorted(one.first_s) or [0.0]
    return Speed(
        percentile(alone_s, 0.5) * 1e3,
        percentile(alone_s, 0.99) * 1e3,
        len(many.first_s) / seconds,
        (after[0] - before[0]) * 1e3 / answered,
        (after[1] - before[1]) * 1e3 / answered,
        many.hit_ratio,
        one.failed + many.failed,
    )


@contextmanager
def stage(
    traffic: Traffic, front: Front, replicas: int, *, workers: int, blocks: int, token_s: float
) -> Iterator[tuple[RouteFleet, Running]]:
    """Fresh workers with caches of ``blocks``, and replicas of a front before them."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name:
        folder = Path(name)
        started = RouteFleet(
            folder, traffic.plan, traffic.folder, count=workers, blocks=blocks, token_s=token_s, worker=front.worker,
            environment=front.environment(folder),
        )  # fmt: skip
        with started as fleet, front.start(folder, fleet, replicas) as running:
            time.sleep(SETTLE_S)
            yield fleet, running


def in_loop(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """``asyncio.run`` on uvloop, whose own ``run`` Python 3.10 and 3.11 reject as a factory."""
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
