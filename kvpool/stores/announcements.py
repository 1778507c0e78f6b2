"""Leased documents in a directory: one small file each, which anyone may read and nobody has to lock.

A file is called by the first 32 hex digits of SHA-256 of its key and holds one msgpack map: ``key``,
``document``,
``expires_unix_s``. It is written beside and renamed, so a reader sees the old one or the new one, whole.
Leases are wall-clock time, since the processes of a host share that clock and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from pathlib import Path
from typing import NamedTuple

import msgpack

from kvpool.errors import StoreUnavailable
from kvpool.stores.store import MAX_ANNOUNCEMENT_KEY_CHARS, MAX_ANNOUNCEMENTS, MAX_DOCUMENT_NBYTES

MAX_FILE_NBYTES = MAX_DOCUMENT_NBYTES + MAX_ANNOUNCEMENT_KEY_CHARS + 128
# A writer that dies between write and rename leaves a file of another name; it is nobody's after this long.
ORPHAN_AGE_S = 3600.0

_FILE_NAME = re.compile(r"[0-9a-f]{32}")


class _Announcement(NamedTuple):
    key: str
    document: bytes
    expires_unix_s: float


class Announcements:
    """The leased documents in one directory. Any thread and any process may call any method.

    Blocking: one small file a document. Errors: ``OSError`` as the system gives it; ``StoreUnavailable`` when
    full.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, key: str, document: bytes, lease_s: float) -> None:
        """Keep ``document`` for ``lease_s`` seconds instead of what was under ``key``."""
        self._directory.mkdir(mode=0o770, parents=True, exist_ok=True)
        path = self._path(key)
        if not path.exists() and self._count() >= MAX_ANNOUNCEMENTS:
            self.all("")  # removes what has run out
            if self._count() >= MAX_ANNOUNCEMENTS:
                raise StoreUnavailable(
                    f"{self._directory}: {MAX_ANNOUNCEMENTS} announcements are kept already"
                )
        packed = msgpack.packb({"key": key, "document": document, "expires_unix_s": time.time() + lease_s})
        assert len(packed) <= MAX_FILE_NBYTES
        temporary = self._beside(path)
        try:
            temporary.write_bytes(packed)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self, key: str) -> bool:
        """End what is under ``key``; whether its lease still ran."""
        path = self._path(key)
        found = _read(path)
        path.unlink(missing_ok=True)
        return found is not None and found.expires_unix_s > time.time()

    def all(self, prefix: str) -> dict[str, bytes]:
        """Documents under keys with ``prefix`` whose lease still runs; those that ran out are removed."""
        now_unix_s = time.time()
        documents: dict[str, bytes] = {}
        for path in self._paths():
            if _FILE_NAME.fullmatch(path.name) is None:
                self._remove_orphan(path, now_unix_s)
                continue
            found = _read(path)
            if found is None:
                continue
            if found.expires_unix_s <= now_unix_s:
                self._remove_expired(path, now_unix_s)
            elif found.key.startswith(prefix):
                documents[found.key] = found.document
        return dict(sorted(documents.items()))

    def _path(self, key: str) -> Path:
        return self._directory / hashlib.sha256(key.encode()).hexdigest()[:32]

    def remove_all(self, prefix: str) -> int:
        """Delete the documents under keys with ``prefix``; how many there were."""
        removed = 0
        for path in self._paths():
            found = _read(path)
            if found is not None and found.key.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    removed += 1
        return removed

    def _paths(self) -> list[Path]:
        try:
            return sorted(self._directory.iterdir())
        except FileNotFoundError:
            return []

    def _count(self) -> int:
        return sum(_FILE_NAME.fullmatch(path.name) is not None for path in self._paths())

    def _remove_expired(self, path: Path, now_unix_s: float) -> None:
        """Take the file aside, look again, and put it back if somebody renewed it just before."""
        aside = self._beside(path)
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        found = _read(aside)
        if found is not None and found.expires_unix_s > now_unix_s:
            with contextlib.suppress(FileExistsError):  # renewed once more: that one stands
                os.link(aside, path)
        aside.unlink(missing_ok=True)

    def _remove_orphan(self, path: Path, now_unix_s: float) -> None:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime + ORPHAN_AGE_S < now_unix_s:
                path.unlink()

    @staticmethod
    def _beside(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")


def _read(path: Path) -> _Announcement | None:
    """What one file says; None when it is gone, too large, or nothing that we wrote."""
    try:
        with path.open("rb") as file:
            packed = file.read(MAX_FILE_NBYTES)  # of a larger file this is no whole document
        fields = msgpack.unpackb(packed, max_map_len=8, max_array_len=0, max_ext_len=0)
    except (OSError, ValueError, msgpack.UnpackException):
        return None
    if not isinstance(fields, dict):
        return None
    key, document, expires = fields.get("key"), fields.get("document"), fields.get("expires_unix_s")
    if not isinstance(key, str) or not isinstance(document, bytes) or not isinstance(expires, float):
        return None
    if path.name.lstrip(".")[:32] != hashlib.sha256(key.encode()).hexdigest()[:32]:
        return None
    return _Announcement(key, document, expires)
