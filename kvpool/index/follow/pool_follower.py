"""``PoolFollower``: follows a pool's announcements and blocks, once it is reachable.

An index may start before its pool and outlives it; until then workers' events alone answer lookups.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvpool.discovery.traffic import Seen
from kvpool.discovery.worker_watch import WorkerWatch
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.index.fleet import Fleet
from kvpool.index.follow.pool_reconciler import DEFAULT_KEYS_PER_S, PoolReconciler, ReconcilerTotals
from kvpool.index.follow.pool_status import PoolStatus
from kvpool.key.key import check_tenant
from kvpool.store import open_store
from kvpool.store.store import Store, Usage
from kvpool.store.url import StoreURL
from kvpool.text import MAX_NBYTES

RETRY_S = 2.0  # between two connection attempts
CLOSE_S = 10.0  # an attempt takes a few seconds

logger = logging.getLogger("kvpool.index")


class PoolFollower:
    """A ``WorkerWatch`` and a ``PoolReconciler`` for ``fleet``, on the pool of ``url``.

    ``tenants``: as in ``WorkerWatch``. Call ``start`` once. A thread retries every ``RETRY_S`` seconds.
    Blocking: the first attempt, a few seconds. Errors: ``ConfigError`` for an unfit URL.
    """

    def __init__(
        self,
        url: str,
        fleet: Fleet,
        *,
        keys_per_s: int = DEFAULT_KEYS_PER_S,
        tenants: Sequence[str] | None = None,
    ) -> None:
        self._url = _pool_url(url)
        in_directory = self._url.scheme == "file" and "capacity=" in url
        self._capacity_nbytes = StoreURL.parse(url).capacity_nbytes if in_directory else None
        for tenant in tenants or ():
            check_tenant(tenant)
        self._fleet, self._keys_per_s, self._tenants = fleet, keys_per_s, tenants
        self._closing = threading.Event()
        self._opening: threading.Thread | None = None
        # Set once, by the caller of start() or by the thread that opens the store.
        self._store: Store | None = None
        self._watch: WorkerWatch | None = None
        self._reconciler: PoolReconciler | None = None
        self._status: PoolStatus | None = None
        self._life = ""
        try:
            self._store = open_store(self._url, threads=1)
        except StoreUnavailable as error:
            logger.warning(
                "the index starts without its pool, and follows it when it can be reached: %s", error
            )
        else:
            with contextlib.suppress(KVPoolError):  # the watch logs it and retries
                self._life = self._store.server_run_id()

    @property
    def life(self) -> str:
        """``Store.server_run_id`` of the pool, as last read; empty: unknown. Any thread."""
        return self._life if self._watch is None else self._watch.life

    @property
    def rounds(self) -> int:
        """Rounds of the ``WorkerWatch`` in which the pool answered. Any thread."""
        return 0 if self._watch is None else self._watch.rounds

    def totals(self) -> ReconcilerTotals:
        return ReconcilerTotals() if self._reconciler is None else self._reconciler.totals()

    @property
    def servers(self) -> list[Usage]:
        """Usage of the pool's servers, as last read; empty: unknown. Any thread.

        A pool never reached: the servers of its URL, not up.
        """
        if self._status is not None:
            return self._status.servers
        return [] if self._store is not None else [Usage(name, up=False) for name in self._url.servers]

    @property
    def traffic(self) -> Mapping[str, Seen]:
        """Requested blocks by window, as engines of this pool last reported. Any thread."""
        return {} if self._status is None else self._status.traffic

    def start(self) -> None:
        if self._store is not None:
            self._follow(self._store)
        else:
            self._opening = threading.Thread(target=self._open, name="kvpool-pool", daemon=True)
            self._opening.start()

    def close(self) -> None:
        """Idempotent. Blocks for ``CLOSE_S`` seconds at most."""
        self._closing.set()
        if self._opening is not None:
            self._opening.join(CLOSE_S)
        for part in (self._watch, self._reconciler, self._status, self._store):
            if part is not None:
                part.close()

    def _open(self) -> None:
        said = ""
        while not self._closing.wait(RETRY_S):
            try:
                store = open_store(self._url, threads=1)
            except KVPoolError as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("the pool cannot be reached: %s", error)
                continue
            logger.info("the pool is reached: %r", store)
            self._store = store
            self._follow(store)
            return

    def _follow(self, store: Store) -> None:
        fleet = self._fleet
        reconciler = self._reconciler = PoolReconciler(fleet, store, keys_per_s=self._keys_per_s)
        watch = self._watch = WorkerWatch(
            store,
            on_worker=lambda worker, keep_s: fleet.add(worker, "pool", keep_s),
            on_gone=lambda worker_id: fleet.remove(worker_id, "pool"),
            on_pool_lost=reconciler.pool_lost,
            incomplete=fleet.incomplete,
            on_requested=self._asked,
            tenants=self._tenants,
            life=self._life,
        )
        self._status = PoolStatus(store, tenants=lambda: watch.tenants, capacity_nbytes=self._capacity_nbytes)

    def _asked(self, worker_id: str, dp_rank: int) -> None:
        if (rank := self._fleet.rank(worker_id, dp_rank)) is not None:
            rank.ask()


def _pool_url(text: str) -> StoreURL:
    url = StoreURL.parse(text)
    if url.scheme == "file":  # may start before the first worker, and evicts nothing
        return replace(url, capacity_nbytes=MAX_NBYTES)
    return url
