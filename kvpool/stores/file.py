"""A store in a directory that every process of the host shares; on tmpfs it is memory.

The native engine owns the records and its threads; ``Announcements`` owns the leased documents beside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.stores.announcements import Announcements
from kvpool.stores.native import NativeStore

_ADVICE = {
    PermissionError: "give this user write access or choose another directory",
    NotADirectoryError: "choose a directory, not a file",
    FileExistsError: "choose a directory, not a file",
}


class FileStore(NativeStore):
    """``file:///dir``: one file a record; full, it drops what was used longest ago, by any process.

    ``path``: absolute; made if it is not there. ``capacity_nbytes``: of all records in the directory.
    ``threads``: native threads that read, write and verify.
    Blocking: reads the directory. Errors: ``ConfigError`` for a path that cannot be such a directory,
    ``StoreUnavailable`` when the file system refuses.
    """

    def __init__(self, path: str, capacity_nbytes: int, threads: int) -> None:
        name = f"file://{path}"
        with _mapped(name, "cannot write", opening=True):
            super().__init__(name, _native.open_file_engine(path, capacity_nbytes, threads))
        self._announced = Announcements(Path(path) / "announcements")

    def _announce(self, key: str, document: bytes, lease_s: float) -> None:
        with _mapped(self._name, "cannot keep an announcement"):
            self._announced.put(key, document, lease_s)

    def _withdraw(self, key: str) -> bool:
        with _mapped(self._name, "cannot withdraw an announcement"):
            return self._announced.remove(key)

    def _announcements(self, prefix: str) -> dict[str, bytes]:
        with _mapped(self._name, "cannot read announcements"):
            return self._announced.all(prefix)


@contextlib.contextmanager
def _mapped(name: str, action: str, *, opening: bool = False) -> Iterator[None]:
    """Turn the system's errors into ours: what failed, why, and what to do."""
    try:
        yield
    except OSError as error:
        text = f"{name}: {action}: {error.strerror or error}"
        advice = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), None)
        if opening and advice is not None:
            raise ConfigError(f"{text}; {advice}") from error
        raise StoreUnavailable(f"{text}; {advice or 'check the disk'}") from error
