"""``WorkerWatch``: reads the workers' records in the pool, and requests the blocks of incomplete ranks.

A request lies beside the rank's record (``Announcer`` reads both at once), without content. Any index may
write it, and renews it until it knows all blocks of the rank.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.discovery.worker import Worker
from kvpool.discovery.worker_record import ENDED, REQUEST_LEASE_S, WorkerRecord, merge_ranks, unpack_worker
from kvpool.errors import AnnouncementsRefused, KVPoolError
from kvpool.key.key import is_engine_key, is_request_key, request_key, tenant_prefix, workers_prefix
from kvpool.store.store import Store
from kvpool.threads import start_thread

REQUEST = b"tell all you hold"
REQUEST_EVERY_S = 2.0  # renewal of a request
MAX_REQUESTS = 32  # per round
INTERVAL_S = 1.0
TENANTS_INTERVAL_S = 5.0
REFUSED_S = 10.0  # pause before refused announcements are read again
REFUSED_TIMES = 10  # pause at least ten times the read: a tenant takes a tenth of the watch's time at most
KEEP_S = 60.0  # many rounds of a watch, failed rounds included
CLOSE_S = 5.0
MAX_LOGGED = 1024  # sentences already logged, so that each is logged once

logger = logging.getLogger("kvpool.index")


@dataclass
class _Known:
    record: WorkerRecord
    ends_s: float  # its lease, by this watch's clock; not before it ends in the pool
    missing: bool = False  # which proves nothing before that


@dataclass
class _Tenant:
    known: dict[str, _Known] = field(default_factory=dict)  # by key
    refused: bool = False  # its announcements cannot be read
    next_s: float = 0.0  # next reading
    unreadable_records: int = 0

    def grant(self, now_s: float) -> None:
        """Give each worker a whole lease to announce itself again."""
        for known in self.known.values():
            known.ends_s = max(known.ends_s, now_s + known.record.lease_s)


class WorkerWatch:
    """Reads the records of all workers every ``interval_s`` seconds, from its own thread.

    ``on_worker(worker, keep_s)``: called for every worker in every round, failed rounds included; keep the
    worker for ``keep_s`` seconds unless told otherwise. ``on_gone(worker_id)``: it withdrew, or its lease
    ended. ``on_pool_lost(tenant)``: the pool lost this tenant's data; None: its server restarted.
    ``incomplete()``: (worker id, data-parallel rank) of incomplete ranks; a few announced ones are requested
    each round, each followed by ``on_requested(worker_id, dp_rank)``. ``tenants``: watch only these, listed
    or not; None: all in the pool's list, read every 5 seconds. ``life``: the pool's ``Store.server_run_id``
    when the caller's state was saved; empty: no saved state.

    A worker that stops says so (``ENDED``). A record that is missing was evicted, or its lease ended: its worker
    is kept until the lease ends that began when this watch first saw the last renewal, and while a server is full and
    refuses renewals. After an outage, restart or flush of the pool, each worker gets a lease from the first answered
    round. The same holds for one tenant whose announcements are unreadable, at no cost to other tenants.

    Callbacks run in the watch's thread and must not block for long; their exceptions are logged. Each problem
    and each outage is logged once. The store must stay open until ``close`` has returned.
    """

    def __init__(
        self,
        store: Store,
        *,
        on_worker: Callable[[Worker, float], object],
        on_gone: Callable[[str], object],
        on_pool_lost: Callable[[str | None], object] = lambda tenant: None,
        incomplete: Callable[[], Iterable[tuple[str, int]]] = lambda: (),
        on_requested: Callable[[str, int], object] = lambda worker_id, dp_rank: None,
        tenants: Sequence[str] | None = None,
        interval_s: float = INTERVAL_S,
        life: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._on_worker, self._on_gone, self._on_pool_lost = on_worker, on_gone, on_pool_lost
        self._incomplete, self._on_requested = incomplete, on_requested
        self._all_tenants = tenants is None
        self._tenants = {tenant: _Tenant() for tenant in sorted(set(tenants or ()))}
        for tenant in self._tenants:
            tenant_prefix(tenant)  # validates the tenant
        self._interval_s, self._clock = interval_s, clock
        self.rounds = 0  # answered rounds whose callbacks have all run
        self.life = life  # of the pool, at the last reading
        self._closing = threading.Event()
        # The fields below: its thread only.
        self._workers: dict[str, Worker] = {}  # by id, as last reported
        self._requested_at_s: dict[str, float] = {}  # by key of an incomplete rank
        self._away = False
        self._list_at_s = 0.0
        self._logged: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="kvpool-watch", daemon=True)
        start_thread(self._thread)

    @property
    def unreadable_records(self) -> int:
        """Records that were no worker's at the last reading. Any thread."""
        return sum(tenant.unreadable_records for tenant in tuple(self._tenants.values()))

    @property
    def tenants(self) -> tuple[str, ...]:
        """The watched tenants. Any thread."""
        return tuple(self._tenants)

    def close(self) -> None:
        """End the thread; idempotent. Blocks for at most ``CLOSE_S`` seconds."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._round()
            self._closing.wait(self._interval_s)

    def _round(self) -> None:
        answered = False
        try:
            started_anew = self._look_at_server()
            self._list_tenants()
            for name, tenant in self._tenants.items():
                self._look_at(name, tenant, started_anew)
        except KVPoolError as error:
            if not self._away:
                logger.warning("the workers in the pool cannot be read; those known are kept: %s", error)
            self._away = True
        else:
            if self._away:
                logger.info("the workers in the pool can be read again")
            self._away, answered = False, True
        workers, problems = merge_ranks(
            known.record for tenant in self._tenants.values() for known in tenant.known.values()
        )
        for problem in problems:
            self._log_once(problem)
        self._report(workers)
        self.rounds += answered
        if not self._away:
            self._call("workers cannot be asked for all they hold", self._request)

    def _look_at_server(self) -> bool:
        """Whether the server restarted since the last round; then marks all tenants. Errors: ``KVPoolError``."""
        life = self._store.server_run_id()
        started_anew = bool(self.life and life and life != self.life)
        if started_anew or self._away:
            for tenant in self._tenants.values():
                tenant.grant(self._clock())
        self.life = life or self.life
        if started_anew:
            self._pool_lost(None)
        return started_anew

    def _list_tenants(self) -> None:
        if not self._all_tenants or self._clock() < self._list_at_s:
            return
        try:
            listed = self._store.announcing_tenants()
        except AnnouncementsRefused as error:
            self._log_once(f"the tenants of the pool cannot be listed; name them with --tenant: {error}")
            listed = []
        # Tenants with known workers are read until those workers are gone.
        kept = {name: tenant for name, tenant in self._tenants.items() if tenant.known or name in listed}
        self._tenants = kept | {name: _Tenant() for name in listed if name not in kept}
        self._list_at_s = self._clock() + TENANTS_INTERVAL_S

    def _look_at(self, name: str, tenant: _Tenant, started_anew: bool) -> None:
        """Read one tenant's announcements. Errors: ``KVPoolError`` when the pool does not answer."""
        began_s = self._clock()
        if began_s < tenant.next_s:
            return
        try:
            announced = self._store.announcements(workers_prefix(name))
            records = {key: record for key, record in announced.items() if not is_request_key(key)}
            ended = {key for key, record in records.items() if record == ENDED}
            tenant.known = {key: known for key, known in tenant.known.items() if key not in ended}
            read = {key: self._unpacked(key, record) for key, record in records.items() if key not in ended}
            found = {key: record for key, record in read.items() if record is not None}
            emptied = not started_anew and self._is_emptied(name, tenant, found)
        except AnnouncementsRefused as error:
            if not tenant.refused:
                logger.warning("workers of tenant %s cannot be read; those known are kept: %s", name, error)
            ended_s = self._clock()
            tenant.refused = True
            tenant.next_s = ended_s + max(REFUSED_S, REFUSED_TIMES * (ended_s - began_s))
            return
        now_s = self._clock()
        if tenant.refused:
            logger.info("workers of tenant %s can be read again", name)
        if tenant.refused or emptied:
            tenant.grant(now_s)
        tenant.refused, tenant.unreadable_records = False, len(read) - len(found)
        if emptied:
            self._pool_lost(name)
        missing = tenant.known.keys() - found.keys()
        if any(now_s >= tenant.known[key].ends_s for key in missing) and self._is_full():
            tenant.grant(now_s)
        for key in missing:
            known = tenant.known[key]
            known.missing = True
            if now_s >= known.ends_s:
                del tenant.known[key]
        for key, record in found.items():
            known = tenant.known.setdefault(key, _Known(record, now_s + record.lease_s))
            if known.record != record:
                known.record, known.ends_s = record, now_s + record.lease_s
            known.missing = False
        if self._all_tenants and not tenant.known:
            tenant.next_s = now_s + TENANTS_INTERVAL_S  # most tenants in the list have no worker any more

    def _is_full(self) -> bool:
        """Whether a server refuses announcements, too, so that a lease that ended proves nothing."""
        refusing = [one.server for one in self._store.usage() if one.refuses]
        if refusing:
            self._log_once(
                f"{', '.join(refusing)}: the server is full and evicts nothing, so workers cannot announce themselves; "
                "those known are kept: CONFIG SET maxmemory-policy allkeys-lru"
            )
        return bool(refusing)

    def _unpacked(self, key: str, record: bytes) -> WorkerRecord | None:
        announced = unpack_worker(key, record)
        if announced is None:
            self._log_once(f"no record of a worker that this version can follow: {key:.200}")
        return announced

    def _is_emptied(self, name: str, tenant: _Tenant, found: dict[str, WorkerRecord]) -> bool:
        """Whether a tenant lost everything: stopped workers would leave their namespace's facts for 30 days."""
        if found or all(known.missing for known in tenant.known.values()):
            return False
        left = self._store.announcements(tenant_prefix(name))
        return all(is_request_key(key) or is_engine_key(key) for key in left)

    def _pool_lost(self, tenant: str | None) -> None:
        self._call("the pool was started anew or emptied", lambda: self._on_pool_lost(tenant))

    def _report(self, workers: dict[str, Worker]) -> None:
        for worker_id in self._workers.keys() - workers.keys():
            self._call(f"worker {worker_id}", functools.partial(self._on_gone, worker_id))
        for worker_id, worker in workers.items():
            self._call(f"worker {worker_id}", functools.partial(self._on_worker, worker, KEEP_S))
        self._workers = workers

    def _request(self) -> None:
        """Request incomplete ranks, longest unrequested first."""
        now_s = self._clock()
        incomplete = set(self._incomplete())
        ranks = {
            key: rank
            for tenant in self._tenants.values()
            for key, known in (tenant.known.items() if incomplete else ())
            if not known.missing and (rank := known.record.rank) in incomplete
        }
        self._requested_at_s = {key: at_s for key, at_s in self._requested_at_s.items() if key in ranks}
        due = [key for key in ranks if self._requested_at_s.get(key, 0.0) <= now_s - REQUEST_EVERY_S]
        for key in sorted(due, key=lambda key: self._requested_at_s.get(key, 0.0))[:MAX_REQUESTS]:
            self._requested_at_s[key] = now_s
            try:
                self._store.announce(request_key(key), REQUEST, lease_s=REQUEST_LEASE_S)
            except AnnouncementsRefused as error:  # of this tenant
                self._log_once(f"worker {ranks[key][0]} cannot be asked for all it holds: {error}")
            else:
                self._on_requested(*ranks[key])

    def _call(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except KVPoolError as error:
            self._log_once(f"{what}: {error}")
        except Exception:
            logger.exception("%s", what)

    def _log_once(self, sentence: str) -> None:
        if sentence not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(sentence)
            logger.warning("%s", sentence)
