"""``SnapshotFile``: writes the index's snapshot to a file at intervals, for the next start.

Writes are atomic: written beside the path, synced, renamed. Mode 0600, no symbolic link is followed. ``lock``
keeps other indexes out. Threads: the file's own writes, and alone uses ``_failed``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kvpool.errors import ConfigError, KVPoolError, SnapshotRefused
from kvpool.files import open_file
from kvpool.index.fleet.snapshot import MAX_NBYTES, Snapshot, unpack
from kvpool.threads import start_thread

DEFAULT_EVERY_S = 60.0
MIN_EVERY_S = 0.1
MAX_EVERY_S = 86400.0
MAX_AGE_S = 86400.0  # publishers keep 10,000 batches: an older snapshot cannot catch up
CLOSE_S = 60.0
MODE = 0o600  # it has workers, addresses and blocks of all tenants

logger = logging.getLogger("kvpool.index")


class SnapshotFile:
    """Writes ``packed()`` to ``path`` every ``every_s`` seconds, and once more at ``close``.

    ``packed``: see ``Fleet.packed``; called in the file's thread. A failing write is logged once an outage,
    and the former file stays. Errors: ``ConfigError`` for an unwritable place.
    """

    def __init__(
        self,
        path: Path,
        packed: Callable[[], AbstractContextManager[Sequence[bytes]]],
        *,
        every_s: float = DEFAULT_EVERY_S,
    ) -> None:
        check_place(path)
        if not MIN_EVERY_S <= every_s <= MAX_EVERY_S:
            raise ConfigError(
                f"a snapshot is written every {MIN_EVERY_S:g} to {MAX_EVERY_S:g} seconds, not {every_s:g}"
            )
        self._path, self._packed, self._every_s = path, packed, every_s
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="kvpool-snapshot", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Write once more and end the thread. Idempotent. Blocks for at most ``CLOSE_S`` seconds."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            self._write()
        self._write()

    def _write(self) -> None:
        try:
            with self._packed() as parts:
                write(self._path, parts)
        except (OSError, KVPoolError) as error:
            if not self._failed:
                why = error.strerror if isinstance(error, OSError) else None
                logger.warning("no snapshot can be written to %s: %s", self._path, why or error)
            self._failed = True
        except Exception:
            if not self._failed:
                logger.exception("no snapshot can be written to %s", self._path)
            self._failed = True
        else:
            if self._failed:
                logger.info("snapshots are written to %s again", self._path)
            self._failed = False


def check_place(path: Path) -> None:
    """Errors: ``ConfigError`` for an unwritable path."""
    folder = path.parent
    if path.is_symlink():
        raise ConfigError(f"--snapshot {path}: this is a symbolic link: name the file itself")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--snapshot {path}: this is not a file: name one, or one that is still to be made")
    if not folder.is_dir():
        raise ConfigError(f"--snapshot {path}: name a file in a folder that is there")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--snapshot {path}: the folder {folder} cannot be written")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Keep other indexes from the file, by a lock on ``path.lock``, which is left there.

    It is held for the index's life and nobody waits for it, so a stopped holder delays no other. It is not taken
    over: the holder may go on, and two indexes would replace each other's snapshots.
    Errors: ``ConfigError`` when another index has the lock, or the path is unwritable.
    """
    check_place(path)
    try:
        descriptor = os.open(
            path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, MODE
        )
    except OSError as error:
        raise ConfigError(
            f"--snapshot {path}: {path.name}.lock cannot be opened: {error.strerror}"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--snapshot {path}: another index writes this file: give each index a file of its own, "
                "or end that one; one that is stopped (SIGSTOP, a frozen container) still counts"
            ) from error
        except OSError as error:
            raise ConfigError(f"--snapshot {path}: cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


def write(path: Path, parts: Sequence[bytes]) -> None:
    """Write all parts in order, or leave the file as it is. Blocking. Errors: ``OSError``."""
    beside = path.with_name(path.name + ".new")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()  # of a killed index, or a link
    with open(beside, "xb", opener=_open) as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path, *, max_age_s: float = MAX_AGE_S, max_nbytes: int = MAX_NBYTES) -> Snapshot | None:
    """The snapshot in the file; None: no file. Blocking.

    Errors: ``SnapshotRefused``, one line, for an unreadable, damaged or outdated file, above ``max_nbytes``,
    or of another version. The file may stay: the next snapshot replaces it.
    """
    try:
        with open_file(path, follow=False) as file:
            if (nbytes := os.fstat(file.fileno()).st_size) > max_nbytes:
                raise SnapshotRefused(
                    f"{path} has more than {max_nbytes} bytes: raise --max-memory to read it"
                )
            packed = file.read(nbytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise SnapshotRefused(f"{path} cannot be read: {why}") from error
    try:
        snapshot = unpack(packed)
    except SnapshotRefused as error:
        raise SnapshotRefused(f"{path}: {error}") from error
    age_s = age(snapshot)
    if age_s > max_age_s:
        raise SnapshotRefused(f"{path}: this snapshot is {age_s:.0f} s old, and {max_age_s:g} s is the limit")
    return snapshot


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, MODE)


def age(snapshot: Snapshot) -> float:
    """Seconds since it was taken, by the wall clock; 0 if the clock went back."""
    return max(0.0, time.time() - snapshot.written_at_s)
