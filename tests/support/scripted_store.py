"""Stores of which a test writes how blocks move and when a batch ends: they count and list nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvpool import _native
from kvpool.key.key import Namespace
from kvpool.store import LookupGroup, Store
from kvpool.store.batch import WRITER_NBYTES, Running
from kvpool.store.clients.lookup_keys import LookupKeys
from kvpool.store.store import Documents, StoredBlock, Usage, WrittenBlock


class LookedUp:
    """A batch of all keys of a lookup, with one status a record."""

    def __init__(self, running: Running, lookup: LookupKeys) -> None:
        self._running, self._lookup = running, lookup
        self.done, self.wait, self.cancel = running.done, running.wait, running.cancel
        self.error, self.given_up = running.error, running.given_up

    def writers(self) -> bytes:
        return b""

    def results(self) -> bytes:
        return self._lookup.records(self._running.results())


class OwnEngine:
    """The engine of a double that carries out its batches itself."""

    def __init__(self, store: SelfMoving) -> None:
        self._store = store

    def submit(
        self,
        op: int,
        keys: Sequence[str],
        buffers: Sequence[Any] | None,
        timeout_s: float,
        max_s: float,
        writer: bytes = b"",
    ) -> Running:
        return self._store.begin(op, keys, buffers, timeout_s)

    def lookup(self, prefix: str, groups: Sequence[LookupGroup], timeout_s: float) -> Running:
        return self._store.look_up(LookupKeys(prefix, groups), timeout_s)

    def counters(self) -> dict[str, int]:
        return self._store.count()

    def close(self, timeout_s: float) -> bool:
        return True


class SelfMoving(Store):
    """A store that is its own engine: a subclass has ``begin``."""

    def __init__(self, name: str, documents: Documents) -> None:
        super().__init__(name, OwnEngine(self), documents)

    def begin(self, op: int, keys: Sequence[str], views: Sequence[Any] | None, timeout_s: float) -> Running:
        raise NotImplementedError

    def look_up(self, lookup: LookupKeys, timeout_s: float) -> Running:
        keys = lookup[0 : len(lookup)]
        return LookedUp(self.begin(_native.TOUCH, keys, None, timeout_s), lookup)

    def count(self) -> dict[str, int]:
        return {}

    def _usage(self) -> list[Usage]:
        return []

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        return iter(())

    def _scan_writers(self, prefix: str) -> Iterator[list[WrittenBlock]]:
        return iter(())


class NoDocuments:
    def put(self, key: str, document: bytes, lease_s: float) -> None: ...

    def remove(self, key: str) -> bool:
        return False

    def of(self, keys: Sequence[str]) -> dict[str, bytes]:
        return {}

    def all(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        return {}

    def tenants(self) -> list[str]:
        return []

    def remove_all(self, prefix: str) -> int:
        return 0


NAMESPACE = Namespace("default", {"model": "test"})


def key(number: int, group: int) -> str:
    return NAMESPACE.key(number.to_bytes(32, "big"), group, 0)


class ScriptedBatch:
    """A batch that ends when the test says so, whatever its deadline was."""

    def __init__(
        self,
        store: ScriptedStore,
        operation: int,
        keys: Sequence[str],
        views: Sequence[memoryview],
        timeout_s: float,
    ) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._store, self.operation, self.keys, self.views = store, operation, list(keys), list(views)
        self._results: list[int] | None = None
        self.cancelled = False

    def end(self, fault: bool = False) -> None:
        """Do it, or fail; the buffers are read and written now."""
        assert self._results is None
        if fault or self.cancelled:
            self._results = [_native.FAULT if fault else _native.CANCELLED] * len(self.keys)
        else:
            self._results = [self._do(i) for i in range(len(self.keys))]

    def _do(self, i: int) -> int:
        records, key = self._store.records, self.keys[i]
        if self.operation == _native.PUT_ABSENT and key in records:
            return _native.PRESENT
        if self.operation in (_native.PUT, _native.PUT_ABSENT):
            if key in self._store.ends:
                return self._store.ends[key]
            records[key] = bytes(self.views[i])
        elif key not in records:
            return _native.MISS
        elif self.operation == _native.GET:
            self.views[i][:] = records[key]
        elif self.operation == _native.DELETE:
            del records[key]
        return _native.OK

    def done(self) -> bool:
        return self._results is not None

    def wait(self, timeout_s: float) -> bool:
        return self.done()

    def cancel(self) -> None:
        self.cancelled = True

    def given_up(self) -> bool:
        return self.cancelled or time.monotonic() >= self._deadline_s

    def writers(self) -> bytes:
        assert self._results is not None
        if self.operation != _native.GET:
            return b""
        return b"".join(self._store.written_by.get(key, bytes(WRITER_NBYTES)) for key in self.keys)

    def results(self) -> bytes:
        assert self._results is not None
        return bytes(self._results)

    def error(self) -> str | None:
        return "as the test says"


class ScriptedStore(SelfMoving):
    """Ends no batch by itself, as a disk that hangs inside the kernel."""

    def __init__(self) -> None:
        super().__init__("scripted", NoDocuments())
        self.records: dict[str, bytes] = {}
        self.ends: dict[str, int] = {}  # how puts of these keys end
        self.written_by: dict[str, bytes] = {}  # as records name them
        self.under_way: list[ScriptedBatch] = []

    def begin(self, op: int, keys: Sequence[str], views: Sequence[Any] | None, timeout_s: float) -> Running:
        self.under_way.append(ScriptedBatch(self, op, keys, views or (), timeout_s))
        return self.under_way[-1]

    def end(self, which: int = 0, fault: bool = False) -> None:
        self.under_way.pop(which).end(fault)

    def end_all(self) -> None:
        while self.under_way:
            self.end()

    def _close(self) -> None: ...
