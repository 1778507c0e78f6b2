"""``NearBlocks``: what the near pool of this host holds, as KV events.

Its directory is listed by a thread, natively, since other engines of the host store into it and evict from it. All of
them tell the same; an index keeps it once for the host (``near_holder`` of ``kvpool.index.fleet.rank``). An idle engine
publishes nothing: what changed meanwhile is told with its next step, and by the others with theirs.

Threads: ``kvpool-near`` lists; the engine's scheduler thread calls the rest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.logger import init_logger

from kvpool import _native
from kvpool.errors import NoThread
from kvpool.key.key import Namespace
from kvpool.store.file_system import FileSystem
from kvpool.threads import TurnThread, start_thread
from kvpool.vllm.geometry import Group
from kvpool.vllm.tell.events import near_event

LOOK_S = 5.0  # between two lists
LOOK_SHARE = 0.05  # of the time, at most
# Of a change of the namespace: by then an index has read the worker's record.
NEW_NAMESPACE_S = 10.0
MAX_RECORDS = 1 << 21
EVENT_HASHES = 1 << 14  # an index applies an event at once

logger = init_logger("vllm.kvpool")


class NearBlocks(TurnThread):
    """Follows the blocks of a namespace in the directory ``path``, until it is closed. Blocks for some system calls."""

    def __init__(
        self, path: str, groups: Sequence[Group], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("kvpool-near")
        self._path, self._groups, self._clock = path, groups, clock
        self._medium = "CPU" if FileSystem.of(path).kind == "tmpfs" else "DISK"
        self._namespace: Namespace | None = None  # written by the scheduler thread
        self._forgotten = False
        self._lock = threading.Lock()  # guards what follows
        self._events: deque[KVCacheEvent] = deque()
        self._of: Namespace | None = None  # whose they are
        self._begun = False  # some of them were taken
        # The thread's own.
        self._listing: _native.PoolListing | None = None
        self._left_s = -NEW_NAMESPACE_S  # when a namespace was left
        self._warned = False

    def start(self) -> None:
        """Without a thread nothing is told. Does not block."""
        try:
            start_thread(self._thread)
        except NoThread as error:  # never reaches the engine
            logger.warning("kvpool: indexes will not see what the near pool holds: %s", error)

    def take(self, namespace: Namespace | None) -> list[KVCacheEvent]:
        """At most one event that was not taken yet. Does not block."""
        if namespace is not self._namespace:
            self._namespace = namespace
            self._woken.set()
        if not self._lock.acquire(blocking=False):
            return []
        try:
            if not self._events or self._of is not namespace or self._forgotten:
                return []
            self._begun = True
            return [self._events.popleft()]
        finally:
            self._lock.release()

    def forget(self) -> None:
        """An index lost some: tell all again. Does not block."""
        self._forgotten = True
        self._woken.set()

    def turn(self) -> float:
        """List once; the seconds until the next time. Never raises."""
        began_s = self._clock()
        try:
            wait_s = self._look()
        except OSError as error:
            if not self._warned:
                logger.warning("kvpool: indexes do not see what the near pool holds: %s", error)
            self._warned = True
            return LOOK_S
        self._warned = False
        return max(wait_s, (self._clock() - began_s) / LOOK_SHARE)

    def _look(self) -> float:
        namespace, forgotten = self._namespace, self._forgotten
        if namespace is not self._of:
            if self._of is not None:
                self._left_s = self._clock()
            with self._lock:
                self._events.clear()
                self._of, self._begun = namespace, False
            self._listing = None
            if namespace is not None:
                self._listing = _native.PoolListing(self._path, namespace.tenant, namespace.hex, MAX_RECORDS)
        if self._listing is None:
            return LOOK_S
        if (early_s := self._left_s + NEW_NAMESPACE_S - self._clock()) > 0:
            return early_s
        self._listing.look()
        with self._lock:
            if forgotten:
                self._forgotten = False
                self._listing.forget()
            elif self._events and self._begun:
                return LOOK_S  # the rest of them is told first
            elif self._begun:
                self._listing.told()
            self._begun = False
            self._events = deque(self._told(self._listing.changes()))
        return LOOK_S

    def _told(self, changes: Sequence[tuple[int, list[int], list[int]]]) -> list[KVCacheEvent]:
        return [
            near_event(kind, self._medium, group, self._groups[group], hashes[start : start + EVENT_HASHES])
            for group, came, went in changes
            if group < len(self._groups)
            for kind, hashes in ((BlockStored, came), (BlockRemoved, went))
            for start in range(0, len(hashes), EVENT_HASHES)
        ]

    def _turn(self) -> float:
        return self.turn()

    def _end(self) -> None:
        """Nothing is left behind."""
