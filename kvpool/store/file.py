"""A store in a directory shared by all processes of the host; on tmpfs it is memory.

The native engine owns the records and its threads; ``FileDocuments`` owns the leased documents beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgpack

from kvpool import _native
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.key.key import KEY_PREFIX, Namespace, parse_tenant
from kvpool.store.advice import host_advice
from kvpool.store.file_records import stored_blocks, written_blocks
from kvpool.store.file_system import FileSystem
from kvpool.store.store import (
    MAX_ANNOUNCEMENT_KEY_CHARS,
    MAX_ANNOUNCEMENTS,
    MAX_DOCUMENT_NBYTES,
    SCAN_KEYS,
    Store,
    StoredBlock,
    Usage,
    WrittenBlock,
)
from kvpool.text import format_nbytes

MAX_FILE_NBYTES = MAX_DOCUMENT_NBYTES + MAX_ANNOUNCEMENT_KEY_CHARS + 128
# A writer that dies between write and rename leaves a temporary file; it is deleted after this long.
ORPHAN_AGE_S = 3600.0

_Block = TypeVar("_Block", StoredBlock, WrittenBlock)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FILE_NAME = re.compile(r"[0-9a-f]{32}")
_NAME_BESIDE = re.compile(r"\.[0-9a-f]{32}\.[0-9]+\.[0-9a-f]{16}")
_ADVICE = {
    PermissionError: "give this user write access or choose another directory",
    NotADirectoryError: "choose a directory, not a file",
    FileExistsError: "choose a directory, not a file",
}


def pool_id(path: str) -> str:
    """32 hex digits: equal for all processes and containers of a host that see this directory; empty: it is gone."""
    try:
        found = Path(path).stat()
        boot = BOOT_ID.read_text()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {found.st_dev} {found.st_ino}".encode()).hexdigest()[:32]


class FileStore(Store):
    """``file:///dir``: one file a record; a full store evicts the least recently used record of any process.

    It is full at its capacity, or when its file system is but for a reserve (5 %, from 16 MiB to 4 GiB). The capacity
    stands in the directory, and holds for all its processes.

    ``path``: absolute; created if absent, refused if it is neither empty nor a pool. ``capacity_nbytes``: of
    all records in a directory that has none yet; None: open an existing pool without writing or evicting.
    ``threads``: native threads that read, write and verify. Blocks for a few file operations, however many
    records exist. Errors: ``ConfigError`` for an unusable path, ``StoreUnavailable`` when the file system refuses.
    """

    def __init__(self, path: str, capacity_nbytes: int | None, threads: int) -> None:
        name = f"file://{path}"
        reads_only = capacity_nbytes is None
        with _mapped(name, "cannot read" if reads_only else "cannot write", opening=True):
            engine = _native.open_file_executor(path, capacity_nbytes, 1 if reads_only else threads)
        self._root = Path(path)
        super().__init__(name, engine, FileDocuments(self._root, name))

    @property
    def capacity_nbytes(self) -> int | None:
        """As it stands in the directory; None: none does. Blocks for a small read."""
        return self.counters()["capacity_nbytes"] or None

    def set_capacity(self, nbytes: int) -> None:
        """For all processes: they follow within a second, and the next put evicts what is above. Errors: as opening."""
        with _mapped(self._name, "cannot write"):
            _native.set_pool_capacity(str(self._root), nbytes)

    def shortage(self, url_nbytes: int | None) -> str:
        """Why it is not, or cannot grow to, the size that a URL says, in one sentence; empty if it is and can.

        ``url_nbytes``: None: it says none.
        """
        if (nbytes := self.capacity_nbytes) is None:
            return ""
        if url_nbytes is not None and url_nbytes != nbytes:
            here, there = format_nbytes(nbytes), format_nbytes(url_nbytes)
            return (
                f"its capacity is {here} for all its processes, and not the {there} of this URL: write "
                f"?capacity={here}, or kvpool capacity changes the pool's"
            )
        system = FileSystem.of(str(self._root))
        room_nbytes = system.room_nbytes(self.counters()["stored_nbytes"])
        if nbytes <= room_nbytes:
            return ""
        return (
            f"its capacity is {format_nbytes(nbytes)}, and {system.place} has room for "
            f"{room_nbytes >> 20:,} MiB of it: a pool leaves {system.reserve_nbytes >> 20:,} MiB there free for "
            "others, and evicts for them; kvpool capacity makes it smaller, or make room"
        )

    def delete_evicted(self) -> None:
        """They wait in free/ for puts that overwrite them; each deletion takes them along, also one of nothing."""
        self.delete_many([Namespace("kvpool", {"of": "nothing"}).key(bytes(32), 0, 0)])

    def _usage(self) -> list[Usage]:
        found = self.counters()
        # Without evictions: each process counts its own.
        return [Usage(self._name, True, found["stored_nbytes"], found["capacity_nbytes"] or None)]

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        return self._in_steps(stored_blocks(self._root / "blocks", prefix))

    def _scan_writers(self, prefix: str) -> Iterator[list[WrittenBlock]]:
        return self._in_steps(written_blocks(self._root / "blocks", prefix))

    def _in_steps(self, blocks: Iterator[_Block]) -> Iterator[list[_Block]]:
        with _mapped(self._name, "cannot look at its blocks"):
            while step := list(itertools.islice(blocks, SCAN_KEYS)):
                yield step


class _Document(NamedTuple):
    key: str
    document: bytes
    expires_unix_s: float


class FileDocuments:
    """Leased documents in a directory: one small file each, shared by processes without locks.

    The file name is the first 32 hex digits of SHA-256 of the key; the content is a msgpack map: ``key``,
    ``document``, ``expires_unix_s``. Renames make writes atomic. Leases are wall-clock time, the only clock
    that a host's processes share.

    Readers delete nothing; each put deletes expired files. Only files with such names are deleted, never
    through a symbolic link. Errors: ``StoreUnavailable``.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._root, self._name = root, name
        self._directory = root / "announcements"

    def put(self, key: str, document: bytes, lease_s: float) -> None:
        with _mapped(self._name, "cannot keep an announcement"):
            try:
                self._put(key, document, lease_s)
            except FileNotFoundError:  # the directory was removed
                _native.make_file_pool(str(self._root))
                self._put(key, document, lease_s)

    def _put(self, key: str, document: bytes, lease_s: float) -> None:
        packed = msgpack.packb({"key": key, "document": document, "expires_unix_s": time.time() + lease_s})
        assert len(packed) <= MAX_FILE_NBYTES
        self._make_directory()
        name = _name(key)
        with self._opened() as folder:
            if not _exists(folder, name):
                self._sweep(folder)
                kept = sum(_FILE_NAME.fullmatch(one) is not None for one in _names(folder))
                if kept >= MAX_ANNOUNCEMENTS:
                    raise StoreUnavailable(
                        f"{self._name}: {MAX_ANNOUNCEMENTS} announcements are kept already"
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
        found = None
        with (
            _mapped(self._name, "cannot withdraw an announcement"),
            contextlib.suppress(FileNotFoundError),
            self._opened() as folder,
        ):
            found = _read(folder, _name(key))
            _unlink(folder, _name(key))
        return found is not None and found.expires_unix_s > time.time()

    def of(self, keys: Sequence[str]) -> dict[str, bytes]:
        found: list[_Document | None] = []
        with (
            _mapped(self._name, "cannot read announcements"),
            contextlib.suppress(FileNotFoundError),
            self._opened() as folder,
        ):
            found = [_read(folder, _name(key)) for key in keys]
        return _running(found)

    def all(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        with _mapped(self._name, "cannot read announcements"):
            found = _running(sorted(self._found(prefix)))
        return {key: document for key, document in found.items() if key.endswith(suffix)}

    def tenants(self) -> list[str]:
        return sorted({tenant for key in self.all(KEY_PREFIX) if (tenant := parse_tenant(key))})

    def remove_all(self, prefix: str) -> int:
        removed = 0
        with _mapped(self._name, "cannot take announcements back"):
            for found in self._found(prefix):
                with contextlib.suppress(FileNotFoundError), self._opened() as folder:
                    removed += _unlink(folder, _name(found.key))
        return removed

    def _found(self, prefix: str) -> list[_Document]:
        try:
            with self._opened() as folder:
                read = [_read(folder, name) for name in _names(folder) if _FILE_NAME.fullmatch(name)]
        except FileNotFoundError:
            return []
        return [found for found in read if found is not None and found.key.startswith(prefix)]

    def _make_directory(self) -> None:
        """With the parent's rights, which may be shared by a group."""
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
        """Remove expired documents and dead writers' files."""
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
        """Move the file aside, check again, and restore it if it was just renewed."""
        aside = _beside(name)
        try:
            os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
        except FileNotFoundError:
            return
        found = _read(folder, aside)
        if found is not None and found.expires_unix_s > now_unix_s:
            with contextlib.suppress(FileExistsError):  # renewed once more: keep the newer file
                os.link(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        _unlink(folder, aside)


def _running(found: Iterable[_Document | None]) -> dict[str, bytes]:
    now_unix_s = time.time()
    return {one.key: one.document for one in found if one is not None and one.expires_unix_s > now_unix_s}


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _names(folder: int) -> list[str]:
    return os.listdir(folder)


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _beside(name: str) -> str:
    return f".{name}.{os.getpid()}.{secrets.token_hex(8)}"


def _unlink(folder: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _read(folder: int, name: str) -> _Document | None:
    """Parse one file; None when gone, too large, no file, or foreign."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as opened:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            packed = opened.read(MAX_FILE_NBYTES)  # cut off, a larger file is no whole document
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
    return _Document(key, document, expires)


@contextlib.contextmanager
def _mapped(name: str, action: str, *, opening: bool = False) -> Iterator[None]:
    """Map the system's errors to ours: what failed, why, and what to do."""
    try:
        yield
    except _native.RefusedDirectory as error:
        raise (ConfigError if opening else StoreUnavailable)(f"{name}: {error}") from error
    except OSError as error:
        words = error.strerror or str(error)
        text = f"{name}: {action}: {words}"
        advice = next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), None)
        if opening and advice is not None:
            raise ConfigError(f"{text}; {advice}") from error
        raise StoreUnavailable(f"{text}; {advice or host_advice(words) or 'check the disk'}") from error
