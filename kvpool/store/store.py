"""The store: batches of buffers by key, and leased documents, on any memory.

Batch is the primitive; a blocking call is a submit and a wait. ``Store`` checks arguments, its engine runs
batches of checked keys and flat views, its documents keep announcements.

Over 400 lines because each call's contract is written here.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from kvpool import _native, metrics
from kvpool.errors import ConfigError, KVPoolError, StoreClosed, StoreUnavailable
from kvpool.key.key import KEY_PREFIX, Namespace, namespace_prefix
from kvpool.metrics import Counters
from kvpool.store.batch import (
    Batch,
    DataPath,
    Destination,
    LookupBatch,
    LookupGroup,
    check_timeout,
    copy_back,
    destination,
    source,
)  # fmt: skip

DEFAULT_TIMEOUT_S = 5.0
MAX_BATCH_KEYS = 1 << 20
MAX_DOCUMENT_NBYTES = 64 << 10
MAX_ANNOUNCEMENTS = 65536
MAX_ANNOUNCEMENT_KEY_CHARS = 512
MAX_LEASE_S = 366 * 86400.0
SCAN_KEYS = 1000  # per step, about
LOOK_KEYS = 128  # per step of scan_keys(): more would hold the GIL too long

# Counter of a store -> metric and label
_GROWTH = {
    "refused": (metrics.REFUSED_KEYS, ""),
    "connections": (metrics.CONNECTIONS, ""),
    "disconnections": (metrics.DISCONNECTIONS, ""),
    "failed_dials": (metrics.FAILED_CONNECTIONS, ""),
    "evicted": (metrics.EVICTED_BLOCKS, ""),
    "near_hits": (metrics.NEAR_FAR_HITS, "near"),
    "far_hits": (metrics.NEAR_FAR_HITS, "far"),
    "near_faults": (metrics.NEAR_FAR_FAULTS, "near"),
    "far_faults": (metrics.NEAR_FAR_FAULTS, "far"),
    "filled": (metrics.FILLED_RECORDS, "filled"),
    "prefetched": (metrics.FILLED_RECORDS, "prefetched"),
    "not_filled": (metrics.FILLED_RECORDS, "no_room"),
    "behind": (metrics.BEHIND_RECORDS, "stored"),
    "behind_present": (metrics.BEHIND_RECORDS, "present"),
    "lost": (metrics.BEHIND_RECORDS, "lost"),
    "no_room_far": (metrics.BEHIND_RECORDS, "no_room"),
    "refused_far": (metrics.BEHIND_RECORDS, "refused"),
    "uses_told": (metrics.FAR_USES, "told"),
    "uses_missing": (metrics.FAR_USES, "missing"),
    "uses_lost": (metrics.FAR_USES, "lost"),
}
_DAMAGED = "damaged_"
_Store = TypeVar("_Store", bound="Store")


class StoredBlock(NamedTuple):
    key: str
    nbytes: int  # of its record: the payload and the header


class WrittenBlock(NamedTuple):
    key: str
    nbytes: int  # as of StoredBlock
    writer: bytes  # 16 bytes, as its header says; zeros: not named


class Usage(NamedTuple):
    """The fill level of a server or a store. None: unknown, or unlimited."""

    server: str  # its address, or the store's own
    up: bool = True
    used_nbytes: int | None = None
    capacity_nbytes: int | None = None
    keys: int | None = None
    evicted: int | None = None  # since it was started
    refuses: bool = False  # what is new: it is full, and evicts nothing


class Invalidations(NamedTuple):
    """Notices since the last call. ``keys``: written, evicted, deleted or expired block keys, each once.

    ``emptied``: a database was flushed, perhaps a different one. ``missed``: keys may have changed without a
    notice. ``problem``: why a server sends no notices at present; empty: all do.
    """

    keys: list[str]
    emptied: bool
    missed: bool
    problem: str


class Notices(Protocol):
    """Notices are hints: late, lost or duplicated. Check every key. Single-threaded."""

    def take(self, timeout_s: float) -> Invalidations:
        """Wait for a notice, at most ``timeout_s`` seconds plus the time to find the servers."""

    def close(self) -> None:
        """Unsubscribe; idempotent. Blocks for a second or two."""


class Documents(Protocol):
    """Leased documents by key, as in ``Store``'s calls, for all processes on it. Any thread; every call blocks."""

    def put(self, key: str, document: bytes, lease_s: float) -> None: ...
    def remove(self, key: str) -> bool: ...
    def of(self, keys: Sequence[str]) -> dict[str, bytes]: ...
    def all(self, prefix: str, suffix: str = "") -> dict[str, bytes]: ...
    def tenants(self) -> list[str]: ...
    def remove_all(self, prefix: str) -> int: ...


class Store(ABC):
    """Values by key, in batches; each answer stands at its key's place.

    Keys come from ``Namespace.keys``. Buffers are any buffer-protocol objects, counted in bytes, not
    elements. A key may repeat in a batch. ``timeout_s`` bounds the whole batch, in seconds (above 0, at most
    3,600; None: 5). A miss is a value; a fault is ``StoreUnavailable``. Any thread may call any method.
    Blocking calls release the GIL. Calls after ``close`` raise ``StoreClosed``; wrong arguments raise
    ``ConfigError`` before any I/O.
    """

    far: Store | None = None  # behind a near pool: the far one by itself
    clock: Callable[[], float] = time.monotonic  # of waits for batches
    writer: bytes = b""  # 16 bytes, or none: named in what is put from now on (docs/reference/records.md)

    def __init__(self, name: str, engine: DataPath, documents: Documents) -> None:
        self._name = name  # without secrets, for errors and repr
        self._engine, self._documents = engine, documents
        self._closed = False
        self._released = False

    # ------------------------------------------------------------------ blocking calls

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Store a value per key, replacing the old one atomically. False: no room. Blocks.

        A non-contiguous buffer is copied once.
        """
        return _finished(self.submit_put(keys, buffers, timeout_s=timeout_s))

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Read each value into its buffer of exactly the value's length. False: a miss. Blocks.

        A value of another length, or one that fails verification, is deleted, counted, and a miss. After a
        miss or a fault the buffer's content is unspecified. Non-contiguous buffers go through a copy.
        """
        destinations = [destination(buffer, position) for position, buffer in enumerate(buffers)]
        found = _finished(self._submit_get(keys, destinations, timeout_s))
        copy_back(destinations, found)
        return found

    def contains_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> list[bool]:
        """Whether each key has a value now; it may vanish, or prove damaged, before a read. Blocks."""
        return _finished(self.submit_contains(keys, timeout_s=timeout_s))

    def touch_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> list[bool]:
        """``contains_many``, and each present value counts as used: it is evicted, and expires, later."""
        return _finished(self.submit_touch(keys, timeout_s=timeout_s))

    def expire_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> int:
        """Let the keys' values go soon; returns how many were present. Blocks.

        A server drops them after a forty-eighth of their time to live, a directory evicts them first. A later use
        (``touch_many``, a get) renews them; a use by another process within a ninety-sixth of the time to live
        after its last one may not.
        """
        return sum(_finished(self._begin(_native.EXPIRE, "expire", keys, None, timeout_s)))

    def delete_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> int:
        """Delete the keys' values; returns how many were present. Blocks."""
        return sum(_finished(self._begin(_native.DELETE, "delete", keys, None, timeout_s)))

    def delete_evicted(self) -> None:  # noqa: B027 (only a directory keeps some)
        """Delete the bytes of evicted records that wait to be overwritten. Blocks. Errors: ``StoreUnavailable``."""

    # ------------------------------------------------------------------ calls that return at once

    def submit_put(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> Batch:
        """Begin ``put_many``. The buffers must not change until ``done()``."""
        views = [source(buffer, position) for position, buffer in enumerate(buffers)]
        return self._begin(_native.PUT, "put", keys, views, timeout_s)

    def submit_put_absent(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> Batch:
        """Begin to put the absent values; present ones count as used, as in ``touch_many``.

        ``Batch.results`` has a byte a key: ``_native.OK``: put here; ``PRESENT``: it was present, or another
        put of the key stored it; ``NO_ROOM``. ``Batch.wait`` says which values are present now. A present
        value is not compared with the buffer, which must not change until ``done()``.
        """
        views = [source(buffer, position) for position, buffer in enumerate(buffers)]
        return self._begin(_native.PUT_ABSENT, "put absent", keys, views, timeout_s)

    def submit_get(
        self,
        keys: Sequence[str],
        buffers: Sequence[Any],
        *,
        timeout_s: float | None = None,
        max_s: float | None = None,
    ) -> Batch:
        """Begin ``get_many_into``, which owns the buffers until ``done()``; non-contiguous ones are refused.

        ``max_s``: bounds the whole batch, in place of ``timeout_s``, which bounds the time without progress.
        """
        destinations = [destination(buffer, position) for position, buffer in enumerate(buffers)]
        for position, (_, copy_to) in enumerate(destinations):
            if copy_to is not None:
                raise ConfigError(
                    f"buffers[{position}] is not contiguous: use get_many_into, or a contiguous one"
                )
        return self._submit_get(keys, destinations, timeout_s, max_s)

    def submit_contains(self, keys: Sequence[str], *, timeout_s: float | None = None) -> Batch:
        """Begin ``contains_many``."""
        return self._begin(_native.CONTAINS, "contains", keys, None, timeout_s)

    def submit_touch(self, keys: Sequence[str], *, timeout_s: float | None = None) -> Batch:
        """Begin ``touch_many``."""
        return self._begin(_native.TOUCH, "touch", keys, None, timeout_s)

    def submit_lookup(
        self, namespace: Namespace, groups: Sequence[LookupGroup], *, timeout_s: float | None = None
    ) -> LookupBatch:
        """Ask which leading records of a prompt are present, as ``touch_many``, while answers are useful.

        Any length: keys are spelled when sent, so this call is short. After a missing part, records that need
        it are skipped; groups without a sliding window go first. Too many pending lookups are
        ``StoreUnavailable``. With ``prefetch_nbytes`` a near pool is filled from the far one, and the batch ends with
        the last copy (``LookupBatch.prefetched``).
        """
        self._check_open()
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else check_timeout(timeout_s)
        for group in groups:
            group.check()
        order = sorted(range(len(groups)), key=lambda place: groups[place].sliding_window)
        asked = [groups[place] for place in order]
        try:
            running = self._engine.lookup(namespace_prefix(namespace.tenant, namespace.hex), asked, timeout_s)
        except (ValueError, TypeError, RuntimeError) as error:
            raise self._mapped(error) from error
        keys = sum(group.records * group.ranks for group in asked)
        name = f"{self._name}: lookup of at most {keys} keys"
        return LookupBatch(running, name, timeout_s, asked, order, self.clock)

    # ------------------------------------------------------------------ leased documents

    def announce(self, key: str, document: bytes, *, lease_s: float) -> None:
        """Keep a small document for ``lease_s`` seconds, replacing the one under ``key``.

        ``key``: printable ASCII, 1 to 512 characters. ``document``: 1 to 65,536 bytes. A store keeps 65,536
        of them, a server as many per tenant. Blocks for a small write.
        """
        self._check_open()
        _check_announcement_key(key)
        if not isinstance(document, bytes) or not 1 <= len(document) <= MAX_DOCUMENT_NBYTES:
            raise ConfigError(f"an announcement is bytes, 1 to {MAX_DOCUMENT_NBYTES} of them")
        if isinstance(lease_s, bool) or not isinstance(lease_s, (int, float)) or not math.isfinite(lease_s):
            raise ConfigError(f"lease_s is a number of seconds, not {lease_s!r:.40}")
        if not 0 < lease_s <= MAX_LEASE_S:
            raise ConfigError(f"lease_s is above 0 and at most {MAX_LEASE_S:g} seconds, not {lease_s}")
        self._documents.put(key, document, float(lease_s))

    def withdraw(self, key: str) -> bool:
        """End an announcement early; False if ``key`` had none. Blocks for a small write.

        After ``StoreUnavailable`` the lease ends it.
        """
        self._check_open()
        _check_announcement_key(key)
        return self._documents.remove(key)

    def announcements(self, prefix: str = "", suffix: str = "") -> dict[str, bytes]:
        """Unexpired documents under keys with this beginning and end, by key; expired ones are removed.

        Blocks for a small read per document. Errors: ``AnnouncementsRefused`` above 32 MiB on a server.
        """
        self._check_open()
        return self._documents.all(prefix, suffix)

    def announced_under(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Unexpired documents under exactly these keys, at a cost independent of all others.

        Blocks for a small read per document.
        """
        self._check_open()
        return self._documents.of(keys)

    def announcing_tenants(self) -> list[str]:
        """Tenants with recent announcements, sorted; at most 4,096 of a server. Blocks for a small read.

        Tenants whose users may not list them are missing.
        """
        self._check_open()
        return self._documents.tenants()

    def server_run_id(self) -> str:
        """A text that changes with each start of the server; empty without a server, or without the right.

        Blocks for a small read.
        """
        self._check_open()
        return self._server_run_id()

    def usage(self) -> list[Usage]:
        """The fill level of each server; a silent one is not ``up``. Blocks for a small read of each.

        Errors: ``StoreUnavailable`` when the servers cannot be found.
        """
        self._check_open()
        return self._usage()

    def withdraw_all(self, prefix: str) -> int:
        """Delete all processes' documents under ``prefix``; returns how many. Blocks for a small write each.

        Running announcers write theirs again.
        """
        self._check_open()
        return self._documents.remove_all(prefix)

    # ------------------------------------------------------------------ what is there

    def scan(self, prefix: str = KEY_PREFIX) -> Iterator[list[StoredBlock]]:
        """Blocks under keys that start with ``prefix``, about a thousand at a time, in no order.

        Concurrent puts and deletes may or may not show; a block may come twice, a lasting block comes at
        least once. Deleting given blocks is safe. Scanning counts as no use. For maintenance: it walks the
        whole pool. Blocks, and may fail, at each step.
        """
        self._check_open()
        return self._scan(prefix)

    def scan_keys(self, prefix: str = KEY_PREFIX) -> Iterator[list[str]]:
        """As ``scan``, keys alone: a list for every hundred or so walked keys, possibly empty.

        Lasting keys come at least once; if that is uncertain (servers changed), the last step fails.
        """
        self._check_open()
        return self._scan_keys(prefix)

    def scan_writers(self, prefix: str = KEY_PREFIX) -> Iterator[list[WrittenBlock]]:
        """As ``scan``, with who wrote each block. It reads headers alone, which prove nothing."""
        self._check_open()
        return self._scan_writers(prefix)

    def notices(self) -> Notices | None:
        """Notices of keys that change from now on; None without a server. Close it first. Never blocks."""
        self._check_open()
        return self._notices()

    # ------------------------------------------------------------------ the rest

    def counters(self) -> dict[str, int]:
        """Totals since the store was opened, by name; never blocks for long."""
        self._check_open()
        return self._engine.counters()

    def count_health(self, counters: Counters) -> None:
        """Add to ``counters`` the growth since the last call, and whether the store is connected.

        A store without a server is neither up nor down. Does not block.
        """
        found = self.counters()
        for name, (metric, label) in _GROWTH.items():
            if name in found:
                counters.add_growth(metric, found[name], label)
        for name, total in found.items():
            if name.startswith(_DAMAGED) and total:
                counters.add_growth(metrics.DAMAGED_BLOCKS, total, name.removeprefix(_DAMAGED))
        if "behind_waiting" in found:
            counters.set(metrics.BEHIND_WAITING, float(found["behind_waiting"]))
        if "up_connections" in found:
            counters.set(metrics.UP, float(found["up_connections"] > 0))

    def close(self) -> None:
        """Cancel pending batches, wait for them, and release everything; idempotent.

        Blocks for at most ``DEFAULT_TIMEOUT_S`` seconds. Errors: ``StoreUnavailable`` if a thread is stuck.
        """
        self._closed = True
        if not self._released:
            self._close()
            self._released = True

    def __enter__(self: _Store) -> _Store:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name}{', closed' if self._closed else ''}>"

    # ------------------------------------------------------------------ what a store adds

    @abstractmethod
    def _usage(self) -> list[Usage]: ...

    @abstractmethod
    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]: ...

    @abstractmethod
    def _scan_writers(self, prefix: str) -> Iterator[list[WrittenBlock]]: ...

    def _scan_keys(self, prefix: str) -> Iterator[list[str]]:
        for blocks in self._scan(prefix):
            for start in range(0, len(blocks), LOOK_KEYS):
                yield [block.key for block in blocks[start : start + LOOK_KEYS]]

    def _server_run_id(self) -> str:
        return ""

    def _notices(self) -> Notices | None:
        return None

    def _close(self) -> None:
        if not self._engine.close(DEFAULT_TIMEOUT_S):
            raise StoreUnavailable(f"{self._name}: a thread is stuck in the system; it was left behind")

    # ------------------------------------------------------------------ how the calls above begin

    def _submit_get(
        self,
        keys: Sequence[str],
        destinations: Sequence[Destination],
        timeout_s: float | None,
        max_s: float | None = None,
    ) -> Batch:
        views = [target.view for target in destinations]
        return self._begin(_native.GET, "get", keys, views, timeout_s, max_s)

    def _begin(
        self,
        operation: int,
        verb: str,
        keys: Sequence[str],
        views: Sequence[memoryview] | None,
        timeout_s: float | None,
        max_s: float | None = None,
    ) -> Batch:
        self._check_open()
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else check_timeout(timeout_s)
        max_s = timeout_s if max_s is None else check_timeout(max_s)
        if isinstance(keys, (str, bytes)):
            raise ConfigError("keys is one key; give a list of keys")
        if len(keys) > MAX_BATCH_KEYS:
            raise ConfigError(f"a batch has at most {MAX_BATCH_KEYS} keys, not {len(keys)}")
        if views is not None and len(views) != len(keys):
            raise ConfigError(f"{len(keys)} keys need as many buffers, not {len(views)}")
        try:
            running = self._engine.submit(operation, keys, views, timeout_s, max_s, self.writer)
        except (ValueError, TypeError, RuntimeError) as error:
            raise self._mapped(error) from error
        name = f"{self._name}: {verb} of {len(keys)} keys"
        return Batch(running, name, timeout_s, max_s, self.clock)

    def _mapped(self, error: Exception) -> KVPoolError:
        if not isinstance(error, RuntimeError):
            return ConfigError(str(error))
        if self._closed:
            return StoreClosed(f"{self._name}: the store is closed")
        return StoreUnavailable(f"{self._name}: {error}")

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self._name}: the store is closed")


def _check_announcement_key(key: object) -> None:
    if not isinstance(key, str) or not key.isascii() or not key.isprintable():
        raise ConfigError(f"announcement key {key!r:.80} is not printable ASCII")
    if not 1 <= len(key) <= MAX_ANNOUNCEMENT_KEY_CHARS:
        raise ConfigError(
            f"an announcement's key has 1 to {MAX_ANNOUNCEMENT_KEY_CHARS} characters, not {len(key)}"
        )


def _finished(batch: Batch) -> list[bool]:
    """Wait for a batch of this call; cancel it if the wait fails."""
    try:
        return batch.wait()
    except BaseException:
        batch.abandon()
        raise
