"""``Sampler``: which blocks an engine was asked for, by a sample of their hashes that follows its load.

A block is in the sample if its number, 64 bits of its hash, is below ``2 ** (64 - shift)``: in all engines with this
shift, or in none. A full interval raises the shift by one, an empty one lowers it, so that an interval has at most
``INTERVAL_BLOCKS`` blocks. ``SampleWindow`` keeps the last requests for a document, which states one shift for all of
them; ``Sample`` is what a reader has of it. A reader knows by the counts since the engine's start what is new.

Threads: ``Sampler`` and ``SampleWindow`` have one each; ``SampledRequest`` and ``Sample`` are immutable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

INTERVAL_S = 15.0
INTERVAL_BLOCKS = 2048
INTERVAL_REQUESTS = 512
KEEP_S = 30.0  # in a document: two turns of its writer
MAX_BLOCKS = 2 * INTERVAL_BLOCKS  # in a document
MAX_REQUESTS = 2 * INTERVAL_REQUESTS
MAX_HELD = 4 * MAX_REQUESTS  # requests that wait for a writer, or are in its window
MAX_SHIFT = 32
MAX_COUNT = 1 << 50
NUMBER, COUNT, SMALL = "<u8", "<u4", "<u2"  # types in a document
MOST_COUNT = (1 << 32) - 1

Numbers = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


class SampledRequest(NamedTuple):
    """One with sampled blocks; their ``numbers`` in the prompt's order. Counts: since the engine's start, with it."""

    at_s: float
    shift: int
    requests: int
    blocks: int
    numbers: Numbers


class Sampler:
    """The requests of one engine; ``now_s``: of the engine's monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._shift = 0
        self._requests = self._blocks = 0  # since the start
        self._ends_s = now_s + INTERVAL_S
        self._in_interval = [0, 0]  # sampled blocks, and requests that have some
        self._new: deque[SampledRequest] = deque(maxlen=MAX_HELD)

    def add(self, numbers: Numbers, now_s: float) -> None:
        """A request for blocks of these numbers, in order."""
        self._requests += 1
        self._blocks += len(numbers)
        if now_s >= self._ends_s:
            if max(self._filled()) < 0.25:
                self._shift = max(0, self._shift - 1)
            self._ends_s, self._in_interval = now_s + INTERVAL_S, [0, 0]
        sampled = numbers[numbers <= largest(self._shift)] if self._shift else numbers
        if not len(sampled):
            return
        self._in_interval[0] += len(sampled)
        self._in_interval[1] += 1
        while max(self._filled()) > 1 and self._shift < MAX_SHIFT:
            self._shift += 1
            self._in_interval = [count // 2 for count in self._in_interval]
            sampled = sampled[sampled <= largest(self._shift)]
        self._new.append(SampledRequest(now_s, self._shift, self._requests, self._blocks, sampled))

    def take(self) -> list[SampledRequest]:
        """Those since the last call, of many the last."""
        taken = list(self._new)
        self._new.clear()
        return taken

    def _filled(self) -> tuple[float, float]:
        blocks, requests = self._in_interval
        return blocks / INTERVAL_BLOCKS, requests / INTERVAL_REQUESTS


class SampleWindow:
    """The requests of the last ``KEEP_S`` seconds."""

    def __init__(self) -> None:
        self._kept: deque[SampledRequest] = deque(maxlen=MAX_HELD)
        self._left = (0, 0)  # counts of the last one that left

    def pack(self, requests: Iterable[SampledRequest], now_s: float, wall_s: float) -> dict[str, Any] | None:
        """Add these, and make a part of a document of all that are kept; None: of none.

        ``wall_s``: seconds since the epoch.
        """
        self._kept.extend(requests)
        while self._kept and self._kept[0].at_s < now_s - KEEP_S:
            gone = self._kept.popleft()
            self._left = (gone.requests, gone.blocks)
        if not self._kept:
            return None
        shift = max(request.shift for request in self._kept)
        numbers = np.concatenate([request.numbers for request in self._kept])
        owners = np.repeat(np.arange(len(self._kept)), [len(request.numbers) for request in self._kept])
        while True:
            sampled = numbers <= largest(shift)
            counts = np.bincount(owners[sampled], minlength=len(self._kept))
            if (
                counts.sum() <= MAX_BLOCKS and np.count_nonzero(counts) <= MAX_REQUESTS
            ) or shift == MAX_SHIFT:
                break
            shift += 1
        kept = [request for request, count in zip(self._kept, counts, strict=True) if count]
        first_requests, first_blocks = self._left
        return {
            "written_s": wall_s,
            "shift": shift,
            "first": self._left,
            "ages_ms": _packed([(now_s - request.at_s) * 1e3 for request in kept], COUNT),
            "requests": _packed([request.requests - first_requests for request in kept], COUNT),
            "blocks": _packed([request.blocks - first_blocks for request in kept], COUNT),
            "sampled": _packed(counts[counts > 0], SMALL),
            "numbers": numbers[sampled].astype(NUMBER).tobytes(),
        }


class Sample(NamedTuple):
    """Requests with sampled blocks. ``at_s``: seconds since the epoch, by the writer's clock.

    ``requests``, ``blocks``: new ones up to each, unsampled ones included. ``sampled``: of ``numbers``, so many are of
    each.
    """

    shift: int
    at_s: npt.NDArray[np.float64]
    requests: Counts
    blocks: Counts
    sampled: Counts
    numbers: Numbers


def unpack_sample(part: Any, known: tuple[int, int]) -> tuple[Sample, tuple[int, int]]:
    """What is new in a document's part to a reader that knows the first ``known`` requests and blocks, and what it
    knows then. Errors: ``ValueError``, ``TypeError`` or ``KeyError`` for a part that makes no sense.
    """
    written_s, shift, first = part["written_s"], part["shift"], part["first"]
    if (
        not _is_count(shift, MAX_SHIFT)
        or len(first) != 2
        or not all(_is_count(one, MAX_COUNT) for one in first)
    ):
        raise ValueError("no counts")
    if not isinstance(written_s, float) or not 0 <= written_s <= MAX_COUNT:
        raise ValueError("no time")
    ages_ms, requests, blocks = (
        _unpacked(part[name], COUNT, MAX_REQUESTS) for name in ("ages_ms", "requests", "blocks")
    )
    sampled = _unpacked(part["sampled"], SMALL, MAX_REQUESTS).astype(np.int64)
    numbers = _unpacked(part["numbers"], NUMBER, MAX_BLOCKS)
    if not len(ages_ms) == len(requests) == len(blocks) == len(sampled) or int(sampled.sum()) != len(numbers):
        raise ValueError("columns of several lengths")
    requests, blocks = (first[0] + requests.astype(np.int64), first[1] + blocks.astype(np.int64))
    before = (np.concatenate(([first[0]], requests[:-1])), np.concatenate(([first[1]], blocks[:-1])))
    if (
        (requests <= before[0]).any()
        or (blocks - before[1] < sampled).any()
        or (numbers > largest(shift)).any()
    ):
        raise ValueError("more sampled than asked for")
    new = requests > known[0]
    sample = Sample(
        shift,
        written_s - ages_ms[new] / 1e3,
        (requests - np.maximum(before[0], known[0]))[new],
        np.maximum(blocks - np.maximum(before[1], known[1]), sampled)[new],
        sampled[new],
        numbers[np.repeat(new, sampled)],
    )
    if not new.any():
        return sample, known
    return sample, (int(requests[-1]), int(blocks[-1]))


def largest(shift: int) -> np.uint64:
    """The largest number that is in a sample."""
    return np.uint64(((1 << 64) >> shift) - 1)


def _packed(values: Iterable[float], kind: str) -> bytes:
    return np.clip(np.asarray(values, np.float64), 0, MOST_COUNT).astype(kind).tobytes()


def _unpacked(raw: Any, kind: str, most: int) -> npt.NDArray[Any]:
    if not isinstance(raw, bytes) or len(raw) > most * np.dtype(kind).itemsize:
        raise ValueError("no column")
    return np.frombuffer(raw, kind)


def _is_count(number: Any, most: int) -> bool:
    return type(number) is int and 0 <= number <= most
