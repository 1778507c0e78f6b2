"""Leased documents in a directory: one small file each, read and written without locks.

A file is called by the first 32 hex digits of SHA-256 of its key and holds one msgpack map: ``key``,
``document``,
``expires_unix_s``. It is written beside and renamed, so a reader sees the old one or the new one, whole.
Leases are wall-clock time, since the processes of a host share that clock and nothing else.

Who reads deletes nothing: what has run out goes when something new is announced. Nothing is deleted but files
with such names, and nothing is reached through a symbolic link.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgpack

from kvpool.errors import StoreUnavailable
from kvpool.store.store import MAX_ANNOUNCEMENT_KEY_CHARS, MAX_ANNOUNCEMENTS, MAX_DOCUMENT_NBYTES

MAX_FILE_NBYTES = MAX_DOCUMENT_NBYTES + MAX_ANNOUNCEMENT_KEY_CHARS + 128
# A writer that dies between write and rename leaves a file of another name; it is deleted after this long.
ORPHAN_AGE_S = 3600.0

_FILE_NAME = re.compile(r"[0-9a-f]{32}")
_NAME_BESIDE = re.compile(r"\.[0-9a-f]{32}\.[0-9]+\.[0-9a-f]{16}")


class _Announcement(NamedTuple):
    key: str
    document: bytes
    expires_unix_s: float


class Announcements:
    """The leased documents in one directory. Any thread and any process may call any method.

    Blocking: one small file a document. Errors: ``OSError`` as the system gives it (``FileNotFoundError`` when the
    directory above is gone); ``StoreUnavailable`` when full.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, key: str, document: bytes, lease_s: float) -> None:
        """Keep ``document`` for ``lease_s`` seconds instead of what was under ``key``."""
        packed = msgpack.packb({"key": key, "document": document, "expires_unix_s": time.time() + lease_s})
        assert len(packed) <= MAX_FILE_NBYTES
        self._make_directory()
        name = _name(key)
        with self._opened() as folder:
            if not _is_there(folder, name):
                self._sweep(folder)
                kept = sum(_FILE_NAME.fullmatch(one) is not None for one in _names(folder))
                if kept >= MAX_ANNOUNCEMENTS:
                    raise StoreUnavailable(
                        f"{self._directory}: {MAX_ANNOUNCEMENTS} announcements are kept already"
                    )
            temporary = _beside(name)
            file = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o660, dir_fd=folder
            )
            try:
                with open(file, "wb") as opened:  # noqa: PTH123
                    if os.fstat(folder).st_mode & stat.S_IWGRP:  # shared by a group, whatever the umask
                        os.fchmod(file, 0o660)
                    opened.write(packed)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _unlink(folder, temporary)
                raise

    def remove(self, key: str) -> bool:
        """End what is under ``key``; whether its lease still ran."""
        try:
            with self._opened() as folder:
                found = _read(folder, _name(key))
                _unlink(folder, _name(key))
        except FileNotFoundError:
            return False
        return found is not None and found.expires_unix_s > time.time()

    def of(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Documents under exactly these keys whose lease still runs."""
        try:
            with self._opened() as folder:
                return _running(_read(folder, _name(key)) for key in keys)
        except FileNotFoundError:
            return {}

    def all(self, prefix: str) -> dict[str, bytes]:
        """Documents under keys with ``prefix`` whose lease still runs."""
        return _running(sorted(self._found(prefix)))

    def remove_all(self, prefix: str) -> int:
        """Delete the documents under keys with ``prefix``; how many there were."""
        removed = 0
        for found in self._found(prefix):
            with contextlib.suppress(FileNotFoundError), self._opened() as folder:
                removed += _unlink(folder, _name(found.key))
        return removed

    def _found(self, prefix: str) -> list[_Announcement]:
        try:
            with self._opened() as folder:
                read = [_read(folder, name) for name in _names(folder) if _FILE_NAME.fullmatch(name)]
        except FileNotFoundError:
            return []
        return [found for found in read if found is not None and found.key.startswith(prefix)]

    def _make_directory(self) -> None:
        """With the rights of the directory above, which may be shared by a group."""
        above = stat.S_IMODE(self._directory.parent.stat().st_mode)
        with contextlib.suppress(FileExistsError):
            self._directory.mkdir(mode=above & 0o770)
            if above & stat.S_IWGRP:
                self._directory.chmod(above & 0o7770)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            yield folder
        finally:
            os.close(folder)

    def _sweep(self, folder: int) -> None:
        """Remove what has run out, and what dead writers left."""
        now_unix_s = time.time()
        for name in _names(folder):
            if _FILE_NAME.fullmatch(name):
                found = _read(folder, name)
                if found is not None and found.expires_unix_s <= now_unix_s:
                    self._remove_expired(folder, name, now_unix_s)
            elif _NAME_BESIDE.fullmatch(name):
                with contextlib.suppress(OSError):
                    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode) and info.st_mtime + ORPHAN_AGE_S < now_unix_s:
                        os.unlink(name, dir_fd=folder)

    def _remove_expired(self, folder: int, name: str, now_unix_s: float) -> None:
        """Take the file aside, look again, and put it back if it was renewed just before."""
        aside = _beside(name)
        try:
            os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
        except FileNotFoundError:
            return
        found = _read(folder, aside)
        if found is not None and found.expires_unix_s > now_unix_s:
            with contextlib.suppress(FileExistsError):  # renewed once more: that one stands
                os.link(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        _unlink(folder, aside)


def _running(found: Iterable[_Announcement | None]) -> dict[str, bytes]:
    now_unix_s = time.time()
    return {one.key: one.document for one in found if one is not None and one.expires_unix_s > now_unix_s}


def _is_there(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _names(folder: int) -> list[str]:
    return os.listdir(folder)


def _beside(name: str) -> str:
    return f".{name}.{os.getpid()}.{secrets.token_hex(8)}"


def _unlink(folder: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _read(folder: int, name: str) -> _Announcement | None:
    """What one file says; None when it is gone, too large, no file, or nothing that we wrote."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as opened:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            packed = opened.read(MAX_FILE_NBYTES)  # of a larger file this is no whole document
        fields = msgpack.unpackb(packed, max_map_len=8, max_array_len=0, max_ext_len=0)
    except (OSError, ValueError, msgpack.UnpackException):
        return None
    if not isinstance(fields, dict):
        return None
    key, document, expires = fields.get("key"), fields.get("document"), fields.get("expires_unix_s")
    if not isinstance(key, str) or not isinstance(document, bytes) or not isinstance(expires, float):
        return None
    if name.lstrip(".")[:32] != _name(key):
        return None
    return _Announcement(key, document, expires)
