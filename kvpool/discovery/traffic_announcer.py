"""``TrafficAnnouncer``: keeps in the pool what an engine was asked for, so that an index can put all engines together.

A thread of its own writes: a pool that is slow or away must not hold up the engine. It is started with the first
document. Threads: any may call ``tell``; the announcing thread reads ``_told``, which is replaced whole.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable

from kvpool.discovery.traffic import WINDOWS, Seen, pack_traffic
from kvpool.errors import KVPoolError
from kvpool.key.key import traffic_key
from kvpool.store.store import Store

LEASE_S = 60.0
EVERY_S = 15.0
CLOSE_S = 5.0

logger = logging.getLogger("kvpool")


class TrafficAnnouncer:
    """``tenant``: of the engine. The store must stay open until ``close`` has returned. ``every_s``: between writes."""

    def __init__(
        self,
        store: Store,
        tenant: str,
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._every_s, self._clock = store, every_s, clock
        self._key = traffic_key(tenant, secrets.token_hex(8))
        self._told: tuple[dict[str, Seen], float] = ({}, 0.0)  # and when
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def tell(self, windows: dict[str, Seen]) -> None:
        """What the engine was asked for, by window; written with the next turn. Does not block.

        An engine that rests tells nothing: its windows count as empty when they are over.
        """
        if not any(seen.prompt_tokens for seen in windows.values()):
            return
        self._told = (windows, self._clock())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvpool-traffic", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Withdraw it and end the thread; again does nothing. Blocking, for ``CLOSE_S`` seconds at most."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._store.announce(self._key, self._document(), lease_s=LEASE_S)
            except KVPoolError as error:  # as a load or a lookup says in its own log, too
                logger.debug("what the engine was asked for is not in the pool: %s", error)
            self._closing.wait(self._every_s)
        with contextlib.suppress(KVPoolError):
            self._store.withdraw(self._key)

    def _document(self) -> bytes:
        windows, told_s = self._told
        rested_s = self._clock() - told_s
        return pack_traffic(
            {name: seen if rested_s < WINDOWS[name] else Seen() for name, seen in windows.items()}
        )
