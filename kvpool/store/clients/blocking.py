"""A store on a server through a client whose calls block: a few threads, each with a link, take windows of batches."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import parse_key
from kvpool.store.clients.link import Link, LinkFault, LinkRefused
from kvpool.store.clients.link_thread import DIAL_S, LinkThread
from kvpool.store.clients.window_queue import QueuedBatch, WindowQueue
from kvpool.store.lookup import LookupKeys, RecordBatch
from kvpool.store.server.server import ServerStore, server_name
from kvpool.store.server.topology import Primaries
from kvpool.store.store import DEFAULT_TIMEOUT_S
from kvpool.store.tls import advice
from kvpool.store.url import StoreURL
from kvpool.store.valkey import ValkeyStore

PROBE_S = 0.5  # for a dial while the server is away
# Under TLS a dial enters the interpreter dozens of times, and where that is busy each may take its switch interval.
TLS_PROBE_S = DIAL_S


class BlockingStore(ServerStore):
    """A store whose values are moved by ``url.threads`` threads, each with a ``Link`` of the subclass's making.

    Blocking: one link is dialled, for 2 seconds an address at most. Errors: ``ConfigError`` when the server refuses
    user, password or database, or a file for TLS cannot be used; ``StoreUnavailable`` when it cannot be reached.
    """

    def __init__(self, url: StoreURL) -> None:
        super().__init__(server_name(url))
        if url.tls is not None:
            # The native client reads what the server says before it hangs up, and advises; redis-py and GLIDE do not.
            ValkeyStore(replace(url, threads=1)).close()
        self._set_up(url, Primaries(url, self._name))
        self._pid = os.getpid()
        self._queue = WindowQueue(self._name)
        probe_s = PROBE_S if url.tls is None else TLS_PROBE_S
        links = [
            LinkThread(self._queue, self._link(), ttl_s=url.ttl_s, probe_s=probe_s)
            for _ in range(url.threads)
        ]
        try:
            links[0].open()
        except LinkRefused as error:
            raise ConfigError(
                f"{self._name}: the server refuses: {error}; correct user, password or database"
            ) from error
        except LinkFault as error:
            raise StoreUnavailable(f"{self._name}: cannot connect: {error}; {advice(str(error))}") from error
        # Daemons: a program that forgets to close the store ends all the same.
        self._threads = [
            threading.Thread(target=link.run, name=f"kvpool-{url.client}-{index}", daemon=True)
            for index, link in enumerate(links)
        ]
        for thread in self._threads:
            thread.start()

    def counters(self) -> dict[str, int]:
        self._check_open()
        return self._queue.counters()

    # ------------------------------------------------------------------ what a client adds

    @abstractmethod
    def _link(self) -> Link:
        """A link that is not dialled yet."""

    # ------------------------------------------------------------------ batches

    def _submit(
        self, operation: int, keys: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float
    ) -> QueuedBatch:
        keys = tuple(keys)
        for key in keys:
            parse_key(key)
        return self._enqueue(operation, keys, views, timeout_s)

    def _submit_lookup(self, keys: LookupKeys, timeout_s: float) -> RecordBatch:
        return RecordBatch(self._enqueue(_native.TOUCH, keys, None, timeout_s), keys)

    def _enqueue(
        self, operation: int, keys: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float
    ) -> QueuedBatch:
        if os.getpid() != self._pid:
            raise StoreUnavailable(f"{self._name}: opened before fork(): open one in this process")
        return self._queue.submit(QueuedBatch(self._queue, operation, keys, views, timeout_s))

    def _close(self) -> None:
        # In a forked child there are no threads, and the lock may be held for ever.
        if os.getpid() == self._pid:
            self._end_threads()
        self._close_kept()

    def _end_threads(self) -> None:
        self._queue.close()
        end_s = time.monotonic() + DEFAULT_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            raise StoreUnavailable(f"{self._name}: a thread is stuck in the client; it was left behind")
