"""``TenantShares``: what each tenant has of an index: workers, ranks, and the endpoints that are followed for it.

A tenant may have a part of each limit, so that one cannot take what all the others need. Threads: the caller holds the
fleet's lock.
"""

from __future__ import annotations

from collections import Counter

from kvpool.discovery.networks import one_spelling
from kvpool.discovery.worker import Worker
from kvpool.errors import ConfigError, KVPoolError

MORE = "remove some of its workers, or give the index a larger --tenant-share"


class TenantShares:
    """``share``: the part of each limit that one tenant may have, up to 1: all of it."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._workers: Counter[str] = Counter()  # by tenant
        self._ranks: Counter[str] = Counter()
        self._followed: dict[str, Counter[str]] = {}  # by endpoint: workers of each tenant that publish there

    def check(self, worker: Worker, *, replaced_ranks: int | None, max_workers: int, max_ranks: int) -> None:
        """Whether the worker may come. ``replaced_ranks``: of the start of it that goes then; None: it is new.

        What names resolve to is looked at when they are connected to (``Dialler``). Errors: ``KVPoolError`` when its
        tenant would have too much; ``ConfigError`` for an endpoint that is followed for another tenant, which would
        see its events.
        """
        tenant = worker.tenant
        for endpoint in _endpoints(worker):
            if self._followed.get(endpoint, Counter()).keys() - {tenant}:
                raise ConfigError(
                    f"worker {worker.name}: {endpoint} is followed for another tenant: name the worker's own endpoint"
                )
        if replaced_ranks is None:
            self._check(tenant, self._workers[tenant] + 1, max_workers, "workers")
        ranks = self._ranks[tenant] + len(worker.publishers) - (replaced_ranks or 0)
        self._check(tenant, ranks, max_ranks, "ranks")

    def enter(self, worker: Worker) -> None:
        """The worker is there now."""
        self._workers[worker.tenant] += 1
        self._ranks[worker.tenant] += len(worker.publishers)
        for endpoint in _endpoints(worker):
            self._followed.setdefault(endpoint, Counter())[worker.tenant] += 1

    def leave(self, worker: Worker) -> None:
        """The worker has gone."""
        tenant = worker.tenant
        self._workers -= Counter({tenant: 1})
        self._ranks -= Counter({tenant: len(worker.publishers)})
        for endpoint in _endpoints(worker):
            self._followed[endpoint] -= Counter({tenant: 1})
            if not self._followed[endpoint]:
                del self._followed[endpoint]

    def clear(self) -> None:
        """There are no workers any more."""
        for known in (self._workers, self._ranks, self._followed):
            known.clear()

    def _check(self, tenant: str, wanted: int, limit: int, what: str) -> None:
        most = int(limit * self.share)
        if wanted > most:
            raise KVPoolError(f"tenant {tenant} may have {most} {what}: {MORE}")


def _endpoints(worker: Worker) -> list[str]:
    """Those of its publishers: its replays alone tell all that it publishes."""
    named = (one for publisher in worker.publishers for one in (publisher.events, publisher.replay))
    return [one_spelling(endpoint) for endpoint in named if endpoint]
