"""``PoolFollower``: follows a pool's announcements, blocks, usage and requests, once it is reachable.

An index may start before its pool and outlives it; until then workers' events alone answer lookups.

Threads: ``kvpool-pool`` reaches the pool, and then reads usage and requests; any may read ``servers``, ``traffic``,
``curves`` and ``audits``, which are replaced whole. ``kvpool-quotas`` counts what tenants hold.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvpool.discovery.quota import Standing, tenants_with_quotas
from kvpool.discovery.traffic import Seen, audits_of
from kvpool.discovery.worker_watch import WorkerWatch
from kvpool.errors import AnnouncementsRefused, KVPoolError, StoreUnavailable
from kvpool.index.answer import EngineAudits, HitCurve, worst_first
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.hit_curves import ALL, HitCurves
from kvpool.index.follow.pool_reconciler import DEFAULT_KEYS_PER_S, PoolReconciler, ReconcilerTotals
from kvpool.index.follow.quota_keeper import QuotaKeeper
from kvpool.key.key import check_tenant, traffic_prefix
from kvpool.store import open_store
from kvpool.store.store import Store, Usage
from kvpool.store.url import StoreURL
from kvpool.text import MAX_NBYTES
from kvpool.threads import start_thread

RETRY_S = 2.0  # between two connection attempts
EVERY_S = 5.0  # between two reads of usage and requests
CLOSE_S = 10.0  # an attempt or a read takes a few seconds

logger = logging.getLogger("kvpool.index")


class PoolFollower:
    """A ``WorkerWatch``, a ``PoolReconciler`` and a ``QuotaKeeper`` for ``fleet``, on the pool of ``url``.

    ``tenants``: as in ``WorkerWatch``. Call ``start`` once. Blocking: the first attempt, a few seconds.
    ``servers``: usage of the pool's servers, as last read; empty: unknown; a pool never reached: the servers of
    its URL, not up. ``traffic``: requested blocks by window, as engines of this pool last reported. ``curves``: by
    tenant, and of ``ALL``. ``audits``: of engines, the worst first. Errors: ``ConfigError`` for an unfit URL.
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
        for tenant in tenants or ():
            check_tenant(tenant)
        self._fleet, self._keys_per_s, self._tenants = fleet, keys_per_s, tenants
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # Set once, by the caller of start() or by the thread.
        self._store: Store | None = None
        self._watch: WorkerWatch | None = None
        self._reconciler: PoolReconciler | None = None
        self._quotas: QuotaKeeper | None = None
        self._life = ""
        self._refused: set[str] = set()  # tenants already logged
        self.servers: list[Usage] = []
        self.traffic: Mapping[str, Seen] = {}
        self.curves: Mapping[str, HitCurve] = {}
        self.audits: Sequence[EngineAudits] = ()
        self._hit_curves = HitCurves()  # its thread only
        try:
            self._store = open_store(self._url, threads=1)
        except StoreUnavailable as error:
            logger.warning(
                "the index starts without its pool, and follows it when it can be reached: %s", error
            )
            self.servers = [Usage(name, up=False) for name in self._url.servers]
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

    @property
    def standings(self) -> Mapping[str, Standing]:
        """Of tenants with a quota, as last counted. Any thread."""
        return {} if self._quotas is None else self._quotas.standings

    def totals(self) -> ReconcilerTotals:
        return ReconcilerTotals() if self._reconciler is None else self._reconciler.totals()

    def start(self) -> None:
        if self._store is not None:
            self._follow(self._store)
        self._thread = threading.Thread(target=self._run, name="kvpool-pool", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Idempotent. Blocks for ``CLOSE_S`` seconds at most."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        for part in (self._quotas, self._watch, self._reconciler, self._store):
            if part is not None:
                part.close()

    def _run(self) -> None:
        store = self._store or self._reach()
        watch = self._watch
        while store is not None and watch is not None and not self._closing.is_set():
            self._read_servers(store)
            self._read_traffic(store, watch.tenants)
            self._closing.wait(EVERY_S)

    def _reach(self) -> Store | None:
        """Open and follow the pool; None: closed before that."""
        said = ""
        while not self._closing.wait(RETRY_S):
            try:
                store = self._store = open_store(self._url, threads=1)
            except KVPoolError as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("the pool cannot be reached: %s", error)
                continue
            logger.info("the pool is reached: %r", store)
            self._follow(store)
            return store
        return None

    def _read_servers(self, store: Store) -> None:
        try:
            found = store.usage()
        except KVPoolError:  # the server list is unknown: the former servers count as away
            found = [Usage(one.server, up=False) for one in self.servers]
        self.servers = found

    def _read_traffic(self, store: Store, tenants: Iterable[str]) -> None:
        documents: dict[str, Mapping[str, bytes]] = {}
        try:
            for tenant in tenants:
                documents[tenant] = {}
                try:
                    documents[tenant] = store.announcements(traffic_prefix(tenant))
                except AnnouncementsRefused as error:
                    if tenant not in self._refused:
                        logger.warning(
                            "what engines of tenant %s were asked for is not counted: %s", tenant, error
                        )
                    self._refused.add(tenant)
        except KVPoolError:  # the pool is away: the last values stay
            return
        self._refused &= documents.keys()
        self.audits = worst_first(
            EngineAudits.of(tenant, news) for tenant, found in documents.items() for news in audits_of(found)
        )
        self.traffic = self._hit_curves.read(documents)
        blocks, block_nbytes = self._sizes()
        self.curves = self._hit_curves.shown(blocks, block_nbytes)

    def _sizes(self) -> tuple[dict[str, int], float]:
        """The pool's blocks by tenant, and the room for blocks of ``ALL``; bytes of a block, 0: unknown."""
        blocks: Counter[str] = Counter()
        for pool in self._fleet.pools():
            if pool.is_media:
                continue
            blocks[pool.tenant] += pool.table.held_by(pool.holder)["pool"]
        held = blocks.total()
        used_nbytes = total(one.used_nbytes for one in self.servers)
        capacity_nbytes = total(one.capacity_nbytes for one in self.servers)
        if not held or not used_nbytes:
            return {**blocks, ALL: held}, 0.0
        return {**blocks, ALL: held * (capacity_nbytes or used_nbytes) // used_nbytes}, used_nbytes / held

    def _follow(self, store: Store) -> None:
        fleet = self._fleet
        reconciler = self._reconciler = PoolReconciler(fleet, store, keys_per_s=self._keys_per_s)
        self._watch = WorkerWatch(
            store,
            on_worker=lambda worker, keep_s: fleet.add(worker, "pool", keep_s),
            on_gone=lambda worker_id: fleet.remove(worker_id, "pool"),
            on_pool_lost=reconciler.pool_lost,
            incomplete=fleet.incomplete,
            on_requested=self._asked,
            tenants=self._tenants,
            life=self._life,
        )
        self._quotas = QuotaKeeper(store, self._with_quotas)

    def _with_quotas(self) -> Sequence[str]:
        """Whose quotas are followed: also of tenants without a worker. Errors: ``KVPoolError``. The keeper's thread."""
        assert self._store is not None
        return self._tenants if self._tenants is not None else tenants_with_quotas(self._store)

    def _asked(self, worker_id: str, dp_rank: int) -> None:
        if (rank := self._fleet.rank(worker_id, dp_rank)) is not None:
            rank.ask()


def total(values: Iterable[int | None]) -> int | None:
    """None: an unknown value, or no values."""
    known = list(values)
    return sum(filter(None, known)) if known and None not in known else None


def _pool_url(text: str) -> StoreURL:
    """The pool of the fleet: a near one is of the workers' hosts."""
    url = StoreURL.parse(text).pools()[-1]
    if url.scheme == "file":  # may start before the first worker, whose capacity it is, and evicts nothing
        return replace(url, capacity_nbytes=MAX_NBYTES, says_capacity=False)
    return url
