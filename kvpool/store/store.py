"""The store: batches of buffers by key, and leased documents, whatever memory is behind it.

Batch is the primitive, and a blocking call is a submit and a wait. ``Store`` checks what the caller gave; its engine
carries out batches of checked keys and flat views, its documents keep what is announced.

Over 400 lines because each call's contract is written here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from kvpool import _native, metrics
from kvpool.errors import ConfigError, KVPoolError, StoreClosed, StoreUnavailable
from kvpool.key.key import KEY_PREFIX, Namespace, namespace_prefix
from kvpool.metrics import Counters
from kvpool.store.batch import Batch, Engine, Lookup, LookupGroup, check_timeout
from kvpool.store.buffers import Destination, copy_back, destination, source

DEFAULT_TIMEOUT_S = 5.0
MAX_BATCH_KEYS = 1 << 20
MAX_DOCUMENT_NBYTES = 64 << 10
MAX_ANNOUNCEMENTS = 65536
MAX_ANNOUNCEMENT_KEY_CHARS = 512
MAX_LEASE_S = 366 * 86400.0
SCAN_KEYS = 1000  # about so many at a time
LOOK_KEYS = 128  # of scan_keys(): looking at more would hold the GIL for too long

# Counter of a store -> metric
_GROWTH = {
    "refused": metrics.REFUSED_KEYS,
    "connections": metrics.CONNECTIONS,
    "disconnections": metrics.DISCONNECTIONS,
    "failed_dials": metrics.FAILED_CONNECTIONS,
    "evicted": metrics.EVICTED_BLOCKS,
}
_DAMAGED = "damaged_"
_Store = TypeVar("_Store", bound="Store")


class StoredBlock(NamedTuple):
    """One block that lies in a store."""

    key: str
    nbytes: int  # of its record: 64 more than the payload


class Usage(NamedTuple):
    """How full one server of a store is, or the store. None: not known, or no limit."""

    server: str  # its address, or the store's own
    up: bool = True  # it answers
    used_nbytes: int | None = None
    capacity_nbytes: int | None = None
    keys: int | None = None
    evicted: int | None = None  # since it was started


class Invalidations(NamedTuple):
    """What came since the last call. ``keys``: blocks' keys that were written, evicted, deleted or expired, each once.

    ``emptied``: a database was flushed, perhaps another one. ``missed``: keys may have changed without a notice.
    ``problem``: why some server sends no notices at present; empty: all do.
    """

    keys: list[str]
    emptied: bool
    missed: bool
    problem: str


class Notices(Protocol):
    """A notice is a hint: late, lost or duplicated. Check every key. For one thread."""

    def take(self, timeout_s: float) -> Invalidations:
        """Wait for a notice, for at most ``timeout_s`` seconds and the time that finding the servers takes."""

    def close(self) -> None:
        """Unsubscribe; calling it again does nothing. Blocking, for a second or two."""


class Documents(Protocol):
    """Leased documents by key, for all processes that use the store. Any thread may call any method; all block."""

    def put(self, key: str, document: bytes, lease_s: float) -> None:
        """Keep ``document`` for ``lease_s`` seconds instead of what was under ``key``."""

    def remove(self, key: str) -> bool:
        """End what is under ``key``; whether its lease still ran."""

    def of(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Documents under exactly these keys whose lease still runs."""

    def all(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        """Documents under keys with this beginning and end whose lease still runs."""

    def tenants(self) -> list[str]:
        """The tenants with documents, sorted, as far as this user may list them."""

    def remove_all(self, prefix: str) -> int:
        """Delete the documents under keys with ``prefix``; how many."""


class Store(ABC):
    """Values by key, in batches; each answer stands at its key's place.

    Keys are those of ``Namespace.keys``. Buffers are anything with the buffer protocol, of any element type:
    their bytes count, not their elements. A key may stand twice in a batch. ``timeout_s`` bounds the whole
    batch, in seconds (above 0, at most 3,600; None: 5). A miss is a value; a fault is ``StoreUnavailable``.
    Any thread may call any method. Every call after ``close`` raises ``StoreClosed``; wrong arguments raise
    ``ConfigError`` before anything is read or written.
    """

    def __init__(self, name: str, engine: Engine, documents: Documents) -> None:
        self._name = name  # without secrets: it stands in errors and in repr
        self._engine, self._documents = engine, documents
        self._closed = False
        self._released = False

    # ------------------------------------------------------------------ blocking calls

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Keep one value per key. False: the store had no room for it.

        A value replaces the one that was there, at once and whole. A buffer that is not contiguous is copied
        once.
        Blocking, with the interpreter free. Errors: ``StoreUnavailable``, ``StoreClosed``, ``ConfigError``.
        """
        return _finished(self.submit_put(keys, buffers, timeout_s=timeout_s))

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> list[bool]:
        """Read each key's value into its buffer, which has exactly the value's length. False: a miss.

        A value of another length, or one that fails verification, is deleted, counted, and a miss. After a
        miss or a fault the content of the buffer is unspecified. A buffer that is not contiguous goes through
        a copy.
        Blocking, with the interpreter free. Errors: ``StoreUnavailable``, ``StoreClosed``, ``ConfigError``.
        """
        destinations = [destination(buffer, position) for position, buffer in enumerate(buffers)]
        found = _finished(self._submit_get(keys, destinations, timeout_s))
        copy_back(destinations, found)
        return found

    def contains_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> list[bool]:
        """Whether each key has a value now; it may be gone, or prove damaged, when it is read.

        Blocking, with the interpreter free. Errors: ``StoreUnavailable``, ``StoreClosed``, ``ConfigError``.
        """
        return _finished(self.submit_contains(keys, timeout_s=timeout_s))

    def touch_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> list[bool]:
        """``contains_many``, and each value that is there counts as used now: it is evicted, and expires, later.

        Blocking, with the interpreter free. Errors: ``StoreUnavailable``, ``StoreClosed``, ``ConfigError``.
        """
        return _finished(self.submit_touch(keys, timeout_s=timeout_s))

    def delete_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> int:
        """Delete the keys' values; returns how many were there.

        Blocking, with the interpreter free. Errors: ``StoreUnavailable``, ``StoreClosed``, ``ConfigError``.
        """
        return sum(_finished(self._begin(_native.DELETE, "delete", keys, None, timeout_s)))

    # ------------------------------------------------------------------ calls that return at once

    def submit_put(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> Batch:
        """Begin ``put_many``. The buffers must not change until the transfer is done. Errors: as there."""
        views = [source(buffer, position) for position, buffer in enumerate(buffers)]
        return self._begin(_native.PUT, "put", keys, views, timeout_s)

    def submit_put_absent(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> Batch:
        """Begin to put the values that are not there; those that are count as used now, as in ``touch_many``.

        ``Batch.results`` has a byte a key: ``_native.OK``: put here; ``PRESENT``: it was there, or another put of
        the key did it; ``NO_ROOM``. ``Batch.wait`` says which values are there now. A value that is there is not
        compared with the buffer. The buffers must not change until the transfer is done. Errors: as ``put_many``.
        """
        views = [source(buffer, position) for position, buffer in enumerate(buffers)]
        return self._begin(_native.PUT_ABSENT, "put absent", keys, views, timeout_s)

    def submit_get(
        self, keys: Sequence[str], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> Batch:
        """Begin ``get_many_into``. The transfer owns the buffers until it is done. Errors: as there.

        A buffer that is not contiguous is refused here: it would need a copy when the transfer is done.
        """
        destinations = [destination(buffer, position) for position, buffer in enumerate(buffers)]
        for position, (_, copy_to) in enumerate(destinations):
            if copy_to is not None:
                raise ConfigError(
                    f"buffers[{position}] is not contiguous: use get_many_into, or a contiguous one"
                )
        return self._submit_get(keys, destinations, timeout_s)

    def submit_contains(self, keys: Sequence[str], *, timeout_s: float | None = None) -> Batch:
        """Begin ``contains_many``. Errors: as there."""
        return self._begin(_native.CONTAINS, "contains", keys, None, timeout_s)

    def submit_touch(self, keys: Sequence[str], *, timeout_s: float | None = None) -> Batch:
        """Begin ``touch_many``. Errors: as there."""
        return self._begin(_native.TOUCH, "touch", keys, None, timeout_s)

    def submit_lookup(
        self, namespace: Namespace, groups: Sequence[LookupGroup], *, timeout_s: float | None = None
    ) -> Lookup:
        """Ask which leading records of a prompt are here, as ``touch_many``, for as long as the answer is of use.

        Of any length: keys are spelled where they are sent, so this call is short.
        Where a part of a record is missing, what only follows it is not asked for any more; groups that are not
        with a sliding window are asked for first.
        Errors: as ``touch_many``; too many lookups under way is ``StoreUnavailable``.
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
        return Lookup(running, f"{self._name}: lookup of at most {keys} keys", timeout_s, asked, order)

    # ------------------------------------------------------------------ leased documents

    def announce(self, key: str, document: bytes, *, lease_s: float) -> None:
        """Keep a small document for ``lease_s`` seconds, instead of the one that was under ``key``.

        ``key``: printable ASCII, 1 to 512 characters. ``document``: 1 to 65,536 bytes. A store keeps 65,536 of
        them, a server as many for each tenant.
        Blocking, for one small write. Errors: ``ConfigError``; ``StoreUnavailable`` when it cannot be kept.
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
        """End an announcement before its lease does; False if there was none under ``key``.

        Blocking, for one small write. Errors: ``ConfigError``; ``StoreUnavailable``, and then the lease ends it.
        """
        self._check_open()
        _check_announcement_key(key)
        return self._documents.remove(key)

    def announcements(self, prefix: str = "", suffix: str = "") -> dict[str, bytes]:
        """The documents under keys that start with ``prefix`` and end with ``suffix`` whose lease still runs, by key.

        Those that have run out are removed on the way. Blocking, for one small read a document.
        Errors: ``StoreUnavailable``, ``StoreClosed``; ``AnnouncementsRefused``, of a server, where they have more than
        32 MiB.
        """
        self._check_open()
        return self._documents.all(prefix, suffix)

    def announced_under(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The documents under exactly these keys whose lease still runs, however many others there are.

        Blocking, for one small read a document. Errors: ``StoreUnavailable``, ``StoreClosed``.
        """
        self._check_open()
        return self._documents.of(keys)

    def announcing_tenants(self) -> list[str]:
        """The tenants of which something was announced lately, sorted; of a server at most 4,096.

        A tenant whose users may not list it is not among them. Blocking, for one small read.
        Errors: ``StoreUnavailable``, ``StoreClosed``.
        """
        self._check_open()
        return self._documents.tenants()

    def server_run_id(self) -> str:
        """A text that changes with each start of the server; empty without a server, or if it may not be asked.

        Blocking, for one small read. Errors: ``StoreUnavailable``, ``StoreClosed``.
        """
        self._check_open()
        return self._server_run_id()

    def usage(self) -> list[Usage]:
        """How full each server of the store is; one that does not answer is not ``up``.

        Blocking, for one small read of each server. Errors: ``StoreUnavailable`` when it cannot be found out which
        servers there are; ``StoreClosed``.
        """
        self._check_open()
        return self._usage()

    def withdraw_all(self, prefix: str) -> int:
        """Delete the documents under keys that start with ``prefix``, those of other processes too; returns how many.

        Announcers that run write theirs again. Blocking, for one small write a document.
        Errors: ``StoreUnavailable``, ``StoreClosed``.
        """
        self._check_open()
        return self._documents.remove_all(prefix)

    # ------------------------------------------------------------------ what is there

    def scan(self, prefix: str = KEY_PREFIX) -> Iterator[list[StoredBlock]]:
        """The blocks under keys that start with ``prefix``, about a thousand at a time, in no order.

        What is put or deleted meanwhile may be among them or not; a block may come twice, a block that stays
        comes at least once. Deleting what was given is no harm. A look, not a use: it keeps nothing from
        being evicted. For maintenance: it walks the whole pool.
        Blocking at each step. Errors, at each step: ``StoreUnavailable``, ``StoreClosed``.
        """
        self._check_open()
        return self._scan(prefix)

    def scan_keys(self, prefix: str = KEY_PREFIX) -> Iterator[list[str]]:
        """As ``scan``, the keys alone: a list for every hundred or so that were walked, which may be empty.

        What stays is given at least once; where it cannot be sure of that (servers changed), the last step fails.
        Blocking at each step. Errors, at each step: ``StoreUnavailable``, ``StoreClosed``.
        """
        self._check_open()
        return self._scan_keys(prefix)

    def notices(self) -> Notices | None:
        """Notices of keys that change from now on; None: there is no server.

        Close it before the store. Never blocks. Errors: ``StoreClosed``.
        """
        self._check_open()
        return self._notices()

    # ------------------------------------------------------------------ the rest

    def counters(self) -> dict[str, int]:
        """What this store has done since it was opened, by name; never blocks for long."""
        self._check_open()
        return self._engine.counters()

    def count_health(self, counters: Counters) -> None:
        """Add to ``counters`` what the store has counted since the last call, and whether it is connected now.

        A store without a server is never up or down. Does not block. Errors: ``StoreClosed``.
        """
        found = self.counters()
        for name, metric in _GROWTH.items():
            counters.add_growth(metric, found.get(name, 0))
        for name, total in found.items():
            if name.startswith(_DAMAGED) and total:
                counters.add_growth(metrics.DAMAGED_BLOCKS, total, name.removeprefix(_DAMAGED))
        if "up_connections" in found:
            counters.set(metrics.UP, float(found["up_connections"] > 0))

    def close(self) -> None:
        """Cancel what is under way, wait for it, and give everything back; calling it again does nothing.

        Blocking, for at most ``DEFAULT_TIMEOUT_S`` seconds. Errors: ``StoreUnavailable`` if a thread is
        stuck.
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
        self, keys: Sequence[str], destinations: Sequence[Destination], timeout_s: float | None
    ) -> Batch:
        return self._begin(_native.GET, "get", keys, [target.view for target in destinations], timeout_s)

    def _begin(
        self,
        operation: int,
        verb: str,
        keys: Sequence[str],
        views: Sequence[memoryview] | None,
        timeout_s: float | None,
    ) -> Batch:
        self._check_open()
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else check_timeout(timeout_s)
        if isinstance(keys, (str, bytes)):
            raise ConfigError("keys is one key; give a list of keys")
        if len(keys) > MAX_BATCH_KEYS:
            raise ConfigError(f"a batch has at most {MAX_BATCH_KEYS} keys, not {len(keys)}")
        if views is not None and len(views) != len(keys):
            raise ConfigError(f"{len(keys)} keys need as many buffers, not {len(views)}")
        try:
            running = self._engine.submit(operation, keys, views, timeout_s)
        except (ValueError, TypeError, RuntimeError) as error:
            raise self._mapped(error) from error
        return Batch(running, f"{self._name}: {verb} of {len(keys)} keys", timeout_s)

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
    """Wait for a batch of this call; if the wait itself fails, the batch is cancelled."""
    try:
        return batch.wait()
    except BaseException:
        batch.abandon()
        raise
