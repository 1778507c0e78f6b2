"""Sessions and their workers, for ``python -m benchmarks fleet``. Simulated time; no threads, no I/O.

A session begins with a system prompt and grows with every turn's question and answer. Sessions arrive at
random, independent of the fleet. A worker computes prompts one after the other, only the blocks it lacks, and
keeps the most recently used blocks.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REQUESTS_PER_S = 3.0  # per worker: near its capacity without hits, a third of it with many
THINK_S = 2.0  # mean pause between two turns
TURNS = (2, 10)
SYSTEM_PROMPTS = 24
SYSTEM_BLOCKS = 32
ADDED_BLOCKS = (8, 24)  # by the user, per turn
ANSWER_BLOCKS = (4, 12)
CACHE_BLOCKS = 2048  # of a worker: some seconds of computing without hits
BLOCK_S = 0.002  # to compute a block of 16 tokens
REQUEST_S = 0.05  # of a worker's time in addition


@dataclass(frozen=True)
class Request:
    """``prompt``, ``answer``: hashes of blocks. ``earlier``: leading blocks from the session's last turn."""

    at_s: float
    router: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    earlier: int


def arrivals(workers: int, routers: int, count: int, seed: int) -> Iterator[Request]:
    """The first ``count`` requests of a fleet, in order; the same for any number of routers."""
    draw, way = random.Random(seed), random.Random(seed + 1)

    def blocks(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.getrandbits(64) for _ in range(draw.randint(least, most)))

    systems = [blocks(SYSTEM_BLOCKS, SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    sessions_per_s = REQUESTS_PER_S * workers / (sum(TURNS) / 2)
    number = itertools.count()
    # (time, tie, text so far, turns left); an empty text starts a session
    due: list[tuple[float, int, tuple[int, ...], int]] = [(0.0, next(number), (), 0)]
    for _ in range(count):
        at_s, _, said, left = heapq.heappop(due)
        if not said:
            heapq.heappush(due, (at_s + draw.expovariate(sessions_per_s), next(number), (), 0))
            left = draw.randint(*TURNS)
        prompt = (said or draw.choice(systems)) + blocks(*ADDED_BLOCKS)
        answer = blocks(*ANSWER_BLOCKS)
        if left > 1:
            again_s = at_s + draw.expovariate(1 / THINK_S)
            heapq.heappush(due, (again_s, next(number), prompt + answer, left - 1))
        yield Request(at_s, way.randrange(routers), prompt, answer, len(said))


@dataclass(frozen=True)
class Taken:
    hit: int  # leading blocks present before
    stored: Sequence[int]
    evicted: Sequence[int]


class BlockCache:
    """The least recently used blocks leave first, a prompt's last ones before others, so prefixes stay whole."""

    def __init__(self, blocks: int = CACHE_BLOCKS) -> None:
        self._blocks = blocks
        self._held: OrderedDict[int, None] = OrderedDict()  # next to be evicted first

    def take(self, prompt: Sequence[int], answer: Sequence[int]) -> Taken:
        held = self._held
        hit = next((at for at, block in enumerate(prompt) if block not in held), len(prompt))
        stored = (*prompt[hit:], *answer)
        for block in reversed((*prompt, *answer)):
            held[block] = None
            held.move_to_end(block)
        evicted = [held.popitem(last=False)[0] for _ in range(len(held) - self._blocks)]
        return Taken(hit, stored, evicted)


class SimulatedFleet:
    """``worked_s``: seconds computed so far by each worker."""

    def __init__(self, workers: int) -> None:
        self._caches = [BlockCache() for _ in range(workers)]
        self._free_at_s = [0.0] * workers
        self._picked_at = [-1] * workers
        self._picks = 0
        self.worked_s = [0.0] * workers

    def earliest(self, request: Request, hits: Sequence[int]) -> int:
        """The first worker to finish the prompt; of equals, the longest idle. ``hits``: leading blocks."""
        done_s = [
            max(0.0, free_at_s - request.at_s) - hit * BLOCK_S
            for free_at_s, hit in zip(self._free_at_s, hits, strict=True)
        ]
        first_s = min(done_s)
        equals = [worker for worker, one_s in enumerate(done_s) if one_s == first_s]
        return min(equals, key=self._picked_at.__getitem__)

    def serve(self, worker: int, request: Request) -> Taken:
        taken = self._caches[worker].take(request.prompt, request.answer)
        work_s = (len(request.prompt) - taken.hit) * BLOCK_S + REQUEST_S
        self._free_at_s[worker] = max(self._free_at_s[worker], request.at_s) + work_s
        self.worked_s[worker] += work_s
        self._picked_at[worker] = self._picks
        self._picks += 1
        return taken
