"""PageMover: whole pages between SGLang's host memory and the pool, one call after the other.

SGLang's threads wait inside these calls, so every batch has a deadline, and a call returns only when nothing touches
the host memory any more: SGLang gives the pages of a call that has returned to other requests. Each call has a
``BlockMover`` of its own; a block is a page, which has a record for each of its buffers.

Threads: any, several at once; ``_lock`` guards ``_speeds``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from kvpool import metrics
from kvpool.config import HiCacheConfig
from kvpool.errors import StoreUnavailable
from kvpool.sglang.faults import Faults
from kvpool.sglang.page_keys import Form, PageKeys, is_hash
from kvpool.sglang.pages import HostPages
from kvpool.sglang.pool_state import PoolState
from kvpool.store import Store
from kvpool.transfer import BlockMover, HostMemory, Moved, Need, Record
from kvpool.transfer.mover import PART_NBYTES, STORE_TIMEOUT_S

ASK_KEYS = 16384  # in one existence check: a page is many where the layout puts layers first
SETTLE_STEP_S = 1.0
MAX_SPEEDS = 1024  # kept until SGLang asks for them

Way = Literal["prefetch", "backup"]


class PageMover:
    """Moves ``pages`` of one server. Errors of its calls: ``StoreUnavailable``, after it was counted."""

    def __init__(
        self,
        store: Store,
        pages: HostPages,
        keys: PageKeys,
        config: HiCacheConfig,
        faults: Faults,
        state: PoolState,
    ) -> None:
        self._store, self._pages, self._keys = store, pages, keys
        self._config, self._faults, self._state = config, faults, state
        self._count = state.counters.add
        self._lock = threading.Lock()
        self._speeds: dict[Way, deque[tuple[int, float]]] = {
            way: deque(maxlen=MAX_SPEEDS) for way in ("prefetch", "backup")
        }

    def leading(self, form: Form, hashes: Sequence[str]) -> int:
        """How many leading pages the pool has. Blocking, for at most ``lookup_timeout_s``."""
        width = len(self._pages.sizes(form))
        names = self._names(form, self._valid(hashes))
        self._count(metrics.LOOKUP_REQUESTS)
        try:
            self._faults.delay(self._config.lookup_timeout_s)
            found = self._leading(names, width)
        except StoreUnavailable:
            self._count(metrics.LOOKUP_FAILURES, 1, "store_unavailable")
            raise
        self._state.answered()
        return next((place for place in range(found) if self._faults.miss()), found)

    def _leading(self, names: list[str], width: int) -> int:
        end = time.monotonic() + self._config.lookup_timeout_s
        found, step = 0, max(1, ASK_KEYS // width) * width
        for first in range(0, len(names), step):
            asked = names[first : first + step]
            timeout_s = end - time.monotonic()
            if timeout_s <= 0:
                raise StoreUnavailable(f"no answer within {self._config.lookup_timeout_s:g} s")
            self._count(metrics.LOOKUP_BLOCKS, len(asked))
            there = self._store.touch_many(asked, timeout_s=timeout_s)
            found += (there.index(False) if False in there else len(there)) // width
            if False in there:
                break
        return found

    def load(self, form: Form, hashes: Sequence[str], views: Sequence[memoryview]) -> int:
        """Load pages into ``views``; how many leading ones have come, and proved themselves.

        Blocking, for at most ``max_load_s``; a pool that makes no progress for ``lookup_timeout_s`` ends it.
        """
        width = self._width(form, hashes, views)
        valid = self._valid(hashes)
        wanted = next((place for place in range(len(valid)) if self._faults.miss()), len(valid))
        records = [
            Record(*pair)
            for pair in zip(self._names(form, valid[:wanted]), views[: wanted * width], strict=True)
        ]
        try:
            self._faults.delay(self._config.lookup_timeout_s)
        except StoreUnavailable:
            self._count(metrics.LOAD_REQUESTS, 1, "store_unavailable")
            raise
        moved = self._move(
            form,
            lambda mover: mover.load(
                "pages",
                records,
                timeout_s=self._config.lookup_timeout_s,
                max_s=self._config.max_load_s,
                width=width,
                need=Need.LEADING,
                short=wanted < len(hashes),
            ),
        )
        self._measure("prefetch", moved)
        return sum(moved.moved)

    def save(self, form: Form, hashes: Sequence[str], views: Sequence[memoryview]) -> list[bool]:
        """Store the pages that the pool does not have; which of them it has now.

        Blocking, for as long as the pool makes progress; nothing but other stores waits for it.
        """
        width = self._width(form, hashes, views)
        valid = [place for place, key in enumerate(hashes) if is_hash(key)]
        if len(valid) < len(hashes):
            self._count(metrics.STORE_SKIPPED_BLOCKS, len(hashes) - len(valid), "fault")
        names = self._names(form, [hashes[place] for place in valid])
        pages = [views[place * width : (place + 1) * width] for place in valid]
        # A record that is damaged on purpose is one byte short.
        ends = [-1 if self._faults.corrupt() else None for _ in valid]
        sent = [view[:end] for page, end in zip(pages, ends, strict=True) for view in page]
        try:
            self._faults.delay(STORE_TIMEOUT_S)
        except StoreUnavailable:
            self._count(metrics.STORE_SKIPPED_BLOCKS, len(valid), "store_unavailable")
            raise
        records = [Record(*pair) for pair in zip(names, sent, strict=True)]
        moved = self._move(form, lambda mover: mover.store("pages", records, width=width))
        self._measure("backup", moved)
        saved = [False] * len(hashes)
        for place, ok in zip(valid, moved.moved, strict=True):
            saved[place] = ok
        return saved

    def take_speeds(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """(pages, GB/s) of each load, and of each store, since the last call."""
        with self._lock:
            prefetched, backed_up = ([*self._speeds[way]] for way in ("prefetch", "backup"))
            for speeds in self._speeds.values():
                speeds.clear()
        return prefetched, backed_up

    def _move(self, form: Form, begin: Callable[[BlockMover[Record]], None]) -> Moved:
        """Do one job, and wait until nothing of it touches a buffer any more, however this is left."""
        sizes = self._pages.sizes(form)
        part_items = len(sizes) * max(1, PART_NBYTES // sum(sizes))
        mover = BlockMover(self._store, HostMemory(part_items), self._state.counters)
        try:
            begin(mover)
            while not mover.drain(SETTLE_STEP_S):
                pass
            finished = mover.poll()
        finally:
            mover.close()
        (moved,) = finished.loads or finished.stores
        if isinstance(moved.error, StoreUnavailable):
            self._state.unavailable(moved.error)
        elif moved.error is not None:
            self._state.fault(f"{type(moved.error).__name__}: {moved.error}", moved.error)
        else:
            self._state.answered()
        return moved

    def _width(self, form: Form, hashes: Sequence[str], views: Sequence[memoryview]) -> int:
        """Buffers of a page. Errors: ``ValueError`` when keys and buffers do not belong together."""
        sizes = self._pages.sizes(form)
        if [view.nbytes for view in views] != list(sizes) * len(hashes):
            raise ValueError(f"{len(views)} buffers are not those of {len(hashes)} pages of {sizes} bytes")
        return len(sizes)

    def _valid(self, hashes: Sequence[str]) -> Sequence[str]:
        """The hashes before the first that is none."""
        place = next((place for place, key in enumerate(hashes) if not is_hash(key)), len(hashes))
        if place < len(hashes):
            self._state.fault(f"{hashes[place]!r:.80} is no hash of a page", None)
            self._count(metrics.LOOKUP_FAILURES, 1, "fault")
        return hashes[:place]

    def _names(self, form: Form, hashes: Sequence[str]) -> list[str]:
        return self._keys.keys(form, [bytes.fromhex(key) for key in hashes], len(self._pages.sizes(form)))

    def _measure(self, way: Way, moved: Moved) -> None:
        if moved.sent:
            with self._lock:
                self._speeds[way].append((moved.sent, moved.nbytes / max(moved.seconds, 1e-9) / 1e9))
