"""A store in a directory that every process of the host shares; on tmpfs it is memory.

The native engine owns the records and its threads; ``Announcements`` owns the leased documents beside them.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.keys import KEY_PREFIX, found_key
from kvpool.stores.announcements import Announcements
from kvpool.stores.native import NativeStore
from kvpool.stores.store import SCAN_KEYS, StoredBlock

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
        self._blocks = Path(path) / "blocks"
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

    def _withdraw_all(self, prefix: str) -> int:
        with _mapped(self._name, "cannot take announcements back"):
            return self._announced.remove_all(prefix)

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        found: list[StoredBlock] = []
        for block in _blocks(self._name, self._blocks, prefix):
            found.append(block)
            if len(found) == SCAN_KEYS:
                yield found
                found = []
        if found:
            yield found


def _blocks(name: str, root: Path, prefix: str) -> Iterator[StoredBlock]:
    """The records below ``root``, where each lies in blocks/{tenant}/{namespace}/{hash[:3]}/{hash}.{group}.{rank}."""
    for tenant in _entries(name, root):
        if not _overlap(f"{KEY_PREFIX}{tenant}:", prefix):
            continue
        for namespace in _entries(name, root / tenant):
            if not _overlap(f"{KEY_PREFIX}{tenant}:{namespace}:", prefix):
                continue
            for start in _entries(name, root / tenant / namespace):
                folder = root / tenant / namespace / start
                for file in _entries(name, folder):
                    parts = file.split(".")
                    key = found_key(tenant, namespace, *parts) if len(parts) == 3 else None
                    if key is None or not key.startswith(prefix) or file[:3] != start:
                        continue
                    nbytes = _record_nbytes(name, folder / file)
                    if nbytes is not None:
                        yield StoredBlock(key, nbytes)


def _record_nbytes(name: str, path: Path) -> int | None:
    """None when it is gone, or a folder, which no store takes for a record."""
    with _mapped(name, "cannot read a block's size"), contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        return None if stat.S_ISDIR(status.st_mode) else status.st_size
    return None


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


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
    except OSError as error:
        text = f"{name}: {action}: {error.strerror or error}"
        advice = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), None)
        if opening and advice is not None:
            raise ConfigError(f"{text}; {advice}") from error
        raise StoreUnavailable(f"{text}; {advice or 'check the disk'}") from error
