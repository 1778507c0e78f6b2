"""The LoRA adapters of an engine's requests: digests of their files.

vLLM's block hashes contain only an adapter's name and path. So the pool's hashes also include the digest of
the adapter's files (``pool_hash``). A thread checks the files per request, by sizes and times if these are
unchanged. An adapter whose files ever differ from the first seen, or from those that a worker loaded
(``adapter_loads``), runs without the pool until a restart: the engine may hold blocks of either under one hash.

Threads: The scheduler's calls all of ``Adapters``, reads checks and ``_known``, and sets ``changed``; reader threads,
alive while checks wait, write ``_known``, and a check's fields before its ``done``. One adapter has one reader at a
time, so that a disk that hangs stops its own adapters alone. ``_lock`` guards what waits and what is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from vllm.logger import init_logger

from kvpool.errors import ConfigError, NoThread
from kvpool.key.checkpoint import ADAPTER_PATTERNS_OF_VLLM, checkpoint_digest
from kvpool.threads import start_thread
from kvpool.vllm.plan import AdapterFiles

logger = init_logger("vllm.kvpool")

TAG_NBYTES = 16
DIGEST_TIMEOUT_S = 10.0
RETRY_S = 30.0  # pause before unreadable files are tried again
MAX_READERS = 16  # adapters that are looked at, at once
MAX_WAITING = 1024  # checks of one adapter; of all adapters ``MAX_READERS`` times as many. More skip the pool
MAX_ADAPTERS = 4096
MAX_ENTRIES = 4096  # of one adapter's folder
_OF_ADAPTERS = (*ADAPTER_PATTERNS_OF_VLLM, ".json")
_HASH64_NBYTES = 8  # the end of a hash, by which an index knows a block
_Key = tuple[str, str]  # an adapter's name and path


@dataclass
class AdapterCheck:
    """A check of a request's adapter. ``tag``: the last known until ``done``; None: no pool (``cause``)."""

    number: int
    name: str
    path: str
    form: str  # how to read its tensors
    tag: bytes | None = None
    files: AdapterFiles | None = None  # that the tag is of; with ``done``
    done: bool = False
    cause: str = "late"

    @property
    def key(self) -> _Key:
        """What the hashes of its blocks cover."""
        return self.name, self.path


@dataclass
class _Files:
    seen: bytes = b""  # the state of the files
    digest: str = ""
    changed: bool = False
    failed_at: float | None = None


class Adapters:
    """Checks the adapters of an engine. ``settings``: further inputs to an adapter's weights."""

    def __init__(
        self,
        settings: str = "",
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = DIGEST_TIMEOUT_S,
    ) -> None:
        self._settings, self._clock, self._timeout_s = settings, clock, timeout_s
        self._known: dict[_Key, _Files] = {}
        self._lock = threading.Lock()
        self._waiting: dict[_Key, list[AdapterCheck]] = {}
        self._waits = 0  # checks in it
        self._reading: set[_Key] = set()
        self._readers = 0

    def check(self, lora_request: Any) -> AdapterCheck:
        """Start to identify an adapter. Does not block."""
        check = AdapterCheck(
            int(lora_request.lora_int_id),
            str(lora_request.lora_name),
            str(lora_request.lora_path),
            str(getattr(lora_request, "is_3d_lora_weight", False)),
        )
        known = self._known.get(check.key)
        if known is not None and known.digest and not known.changed:
            check.tag = self._tag(known.digest, check)
        # Up to 0.31, such a request's weights come from elsewhere.
        from_elsewhere = bool(getattr(lora_request, "tensorizer_config_dict", None))
        with self._lock:
            of_it = len(self._waiting.get(check.key, ()))
            if from_elsewhere or of_it >= MAX_WAITING or self._waits >= MAX_WAITING * MAX_READERS:
                check.tag, check.done = None, True
                check.cause = "unreadable" if from_elsewhere else check.cause
                return check
            self._waiting.setdefault(check.key, []).append(check)
            self._waits += 1
            starts = check.key not in self._reading and self._readers < MAX_READERS
            self._readers += starts
        if starts:
            self._start()
        return check

    def _start(self) -> None:
        try:
            start_thread(
                threading.Thread(
                    target=self._answer, args=(self._looked,), name="kvpool-adapters", daemon=True
                )
            )
        except NoThread as error:  # never reaches the engine
            logger.warning("kvpool: adapters go without the pool: %s", error)
            self._answer(lambda _: (None, "unreadable"))

    def other_files(self, name: str, path: str) -> None:
        """A worker has loaded an adapter of other files than its digest is of."""
        known = self._known.get((name, path))
        if known is not None and not known.changed:
            self._change(known, name, path)

    @staticmethod
    def _change(known: _Files, name: str, path: str) -> None:
        known.changed = True
        logger.warning(
            "kvpool: adapter %s goes without the pool until this engine restarts, for the files in %s are not those "
            "that it was loaded of, or were just written: give an adapter whose weights have changed another path",
            name,
            path,
        )

    def close(self) -> None:
        """Drop waiting checks; the threads end after their present reads."""
        with self._lock:
            self._waiting.clear()
            self._waits = 0

    def _next(self, ended: _Key | None) -> tuple[_Key, list[AdapterCheck]] | None:
        """All that waits for an adapter that nobody looks at, for a reader who ``ended`` with one; None: it is done."""
        with self._lock:
            self._reading -= {ended}
            key = next((key for key in self._waiting if key not in self._reading), None)
            if key is None:
                self._readers -= 1
                return None
            self._reading.add(key)
            checks = self._waiting.pop(key)
            self._waits -= len(checks)
            return key, checks

    def _answer(self, look: Callable[[_Key], tuple[_Files | None, str]]) -> None:
        """All that waits, as a reader."""
        key: _Key | None = None
        while (found := self._next(key)) is not None:
            key, checks = found
            try:
                known, cause = look(key)
            except Exception as error:  # never reaches the engine
                logger.warning("kvpool: adapter %s: %s: %s", key[0], type(error).__name__, error)
                known, cause = None, "unreadable"
            for check in checks:
                if known is not None:
                    check.files = AdapterFiles(check.number, *key, known.seen)
                check.tag = None if known is None else self._tag(known.digest, check)
                check.cause, check.done = cause, True

    def _looked(self, key: _Key) -> tuple[_Files | None, str]:
        """What an adapter's files are, and why None."""
        name, path = key
        if key not in self._known and len(self._known) >= MAX_ADAPTERS:
            return None, "too_many"
        known = self._known.setdefault(key, _Files())
        if known.changed:
            return None, "changed"
        if known.failed_at is not None and self._clock() < known.failed_at + RETRY_S:
            return None, "unreadable"
        folder = Path(path).expanduser()
        try:
            seen, _ = files_state(folder)
            digest = known.digest
            if seen != known.seen:
                digest = checkpoint_digest(
                    folder, patterns=ADAPTER_PATTERNS_OF_VLLM, timeout_s=self._timeout_s
                ).hex
                if files_state(folder)[0] != seen:
                    raise ConfigError(f"{folder} was written while it was read")
        except (ConfigError, NoThread, OSError) as error:
            if known.failed_at is None:
                logger.warning(
                    "kvpool: adapter %s goes without the pool, for its files cannot be looked at: %s",
                    name,
                    error,
                )
            known.failed_at = self._clock()
            return None, "unreadable"
        if known.digest and digest != known.digest:
            self._change(known, name, path)
            return None, "changed"
        known.seen, known.digest, known.failed_at = seen, digest, None
        return known, ""

    def _tag(self, digest: str, check: AdapterCheck) -> bytes:
        return hashlib.sha256(json.dumps([digest, self._settings, check.form]).encode()).digest()[:TAG_NBYTES]


def pool_hash(block_hash: bytes, tag: bytes) -> bytes:
    """The hash in the key of an adapter's block; an index knows its last 8 bytes, which stay the engine's."""
    width = len(block_hash)
    return (int.from_bytes(block_hash, "big") ^ _mask(tag, width)).to_bytes(width, "big")


def pool_hashes(block_hashes: bytes, hash_nbytes: int, tag: bytes) -> bytes:
    """``pool_hash`` of each of the packed ``block_hashes``; a millisecond per 60,000."""
    mask = numpy.frombuffer(_mask(tag, hash_nbytes).to_bytes(hash_nbytes, "big"), numpy.uint8)
    return (numpy.frombuffer(block_hashes, numpy.uint8).reshape(-1, hash_nbytes) ^ mask).tobytes()


@functools.lru_cache(maxsize=MAX_ADAPTERS)
def _mask(tag: bytes, width: int) -> int:
    """The mask for the replaced bytes, as random as the hash itself."""
    spread = hashlib.sha256(tag).digest() * 2
    return int.from_bytes(spread[: width - _HASH64_NBYTES] + bytes(_HASH64_NBYTES), "big")


def files_state(path: Path) -> tuple[bytes, int]:
    """A digest of the names, sizes and times of an adapter's files, and when the last changed, in ns of its clock.

    A write, or another file in its place, changes it, unless it comes within a tick of that clock. Other files in the
    folder do not count. Errors: ``ConfigError``, ``OSError``.
    """
    files = [path]
    if path.is_dir():
        with os.scandir(path) as entries:
            names = [entry.name for _, entry in zip(range(MAX_ENTRIES + 1), entries, strict=False)]
        if len(names) > MAX_ENTRIES:
            raise ConfigError(
                f"{path} has more than {MAX_ENTRIES} files; give the adapter a folder of its own"
            )
        files = [path / name for name in sorted(names) if name.endswith(_OF_ADAPTERS)]
    found = [(file.name, file.stat()) for file in files]
    said = [[name, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns] for name, one in found]
    return hashlib.sha256(json.dumps(said).encode()).digest(), max(
        (one.st_ctime_ns for _, one in found), default=0
    )
