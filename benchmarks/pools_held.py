"""``NearFar``: which blocks a near pool of the host and a far one behind it hold, and what goes from one to the other.

Rules are those of a directory's eviction (``kvpool/_native/store/evict.cpp``) and of ``near_far/behind.cpp``. Time is
the caller's; a copy is there at once. Blocks have numbers. One thread.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.discovery.trace import Hashes

BUCKETS = 4096  # directories of a pool, by the last digits of the hash
SAMPLE = 1024  # records that eviction looks at, in whole buckets; it deletes the oldest tenth of them
SHORTEST_SPAN_S, LONGEST_SPAN_S = 15.0, 600.0  # between two uses that far is told of
TOGETHER = 256  # uses in a batch

Blocks = npt.NDArray[np.int32]


class Directory:
    """A pool of the file store with room for ``most`` blocks. ``hashes``: by block. ``there``: likewise."""

    def __init__(self, most: int, hashes: Hashes) -> None:
        self.most = most
        self.there = np.zeros(len(hashes), bool)
        self._bucket = (hashes & np.uint64(BUCKETS - 1)).astype(np.int64)
        self._used = np.zeros(len(hashes), np.int64)
        self._entries = np.zeros(
            (BUCKETS, 8), np.int32
        )  # a bucket's blocks, and behind them nothing of meaning
        self._counts = np.zeros(BUCKETS, np.int64)
        self._held = self._uses = self._cursor = 0

    def use(self, blocks: Blocks, *, together: bool = True) -> None:
        """What is there counts as used; of one batch, the first one last: the others are of no use without it."""
        order = np.arange(self._uses, self._uses + len(blocks))
        self._used[blocks] = order[::-1] if together else order
        self._uses += len(blocks)

    def add(self, blocks: Blocks, *, together: bool) -> None:
        """They are not there."""
        while self.most and len(blocks):
            if self._held == self.most:
                self._evict()
            now, blocks = np.split(blocks, [self.most - self._held])
            self.there[now] = True
            self._held += len(now)
            self.use(now, together=together)
            self._enter(now)

    def _enter(self, blocks: Blocks) -> None:
        blocks = blocks[np.argsort(self._bucket[blocks], kind="stable")]
        of = self._bucket[blocks]
        places = self._counts[of] + np.arange(len(of)) - np.searchsorted(of, of)
        self._counts += np.bincount(of, minlength=BUCKETS)
        while self._counts.max() > self._entries.shape[1]:
            self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)], axis=1)
        self._entries[of, places] = blocks

    def _evict(self) -> None:
        from_here = np.roll(np.arange(BUCKETS), -self._cursor)
        looked = min(BUCKETS, int(np.searchsorted(np.cumsum(self._counts[from_here]), SAMPLE)) + 1)
        buckets = from_here[:looked]
        self._cursor = (self._cursor + looked) % BUCKETS
        counts = self._counts[buckets]
        sample = self._entries[buckets][np.arange(self._entries.shape[1]) < counts[:, None]]
        oldest = -(-len(sample) // 10) + (looked == BUCKETS)  # of a whole pool also what is too much
        order = np.argsort(self._used[sample])
        self.there[sample[order[:oldest]]] = False
        self._held -= len(order[:oldest])
        self._counts[buckets] = 0
        self._enter(sample[order[oldest:]])


class Counts(NamedTuple):
    """Blocks. ``read``: from far, with ``read_once`` of those that were written there. ``again``: of the ``written``
    ones, copies of what far had evicted while near had it.
    """

    near: int
    far: int
    written: int
    again: int
    read_once: int


class NearFar:
    """``far_gets_all``: else what is loaded, or computed again, after it was stored."""

    def __init__(self, near: Directory, far: Directory, *, far_gets_all: bool) -> None:
        self.near, self.far, self._all = near, far, far_gets_all
        blocks = len(near.there)
        self._due_s = np.zeros(blocks)  # when far is to hear of the next use
        self._was_far, self._reused, self._unread = (np.zeros(blocks, bool) for _ in range(3))
        self._span_s, self._lengthens_s = SHORTEST_SPAN_S, SHORTEST_SPAN_S
        self.counts = Counts(0, 0, 0, 0, 0)

    def ask(self, blocks: Blocks, findable: int, now_s: float, device: int = 0) -> int:
        """A prompt is looked up. What is there of its first ``findable`` blocks, behind the ``device`` ones that its
        engine has, is loaded, and the rest is stored. Returns how many leading ones were somewhere.
        """
        near = self.near.there[blocks[:findable]]
        is_there = near | self.far.there[blocks[:findable]]
        leading = findable if is_there.all() else int(np.argmin(is_there))
        found, is_near = blocks[:leading], near[:leading]
        self.near.use(found[is_near])
        self.far.use(found[~is_near])
        self._tell(found[is_near], now_s)
        loaded, is_near = found[device:], is_near[device:]
        self._reuse(loaded[is_near], now_s)
        self._load(loaded[~is_near], now_s)
        self.counts = self.counts._replace(near=self.counts.near + int(is_near.sum()))
        rest = blocks[max(leading, device) :]
        is_near = self.near.there[rest]
        self._reuse(rest[is_near], now_s)
        self._tell(rest[is_near], now_s)
        self._put(self.near, rest, together=True)
        if self._all:
            self._copy(rest[~is_near], now_s)
        return max(leading, device)

    def _load(self, blocks: Blocks, now_s: float) -> None:
        """What near lacks and far has."""
        self._is_far(blocks, now_s)
        self.near.add(blocks, together=False)
        read = int(self._unread[blocks].sum())
        self._unread[blocks] = False
        self.counts = self.counts._replace(
            far=self.counts.far + len(blocks), read_once=self.counts.read_once + read
        )

    def _reuse(self, blocks: Blocks, now_s: float) -> None:
        if not self._all:
            first = blocks[~self._reused[blocks]]
            self._reused[first] = True
            self._copy(first, now_s)

    def _copy(self, blocks: Blocks, now_s: float) -> int:
        """To far, which may have some of them. Returns how many it lacked."""
        new = self._put(self.far, blocks, together=False)
        self._is_far(blocks, now_s)
        if self.far.most:
            self._unread[new] = True
            self.counts = self.counts._replace(written=self.counts.written + len(new))
        return len(new)

    @staticmethod
    def _put(pool: Directory, blocks: Blocks, *, together: bool) -> Blocks:
        """Returns those that were not there."""
        is_there = pool.there[blocks]
        new: Blocks = blocks[~is_there]
        pool.use(blocks[is_there])
        pool.add(new, together=together)
        pool.use(blocks, together=together)
        return new

    def _is_far(self, blocks: Blocks, now_s: float) -> None:
        self._due_s[blocks] = now_s + self._span_s
        self._was_far[blocks] = True

    def _tell(self, blocks: Blocks, now_s: float) -> None:
        """Far hears of what was used near, and gets again what it lacks of that."""
        if not self.far.most:
            return
        blocks = blocks[self._due_s[blocks] <= now_s]
        for first in range(0, len(blocks), TOGETHER):
            told = blocks[first : first + TOGETHER]
            has = self.far.there[told]
            self.far.use(told[has])
            self._is_far(told[has], now_s)
            lacking = told[~has]
            self._due_s[lacking] = now_s + self._span_s
            was_far = self._was_far[lacking]
            if was_far.any():
                self._span_s = max(self._span_s / 2, SHORTEST_SPAN_S)
                self._lengthens_s = now_s + self._span_s
            elif now_s >= self._lengthens_s:
                self._span_s = min(2 * self._span_s, LONGEST_SPAN_S)
                self._lengthens_s = now_s + self._span_s
            again = self._copy(lacking if self._all else lacking[was_far], now_s)
            self.counts = self.counts._replace(again=self.counts.again + again)
