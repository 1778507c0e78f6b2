"""The contest of ``python -m benchmarks index``: every index takes the same prompts and answers lookups.

Also runs in the interpreter of another project's index, so it imports nothing of kvpool. Prompts come from
one seed, questions in one order, and each index is timed in its own process. Prompts rotate, so that the
table, not a cache, answers.

``sessions``: 1 to 8 workers hold a prompt of 8,192 blocks, only the first to its end. ``everybody``: all
workers hold all of it.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PROMPT_BLOCKS = 8192
LENGTHS = (64, 512, 1024, 8192)
# The held part of a question: all, the first half, nothing, or all except some blocks in the middle.
KINDS = ("full", "half", "none", "holes")
MOST_HOLDERS = 8
BLOCKS_A_HOLE = 64  # every such block is removed again, from every holder but the first
SLOW_ROUNDS = 2  # for answers that take milliseconds
SLOW_PROMPTS = 16
SEED, OTHER_SEED = 5, 6  # of the prompts; of unstored blocks, and of holes

Question = Any  # a prompt in an index's own form
Held = tuple[bytes, list[tuple[int, int]]]  # a packed prompt, and (worker, its leading blocks)
Scores = dict[int, int]  # leading blocks by worker; workers without any are left out


class Contestant(Protocol):
    """An index. Times are seconds of its own work, without the preparation of arguments."""

    is_slow: bool

    def store(self, worker: int, hashes: Sequence[int]) -> float:
        """The worker holds these leading blocks of one prompt."""

    def take_away(self, worker: int, hashes: Sequence[int]) -> None: ...

    def question(self, packed: bytes) -> Question:
        """``packed``: little-endian u64 hashes."""

    def ask(self, question: Question) -> object: ...

    def scores(self, answer: Any) -> Scores: ...

    def remove_worker(self, worker: int) -> float: ...

    def nbytes(self) -> int:
        """Present memory."""


@dataclass(frozen=True)
class Asked:
    """``wrong``: prompts with a wrong score of any worker."""

    blocks: int
    kind: str
    p50_us: float
    p99_us: float
    wrong: int


@dataclass(frozen=True)
class Result:
    """M pairs/s are 10^6 (block, worker) pairs a second, on one thread."""

    pairs: int
    ingest_mpairs_per_s: float
    block_nbytes: float
    asked: list[Asked]
    remove_worker_us: float


def holdings(shape: str, workers: int, prompts: int) -> Iterator[Held]:
    """Prompts and their holders, the same each time."""
    draw = random.Random(SEED)
    for _ in range(prompts):
        packed = draw.randbytes(8 * PROMPT_BLOCKS)
        if shape == "everybody":
            yield packed, [(worker, PROMPT_BLOCKS) for worker in range(workers)]
            continue
        holders = draw.sample(range(workers), draw.randint(1, min(MOST_HOLDERS, workers)))
        yield (
            packed,
            [
                (worker, draw.randint(1, PROMPT_BLOCKS) if place else PROMPT_BLOCKS)
                for place, worker in enumerate(holders)
            ],
        )


def contest(contestant: Contestant, shape: str, workers: int, prompts: int, rounds: int) -> Result:
    """Fill the index, ask it, remove blocks, ask again, and remove a worker."""
    held = list(holdings(shape, workers, prompts))
    before_nbytes = contestant.nbytes()
    taken_s, pairs = 0.0, 0
    for packed, theirs in held:
        hashes = unpacked(packed)
        for worker, blocks in theirs:
            taken_s += contestant.store(worker, hashes[:blocks])
            pairs += blocks
    block_nbytes = (contestant.nbytes() - before_nbytes) / (prompts * PROMPT_BLOCKS)
    asked = [_asked(contestant, blocks, kind, held, {}, rounds) for kind in KINDS[:3] for blocks in LENGTHS]
    holes = _punch(contestant, held)
    asked += [_asked(contestant, blocks, "holes", held, holes, rounds) for blocks in LENGTHS]
    return Result(
        pairs=pairs,
        ingest_mpairs_per_s=pairs / taken_s / 1e6,
        block_nbytes=block_nbytes,
        asked=asked,
        remove_worker_us=contestant.remove_worker(0) * 1e6,
    )


def _punch(contestant: Contestant, held: list[Held]) -> dict[tuple[int, int], int]:
    draw = random.Random(OTHER_SEED)
    holes: dict[tuple[int, int], int] = {}
    for number, (packed, theirs) in enumerate(held):
        hashes = unpacked(packed)
        for worker, blocks in theirs[1:]:
            gone = sorted(draw.sample(range(blocks), max(1, blocks // BLOCKS_A_HOLE)))
            contestant.take_away(worker, [hashes[at] for at in gone])
            holes[number, worker] = gone[0]
    return holes


def _asked(
    contestant: Contestant,
    blocks: int,
    kind: str,
    held: list[Held],
    holes: dict[tuple[int, int], int],
    rounds: int,
) -> Asked:
    draw = random.Random(OTHER_SEED)
    known = {"full": blocks, "half": blocks // 2, "none": 0, "holes": blocks}[kind]
    some = held[:SLOW_PROMPTS] if contestant.is_slow else held
    questions = [
        contestant.question(packed[: 8 * known] + draw.randbytes(8 * (blocks - known))) for packed, _ in some
    ]
    wrong = 0
    for number, (_, theirs) in enumerate(some):
        right = {
            worker: min(known, leading, holes.get((number, worker), leading)) for worker, leading in theirs
        }
        found = contestant.scores(contestant.ask(questions[number]))
        wrong += found != {worker: leading for worker, leading in right.items() if leading}
    times = timed(
        lambda number: contestant.ask(questions[number]),
        len(questions),
        min(rounds, SLOW_ROUNDS) if contestant.is_slow else rounds,
    )
    return Asked(blocks, kind, percentile(times, 0.5), percentile(times, 0.99), wrong)


def timed(ask: Callable[[int], object], prompts: int, rounds: int) -> list[float]:
    """Sorted microseconds of all calls, prompt after prompt; the first round warms up."""
    times = []
    for turn in range(rounds + 1):
        for number in range(prompts):
            started = time.perf_counter()
            ask(number)
            if turn:
                times.append((time.perf_counter() - started) * 1e6)
    return sorted(times)


def percentile(sorted_values: Sequence[float], part: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(part * len(sorted_values)))]


def unpacked(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)
