"""``Load``: how busy a worker's rank is, and ``LoadBoard``: what was last said of each.

``_lock`` guards ``_reported`` and ``_scraped``; any thread may call anything, nothing blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvpool.errors import ConfigError

LoadSource = Literal["none", "reported", "scraped"]

KEEP_S = 10.0  # what is older is not known any more
MAX_KEPT = 65536  # of either source
_MOST = (1 << 32) - 1
_MOST_TOKENS = (1 << 53) - 1


@dataclass(frozen=True)
class Load:
    """What one data-parallel rank of one worker has to do.

    ``running``, ``waiting``: requests. ``queued_tokens``: prompt tokens that wait to be computed; None: not known.
    ``kv_usage``: from 0 to 1 (the KV cache is full). Errors: ``ConfigError`` for what is no load.
    """

    worker: str
    dp_rank: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int | None = None
    kv_usage: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (
            ("dp_rank", _MOST), ("running", _MOST), ("waiting", _MOST), ("queued_tokens", _MOST_TOKENS),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (value is None and name == "queued_tokens") and (
                type(value) is not int or not 0 <= value <= most
            ):
                raise ConfigError(f"load of {self.worker:.80}: {name} is a whole number, not {value!r:.40}")
        if isinstance(self.kv_usage, bool) or not 0 <= self.kv_usage <= 1:
            raise ConfigError(
                f"load of {self.worker:.80}: kv_usage is from 0 to 1, not {self.kv_usage!r:.40}"
            )


class Known(NamedTuple):
    """The load of a rank as it was last told, ``age_s`` seconds ago. ``asleep``: its engine serves no requests now."""

    load: Load
    source: LoadSource
    age_s: float
    asleep: bool


_Key = tuple[str, int]  # worker's id, rank


class LoadBoard:
    """The last load of each rank, for ``KEEP_S`` seconds; the later of what routers report and what was scraped.

    ``clock``: seconds that only go up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reported: dict[_Key, tuple[float, Load]] = {}
        self._scraped: dict[_Key, tuple[float, Load, bool]] = {}

    def report(self, worker_id: str, load: Load) -> None:
        """A router has said so. Not kept when ``MAX_KEPT`` others are."""
        key = (worker_id, load.dp_rank)
        with self._lock:
            if self._has_room(self._reported, key):
                self._reported[key] = (self._clock(), load)

    def scrape(self, worker_id: str, load: Load, *, asleep: bool) -> None:
        """The worker's metrics have said so. Not kept when ``MAX_KEPT`` others are."""
        key = (worker_id, load.dp_rank)
        with self._lock:
            if self._has_room(self._scraped, key):
                self._scraped[key] = (self._clock(), load, asleep)

    def get(self, worker_id: str, dp_rank: int) -> Known | None:
        """None: nothing was said for ``KEEP_S`` seconds."""
        key = (worker_id, dp_rank)
        with self._lock:
            now_s = self._clock()
            reported, scraped = self._reported.get(key), self._scraped.get(key)
        asleep = False
        if scraped is not None:
            if now_s - scraped[0] > KEEP_S:
                scraped = None
            else:
                asleep = scraped[2]
        if reported is not None and now_s - reported[0] > KEEP_S:
            reported = None
        if reported is not None and (scraped is None or reported[0] >= scraped[0]):
            return Known(reported[1], "reported", now_s - reported[0], asleep)
        if scraped is not None:
            return Known(scraped[1], "scraped", now_s - scraped[0], asleep)
        return None

    def _has_room(self, kept: dict[_Key, Any], key: _Key) -> bool:
        if key not in kept and len(kept) >= MAX_KEPT:
            since_s = self._clock() - KEEP_S
            for old in [other for other, entry in kept.items() if entry[0] < since_s]:
                del kept[old]
        return key in kept or len(kept) < MAX_KEPT
