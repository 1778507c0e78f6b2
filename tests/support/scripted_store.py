"""Stores of which a test writes how blocks move and when a batch ends: they count and list nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvpool import _native
from kvpool.key.key import Namespace
from kvpool.store import Store
from kvpool.store.store import StoredBlock


class BlockStore(Store):
    def counters(self) -> dict[str, int]:
        return {}

    def _announce(self, key: str, document: bytes, lease_s: float) -> None: ...

    def _announcements(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        return {}

    def _withdraw(self, key: str) -> bool:
        return False

    def _withdraw_all(self, prefix: str) -> int:
        return 0

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        return iter(())


NAMESPACE = Namespace("default", {"model": "test"})


def key(number: int, group: int) -> str:
    return NAMESPACE.key(number.to_bytes(32, "big"), group, 0)


class StallingBatch:
    """A batch that ends when the test says so, whatever its deadline was."""

    def __init__(self, count: int) -> None:
        self.count, self.ended, self.cancelled = count, False, False

    def done(self) -> bool:
        return self.ended

    def wait(self, timeout_s: float) -> bool:
        if not self.ended:
            time.sleep(min(timeout_s, 0.01))
        return self.ended

    def cancel(self) -> None:
        self.cancelled = True

    def results(self) -> bytes:
        return bytes([_native.OK]) * self.count

    def error(self) -> str | None:
        return None


class StallingStore(BlockStore):
    """Takes every batch and never ends one by itself: a disk that hangs inside the kernel."""

    def __init__(self) -> None:
        super().__init__("stalling")
        self.batches: list[tuple[StallingBatch, list[memoryview]]] = []

    def _submit(
        self, operation: int, keys: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float
    ) -> StallingBatch:
        self.batches.append((StallingBatch(len(keys)), list(views or ())))
        return self.batches[-1][0]

    def _close(self) -> None: ...


class ScriptedBatch:
    def __init__(
        self, store: ScriptedStore, operation: int, keys: Sequence[str], views: Sequence[memoryview]
    ) -> None:
        self._store, self.operation, self.keys, self._views = store, operation, list(keys), list(views)
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
            records[key] = bytes(self._views[i])
        elif key not in records:
            return _native.MISS
        elif self.operation == _native.GET:
            self._views[i][:] = records[key]
        return _native.OK

    def done(self) -> bool:
        return self._results is not None

    def wait(self, timeout_s: float) -> bool:
        return self.done()

    def cancel(self) -> None:
        self.cancelled = True

    def results(self) -> bytes:
        assert self._results is not None
        return bytes(self._results)

    def error(self) -> str | None:
        return "as the test says"


class ScriptedStore(StallingStore):
    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, bytes] = {}
        self.under_way: list[ScriptedBatch] = []

    def _submit(  # type: ignore[override]
        self, operation: int, keys: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float
    ) -> ScriptedBatch:
        self.under_way.append(ScriptedBatch(self, operation, keys, views or ()))
        return self.under_way[-1]

    def end(self, which: int = 0, fault: bool = False) -> None:
        self.under_way.pop(which).end(fault)

    def end_all(self) -> None:
        while self.under_way:
            self.end()
