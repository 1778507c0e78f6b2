"""``QuotaKeeper``: counts the bytes of records of each tenant with a quota, and writes the sums into the pool.

It walks such a tenant's keys again and again, for at most a tenth of the time. So workers hear of a change after ten
walks, and never look through the pool themselves. Sums expire: without an index there is no limit. A quota that is
lost (an eviction, a new server) is written again by an index that has read it.

Threads: ``kvpool-quotas``; any may read ``standings``, which is replaced whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from kvpool.discovery.quota import Standing, read_standings, write_held, write_quota
from kvpool.errors import KVPoolError, RepliesTooLarge
from kvpool.key.key import tenant_prefix
from kvpool.store.store import Store
from kvpool.threads import TurnThread, start_thread

PAUSE_S = 10.0  # at least, between two walks
REST = 9.0  # times a walk
LEASE_TURNS = 3  # of a sum
MIN_LEASE_S = 60.0

logger = logging.getLogger("kvpool.index")


class QuotaKeeper(TurnThread):
    """``tenants``: whose quotas are read, may raise ``KVPoolError``; those that had one stay.

    Close it before the store.
    """

    def __init__(self, store: Store, tenants: Callable[[], Iterable[str]]) -> None:
        super().__init__("kvpool-quotas")
        self._store, self._tenants = store, tenants
        self.standings: Mapping[str, Standing] = {}
        # The fields below: its thread only.
        self._quotas: dict[str, int | None] = {}  # as last read; None: taken back
        self._lease_s = MIN_LEASE_S  # of the next sums
        self._said: dict[str, str] = {}  # present troubles, by tenant or "" for the pool
        start_thread(self._thread)

    def _turn(self) -> float:
        began_s = time.monotonic()
        try:
            self.turn(self._lease_s)
            self._say("", "")
        except KVPoolError as error:  # the last standings stay
            self._say("", f"quotas cannot be followed: {error}")
        except Exception:  # never ends the thread
            logger.exception("counting what tenants hold failed")
        took_s = time.monotonic() - began_s
        rest_s = max(PAUSE_S, REST * took_s)
        self._lease_s = max(MIN_LEASE_S, LEASE_TURNS * (took_s + rest_s))
        return rest_s

    def _end(self) -> None:
        """Sums expire by themselves: another index may write them, too."""

    def turn(self, lease_s: float = MIN_LEASE_S) -> None:
        """Read the quotas, write lost ones again, count, and write. Blocks for walks. Errors: ``KVPoolError``."""
        standings = read_standings(self._store, sorted({*self._tenants(), *self._quotas}))
        shown: dict[str, Standing] = {}
        for tenant, standing in standings.items():
            if standing.is_unreadable and not standing.is_said:
                self._say(tenant, f"the quota of tenant {tenant} makes no sense: write it with kvpool quota")
                continue
            if standing.is_said:
                self._quotas[tenant] = standing.quota_nbytes
            elif tenant in self._quotas:
                write_quota(self._store, tenant, self._quotas[tenant])
            if (quota_nbytes := self._quotas.get(tenant)) is None:
                self._say(tenant, "")
                continue
            held_nbytes = self._count(tenant)
            if self._closing:
                return
            if held_nbytes is not None:
                write_held(self._store, tenant, held_nbytes, lease_s)
            shown[tenant] = Standing(quota_nbytes, held_nbytes, is_said=True)
        self.standings = shown

    def _count(self, tenant: str) -> int | None:
        """The bytes of its records; None: unknown. Errors: ``StoreUnavailable``."""
        nbytes = 0
        try:
            for blocks in self._store.scan(tenant_prefix(tenant)):
                nbytes += sum(block.nbytes for block in blocks)
                if self._closing:
                    return None
        except RepliesTooLarge as error:  # its own names; other tenants are counted
            self._say(tenant, f"what tenant {tenant} holds cannot be counted: {error}")
            return None
        self._say(tenant, "")
        return nbytes

    def _say(self, of: str, trouble: str) -> None:
        """Log a trouble when it begins or changes."""
        if trouble and self._said.get(of) != trouble:
            logger.warning("%s", trouble)
        self._said[of] = trouble
