"""``Adapters``: which LoRA adapter a request is of, by its files: vLLM's block hashes hold its name and path alone.

A request's blocks lie in the pool under hashes into which the digest of the adapter's files went (``pool_hash``). Files
are looked at again for each request, from a thread of this module; by their sizes and times where these are as they
were. An adapter whose files are once not those that this engine saw first goes without the pool until the engine
restarts: the engine may hold blocks of either, under one hash.

What cannot be noticed: files that are rewritten between the moment at which the engine loads them and the first request
for the adapter.

Threads: the scheduler's calls ``check`` and ``close``, and reads checks and ``_known``; a reader's, of which there is
one while something waits, writes ``_known``, and a check's fields before its ``done``. ``_lock`` guards ``_waiting``
and ``_reading``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from vllm.logger import init_logger

from kvpool.errors import ConfigError
from kvpool.key.checkpoint import checkpoint_digest

logger = init_logger("vllm.kvpool")

TAG_NBYTES = 16
DIGEST_TIMEOUT_S = 10.0
RETRY_S = 30.0  # files that could not be read are tried again after so long
MAX_WAITING = 1024  # checks; more go without the pool
MAX_ADAPTERS = 4096
MAX_FILES = 1024  # of one adapter's folder
_HASH64_NBYTES = 8  # the end of a hash, by which an index knows a block


@dataclass
class AdapterCheck:
    """What is found out about one request's adapter. ``tag``: None: its request goes without the pool.

    Until it is ``done``, ``tag`` is what the adapter's was when it was looked at last. ``cause``: why there is none.
    """

    name: str
    path: str
    form: str  # how its tensors are to be read
    tag: bytes | None = None
    done: bool = False
    cause: str = "late"


@dataclass
class _Known:
    seen: object = None  # sizes and times of the files
    digest: str = ""
    changed: bool = False
    failed_at: float | None = None


class Adapters:
    """Checks the adapters of one engine. ``settings``: what else decides how an adapter's files become weights."""

    def __init__(
        self,
        settings: str = "",
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = DIGEST_TIMEOUT_S,
    ) -> None:
        self._settings, self._clock, self._timeout_s = settings, clock, timeout_s
        self._known: dict[tuple[str, str], _Known] = {}
        self._lock = threading.Lock()
        self._waiting: deque[AdapterCheck] = deque()
        self._reading = False

    def check(self, lora_request: Any) -> AdapterCheck:
        """Start to find out which adapter it is. Does not block."""
        check = AdapterCheck(
            str(lora_request.lora_name),
            str(lora_request.lora_path),
            str(getattr(lora_request, "is_3d_lora_weight", False)),
        )
        known = self._known.get((check.name, check.path))
        if known is not None and known.digest and not known.changed:
            check.tag = self._tag(known.digest, check)
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                check.tag, check.done = None, True
                return check
            self._waiting.append(check)
            start, self._reading = not self._reading, True
        if start:
            threading.Thread(target=self._read, name="kvpool-adapters", daemon=True).start()
        return check

    def close(self) -> None:
        """Let nothing wait any more; the thread ends with what it reads."""
        with self._lock:
            self._waiting.clear()

    def _next(self) -> AdapterCheck | None:
        with self._lock:
            self._reading = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _read(self) -> None:
        while (check := self._next()) is not None:
            try:
                check.tag, check.cause = self._looked(check)
            except Exception as error:  # the engine around must never hear of it
                logger.warning("kvpool: adapter %s: %s: %s", check.name, type(error).__name__, error)
                check.tag, check.cause = None, "unreadable"
            check.done = True

    def _looked(self, check: AdapterCheck) -> tuple[bytes | None, str]:
        """(tag, why there is none)."""
        key = (check.name, check.path)
        if key not in self._known and len(self._known) >= MAX_ADAPTERS:
            return None, "too_many"
        known = self._known.setdefault(key, _Known())
        if known.changed:
            return None, "changed"
        if known.failed_at is not None and self._clock() < known.failed_at + RETRY_S:
            return None, "unreadable"
        path = Path(check.path).expanduser()
        try:
            seen = _seen(path)
            digest = known.digest
            if seen != known.seen:
                digest = checkpoint_digest(path, timeout_s=self._timeout_s).hex
                if _seen(path) != seen:
                    raise ConfigError(f"{path} was written while it was read")
        except (ConfigError, OSError) as error:
            self._say(
                known,
                f"adapter {check.name} goes without the pool, for its files cannot be looked at: {error}",
            )
            known.failed_at = self._clock()
            return None, "unreadable"
        if known.digest and digest != known.digest:
            known.changed = True
            logger.warning(
                "kvpool: adapter %s goes without the pool until this engine restarts, for the files in %s were changed "
                "under it: give an adapter whose weights have changed another path",
                check.name,
                check.path,
            )
            return None, "changed"
        known.seen, known.digest, known.failed_at = seen, digest, None
        return self._tag(digest, check), ""

    def _tag(self, digest: str, check: AdapterCheck) -> bytes:
        return hashlib.sha256(json.dumps([digest, self._settings, check.form]).encode()).digest()[:TAG_NBYTES]

    @staticmethod
    def _say(known: _Known, sentence: str) -> None:
        if known.failed_at is None:
            logger.warning("kvpool: %s", sentence)


def pool_hash(block_hash: bytes, tag: bytes) -> bytes:
    """The hash in the key of a block that was computed with the adapter of ``tag``, of the same length.

    Its last 8 bytes are the engine's own, so that an index finds the block by what it knows of the engine's events.
    """
    width = len(block_hash)
    return (int.from_bytes(block_hash, "big") ^ _mask(tag, width)).to_bytes(width, "big")


def pool_hashes(block_hashes: bytes, hash_nbytes: int, tag: bytes) -> bytes:
    """``pool_hash`` of each of the packed ``block_hashes``; a millisecond for 60,000 of them."""
    mask = numpy.frombuffer(_mask(tag, hash_nbytes).to_bytes(hash_nbytes, "big"), numpy.uint8)
    return (numpy.frombuffer(block_hashes, numpy.uint8).reshape(-1, hash_nbytes) ^ mask).tobytes()


@functools.lru_cache(maxsize=MAX_ADAPTERS)
def _mask(tag: bytes, width: int) -> int:
    """What is not to be the engine's own of a hash is as random as the hash itself."""
    spread = hashlib.sha256(tag).digest() * 2
    return int.from_bytes(spread[: width - _HASH64_NBYTES] + bytes(_HASH64_NBYTES), "big")


def _seen(path: Path) -> object:
    """Sizes and times of the files, which are others when one was written."""
    if not path.is_dir():
        return _of_file(path)
    with os.scandir(path) as entries:
        files = [Path(entry.path) for _, entry in zip(range(MAX_FILES), entries, strict=False)]
    return sorted((file.name, *_of_file(file)) for file in files)


def _of_file(path: Path) -> tuple[int, int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
