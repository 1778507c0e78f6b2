"""``RequestState``: what is found, loaded and counted of a request. Each part has one file that writes it.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.vllm.load.lookups import RequestLookup
from kvpool.vllm.requests import Asked


class Span(NamedTuple):
    """What is offered: the tokens between the engine's own and the hit's end. ``near``: the near pool has all."""

    local_tokens: int
    hit_tokens: int
    near: bool
    found_tokens: int = 0  # the end of what was found, if its last block is withheld for an audit


class Wait(NamedTuple):
    """For a lookup. ``seconds``: None: the engine did not wait. ``answered``: by the pool."""

    seconds: float | None
    answered: bool


@dataclass
class Found:
    """What the pool was found to have of a prompt, and why no more is offered. Only ``offers.py`` writes it."""

    lookup: RequestLookup | None = None  # the latest
    lookups: int = 0  # begun
    waiting_since: float | None = None  # first "ask again later" to the engine
    waited_s: float = 0.0  # before the latest answer for which the engine waited
    ended: Wait | None = None  # with the engine's latest question
    result: str = "no_answer"  # why nothing is offered: of ``metrics.REQUEST_RESULTS``
    reason: str = "unavailable"  # why no more is offered: of ``metrics.MISS_REASONS``
    span: Span | None = None  # of the present offer
    crowded: bool = False  # it waited its time for room; while it waits, vLLM gives memory to others
    refused: bool = False  # nothing is offered again: its lookup failed, or a load is slower than computing


@dataclass
class Load:
    """Of a request's latest load. Only ``loads.py`` writes it."""

    tokens: int = 0
    seconds: float = 0.0
    near: float = 0.0  # share of it that came from the near pool
    near_only: bool = False  # the lookup found all of it near
    under_way: bool = False
    failure: str = ""  # of ``metrics.MISS_REASONS``; nothing is offered again


@dataclass
class Outcome:
    """What is counted of a request. Only ``tell/metrics.py`` writes it."""

    usable_tokens: int = 0  # of its prompt, at most, from the engine's cache and the pool
    local_tokens: int = 0  # of its prompt, in the engine's own cache
    waits: int = -1  # the number of lookups with which a wait was last observed
    counted: bool = False
    loads_first: bool = False  # counted at the end of its load


@dataclass
class RequestState:
    """Of a request, from its arrival to its end. Each part has one file that writes it."""

    asked: Asked
    found: Found = field(default_factory=Found)
    load: Load = field(default_factory=Load)
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def refused(self) -> bool:
        """Whether nothing is offered again."""
        return self.found.refused or bool(self.load.failure)

    @property
    def reason(self) -> str:
        """Why no more is loaded: of ``metrics.MISS_REASONS``."""
        return self.load.failure or self.found.reason
