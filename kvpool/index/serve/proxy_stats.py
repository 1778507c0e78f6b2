"""``ProxyStats``: counts what the proxy does, for its metrics.

Any thread may call anything. ``_lock`` guards all fields.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal, NamedTuple

from kvpool.index.serve.request_stats import Histogram

# The class of a worker's status, or: a refusal of the router itself, a response that its worker did not complete, a
# client that did not wait for the end.
OUTCOMES = ("2xx", "3xx", "4xx", "5xx", "refused", "broken", "gone")
Retry = Literal["unreachable", "lost", "503"]
RETRIES: tuple[Retry, ...] = ("unreachable", "lost", "503")
FIRST_BYTE_S = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


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
        self._responses: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._retries: Counter[str] = Counter(dict.fromkeys(RETRIES, 0))
        self._first_byte = Histogram(FIRST_BYTE_S)

    def begin(self) -> None:
        """A request has come."""
        with self._lock:
            self._under_way += 1

    def end(self, outcome: str) -> None:
        """One of ``OUTCOMES`` has come of it."""
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
