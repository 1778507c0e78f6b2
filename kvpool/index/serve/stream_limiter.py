"""``StreamLimiter``: how many streams are open, in all and from each host.

A caller that never reads keeps its stream for as long as its connection stands: gRPC ends a call only when the status
could be sent. So the number of streams is what bounds such callers, and it leaves room for calls that end by
themselves. One event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.errors import KVPoolError

MAX_STREAMS = 192
MAX_STREAMS_OF_HOST = 64


class StreamLimiter:
    """Counts streams; ``peer`` is as gRPC spells it: ``ipv4:10.0.0.7:40312``."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def acquire(self, peer: str) -> Iterator[None]:
        """For as long as the stream is open. Errors: ``KVPoolError`` when there are too many."""
        host = peer.rpartition(":")[0]
        if self._open[host] >= MAX_STREAMS_OF_HOST:
            raise KVPoolError(
                f"{MAX_STREAMS_OF_HOST} streams are open from this host: one for each process is enough"
            )
        if self._open.total() >= MAX_STREAMS:
            raise KVPoolError(f"{MAX_STREAMS} streams are open on this index: use calls, or another replica")
        self._open[host] += 1
        try:
            yield
        finally:
            self._open[host] -= 1
            if not self._open[host]:
                del self._open[host]
