"""``QuotaWatch``: whether a tenant is over its quota, so that its workers store nothing more.

Soft: between two counts of an index a fleet stores beyond it, and what nobody counts is no limit. What cannot be read
is unknown: what was known last holds, for ``UNKNOWN_S`` seconds.

Threads: any asks ``is_over``; the rest is ``kvpool-quota``'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvpool import metrics
from kvpool.discovery.quota import Standing, read_standings
from kvpool.errors import KVPoolError, NoThread
from kvpool.metrics import Counters
from kvpool.store.store import Store
from kvpool.threads import TurnThread, start_thread

READ_S = 5.0
RESUME = 0.95  # of the quota: below it stores go on
UNKNOWN_S = (
    600.0  # then there is no limit: a worker whose right to read was taken back would store nothing, for ever
)


class QuotaWatch(TurnThread):
    """Reads the quota of ``tenant`` every ``READ_S`` seconds until closed. Close it before the store.

    ``log``: the engine's; it gets a line when the tenant gets over its quota, and when stores go on, with the reason.
    """

    def __init__(
        self,
        store: Store,
        tenant: str,
        counters: Counters,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("kvpool-quota")
        self._store, self._tenant, self._counters, self._log = store, tenant, counters, log
        self._clock = clock
        # Written by the thread.
        self._is_over = False
        self._was_over = False  # when it was last counted
        self._known_s = 0.0  # when it was last known

    def start(self) -> None:
        """Without a thread there is no limit. Does not block."""
        try:
            start_thread(self._thread)
        except NoThread as error:  # never reaches the engine
            self._log.warning("kvpool: the quota of tenant %s is not read: %s", self._tenant, error)

    def is_over(self) -> bool:
        """As last read; false before the first reading. Does not block."""
        return self._is_over

    def turn(self) -> None:
        """Read once. Blocks for two small reads; never raises."""
        standing, now_s = self._read(), self._clock()
        if standing is None:
            if self._is_over and now_s >= self._known_s + UNKNOWN_S:
                self._is_over = False
                self._log.warning(
                    "kvpool: the quota of tenant %s could not be read for %.0f minutes: there is no limit until it "
                    "can, and this worker stores again",
                    self._tenant,
                    UNKNOWN_S / 60,
                )
            return
        self._known_s = now_s
        is_counted = standing.quota_nbytes is None or standing.held_nbytes is not None
        if is_counted:
            self._was_over = standing.used >= (RESUME if self._was_over else 1)
        was_over, self._is_over = self._is_over, is_counted and self._was_over
        if self._is_over and not was_over:
            self._log.warning(
                f"kvpool: tenant {self._tenant} holds {standing.held_nbytes:,} bytes of a quota of "
                f"{standing.quota_nbytes:,}: this worker loads, and stores nothing more until it holds less than "
                f"{RESUME:.0%} of it; kvpool quota raises the quota, kvpool purge makes room"
            )
        elif was_over and not is_counted:
            self._log.warning(
                "kvpool: no index counts any more what tenant %s holds: there is no limit until one does, and this "
                "worker stores again",
                self._tenant,
            )
        elif was_over and not self._is_over:
            self._log.info(
                "kvpool: tenant %s is not over its quota any more: this worker stores again", self._tenant
            )

    def _read(self) -> Standing | None:
        """None: unknown."""
        try:
            standing = read_standings(self._store, [self._tenant])[self._tenant]
        except KVPoolError:  # loads and lookups already log the pool's state
            self._counters.add(metrics.QUOTA_FAILURES, 1, "store_unavailable")
            return None
        except Exception:  # never ends the thread
            self._log.exception("kvpool failed to read a quota")
            self._counters.add(metrics.QUOTA_FAILURES, 1, "unreadable")
            return None
        if standing.is_unreadable:
            self._counters.add(metrics.QUOTA_FAILURES, 1, "unreadable")
            return None
        # One that is not there was lost, and an index writes it again.
        return None if self._was_over and not standing.is_said else standing

    def _turn(self) -> float:
        self.turn()
        return READ_S

    def _end(self) -> None:
        """Nothing is left behind."""
