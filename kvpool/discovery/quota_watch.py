"""``QuotaWatch``: whether a tenant is over its quota, so that its workers store nothing more.

Soft: between two counts of an index a fleet stores beyond it, and whatever cannot be read is no limit.

Threads: any asks ``is_over``; the rest is ``kvpool-quota``'s.
"""

from __future__ import annotations

import logging

from kvpool import metrics
from kvpool.discovery.quota import Standing, read_standings
from kvpool.errors import KVPoolError, NoThread
from kvpool.metrics import Counters
from kvpool.store.store import Store
from kvpool.threads import TurnThread, start_thread

READ_S = 5.0
RESUME = 0.95  # of the quota: below it stores go on


class QuotaWatch(TurnThread):
    """Reads the quota of ``tenant`` every ``READ_S`` seconds until closed. Close it before the store.

    ``log``: the engine's; it gets a line when the tenant gets over its quota, and when it is within it again.
    """

    def __init__(self, store: Store, tenant: str, counters: Counters, log: logging.Logger) -> None:
        super().__init__("kvpool-quota")
        self._store, self._tenant, self._counters, self._log = store, tenant, counters, log
        self._is_over = False  # written by the thread

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
        try:
            standing = read_standings(self._store, [self._tenant])[self._tenant]
        except KVPoolError:  # loads and lookups already log the pool's state
            self._counters.add(metrics.QUOTA_FAILURES, 1, "store_unavailable")
            standing = Standing()
        except Exception:  # never ends the thread
            self._log.exception("kvpool failed to read a quota")
            self._counters.add(metrics.QUOTA_FAILURES, 1, "unreadable")
            standing = Standing()
        if standing.is_unreadable:
            self._counters.add(metrics.QUOTA_FAILURES, 1, "unreadable")
        was_over, self._is_over = self._is_over, standing.used >= (RESUME if self._is_over else 1)
        if self._is_over and not was_over:
            self._log.warning(
                f"kvpool: tenant {self._tenant} holds {standing.held_nbytes:,} bytes of a quota of "
                f"{standing.quota_nbytes:,}: this worker loads, and stores nothing more until it is less; kvpool quota "
                "raises the quota, kvpool purge makes room"
            )
        elif was_over and not self._is_over:
            self._log.info(
                "kvpool: tenant %s is not over its quota any more: this worker stores again", self._tenant
            )

    def _turn(self) -> float:
        self.turn()
        return READ_S

    def _end(self) -> None:
        """Nothing is left behind."""
