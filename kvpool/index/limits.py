"""``Limits``: callers' shares of one index, in all and per owner: calls, memory, work in threads.

An owner is a tenant; callers of all tenants share their host's part. A full limit is an answer: the caller
does without or retries. Only ``acquire`` and ``Work`` wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from kvpool import _native
from kvpool.errors import ConfigError, KVPoolError
from kvpool.text import MAX_NBYTES

Value = TypeVar("Value")


class NotAtOnce(KVPoolError):
    """An answer waits for a batch, or takes too long for an event loop: call again in a thread."""


class Kind(NamedTuple):
    """A kind of calls. A caller can hold a call open as long as its connection, so their number is bounded.

    ``advice``: for a caller whose host has too many.
    """

    what: str
    advice: str
    total: int
    of_host: int
    of_tenant: int


CALLS = Kind("calls", "wait for some of them, or use a stream", 1024, 256, 256)
HTTP_CALLS = CALLS._replace(advice="wait for some of them")  # counted by themselves
STREAMS = Kind("streams", "one for each process is enough", 512, 64, 192)
# Health and reflection take no token.
WATCHES = Kind("watches", "one for each process is enough", 1024, 64, 1024)
# One host may be a proxy that asks about each request of its clients.
PLACEMENTS = Kind("requests", "send it again later", 6144, 4096, 4096)
REQUESTS = Kind("requests", "send it again later", 4096, 2048, 4096)  # that a router forwards
PAGES = Kind("requests of status pages", "look less often", 32, 16, 8)  # answered by one thread

DEFAULT_NBYTES = 1 << 30  # without --max-memory
SHARE = 4  # one part in four of --max-memory is for all but tables
ROOM_TIMEOUT_S = 10.0  # a large message's wait for room
ROOM_RETRY_S = 0.01
REQUESTS_OF_OWNER = 15  # of the largest size, in an owner's part: 33 MiB each without --max-memory
REQUEST_NBYTES = 5 << 20  # a prompt of a million tokens, or of 4 MiB of text
HOST_PARTS = 4  # of INFERENCE and HEADS; one host has three at most, such as a proxy with many clients
# Per block: 12 copied, 8 sorted, 9 packed, then 8 as Python's bytes in place of the sorted; 28 measured.
PACK_BLOCK_NBYTES = 32
# Per byte of a snapshot that is read: 3 until its table is made, which takes up to 29 bytes per 8-byte block.
READ_COPIES = 7
# Owners that are no tenants.
INDEX = ""
INFERENCE = "inference requests"
HEADS = "heads of HTTP requests"
TEXTS = "texts that are made into tokens"


class Limits:
    """``max_memory_nbytes``: three quarters for ``tables``, of all partitions; a quarter, ``limit_nbytes``, for
    received batches, digests of batches, ranks, large messages, bodies and snapshots. None: tables are unlimited.

    An owner has at most half of ``limit_nbytes``, ``INDEX`` all. Any thread; ``_lock`` guards counts. Errors:
    ``ConfigError``.
    """

    def __init__(self, max_memory_nbytes: int | None = None) -> None:
        self.tables: _native.MemoryBudget | None = None
        self.tables_nbytes: int | None = None
        self.limit_nbytes = DEFAULT_NBYTES
        if max_memory_nbytes is not None:
            if type(max_memory_nbytes) is not int or not 1 <= max_memory_nbytes <= MAX_NBYTES:
                raise ConfigError(f"a memory budget is 1 to {MAX_NBYTES} bytes, not {max_memory_nbytes!r}")
            self.limit_nbytes = max_memory_nbytes // SHARE
            self.tables_nbytes = max_memory_nbytes - self.limit_nbytes
            self.tables = _native.MemoryBudget(self.tables_nbytes)
        self.used_nbytes = 0
        self._lock = threading.Lock()
        self._used_by: Counter[Hashable] = Counter()  # by owner, and by owner and host
        self._open: Counter[Hashable] = Counter()  # by kind, kind and host, kind and tenants

    # ---- calls

    @contextmanager
    def calls(self, kind: Kind, peer: str, tenants: frozenset[str] | None) -> Iterator[None]:
        """Counts a call while the block lasts.

        ``peer``: as gRPC spells it, ``ipv4:10.0.0.7:40312``. ``tenants``: of the caller's token; tokens for
        the same tenants share a part; None: all tenants, so only the host is bounded. Errors: ``KVPoolError``.
        """
        host = peer.rpartition(":")[0]
        keys: list[Hashable] = [kind, (kind, host)]
        if tenants is not None:
            keys.append((kind, tenants))
        with self._lock:
            if self._open[kind, host] >= kind.of_host:
                raise KVPoolError(f"{kind.of_host} {kind.what} are open from this host: {kind.advice}")
            if tenants is not None and self._open[kind, tenants] >= kind.of_tenant:
                raise KVPoolError(f"{kind.of_tenant} {kind.what} are open for this tenant: ask again later")
            if self._open[kind] >= kind.total:
                raise KVPoolError(f"{kind.total} {kind.what} are open on this index: use another replica")
            for key in keys:
                self._open[key] += 1
        try:
            yield
        finally:
            with self._lock:
                for key in keys:
                    _subtract(self._open, key, 1)

    # ---- memory

    @property
    def limit_of_owner_nbytes(self) -> int:
        return self.limit_nbytes // 2

    def limit_of_request_nbytes(self, most_nbytes: int) -> int:
        """Largest size of one request, up to ``most_nbytes``. Requests are not counted while they arrive."""
        of_owner = self.limit_of_owner_nbytes
        return min(most_nbytes, max(of_owner // REQUESTS_OF_OWNER, min(of_owner // 2, REQUEST_NBYTES)))

    def take(self, nbytes: int, owner: str, *, optional: bool = False, host: str = "") -> bool:
        """Take the bytes if the limits have room; returns whether they did.

        ``optional``: half of either limit is left to others. ``host``: takes from the host's part of the owner's.
        """
        part = 2 if optional else 1
        of_owner_nbytes = self.limit_of_owner_nbytes
        with self._lock:
            used = self._used_by
            if self.used_nbytes + nbytes > self.limit_nbytes // part:
                return False
            if owner != INDEX and used[owner] + nbytes > of_owner_nbytes // part:
                return False
            if host and used[owner, host] + nbytes > of_owner_nbytes * (HOST_PARTS - 1) // HOST_PARTS:
                return False
            self.used_nbytes += nbytes
            used[owner] += nbytes
            if host:
                used[owner, host] += nbytes
            return True

    def give(self, nbytes: int, owner: str, *, host: str = "") -> None:
        with self._lock:
            self.used_nbytes -= nbytes
            _subtract(self._used_by, owner, nbytes)
            if host:
                _subtract(self._used_by, (owner, host), nbytes)

    async def acquire(self, nbytes: int, owner: str) -> bool:
        """``take`` that waits for room, up to ``ROOM_TIMEOUT_S`` seconds. Any event loop."""
        until = time.monotonic() + ROOM_TIMEOUT_S
        while not self.take(nbytes, owner):
            if nbytes > self.limit_of_owner_nbytes or time.monotonic() >= until:
                return False
            await asyncio.sleep(ROOM_RETRY_S)
        return True

    # ---- snapshots

    def limit_of_snapshot_nbytes(self, most_nbytes: int) -> int:
        """Largest snapshot at the start, when memory is still free, up to ``most_nbytes``."""
        if self.tables_nbytes is None:
            return most_nbytes
        return min(most_nbytes, (self.tables_nbytes + self.limit_nbytes) // READ_COPIES)

    @contextmanager
    def snapshot(
        self, pack: Callable[[], list[bytes]], blocks: int, used_nbytes: int
    ) -> Iterator[list[bytes]]:
        """``pack()``, for use within the block. ``blocks``, ``used_nbytes``: of the tables now.

        A snapshot first uses the tables' free part. Errors: ``KVPoolError`` without room.
        """
        if self.tables_nbytes is None:
            yield pack()
            return
        spare_nbytes = max(0, self.tables_nbytes - used_nbytes)  # tables grow little meanwhile
        wanted_nbytes = PACK_BLOCK_NBYTES * blocks
        taken_nbytes = max(0, wanted_nbytes - spare_nbytes)
        if not self.take(taken_nbytes, INDEX):
            raise KVPoolError(
                f"there is no room for a snapshot, which takes {wanted_nbytes} bytes beside the tables for a moment: "
                "raise --max-memory"
            )
        try:
            parts = pack()
            kept_nbytes = min(taken_nbytes, max(0, sum(map(len, parts)) - spare_nbytes))
            self.give(taken_nbytes - kept_nbytes, INDEX)
            taken_nbytes = kept_nbytes
            yield parts
        finally:
            self.give(taken_nbytes, INDEX)


class CallMemory:
    """Bytes that ``owner`` holds for one call. Made in the call's task, whose end returns all.

    gRPC keeps a reply until its caller reads or the connection ends, and the task lasts as long. One event loop.
    """

    def __init__(self, limits: Limits, owner: str) -> None:
        self._limits, self._owner = limits, owner
        self._held_nbytes = 0
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self.give(self._held_nbytes))

    def take(self, nbytes: int) -> bool:
        taken = self._limits.take(nbytes, self._owner)
        if taken:
            self._held_nbytes += nbytes
        return taken

    def give(self, nbytes: int | None = None) -> None:
        """None: all."""
        nbytes = self._held_nbytes if nbytes is None else nbytes
        self._held_nbytes -= nbytes
        if nbytes:
            self._limits.give(nbytes, self._owner)

    @asynccontextmanager
    async def waiting(self, nbytes: int) -> AsyncIterator[bool]:
        """Wait for room for these bytes, for the block; yields whether it came."""
        if not await self._limits.acquire(nbytes, self._owner):
            yield False
            return
        try:
            yield True
        finally:
            self._limits.give(nbytes, self._owner)


class Work:
    """``total`` pieces of work at a time, ``of_owner`` of them per owner; others wait in line.

    Only work within its owner's part waits for the whole: an owner waits for at most one part of each other
    owner. ``name``: of the threads that ``run`` uses. One event loop; ``run`` works in any thread.
    """

    def __init__(self, total: int, of_owner: int, name: str = "") -> None:
        self._all = asyncio.Semaphore(total)
        self._of_owner = of_owner
        self._owners: WeakValueDictionary[str, asyncio.Semaphore] = (
            WeakValueDictionary()
        )  # with work or a wait
        self._threads = ThreadPoolExecutor(total, name)

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        async with self._of(owner), self._all:
            yield

    async def run(self, owner: str, work: Callable[[], Value]) -> Value:
        """The value of ``work``. Its thread is taken until it returns, even if the caller is cancelled."""
        loop, mine = asyncio.get_running_loop(), self._of(owner)
        await mine.acquire()
        try:
            job = self._threads.submit(work)
        except BaseException:
            mine.release()
            raise

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(mine.release)

        job.add_done_callback(release)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """End the threads. Blocks until running work is done."""
        self._threads.shutdown()

    def _of(self, owner: str) -> asyncio.Semaphore:
        return self._owners.setdefault(owner, asyncio.Semaphore(self._of_owner))


def _subtract(counts: Counter[Hashable], key: Hashable, count: int) -> None:
    counts[key] -= count
    if not counts[key]:
        del counts[key]
