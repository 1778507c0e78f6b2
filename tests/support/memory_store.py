"""``MemoryStore``: a double of a store, in the memory of a test.

Threads: ``_lock`` guards ``_records``, ``_held_nbytes`` and ``_counters``; nothing is copied, hashed or
read under it. A record is immutable from the moment that it is in ``_records``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from kvpool import _native
from kvpool.errors import StoreUnavailable
from kvpool.key.key import KEY_PREFIX, parse_key, parse_tenant
from kvpool.store.batch import Running
from kvpool.store.clients.lookup_keys import LookupKeys
from kvpool.store.store import MAX_ANNOUNCEMENTS, SCAN_KEYS, StoredBlock, Usage, WrittenBlock
from tests.support.records import parse_header
from tests.support.scripted_store import LookedUp, SelfMoving

# The names that the file store uses, too. Nothing here faults, is cancelled or times out.
_COUNTERS = (
    "puts", "put_nbytes", "present_puts", "get_hits", "get_misses", "get_nbytes", "contains_hits",
    "contains_misses", "deletes", "delete_misses", "expires", "expire_misses",
    "no_room", "faults", "cancelled", "timed_out", "damaged", "evicted",
)  # fmt: skip


LOOKUP_KEYS = 256  # of a lookup, between two looks at what is still worth asking


class _EndedBatch:
    """A batch that ended before it was handed out."""

    def __init__(self, results: bytes, writers: bytes = b"") -> None:
        self._results, self._writers = results, writers

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True

    def given_up(self) -> bool:
        return False

    def cancel(self) -> None:
        pass

    def results(self) -> bytes:
        return self._results

    def writers(self) -> bytes:
        return self._writers

    def error(self) -> str | None:
        return None


class MemoryDocuments:
    """``_lock`` guards ``_kept``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[bytes, float]] = {}  # document, end of its lease (monotonic)

    def put(self, key: str, document: bytes, lease_s: float) -> None:
        with self._lock:
            kept = self._running()
            if key not in kept and len(kept) >= MAX_ANNOUNCEMENTS:
                raise StoreUnavailable(f"{MAX_ANNOUNCEMENTS} announcements are kept already")
            kept[key] = (document, time.monotonic() + lease_s)

    def remove(self, key: str) -> bool:
        with self._lock:
            return self._running().pop(key, None) is not None

    def of(self, keys: Sequence[str]) -> dict[str, bytes]:
        with self._lock:
            kept = self._running()
            return {key: kept[key][0] for key in keys if key in kept}

    def all(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        with self._lock:
            kept = self._running()
            return {
                key: kept[key][0] for key in sorted(kept) if key.startswith(prefix) and key.endswith(suffix)
            }

    def tenants(self) -> list[str]:
        return sorted({tenant for key in self.all(KEY_PREFIX) if (tenant := parse_tenant(key))})

    def remove_all(self, prefix: str) -> int:
        return sum([self.remove(key) for key in self.all(prefix)])

    def _running(self) -> dict[str, tuple[bytes, float]]:
        now_s = time.monotonic()
        self._kept = {key: kept for key, kept in self._kept.items() if kept[1] > now_s}
        return self._kept


class MemoryStore(SelfMoving):
    """Each one is a store of its own; full, it drops the least recently used record.

    ``capacity_nbytes`` counts headers and payloads. A batch is carried out in the calling thread, by
    ``submit_*``.
    """

    def __init__(self, capacity_nbytes: int = 1 << 30) -> None:
        super().__init__("a double in memory", MemoryDocuments())
        self._capacity_nbytes = capacity_nbytes
        self._lock = threading.Lock()
        self._records: OrderedDict[str, bytes] = OrderedDict()  # least recently used first
        self._held_nbytes = 0
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))

    def count(self) -> dict[str, int]:
        with self._lock:
            return {**self._counters, "held_nbytes": self._held_nbytes, "held_keys": len(self._records)}

    def _usage(self) -> list[Usage]:
        with self._lock:
            held_nbytes, keys, evicted = self._held_nbytes, len(self._records), self._counters["evicted"]
        return [Usage(self._name, True, held_nbytes, self._capacity_nbytes, keys, evicted)]

    def begin(
        self, op: int, keys: Sequence[str], views: Sequence[Any] | None, timeout_s: float
    ) -> _EndedBatch:
        for key in keys:
            parse_key(key)
        if op == _native.PUT:
            assert views is not None
            results = bytes(map(self._put, keys, views))
        elif op == _native.PUT_ABSENT:
            assert views is not None
            results = bytes(map(self._put_absent, keys, views))
        elif op == _native.GET:
            assert views is not None
            found = list(map(self._get, keys, views))
            results = bytes(_native.MISS if writer is None else _native.OK for writer in found)
            return _EndedBatch(results, b"".join(writer or bytes(16) for writer in found))
        elif op == _native.EXPIRE:
            with self._lock:
                found = [key in self._records for key in keys]
                for key in (key for key, hit in zip(keys, found, strict=True) if hit):
                    self._records.move_to_end(key, last=False)
                self._counters["expires"] += sum(found)
                self._counters["expire_misses"] += len(found) - sum(found)
            results = bytes(_native.OK if hit else _native.MISS for hit in found)
        elif op in (_native.CONTAINS, _native.TOUCH):
            with self._lock:
                found = [key in self._records for key in keys]
                if op == _native.TOUCH:
                    for key, hit in zip(keys, found, strict=True):
                        if hit:
                            self._records.move_to_end(key)
                self._counters["contains_hits"] += sum(found)
                self._counters["contains_misses"] += len(found) - sum(found)
            results = bytes(_native.OK if hit else _native.MISS for hit in found)
        else:
            assert op == _native.DELETE, op
            results = bytes(map(self._delete, keys))
        return _EndedBatch(results)

    def look_up(self, lookup: LookupKeys, timeout_s: float) -> Running:
        statuses = bytearray(len(lookup))
        index = lookup.next_wanted(0)
        while index < len(lookup):
            end = min(index + LOOKUP_KEYS, len(lookup))
            found = self.begin(_native.TOUCH, lookup[index:end], None, timeout_s).results()
            statuses[index:end] = found
            lookup.take(index, found)
            index = lookup.next_wanted(end)
        return LookedUp(_EndedBatch(bytes(statuses)), lookup)

    def _put_absent(self, key: str, view: memoryview) -> int:
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)
                self._counters["present_puts"] += 1
                return _native.PRESENT
        return self._put(key, view)

    def _put(self, key: str, view: memoryview) -> int:
        record = b"".join((view, _native.pack_header(key, view, self.writer)))
        with self._lock:
            if len(record) > self._capacity_nbytes:
                self._counters["no_room"] += 1
                return _native.NO_ROOM
            self._remove(key)
            while self._held_nbytes + len(record) > self._capacity_nbytes:
                self._remove(next(iter(self._records)))
                self._counters["evicted"] += 1
            self._records[key] = record
            self._held_nbytes += len(record)
            self._counters["puts"] += 1
            self._counters["put_nbytes"] += view.nbytes
        return _native.OK

    def _get(self, key: str, view: memoryview) -> bytes | None:
        """Who wrote it; None: a miss."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                self._counters["get_misses"] += 1
                return None
            self._records.move_to_end(key)
        whole = memoryview(record)
        payload, header = whole[: -_native.RECORD_HEADER_NBYTES], whole[-_native.RECORD_HEADER_NBYTES :]
        fault = _native.verify_record(key, header, payload)
        if fault is None and payload.nbytes == view.nbytes:
            view[:] = payload
            with self._lock:
                self._counters["get_hits"] += 1
                self._counters["get_nbytes"] += view.nbytes
            return parse_header(bytes(header)).writer
        with self._lock:
            self._counters["get_misses"] += 1
            self._counters["damaged"] += 1
            if self._records.get(key) is record:
                self._remove(key)
        return None

    def _delete(self, key: str) -> int:
        with self._lock:
            found = self._remove(key)
            self._counters["deletes" if found else "delete_misses"] += 1
        return _native.OK if found else _native.MISS

    def _remove(self, key: str) -> bool:
        """Forget one record; the caller holds the lock."""
        record = self._records.pop(key, None)
        self._held_nbytes -= len(record) if record is not None else 0
        return record is not None

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        with self._lock:
            found = [
                StoredBlock(key, len(record))
                for key, record in self._records.items()
                if key.startswith(prefix)
            ]
        for start in range(0, len(found), SCAN_KEYS):
            yield found[start : start + SCAN_KEYS]

    def _scan_writers(self, prefix: str) -> Iterator[list[WrittenBlock]]:
        for step in self._scan(prefix):
            with self._lock:
                records = [(block, self._records[block.key]) for block in step if block.key in self._records]
            yield [
                WrittenBlock(*block, parse_header(record[-_native.RECORD_HEADER_NBYTES :]).writer)
                for block, record in records
            ]

    def _close(self) -> None:
        with self._lock:
            self._records.clear()
            self._held_nbytes = 0
