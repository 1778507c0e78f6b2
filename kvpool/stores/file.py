"""A store in a directory that every process of the host shares; on tmpfs it is memory.

The native engine owns the records and its threads; ``Announcements`` owns the leased documents beside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpool import _native
from kvpool.errors import ConfigError, StoreClosed, StoreUnavailable
from kvpool.stores.announcements import Announcements
from kvpool.stores.store import DEFAULT_TIMEOUT_S, Store

_ADVICE = {
    PermissionError: "give this user write access or choose another directory",
    NotADirectoryError: "choose a directory, not a file",
    FileExistsError: "choose a directory, not a file",
}


class FileStore(Store):
    """``file:///dir``: one file a record; full, it drops what was used longest ago, by any process.

    ``path``: absolute; made if it is not there. ``capacity_nbytes``: of all records in the directory.
    ``threads``: native threads that read, write and verify.
    Blocking: reads the directory. Errors: ``ConfigError`` for a path that cannot be such a directory,
    ``StoreUnavailable`` when the file system refuses.
    """

    def __init__(self, path: str, capacity_nbytes: int, threads: int) -> None:
        super().__init__(f"file://{path}")
        with self._mapped("cannot write", opening=True):
            self._engine = _native.open_file_engine(path, capacity_nbytes, threads)
        self._announced = Announcements(Path(path) / "announcements")

    def counters(self) -> dict[str, int]:
        self._check_open()
        return self._engine.counters()

    def fileno(self) -> int:
        self._check_open()
        return self._engine.fileno()

    def _submit(
        self, operation: int, keys: Sequence[str], views: Sequence[memoryview] | None, timeout_s: float
    ) -> _native.Batch:
        try:
            return self._engine.submit(operation, keys, views, timeout_s)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from error
        except RuntimeError as error:
            if self._closed:
                raise StoreClosed(f"{self._name}: the store is closed") from error
            raise StoreUnavailable(f"{self._name}: {error}") from error

    def _announce(self, key: str, document: bytes, lease_s: float) -> None:
        with self._mapped("cannot keep an announcement"):
            self._announced.put(key, document, lease_s)

    def _announcements(self, prefix: str) -> dict[str, bytes]:
        with self._mapped("cannot read announcements"):
            return self._announced.all(prefix)

    def _close(self) -> None:
        if not self._engine.close(DEFAULT_TIMEOUT_S):
            raise StoreUnavailable(f"{self._name}: a thread is stuck in the file system; it was left behind")

    @contextlib.contextmanager
    def _mapped(self, action: str, *, opening: bool = False) -> Iterator[None]:
        """Turn the system's errors into ours: what failed, why, and what to do."""
        try:
            yield
        except OSError as error:
            text = f"{self._name}: {action}: {error.strerror or error}"
            advice = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), None)
            if opening and advice is not None:
                raise ConfigError(f"{text}; {advice}") from error
            raise StoreUnavailable(f"{text}; {advice or 'check the disk'}") from error
