"""``WorkerWatch``: reads the workers' records in the pool, and leaves requests for ranks that are not known whole.

An index leaves a request beside the record of a rank (``Announcer`` reads both at once), and renews it until it knows
all that the rank holds. The request has no content; it does not matter which of several indexes left it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpool.discovery.worker import Worker
from kvpool.discovery.worker_record import REQUEST_LEASE_S, Announced, merge_ranks, unpack_worker
from kvpool.errors import KVPoolError
from kvpool.key.key import is_request_key, parse_tenant, request_key, tenant_prefix, workers_prefix
from kvpool.store.store import Store

REQUEST = b"tell all you hold"
ASK_S = 2.0  # a request is renewed that often
MAX_ASKED = 32  # ranks in one round
INTERVAL_S = 1.0
TENANTS_INTERVAL_S = 5.0
KEEP_S = 60.0  # many rounds of a watch, failed ones included
CLOSE_S = 5.0
MAX_LOGGED = 1024  # sentences that are remembered so that they are logged once

logger = logging.getLogger("kvpool.index")


@dataclass
class _Known:
    announced: Announced
    missing: bool = False  # the record is not there any more, which proves nothing yet


class WorkerWatch:
    """Reads the records of all workers every ``interval_s`` seconds, from a thread of its own.

    ``on_worker(worker, keep_s)`` is called for every worker in every round, in a round that failed, too: it is to be
    kept for ``keep_s`` seconds unless something else is said. ``on_gone(worker_id)``: it has stopped, or its lease has
    ended. ``on_pool_lost()``: the pool's server was started anew, or the pool was emptied.
    ``incomplete()``: (worker id, data-parallel rank) of those that are to tell all they hold; those that announce
    themselves here are asked, a few in each round, and ``on_asked(worker_id, dp_rank)`` is called.
    ``tenants``: only these; None: all that announce anything, looked for every 5 seconds. ``life``: of the pool
    (``Store.server_run_id``) as it was when what is known of it was read; empty: nothing is known.

    A record that is not there any more means that its worker is gone, with one exception: where the pool could not be
    read, was started anew or was emptied, workers had no chance to renew their records, and each gets a whole lease
    from the first round in which the pool answers.

    All calls come from the watch's thread and must not block for long; what they raise is logged. Problems are
    logged once, an outage once. The store must stay open until ``close`` has returned.
    """

    def __init__(
        self,
        store: Store,
        *,
        on_worker: Callable[[Worker, float], object],
        on_gone: Callable[[str], object],
        on_pool_lost: Callable[[], object] = lambda: None,
        incomplete: Callable[[], Iterable[tuple[str, int]]] = lambda: (),
        on_asked: Callable[[str, int], object] = lambda worker_id, dp_rank: None,
        tenants: Sequence[str] | None = None,
        interval_s: float = INTERVAL_S,
        life: str = "",
    ) -> None:
        self._store = store
        self._on_worker, self._on_gone, self._on_pool_lost = on_worker, on_gone, on_pool_lost
        self._incomplete, self._on_asked = incomplete, on_asked
        self._all_tenants = tenants is None
        self._tenants = sorted(set(tenants or ()))
        for tenant in self._tenants:
            tenant_prefix(tenant)  # judges it
        self._interval_s = interval_s
        self.unreadable_records = 0  # in the last round
        self.rounds = 0  # in which the pool answered, and all that follows from it was told
        self.life = life  # of the pool, as it was read last
        self._closing = threading.Event()
        # The fields below: its thread only.
        self._known: dict[str, _Known] = {}  # by key
        self._workers: dict[str, Worker] = {}  # by id, as they were told
        self._asked_at_s: dict[str, float] = {}  # by key, of those that are incomplete still
        self._away = False
        self._doubt_since_s: float | None = None  # until a lease later, a missing record proves nothing
        self._tenants_at_s = 0.0
        self._logged: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="kvpool-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; again does nothing. Blocking, for at most ``CLOSE_S`` seconds."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._round()
            self._closing.wait(self._interval_s)

    def _round(self) -> None:
        answered = False
        try:
            life = self._store.server_run_id()
            records = self._read()
            found = {key: one for key, record in records.items() if (one := self._unpacked(key, record))}
            emptied = self._is_emptied(found)
        except KVPoolError as error:
            if not self._away:
                logger.warning("the workers in the pool cannot be read; those known are kept: %s", error)
            self._away = True
        else:
            self.unreadable_records = len(records) - len(found)
            self._update(life, found, emptied, time.monotonic())
            answered = True
        workers, problems = merge_ranks(known.announced for known in self._known.values())
        for problem in problems:
            self._log_once(problem)
        self._report(workers)
        self.rounds += answered
        if not self._away:
            self._call("workers cannot be asked for all they hold", self._ask)

    def _read(self) -> dict[str, bytes]:
        now_s = time.monotonic()
        if self._all_tenants and now_s >= self._tenants_at_s:
            found = {parse_tenant(key) for key in self._store.announcements("kvpool:")}
            # One of whose workers something is known is asked about until they are gone.
            found |= {known.announced.worker.tenant for known in self._known.values()}
            self._tenants = sorted(tenant for tenant in found if tenant is not None)
            self._tenants_at_s = now_s + TENANTS_INTERVAL_S
        records: dict[str, bytes] = {}
        for tenant in self._tenants:
            records |= self._store.announcements(workers_prefix(tenant))
        return {key: record for key, record in records.items() if not is_request_key(key)}

    def _unpacked(self, key: str, record: bytes) -> Announced | None:
        announced = unpack_worker(key, record)
        if announced is None:
            self._log_once(f"no record of a worker that this version can follow: {key:.200}")
        return announced

    def _is_emptied(self, found: dict[str, Announced]) -> bool:
        """Whether a tenant that has just had workers has nothing in the pool any more.

        Workers leave the facts of their namespace there for 30 days: one that stops does not look like this.
        """
        had = {known.announced.worker.tenant for known in self._known.values() if not known.missing}
        left = had - {announced.worker.tenant for announced in found.values()}
        return any(
            all(map(is_request_key, self._store.announcements(tenant_prefix(tenant)))) for tenant in left
        )

    def _update(self, life: str, found: dict[str, Announced], emptied: bool, now_s: float) -> None:
        """What follows from a round in which the pool has answered."""
        if self._away:
            logger.warning("the workers in the pool can be read again")
            self._away, self._doubt_since_s = False, now_s
        if emptied or (self.life and life and life != self.life):
            self._doubt_since_s = now_s
            self._call("the pool was started anew or emptied", self._on_pool_lost)
        self.life = life or self.life
        for key in self._known.keys() - found.keys():
            known = self._known[key]
            known.missing = True
            if self._doubt_since_s is None or now_s >= self._doubt_since_s + known.announced.lease_s:
                del self._known[key]
        self._known |= {key: _Known(announced) for key, announced in found.items()}

    def _report(self, workers: dict[str, Worker]) -> None:
        for worker_id in self._workers.keys() - workers.keys():
            self._call(f"worker {worker_id}", functools.partial(self._on_gone, worker_id))
        for worker_id, worker in workers.items():
            self._call(f"worker {worker_id}", functools.partial(self._on_worker, worker, KEEP_S))
        self._workers = workers

    def _ask(self) -> None:
        """Leave a request for each rank that is incomplete, those first that were asked longest ago."""
        now_s = time.monotonic()
        incomplete = set(self._incomplete())
        ranks = {
            key: rank
            for key, known in (self._known.items() if incomplete else ())
            if not known.missing and (rank := known.announced.rank) in incomplete
        }
        self._asked_at_s = {key: at_s for key, at_s in self._asked_at_s.items() if key in ranks}
        due = [key for key in ranks if self._asked_at_s.get(key, 0.0) <= now_s - ASK_S]
        for key in sorted(due, key=lambda key: self._asked_at_s.get(key, 0.0))[:MAX_ASKED]:
            self._store.announce(request_key(key), REQUEST, lease_s=REQUEST_LEASE_S)
            self._asked_at_s[key] = now_s
            self._on_asked(*ranks[key])

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
