"""How workers and indexes find each other in the pool: ``Announcer`` and ``WorkerWatch``.

A worker keeps a record under a lease (``kvpool.discovery.worker_record``) and renews it; an index reads all records
every second. Neither knows the other's address, and no clocks are compared: the pool ends leases.

An index that knows only a part of what a rank holds leaves a request beside its record, and renews it until it knows
all; the rank reads both at once. What the request says does not matter, nor which of several indexes left it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvpool.discovery.worker import Worker
from kvpool.discovery.worker_record import Announced, merge_ranks, pack_worker, unpack_worker
from kvpool.errors import KVPoolError
from kvpool.key.key import is_request_key, parse_tenant, request_key, tenant_prefix, workers_prefix
from kvpool.store.store import Store

DEFAULT_LEASE_S = 10.0
RENEWALS = 3  # in one lease
READ_S = DEFAULT_LEASE_S / RENEWALS  # a longer lease is renewed as often, since requests are read then
# A request outlives the pause between two readings, and is over when the rank may be asked again
# (``kvpool.vllm.cache_resync.INTERVAL_S``): so what is asked then is asked since the answer.
REQUEST_LEASE_S = 5.0
REQUEST = b"tell all you hold"
ASK_S = 2.0  # a request is renewed that often
MAX_ASKED = 32  # ranks in one round
RETRY_S = 1.0  # after a failure, where the lease does not ask for less
INTERVAL_S = 1.0
TENANTS_INTERVAL_S = 5.0
KEEP_S = 60.0  # many rounds of a watch, failed ones included
CLOSE_S = 5.0
MAX_SAID = 1024  # sentences that are remembered so that they are said once

logger = logging.getLogger("kvpool.index")

Say = Callable[[str], None]


class Announcer:
    """Announces one rank of a worker until it is closed, from a thread of its own.

    ``worker``: with one publisher and an incarnation. ``lease_s``: how long the record outlives its last renewal; it
    is renewed three times as often, and every ``READ_S`` seconds at least. ``say``: is told, in one line each, when
    the pool cannot be written (once an outage), when it can again, and when somebody else announces a worker of this
    name.
    A pool that is away is tried again and again. The store must stay open until ``close`` has returned.
    Errors: ``ConfigError`` for a worker that cannot be announced.
    """

    def __init__(
        self, store: Store, worker: Worker, *, lease_s: float = DEFAULT_LEASE_S, say: Say = logger.warning
    ) -> None:
        self._key, self._record = pack_worker(worker, lease_s)
        self._store, self._worker, self._lease_s, self._say = store, worker, lease_s, say
        self._closing = False
        self._woken = threading.Event()
        self._asked = False  # its thread writes
        # The fields below: its thread only.
        self._kept = False  # the record was written at least once
        self._away = False  # the last try failed
        self._said_twin = ""
        self._thread = threading.Thread(target=self._run, name="kvpool-announcer", daemon=True)
        self._thread.start()

    @property
    def asked(self) -> bool:
        """Whether an index asks for all that this rank holds, as was last read. Any thread."""
        return self._asked

    def enter(self, namespace: str) -> None:
        """From now on the worker's blocks in the pool are those of another namespace. Any thread; does not block.

        ``namespace``: 32 hex digits.
        """
        self._worker = replace(self._worker, namespace=namespace)
        _, self._record = pack_worker(self._worker, self._lease_s)
        self._woken.set()

    def close(self) -> None:
        """Withdraw the record and end the thread; again does nothing.

        Blocking, for at most ``CLOSE_S`` seconds: where the pool does not answer, the lease ends the record.
        """
        self._closing = True
        self._woken.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing:
            self._woken.clear()
            if self._closing:
                break
            failed = not self._try(self._renew, "cannot be announced, and no index sees it")
            wait_s = min(self._lease_s / RENEWALS, READ_S)
            self._woken.wait(min(RETRY_S, wait_s) if failed else wait_s)
        if self._kept and not self._away:
            self._try(self._withdraw, "is not withdrawn, and announced until its lease ends")

    def _try(self, step: Callable[[], None], failure: str) -> bool:
        try:
            step()
        except Exception as error:  # the engine around must never hear of it
            self._asked = False
            if not self._away:
                reason = str(error) if isinstance(error, KVPoolError) else f"{type(error).__name__}: {error}"
                self._say(f"worker {self._worker.name} {failure}: {reason}")
            self._away = True
            return False
        if self._away:
            self._say(f"worker {self._worker.name} is announced again")
        self._away = False
        return True

    def _renew(self) -> None:
        found = self._store.announcements(self._key)
        self._asked = request_key(self._key) in found
        twin = self._other_incarnation(found) if self._kept else ""
        if twin and twin != self._said_twin:
            self._said_twin = twin
            self._say(
                f"somebody else announces a worker {self._worker.name} of tenant {self._worker.tenant}, too: "
                'give each engine its own "worker" or "advertise_host"'
            )
        self._store.announce(self._key, self._record, lease_s=self._lease_s)
        self._kept = True

    def _withdraw(self) -> None:
        # Not that of the engine that took this one's place.
        if not self._other_incarnation(self._store.announcements(self._key)):
            self._store.withdraw(self._key)

    def _other_incarnation(self, announced: dict[str, bytes]) -> str:
        record = announced.get(self._key)
        found = unpack_worker(self._key, record) if record is not None else None
        if found is None or found.worker.incarnation == self._worker.incarnation:
            return ""
        return found.worker.incarnation


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
        self._said: set[str] = set()
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
            self._heard(life, found, emptied, time.monotonic())
            answered = True
        workers, problems = merge_ranks(known.announced for known in self._known.values())
        for problem in problems:
            self._say_once(problem)
        self._tell(workers)
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
            self._say_once(f"no record of a worker that this version can follow: {key:.200}")
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

    def _heard(self, life: str, found: dict[str, Announced], emptied: bool, now_s: float) -> None:
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

    def _tell(self, workers: dict[str, Worker]) -> None:
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
            self._say_once(f"{what}: {error}")
        except Exception:
            logger.exception("%s", what)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said and len(self._said) < MAX_SAID:
            self._said.add(sentence)
            logger.warning("%s", sentence)
