"""``RequestStats``: counts the index's replies, for its metrics and for ``ListWorkers``.

Any thread. ``_lock`` guards all totals; held for microseconds, for a copy 0.1 ms.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from kvpool.errors import ConfigError, UnknownModel
from kvpool.index.answer import Lookup

Result = Literal["answered", "wrong", "unknown", "failed"]
# Why a placed request went to its worker; the last two: why it got none.
Outcome = Literal["prefix", "load", "no-tokens", "unknown-model", "unreadable", "failed", "no-worker", "busy"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# Why a request was placed without its prompt.
Promptless = Literal[
    "no-body",  # none was shown: a GET, or a proxy that keeps bodies to itself
    "unreadable",  # a body that is no request
    "too-large",  # a body of more than is read
    "unknown-model",
    "no-prompt",  # a path on which prompts have no tokens, such as embeddings
    "no-render",  # the workers have no /render there
    "refused",  # by a worker's /render
    "large-answer",  # a worker's /render says more than is read
    "no-answer",  # no worker's /render answers
    "late",  # tokens that were not made in time
    "busy",  # with other prompts
    "unmatched",  # its tokens cannot be looked up
    "no-worker",  # none is known yet
    "failed",  # a fault of ours
]
PROMPTLESS: tuple[Promptless, ...] = get_args(Promptless)
Check = Literal["same", "different", "unanswered"]  # of a prompt's tokens, beside a worker's
CHECKS: tuple[Check, ...] = get_args(Check)
# Where a session's request went: to its home, away from it, or beside it, as a sub-agent's.
Placed = Literal["first", "stayed", "moved", "aside"]
PLACED: tuple[Placed, ...] = get_args(Placed)
RESULTS: tuple[Result, ...] = ("answered", "wrong", "unknown", "failed")
SECONDS = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0)
RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

# The class of a worker's status, or: a refusal of the router itself, a response that its worker did not
# complete, a client that left before the end.
RESPONSES = ("2xx", "3xx", "4xx", "5xx", "refused", "broken", "gone")
Retry = Literal["unreachable", "lost", "503", "429", "404"]
RETRIES: tuple[Retry, ...] = get_args(Retry)
FIRST_BYTE_S = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Matched(NamedTuple):
    """Blocks of a prompt, and the largest leading count of any rank, by tier; also sums of these."""

    prompt_blocks: int = 0
    device_blocks: int = 0
    local_blocks: int = 0
    pool_blocks: int = 0

    @classmethod
    def of(cls, lookup: Lookup) -> Matched:
        return cls(*(max(getattr(lookup, column), default=0) for column in cls._fields))


class PlacedRequests(NamedTuple):
    """Requests that got a worker; ``prompt_blocks``, ``matched_blocks``: as in ``IndexStatus``."""

    requests: int = 0
    prompt_blocks: int = 0
    matched_blocks: int = 0


class Reuse(NamedTuple):
    """Blocks of prompts that a worker could reuse, as known at the request; sums.

    ``held_blocks``: the largest count of any rank or the pool; over ``prompt_blocks``, the ceiling of routing.
    """

    prompts: int = 0
    prompt_blocks: int = 0
    held_blocks: int = 0


class Histogram:
    """Counts by upper bound, and their sum. One thread at a time."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class RequestTotals:
    """Since the stats were made; ``streams``: now."""

    results: Counter[str] = field(default_factory=lambda: _zeros(RESULTS))
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # of answered lookups
    lookups: int = 0  # with a row
    matched: Matched = field(default_factory=Matched)  # of these, summed
    ratios: dict[str, Histogram] = field(  # of these, by tier: matched blocks over prompt blocks
        default_factory=lambda: {where: Histogram(RATIOS) for where in ("device", "local", "pool")}
    )
    refused: Counter[str] = field(default_factory=Counter)  # by gRPC status name
    streams: int = 0
    placements: Counter[str] = field(default_factory=lambda: _zeros(OUTCOMES))  # requests of proxies
    promptless: Counter[str] = field(default_factory=lambda: _zeros(PROMPTLESS))  # of these, by why
    checks: Counter[str] = field(default_factory=lambda: _zeros(CHECKS))
    sessions: Counter[str] = field(default_factory=lambda: _zeros(PLACED))  # their requests
    placement_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    placed: PlacedRequests = field(default_factory=PlacedRequests)
    reuse: Reuse = field(default_factory=Reuse)  # of lookups and placements


@dataclass
class ProxyTotals:
    """Since the stats were made; ``under_way``: now."""

    under_way: int = 0
    responses: Counter[str] = field(default_factory=lambda: _zeros(RESPONSES))
    retries: Counter[str] = field(default_factory=lambda: _zeros(RETRIES))
    first_byte_seconds: Histogram = field(default_factory=lambda: Histogram(FIRST_BYTE_S))


def _zeros(names: Sequence[str]) -> Counter[str]:
    return Counter(dict.fromkeys(names, 0))


def outcome_of(promptless: Promptless | None) -> Outcome:
    """Of a placed request that no worker has a block of."""
    if promptless is None:
        return "load"
    if promptless in ("no-body", "unreadable", "too-large"):
        return "unreadable"
    return "unknown-model" if promptless == "unknown-model" else "no-tokens"


def result_of(error: BaseException) -> Result:
    if isinstance(error, UnknownModel):
        return "unknown"
    return "wrong" if isinstance(error, ConfigError) else "failed"


class RequestStats:
    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self._lock = threading.Lock()
        self._totals = RequestTotals()

    def record_lookup(self, seconds: float, result: Result, matched: Matched | None = None) -> None:
        """``matched``: of an answered lookup."""
        with self._lock:
            totals = self._totals
            totals.results[result] += 1
            if matched is None:
                return
            totals.seconds.add(seconds)
            if not matched.prompt_blocks:
                return
            totals.lookups += 1
            totals.matched = Matched(*map(sum, zip(totals.matched, matched, strict=True)))
            self._add_reuse(matched.prompt_blocks, max(matched.local_blocks, matched.pool_blocks))
            for histogram, blocks in zip(totals.ratios.values(), matched[1:], strict=True):
                histogram.add(blocks / matched.prompt_blocks)

    def record_refusal(self, status: str) -> None:
        """A request without an answer. ``status``: a gRPC status name."""
        with self._lock:
            self._totals.refused[status] += 1

    def record_stream(self, change: int) -> None:
        """A stream of lookups began (1) or ended (-1)."""
        with self._lock:
            self._totals.streams += change

    def record_placement(
        self, seconds: float, outcome: Outcome, promptless: Promptless | None = None
    ) -> None:
        """``promptless``: of a request that was placed without its prompt."""
        with self._lock:
            self._totals.placements[outcome] += 1
            if promptless is not None:
                self._totals.promptless[promptless] += 1
            self._totals.placement_seconds.add(seconds)

    def record_check(self, result: Check) -> None:
        with self._lock:
            self._totals.checks[result] += 1

    def record_session(self, placed: Placed) -> None:
        with self._lock:
            self._totals.sessions[placed] += 1

    def record_placed(self, prompt_blocks: int = 0, matched_blocks: int = 0, held_blocks: int = 0) -> None:
        """``matched_blocks`` of ``prompt_blocks`` (0: unknown) need no compute. ``held_blocks``: as in ``Reuse``."""
        with self._lock:
            requests, blocks, matched = self._totals.placed
            self._totals.placed = PlacedRequests(
                requests + 1, blocks + prompt_blocks, matched + matched_blocks
            )
            if prompt_blocks:
                self._add_reuse(prompt_blocks, held_blocks)

    def _add_reuse(self, prompt_blocks: int, held_blocks: int) -> None:
        prompts, blocks, held = self._totals.reuse
        self._totals.reuse = Reuse(prompts + 1, blocks + prompt_blocks, held + held_blocks)

    def totals(self) -> RequestTotals:
        with self._lock:
            return deepcopy(self._totals)


class ProxyStats:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = ProxyTotals()

    def begin(self) -> None:
        with self._lock:
            self._totals.under_way += 1

    def end(self, outcome: str) -> None:
        with self._lock:
            self._totals.under_way -= 1
            self._totals.responses[outcome] += 1

    def record_retry(self, why: Retry) -> None:
        with self._lock:
            self._totals.retries[why] += 1

    def record_first_byte(self, seconds: float) -> None:
        with self._lock:
            self._totals.first_byte_seconds.add(seconds)

    def totals(self) -> ProxyTotals:
        with self._lock:
            return deepcopy(self._totals)
