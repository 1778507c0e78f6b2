"""``Limiter``: how many of one kind (calls, streams, watches) are under way in all, from each host, for each tenant.

A caller can keep a call open for as long as its connection stands: it sends no request, or reads no reply, and gRPC
ends a call only when the status could be sent. So their number is what bounds such callers. What one host or one
tenant may have is a part of the whole, so that others find room. One event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from kvpool.errors import KVPoolError

MAX_CALLS = 1024
MAX_CALLS_OF_HOST = 256
MAX_CALLS_OF_TENANT = 256
MAX_STREAMS = 512
MAX_STREAMS_OF_HOST = 64
MAX_STREAMS_OF_TENANT = 192
MAX_PLACEMENTS = 6144
MAX_PLACEMENTS_OF_HOST = 4096  # a proxy asks about each request of its clients
MAX_REQUESTS = 4096  # that a router has under way
MAX_REQUESTS_OF_HOST = 2048
MAX_PAGES = 32  # requests of status pages, which one thread answers
MAX_PAGES_OF_HOST = 16
MAX_PAGES_OF_TENANT = 8
MAX_WATCHES = 1024
MAX_WATCHES_OF_HOST = 64


class Limiter:
    """Counts ``what``. ``advice``: what a caller can do that is refused because its host has too many."""

    def __init__(self, what: str, advice: str, *, total: int, of_host: int, of_tenant: int) -> None:
        self._what, self._advice = what, advice
        self._total, self._of_host, self._of_tenant = total, of_host, of_tenant
        self._open = 0
        self._by: Counter[Hashable] = Counter()  # by host, and by tenants

    @contextmanager
    def acquire(self, peer: str, tenants: frozenset[str] | None) -> Iterator[None]:
        """For as long as one is under way.

        ``peer`` is as gRPC spells it: ``ipv4:10.0.0.7:40312``. ``tenants``: those that the token of the
        caller is for; tokens for the same ones share their part; None: all, which only the host's part bounds. Errors:
        ``KVPoolError`` when there are too many.
        """
        host, by = peer.rpartition(":")[0], self._by
        if by[host] >= self._of_host:
            raise KVPoolError(f"{self._of_host} {self._what} are open from this host: {self._advice}")
        if tenants is not None and by[tenants] >= self._of_tenant:
            raise KVPoolError(f"{self._of_tenant} {self._what} are open for this tenant: ask again later")
        if self._open >= self._total:
            raise KVPoolError(f"{self._total} {self._what} are open on this index: use another replica")
        keys: tuple[Hashable, ...] = (host,) if tenants is None else (host, tenants)
        self._open += 1
        for key in keys:
            by[key] += 1
        try:
            yield
        finally:
            self._open -= 1
            for key in keys:
                by[key] -= 1
                if not by[key]:
                    del by[key]


def of_calls() -> Limiter:
    """Of calls that wait for their request, or are being answered."""
    return Limiter(
        "calls", "wait for some of them, or use a stream",
        total=MAX_CALLS, of_host=MAX_CALLS_OF_HOST, of_tenant=MAX_CALLS_OF_TENANT,
    )  # fmt: skip


def of_streams() -> Limiter:
    """Of streams of lookups, batches and snapshots."""
    return Limiter(
        "streams", "one for each process is enough",
        total=MAX_STREAMS, of_host=MAX_STREAMS_OF_HOST, of_tenant=MAX_STREAMS_OF_TENANT,
    )  # fmt: skip


def of_placements() -> Limiter:
    """Of requests of which a proxy asks where they should go, until it has no more to ask."""
    return Limiter(
        "requests", "send it again later",
        total=MAX_PLACEMENTS, of_host=MAX_PLACEMENTS_OF_HOST, of_tenant=MAX_PLACEMENTS_OF_HOST,
    )  # fmt: skip


def of_requests() -> Limiter:
    """Of requests that a router forwards, each until its response has ended."""
    return Limiter(
        "requests", "send it again later",
        total=MAX_REQUESTS, of_host=MAX_REQUESTS_OF_HOST, of_tenant=MAX_REQUESTS,
    )  # fmt: skip


def of_watches() -> Limiter:
    """Of watches of health and of reflection, which take no token."""
    return Limiter(
        "watches", "one for each process is enough",
        total=MAX_WATCHES, of_host=MAX_WATCHES_OF_HOST, of_tenant=MAX_WATCHES,
    )  # fmt: skip


def of_pages() -> Limiter:
    """Of requests of status pages, each until it is answered."""
    return Limiter(
        "requests of status pages", "look less often",
        total=MAX_PAGES, of_host=MAX_PAGES_OF_HOST, of_tenant=MAX_PAGES_OF_TENANT,
    )  # fmt: skip
