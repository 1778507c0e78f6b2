"""``PoolStatus``: usage of a pool's servers and its engines' requests, read every few seconds.

Threads: its own reads; any may call ``servers`` and ``traffic``, which are replaced whole.
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
CLOSE_S = 5.0  # a read takes a few seconds

logger = logging.getLogger("kvpool.index")


class PoolStatus:
    """Reads ``store`` until it is closed; the store must stay open until then.

    ``tenants``: whose engines' requests are read; called in each round. ``capacity_nbytes``: of a pool in a
    directory, which has none of its own; None: unknown.
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
        self._refused: set[str] = set()  # tenants already logged; its thread only
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-pool-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Blocks for ``CLOSE_S`` seconds at most."""
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
        except KVPoolError:  # the server list is unknown: the former servers count as away
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
        except KVPoolError:  # the pool is away: the last values stay
            return
        self.traffic = together(documents)
