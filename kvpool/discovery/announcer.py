"""``Announcer``: keeps the record of one rank of a worker in the pool, and reads what indexes ask of that rank.

The record (``kvpool.discovery.worker_record``) has a lease and is renewed; ``WorkerWatch`` reads all records. Neither
needs the other's address, and no clocks are compared: the pool ends leases.

A request stands beside the record: some index knows only a part of what the rank holds. One request serves all indexes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvpool.discovery.worker import Worker
from kvpool.discovery.worker_record import DEFAULT_LEASE_S, READ_S, RENEWALS, pack_worker, unpack_worker
from kvpool.errors import KVPoolError
from kvpool.key.key import request_key
from kvpool.store.store import Store

RETRY_S = 1.0  # after a failure, where the lease does not ask for less
TAKE_OVER_S = 2.0  # before a record of this name is replaced
CLOSE_S = 5.0

logger = logging.getLogger("kvpool.index")


class Announcer:
    """Announces one rank of a worker until it is closed, from a thread of its own.

    ``worker``: with one publisher and an incarnation. ``lease_s``: how long the record outlives its last renewal; it
    is renewed three times as often, and every ``READ_S`` seconds at least. ``say``: called with one line when the pool
    cannot be written (once an outage), when it can again, and when another process announces a worker of this name.
    A record of this name that is there already is replaced after ``TAKE_OVER_S``. A pool that is away is tried again.
    The store must stay open until ``close`` has returned.
    Errors: ``ConfigError`` for a worker that cannot be announced.
    """

    def __init__(
        self,
        store: Store,
        worker: Worker,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        say: Callable[[str], None] = logger.warning,
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
        self._has_waited = False
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
            failed = not self._try(
                self._renew, "cannot be announced: an index that starts now will not see it"
            )
            wait_s = min(self._lease_s / RENEWALS, READ_S)
            self._woken.wait(min(RETRY_S, wait_s) if failed else wait_s)
        if self._kept and not self._away:
            self._try(self._withdraw, "is not withdrawn, and announced until its lease ends")

    def _try(self, step: Callable[[], None], failure: str) -> bool:
        try:
            step()
        except Exception as error:  # an error here must not reach the engine
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
        found = self._store.announced_under((self._key, request_key(self._key)))
        self._asked = request_key(self._key) in found
        other = self._other_incarnation(found)
        if other and not self._kept and not self._has_waited:
            # The one of before, or one that runs: then this engine fails in a moment, for that one has its ports.
            self._has_waited = True
            ends_s = time.monotonic() + TAKE_OVER_S
            while not self._closing and (left_s := ends_s - time.monotonic()) > 0:  # enter() wakes it, too
                self._woken.wait(left_s)
                self._woken.clear()
            if self._closing:
                return
        twin = other if self._kept else ""
        if twin and twin != self._said_twin:
            self._said_twin = twin
            self._say(
                f"another process announces a worker {self._worker.name} of tenant {self._worker.tenant}, too: "
                'give each engine a "worker" of its own, or a "http_port" or "advertise_host" of its own'
            )
        self._store.announce(self._key, self._record, lease_s=self._lease_s)
        self._kept = True

    def _withdraw(self) -> None:
        # Not that of the engine that took this one's place.
        if not self._other_incarnation(self._store.announced_under((self._key,))):
            self._store.withdraw(self._key)

    def _other_incarnation(self, announced: dict[str, bytes]) -> str:
        record = announced.get(self._key)
        found = unpack_worker(self._key, record) if record is not None else None
        if found is None or found.worker.incarnation == self._worker.incarnation:
            return ""
        return found.worker.incarnation
