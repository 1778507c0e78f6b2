"""``PoolStatus``: how full a pool's servers are, and what its engines were asked for, read every few seconds.

Threads: one of its own reads; any may call ``servers`` and ``traffic``, which are replaced whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from kvpool.discovery.traffic import Seen, together
from kvpool.errors import AnnouncementsRefused, KVPoolError
from kvpool.key.key import traffic_prefix
from kvpool.store.store import Store, Usage

EVERY_S = 5.0
CLOSE_S = 5.0  # a read that is under way takes a few seconds

logger = logging.getLogger("kvpool.index")


class PoolStatus:
    """Reads ``store`` until it is closed; the store must stay open until then.

    ``tenants``: whose engines are asked about; called in each round. ``capacity_nbytes``: of a pool in a directory,
    which does not know it by itself; None: not known.
    """

    def __init__(
        self,
        store: Store,
        *,
        tenants: Callable[[], Iterable[str]],
        capacity_nbytes: int | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._store, self._tenants, self._capacity_nbytes = store, tenants, capacity_nbytes
        self._every_s = every_s
        self.servers: list[Usage] = []
        self.traffic: dict[str, Seen] = {}  # by window
        self._refused: set[str] = set()  # tenants of whom that was said; its thread only
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-pool-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; again does nothing. Blocking, for ``CLOSE_S`` seconds at most."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._read_servers()
            self._read_traffic()
            self._closing.wait(self._every_s)

    def _read_servers(self) -> None:
        try:
            found = self._store.usage()
        except KVPoolError:  # nobody says which servers there are: those that were known do not answer
            self.servers = [Usage(one.server, up=False) for one in self.servers]
            return
        if self._capacity_nbytes is not None:
            found = [one._replace(capacity_nbytes=self._capacity_nbytes) for one in found]
        self.servers = found

    def _read_traffic(self) -> None:
        documents: list[bytes] = []
        try:
            for tenant in self._tenants():
                try:
                    documents += self._store.announcements(traffic_prefix(tenant)).values()
                except AnnouncementsRefused as error:
                    if tenant not in self._refused:
                        logger.warning(
                            "what engines of tenant %s were asked for is not counted: %s", tenant, error
                        )
                    self._refused.add(tenant)
        except KVPoolError:  # the pool is away: what was read last stays
            return
        self.traffic = together(documents)
