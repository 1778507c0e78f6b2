"""The thread that tells the data path which servers there are, whenever that has reason to doubt."""

from __future__ import annotations

import os
import threading

from kvpool import _native
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.store.server.topology import Primaries

PAUSE_S = 0.5  # between two askings: at most two a second, however much fails
WAIT_S = 60.0
JOIN_S = 5.0


class TopologyWatch:
    """Installs what ``primaries`` finds into ``topology``: once when it is made, then after each doubt.

    Ownership: the caller closes it after the engine. A store that is dropped instead closes its topology, which ends
    the thread, too. The thread keeps nothing else of the store alive.
    Blocking: as ``Primaries.find``. Errors: those of the first asking; later ones mean asking again.
    """

    def __init__(self, topology: _native.Topology, primaries: Primaries) -> None:
        self._topology, self._primaries = topology, primaries
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._install()
        self._thread = threading.Thread(target=self._run, name="kvpool-topology", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; blocking, for as long as it asks just now: a second or two for each silent server."""
        if os.getpid() != self._pid:
            return  # it did not come along into this process
        self._closed.set()
        self._topology.close()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        is_current = True
        while not self._topology.closed():
            if is_current and not self._topology.wait_until_stale(WAIT_S):
                continue
            try:
                self._install()
                is_current = True
            except KVPoolError:
                is_current = False
            self._closed.wait(PAUSE_S)

    def _install(self) -> None:
        found = self._primaries.find()
        try:
            self._topology.install(found)
        except ValueError as error:
            raise StoreUnavailable(f"what the servers say makes no sense: {error}") from error
