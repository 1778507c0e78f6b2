"""A store that keeps its records in a dictionary and ends each batch when, and as, the test says."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool import _native
from tests.transfer.test_mover import StallingStore


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
