"""``RequestStats``: counts what an index answers, for its metrics and for ``ListWorkers``.

Any thread may call anything. ``_lock`` guards all fields but ``started_s``; nothing under it takes more than a few
microseconds.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from kvpool.errors import ConfigError, UnknownModel
from kvpool.index.answer import Lookup

Result = Literal["answered", "wrong", "unknown", "failed"]
# Why a placed request went to its worker; the last two: why it went to none.
Outcome = Literal["prefix", "load", "no-tokens", "unknown-model", "unreadable", "failed", "no-worker", "busy"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
RESULTS: tuple[Result, ...] = ("answered", "wrong", "unknown", "failed")
SECONDS = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0)
RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

# The class of a worker's status, or: a refusal of the router itself, a response that its worker did not complete, a
# client that did not wait for the end.
RESPONSES = ("2xx", "3xx", "4xx", "5xx", "refused", "broken", "gone")
Retry = Literal["unreachable", "lost", "503"]
RETRIES: tuple[Retry, ...] = ("unreachable", "lost", "503")
FIRST_BYTE_S = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Matched(NamedTuple):
    """Blocks of a prompt, and the most of them that one rank has leading, by where; sums of these."""

    prompt_blocks: int = 0
    device_blocks: int = 0
    local_blocks: int = 0
    pool_blocks: int = 0

    @classmethod
    def of(cls, lookup: Lookup) -> Matched:
        """Of an answer."""
        return cls(*(max(getattr(lookup, column), default=0) for column in cls._fields))


class Placed(NamedTuple):
    """Requests that got a worker; ``prompt_blocks``, ``matched_blocks``: as ``IndexStatus`` has them."""

    requests: int = 0
    prompt_blocks: int = 0
    matched_blocks: int = 0


class Reuse(NamedTuple):
    """What of prompts could be reused instead of computed, by what the index knew when it was asked; sums.

    ``held_blocks``: the most leading blocks that one rank, or the pool, had of each: so much a request finds that is
    sent to the best place, and their share of ``prompt_blocks`` is the ceiling of what routing can reach.
    """

    prompts: int = 0
    prompt_blocks: int = 0
    held_blocks: int = 0


class Histogram:
    """Counts by upper bound, and their sum; for one thread at a time."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        """As it is now."""
        copy = Histogram(self.bounds)
        copy.counts, copy.sum = self.counts.copy(), self.sum
        return copy


class Totals(NamedTuple):
    """Since the stats was made; ``streams``: now."""

    results: dict[str, int]
    seconds: Histogram  # of those that were answered
    lookups: int  # that had a row
    matched: Matched  # of these, summed
    ratios: dict[str, Histogram]  # of these, by where: matched blocks over prompt blocks
    refused: dict[str, int]  # by the name of the status
    streams: int
    placements: dict[str, int]  # requests of proxies, by why they went where they did
    placement_seconds: Histogram
    placed: Placed
    reuse: Reuse  # of lookups and placements


def result_of(error: BaseException) -> Result:
    """Of a lookup that failed."""
    if isinstance(error, UnknownModel):
        return "unknown"
    return "wrong" if isinstance(error, ConfigError) else "failed"


class RequestStats:
    """Written by the servers, read by the metrics page and ``ListWorkers``."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self._lock = threading.Lock()
        self._results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self._seconds = Histogram(SECONDS)
        self._lookups = 0
        self._matched = Matched()
        self._reuse = Reuse()
        self._ratios = {where: Histogram(RATIOS) for where in ("device", "local", "pool")}
        self._refused: Counter[str] = Counter()
        self._streams = 0
        self._placements: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._placement_seconds = Histogram(SECONDS)
        self._placed = Placed()

    def record_lookup(self, seconds: float, result: Result, matched: Matched | None = None) -> None:
        """One lookup has ended. ``matched``: of one that was answered."""
        with self._lock:
            self._results[result] += 1
            if matched is None:
                return
            self._seconds.add(seconds)
            if not matched.prompt_blocks:
                return
            self._lookups += 1
            self._matched = Matched(*map(sum, zip(self._matched, matched, strict=True)))
            self._add_reuse(matched.prompt_blocks, max(matched.local_blocks, matched.pool_blocks))
            for histogram, blocks in zip(self._ratios.values(), matched[1:], strict=True):
                histogram.add(blocks / matched.prompt_blocks)

    def record_refusal(self, status: str) -> None:
        """One request ended without an answer. ``status``: a name of gRPC's status codes."""
        with self._lock:
            self._refused[status] += 1

    def record_stream(self, change: int) -> None:
        """One stream of lookups was opened (1), or has ended (-1)."""
        with self._lock:
            self._streams += change

    def record_placement(self, seconds: float, outcome: str) -> None:
        """One request of a proxy was placed, or not. ``outcome``: one of ``OUTCOMES``."""
        with self._lock:
            self._placements[outcome] += 1
            self._placement_seconds.add(seconds)

    def record_placed(self, prompt_blocks: int = 0, matched_blocks: int = 0, held_blocks: int = 0) -> None:
        """One request got a worker, which need not compute ``matched_blocks`` of ``prompt_blocks`` (0: not known).
        ``held_blocks``: as in ``Reuse``."""
        with self._lock:
            placed = self._placed
            self._placed = Placed(
                placed.requests + 1,
                placed.prompt_blocks + prompt_blocks,
                placed.matched_blocks + matched_blocks,
            )
            if prompt_blocks:
                self._add_reuse(prompt_blocks, held_blocks)

    def _add_reuse(self, prompt_blocks: int, held_blocks: int) -> None:
        prompts, asked, held = self._reuse
        self._reuse = Reuse(prompts + 1, asked + prompt_blocks, held + held_blocks)

    def totals(self) -> Totals:
        """All of it at one moment."""
        with self._lock:
            return Totals(
                dict(self._results),
                self._seconds.copy(),
                self._lookups,
                self._matched,
                {where: histogram.copy() for where, histogram in self._ratios.items()},
                dict(self._refused),
                self._streams,
                dict(self._placements),
                self._placement_seconds.copy(),
                self._placed,
                self._reuse,
            )


class ProxyTotals(NamedTuple):
    """Since the stats was made; ``under_way``: now."""

    under_way: int
    responses: dict[str, int]
    retries: dict[str, int]
    first_byte_seconds: Histogram


class ProxyStats:
    """Written by the proxy, read by the metrics page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._responses: Counter[str] = Counter(dict.fromkeys(RESPONSES, 0))
        self._retries: Counter[str] = Counter(dict.fromkeys(RETRIES, 0))
        self._first_byte = Histogram(FIRST_BYTE_S)

    def begin(self) -> None:
        """A request has come."""
        with self._lock:
            self._under_way += 1

    def end(self, outcome: str) -> None:
        """One of ``RESPONSES`` has come of it."""
        with self._lock:
            self._under_way -= 1
            self._responses[outcome] += 1

    def record_retry(self, why: Retry) -> None:
        """A request goes to another worker."""
        with self._lock:
            self._retries[why] += 1

    def record_first_byte(self, seconds: float) -> None:
        """A worker's response has begun so long after its request came."""
        with self._lock:
            self._first_byte.add(seconds)

    def totals(self) -> ProxyTotals:
        """All of it at one moment."""
        with self._lock:
            return ProxyTotals(
                self._under_way, dict(self._responses), dict(self._retries), self._first_byte.copy()
            )
