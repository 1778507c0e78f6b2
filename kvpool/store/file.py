"""A store in a directory that every process of the host shares; on tmpfs it is memory.

The native engine owns the records and its threads; ``Announcements`` owns the leased documents beside them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import found_key
from kvpool.store.documents import Announcements
from kvpool.store.native import NativeStore
from kvpool.store.store import SCAN_KEYS, StoredBlock, Usage
from kvpool.text import MAX_NBYTES

_ADVICE = {
    PermissionError: "give this user write access or choose another directory",
    NotADirectoryError: "choose a directory, not a file",
    FileExistsError: "choose a directory, not a file",
}


class FileStore(NativeStore):
    """``file:///dir``: one file a record; full, it drops what was used longest ago, by any process.

    ``path``: absolute; made if it is not there, and refused if it holds anything and is no pool.
    ``capacity_nbytes``: of all records in the directory; None: of a pool that is there, in which opening writes
    nothing and nothing is evicted. ``threads``: native threads that read, write and verify.
    Blocking: some file operations, however many records there are. Errors: ``ConfigError`` for a path that
    cannot be such a directory, ``StoreUnavailable`` when the file system refuses.
    """

    def __init__(self, path: str, capacity_nbytes: int | None, threads: int) -> None:
        name = f"file://{path}"
        if capacity_nbytes is None:
            with _mapped(name, "cannot read", opening=True):
                engine = _native.find_file_executor(path)
        else:
            with _mapped(name, "cannot write", opening=True):
                engine = _native.open_file_executor(path, capacity_nbytes, threads)
        super().__init__(name, engine)
        self._root = Path(path)
        self._capacity_nbytes = None if capacity_nbytes == MAX_NBYTES else capacity_nbytes
        self._announced = Announcements(self._root / "announcements")

    def _announce(self, key: str, document: bytes, lease_s: float) -> None:
        with _mapped(self._name, "cannot keep an announcement"):
            try:
                self._announced.put(key, document, lease_s)
            except FileNotFoundError:  # the directory was removed
                _native.make_file_pool(str(self._root))
                self._announced.put(key, document, lease_s)

    def _withdraw(self, key: str) -> bool:
        with _mapped(self._name, "cannot withdraw an announcement"):
            return self._announced.remove(key)

    def _announcements(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        with _mapped(self._name, "cannot read announcements"):
            found = self._announced.all(prefix)
        return {key: document for key, document in found.items() if key.endswith(suffix)}

    def _announced_under(self, keys: Sequence[str]) -> dict[str, bytes]:
        with _mapped(self._name, "cannot read announcements"):
            return self._announced.of(keys)

    def _withdraw_all(self, prefix: str) -> int:
        with _mapped(self._name, "cannot take announcements back"):
            return self._announced.remove_all(prefix)

    def _usage(self) -> list[Usage]:
        found = self.counters()
        return [
            Usage(self._name, True, found["stored_nbytes"], self._capacity_nbytes, None, found["evicted"])
        ]

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        found: list[StoredBlock] = []
        for block in _blocks(self._name, self._root / "blocks", prefix):
            found.append(block)
            if len(found) == SCAN_KEYS:
                yield found
                found = []
        if found:
            yield found


def _blocks(name: str, root: Path, prefix: str) -> Iterator[StoredBlock]:
    """The records below ``root``, where each lies in {bucket}/{tenant}.{namespace}.{hash}.{group}.{rank}; the bucket
    is the last three digits of the hash.
    """
    for bucket in _entries(name, root):
        for file in _entries(name, root / bucket):
            parts = file.split(".")
            key = found_key(*parts) if len(parts) == 5 else None
            if key is None or not key.startswith(prefix) or parts[2][-3:] != bucket:
                continue
            nbytes = _record_nbytes(name, root / bucket / file)
            if nbytes is not None:
                yield StoredBlock(key, nbytes)


def _record_nbytes(name: str, path: Path) -> int | None:
    """None when it is gone, or a folder, which no store takes for a record."""
    with _mapped(name, "cannot read a block's size"), contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return None if stat.S_ISDIR(status.st_mode) else status.st_size
    return None


def _entries(name: str, folder: Path) -> list[str]:
    """What lies in ``folder``; nothing when it is gone, or is none."""
    with _mapped(name, "cannot read a folder"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)  # noqa: PTH208
    return []


@contextlib.contextmanager
def _mapped(name: str, action: str, *, opening: bool = False) -> Iterator[None]:
    """Turn the system's errors into ours: what failed, why, and what to do."""
    try:
        yield
    except _native.RefusedDirectory as error:
        raise (ConfigError if opening else StoreUnavailable)(f"{name}: {error}") from error
    except OSError as error:
        text = f"{name}: {action}: {error.strerror or error}"
        advice = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), None)
        if opening and advice is not None:
            raise ConfigError(f"{text}; {advice}") from error
        raise StoreUnavailable(f"{text}; {advice or 'check the disk'}") from error
