"""Writers of leased records in a pool: ``Announcer`` of a rank, ``TrafficAnnouncer`` of an engine's traffic and audits.

Writers and readers (``WorkerWatch``) meet in the pool, which ends leases, so clocks are never compared. An
index that lacks blocks of a rank puts a request beside its record, for all indexes.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvpool.discovery.audit_news import AuditNews
from kvpool.discovery.sample import MAX_HELD, SampledRequest, SampleWindow
from kvpool.discovery.traffic import WINDOWS, Seen, pack_traffic
from kvpool.discovery.worker import Worker
from kvpool.discovery.worker_record import (
    DEFAULT_LEASE_S,
    ENDED,
    READ_S,
    RENEWALS,
    pack_worker,
    unpack_worker,
)
from kvpool.errors import KVPoolError, NoThread
from kvpool.key.key import request_key, traffic_key
from kvpool.store.store import Store
from kvpool.threads import TurnThread, start_thread

RETRY_S = 1.0  # after a failure or an eviction; a shorter lease retries sooner
TAKE_OVER_S = 2.0  # a record of the same name is replaced this much later
TRAFFIC_LEASE_S = 60.0
TRAFFIC_EVERY_S = 15.0

logger = logging.getLogger("kvpool.index")


class _Writer(TurnThread):
    """Writes a record every ``every_s`` seconds until closed, and withdraws it then. Close it before the store."""

    def __init__(self, store: Store, *, every_s: float, thread: str) -> None:
        super().__init__(thread)
        self._store, self._every_s = store, every_s

    def _turn(self) -> float:
        return self._every_s if self._write() else min(RETRY_S, self._every_s)

    @abstractmethod
    def _write(self) -> bool:
        """Write once; false: it failed, or what was written before was gone. It is tried again soon."""


class Announcer(_Writer):
    """Announces one rank of a worker until closed, from its own thread.

    ``worker``: with one publisher and an incarnation. ``lease_s``: the record outlives its last renewal by
    this; three renewals a lease, and at least one every ``READ_S`` seconds, the next after ``RETRY_S`` where
    the server refused or evicted the record. ``log``: gets one line when an outage begins or ends, and
    when another process announces the same name. A present record of the same name is replaced after
    ``TAKE_OVER_S``. ``media``: the worker's ``media_namespaces``, asked by the thread for each record, must not
    block; None: they stay. Errors: ``ConfigError`` for a worker that cannot be announced.
    """

    def __init__(
        self,
        store: Store,
        worker: Worker,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        log: logging.Logger = logger,
        media: Callable[[], tuple[str, ...]] | None = None,
    ) -> None:
        self._key, _ = pack_worker(worker, lease_s)
        super().__init__(store, every_s=min(lease_s / RENEWALS, READ_S), thread="kvpool-announcer")
        self._worker, self._lease_s, self._log, self._media = worker, lease_s, log, media
        self._requested = False  # written by its thread
        # The fields below: its thread only.
        self._renewals = 0
        self._written = False  # at least once
        self._evicted = False  # at the last reading
        self._away = False  # the last try failed
        self._warned_twin = ""
        self._has_waited = False
        start_thread(self._thread)

    @property
    def requested(self) -> bool:
        """Whether an index requested all blocks of this rank at the last reading. Any thread."""
        return self._requested

    def enter(self, namespace: str) -> None:
        """Announce another namespace (32 hex digits) of the worker. Any thread; does not block."""
        worker = replace(self._worker, namespace=namespace)
        pack_worker(worker, self._lease_s)  # validates it
        self._worker = worker
        self._woken.set()

    def _write(self) -> bool:
        says = "cannot be announced: an index that starts now will not see it"
        return self._try(self._renew, says) and not self._evicted

    def _end(self) -> None:
        if self._written and not self._away:
            self._try(self._withdraw, "is not withdrawn, and announced until its lease ends")

    def _try(self, step: Callable[[], None], failure: str) -> bool:
        try:
            step()
        except Exception as error:  # never reaches the engine
            self._requested = False
            if not self._away:
                reason = str(error) if isinstance(error, KVPoolError) else f"{type(error).__name__}: {error}"
                self._log.warning("kvpool: worker %s %s: %s", self._worker.name, failure, reason)
            self._away = True
            return False
        if self._away:
            self._log.info("kvpool: worker %s is announced again", self._worker.name)
        self._away = False
        return True

    def _renew(self) -> None:
        found = self._store.announced_under((self._key, request_key(self._key)))
        self._requested = request_key(self._key) in found
        self._evicted = self._written and self._key not in found
        other = self._other_incarnation(found)
        if other and not self._written and not self._has_waited:
            # A predecessor, or a running engine that owns the ports: then this engine fails in a moment.
            self._has_waited = True
            ends_s = time.monotonic() + TAKE_OVER_S
            while not self._closing and (left_s := ends_s - time.monotonic()) > 0:  # enter() also wakes it
                self._woken.wait(left_s)
                self._woken.clear()
            if self._closing:
                return
        twin = other if self._written else ""
        if twin and twin != self._warned_twin:
            self._warned_twin = twin
            self._log.warning(
                "kvpool: another process announces a worker %s of tenant %s, too: give each engine a \"worker\" of its "
                'own, or a "http_port" or "advertise_host" of its own',
                self._worker.name, self._worker.tenant,
            )  # fmt: skip
        self._renewals += 1
        worker = self._worker
        if self._media is not None:
            worker = replace(worker, media_namespaces=self._media())
        _, record = pack_worker(worker, self._lease_s, self._renewals)
        self._store.announce(self._key, record, lease_s=self._lease_s)
        self._written = True

    def _withdraw(self) -> None:
        # Keep the record of an engine that took over.
        if not self._other_incarnation(self._store.announced_under((self._key,))):
            self._store.announce(self._key, ENDED, lease_s=self._lease_s)

    def _other_incarnation(self, announced: dict[str, bytes]) -> str:
        record = announced.get(self._key)
        found = unpack_worker(self._key, record) if record is not None else None
        if found is None or found.worker.incarnation == self._worker.incarnation:
            return ""
        return found.worker.incarnation


class TrafficAnnouncer(_Writer):
    """Writes an engine's traffic and its audits to the pool, from the first word on either."""

    def __init__(
        self,
        store: Store,
        tenant: str,
        *,
        every_s: float = TRAFFIC_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, every_s=every_s, thread="kvpool-traffic")
        self._clock = clock
        self._key = traffic_key(tenant, secrets.token_hex(8))
        self._received: tuple[dict[str, Seen], float] = (
            {name: Seen() for name in WINDOWS},
            0.0,
        )  # and its time
        self._audits: AuditNews | None = None  # replaced by tell_audits()
        # Filled by tell(), emptied by its thread.
        self._sampled: deque[SampledRequest] = deque(maxlen=MAX_HELD)
        self._window = SampleWindow()  # its thread only

    def tell(self, windows: dict[str, Seen], sampled: Sequence[SampledRequest]) -> None:
        """Write these windows with the next turn; without further calls they expire. One thread; does not block.

        ``sampled``: requests since the last call, timed by ``clock``.
        """
        self._sampled.extend(sampled)
        if not any(seen.prompt_tokens for seen in windows.values()):
            return
        self._received = (windows, self._clock())
        self._start()

    def tell_audits(self, news: AuditNews) -> None:
        """Write these news in place of earlier ones, with the next turn. Any thread; does not block."""
        self._audits = news
        self._start()

    def _start(self) -> None:
        if self._thread.ident is None:
            with contextlib.suppress(
                NoThread, RuntimeError
            ):  # the next call tries again; another thread was first
                start_thread(self._thread)

    def _write(self) -> bool:
        windows, received_s = self._received
        now_s = self._clock()
        rested_s = now_s - received_s
        recent = {name: seen if rested_s < WINDOWS[name] else Seen() for name, seen in windows.items()}
        sampled = [self._sampled.popleft() for _ in range(len(self._sampled))]
        sample = self._window.pack(sampled, now_s, time.time())
        try:
            document = pack_traffic(recent, sample, self._audits)
            self._store.announce(self._key, document, lease_s=TRAFFIC_LEASE_S)
        except KVPoolError as error:  # loads and lookups already log the pool's state
            logger.debug("what the engine was asked for is not in the pool: %s", error)
        return True

    def _end(self) -> None:
        with contextlib.suppress(KVPoolError):
            self._store.withdraw(self._key)
