"""``Roster``: who is in the fleet, and that exactly those are followed.

Flags, calls, the pool and leases that end all come here, each on a thread of its own. ``_lock`` is held for the whole
of each change, so that the fleet and the feed see changes in one order. The feed lets go of a start before the fleet
knows of the next one: so a late batch of the first is never taken for one of the second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from typing import Protocol

from kvpool.discovery.networks import WorkerNetworks
from kvpool.discovery.worker import Position, Worker
from kvpool.errors import ConfigError, KVPoolError
from kvpool.index.fleet import Added, Fleet
from kvpool.index.membership import Source
from kvpool.index.snapshot import Snapshot

logger = logging.getLogger("kvpool.index")


class Feed(Protocol):
    """Who subscribes to workers' events and tells the fleet, as an ``EventSink``, what they say.

    When ``unfollow`` has returned, nothing more is said of that start of the worker; it may wait for a batch that is
    being applied, and for nothing else.
    """

    def follow(self, worker: Worker, positions: Mapping[int, Position] | None = None) -> None: ...

    def unfollow(self, worker_id: str) -> None: ...

    def close(self) -> None: ...

    @property
    def is_alive(self) -> bool: ...


class Roster:
    """Adds workers to ``fleet`` and removes them, and has ``feed`` follow those that are there.

    ``feed``: None where events come some other way. ``networks``: where those are that no flag names; None: anywhere.
    Any thread may call any method.
    """

    def __init__(
        self, fleet: Fleet, feed: Feed | None = None, *, networks: WorkerNetworks | None = None
    ) -> None:
        self.fleet = fleet
        self._networks = networks
        self._feed = feed
        self._lock = threading.Lock()

    def add(self, worker: Worker, source: Source, lease_s: float | None = None) -> Added:
        """``Fleet.add``; a new start is followed from now on, and no longer the one before it."""
        if source != "flag":
            self._check(worker)
        with self._lock:
            replaces = self.fleet.replaces(worker, source)
            if replaces:
                self._unfollow(worker.id)
            added: Added | None = None
            try:
                added = self.fleet.add(worker, source, lease_s)
                if added in ("new", "replaced"):
                    self._follow(worker)
            except KVPoolError:
                if replaces or added is not None:  # it is not followed
                    self.fleet.remove(worker.id)
                raise
            return added

    def restore(self, snapshot: Snapshot, *, age_s: float, flags: Collection[str], life: str | None) -> None:
        """``Fleet.restore``; those that come back are followed from where they were. Errors: ``SnapshotRefused``."""
        with self._lock:
            for worker, positions in self.fleet.restore(snapshot, age_s=age_s, flags=flags, life=life):
                try:
                    if worker.id not in flags:
                        self._check(worker)
                except ConfigError as error:
                    logger.warning("%s", error)
                    self.fleet.remove(worker.id)
                    continue
                self._follow(worker, positions)

    def remove(self, worker_id: str, source: Source | None = None) -> bool:
        """``Fleet.remove``."""
        with self._lock:
            removed = self.fleet.remove(worker_id, source)
            if removed:
                self._unfollow(worker_id)
            return removed

    def expire(self) -> list[str]:
        """``Fleet.expire``. Errors: ``KVPoolError`` when the feed has ended, since nothing known stays true then."""
        if self._feed is not None and not self._feed.is_alive:
            raise KVPoolError("the index has stopped and reads no more events; the lines above say why")
        with self._lock:
            ended = self.fleet.expire()
            for worker_id in ended:
                self._unfollow(worker_id)
            return ended

    def close(self) -> None:
        """Stop following all workers."""
        if self._feed is not None:
            self._feed.close()

    def _check(self, worker: Worker) -> None:
        if self._networks is not None:
            self._networks.check(worker)

    def _follow(self, worker: Worker, positions: Mapping[int, Position] | None = None) -> None:
        if self._feed is not None:
            self._feed.follow(worker, positions)

    def _unfollow(self, worker_id: str) -> None:
        if self._feed is not None:
            self._feed.unfollow(worker_id)
