"""``ReuseCurve``: the hit rate of a cache of any size, from the distances between requests for the same block.

A block is in an LRU cache of ``n`` blocks if fewer than ``n`` others were used since (Mattson et al. 1970), so one pass
over the requests tells the hit rate of all sizes. A hit is a leading one: a block counts only if all before it in its
prompt are there, too. All blocks of a request are looked up when it arrives, and then used in order.

Exact while all distinct blocks can be followed. With more of them, only those are whose hash is below a threshold,
which falls so that ``most_blocks`` stay; distances and counts are scaled by the share that is left, and what they lack
of all blocks asked for is counted as hits (SHARDS with its correction: Waldspurger et al., FAST 2015): a block that
each request begins with is followed or not, and its distance is a request's length.

Memory: about 200 bytes a block that is followed. Not thread-safe.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MOST_BLOCKS = 1 << 15
HASHES = 1 << 64
CHUNK = 1 << 12  # uses that are counted together
Counts = npt.NDArray[np.int64]


def _ladder() -> list[int]:
    """The sizes of a curve: all small ones, then a twentieth more each."""
    sizes = list(range(1, 101))
    while sizes[-1] < 1 << 48:
        sizes.append(math.ceil(sizes[-1] * 1.05))
    return sizes


LADDER = _ladder()


class Point(NamedTuple):
    """A cache of ``blocks``, and the share of the blocks asked for that it would have had."""

    blocks: int
    hit_rate: float


class ReuseCurve:
    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._threshold = HASHES  # blocks with a hash below it are followed
        self._uses = _Uses()
        self._largest: list[int] = []  # a heap of the hashes that are followed, negated
        self._hits = [0.0] * len(LADDER)  # blocks, by the first size that has them
        self._counted = 0.0  # blocks asked for, as the followed ones tell
        self.requests = self.asked_blocks = 0

    @property
    def share(self) -> float:
        """Of all blocks, those that are followed."""
        return self._threshold / HASHES

    @property
    def distinct_blocks(self) -> int:
        return min(round(len(self._uses) / self.share), LADDER[-1])

    @property
    def threshold(self) -> int:
        """Blocks with a hash below it are followed."""
        return self._threshold

    def lower(self, threshold: int) -> None:
        """Follow no others from now on than those with a hash below it."""
        self._threshold = min(self._threshold, threshold)
        gone = []
        while self._largest and -self._largest[0] >= self._threshold:
            gone.append(-heapq.heappop(self._largest))
        self._uses.forget(gone)

    def ask(self, hashes: Sequence[int]) -> None:
        """A prompt is asked for. ``hashes``: of its blocks in order, spread evenly over 64 bits."""
        self.count(1, len(hashes))
        self.follow(hashes)

    def count(self, requests: int, blocks: int) -> None:
        """Count requests for so many blocks in all; ``follow`` takes those that are followed, of one request each."""
        self.requests += requests
        self.asked_blocks += blocks

    def follow(self, hashes: Sequence[int]) -> None:
        """``hashes``: of a prompt's blocks in order, all of those below the threshold among them."""
        threshold = self._threshold
        followed = hashes if threshold == HASHES else [one for one in hashes if one < threshold]
        if not followed:
            return
        weight = HASHES / threshold
        self._counted += weight * len(followed)
        distances = self._uses.distances(followed)
        leading = distances[: int(np.argmin(distances != 0)) if not distances.all() else None]
        for distance, count in zip(
            *np.unique(np.maximum.accumulate(leading), return_counts=True), strict=True
        ):
            size = min(bisect_left(LADDER, int(distance) * weight), len(LADDER) - 1)
            self._hits[size] += int(count) * weight
        for one in self._uses.use(followed):
            heapq.heappush(self._largest, -one)
        while len(self._uses) > self._most:
            self.lower(-self._largest[0])

    def points(self) -> list[Point]:
        """The curve, from one block to all distinct ones; neighbours are at most a tenth apart, but for the first."""
        if not self.asked_blocks:
            return []
        hits = np.array(self._hits)
        hits[bisect_left(LADDER, self.asked_blocks / self.requests)] += self.asked_blocks - self._counted
        rates = np.clip(np.maximum.accumulate(np.cumsum(hits)) / self.asked_blocks, 0.0, 1.0).tolist()
        most = self.distinct_blocks
        found = [Point(*each) for each in zip(LADDER, rates, strict=True) if each[0] < most]
        return [*found, Point(most, rates[-1])]


class _Uses:
    """Blocks in the order in which they were last used."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}  # of a block's last use
        self._next = 0
        self._make_room(4 * CHUNK)

    def __len__(self) -> int:
        return len(self._place)

    def distances(self, hashes: Iterable[int]) -> Counts:
        """The least cache that has each block: itself and those that were used since; 0: it was never used."""
        places = np.fromiter((self._place.get(one, -1) for one in hashes), np.int64)
        found = np.zeros(len(places), np.int64)
        behind = len(self) - np.cumsum(self._in_chunk)
        for chunk in np.unique(places[places >= 0] // CHUNK).tolist():
            of_chunk = self._last[chunk * CHUNK : (chunk + 1) * CHUNK]
            since = np.cumsum(of_chunk[::-1])[::-1]
            here = places // CHUNK == chunk
            found[here] = behind[chunk] + since[places[here] - chunk * CHUNK]
        return found

    def use(self, hashes: Sequence[int]) -> list[int]:
        """The blocks among them that are new."""
        if self._next + len(hashes) > len(self._last):
            self._renumber(len(hashes))
        before = [self._place.get(one, -1) for one in hashes]
        self._set({place for place in before if place >= 0}, False)
        first, self._next = self._next, self._next + len(hashes)
        self._block[first : self._next] = hashes
        self._place.update(zip(hashes, range(first, self._next), strict=True))
        self._set({self._place[one] for one in hashes}, True)
        return list(dict.fromkeys(one for one, place in zip(hashes, before, strict=True) if place < 0))

    def forget(self, blocks: Iterable[int]) -> None:
        self._set({self._place.pop(block) for block in blocks}, False)

    def _set(self, places: set[int], last: bool) -> None:
        """Whether these are last uses."""
        at = np.fromiter(places, np.int64)
        self._last[at] = last
        change = np.bincount(at // CHUNK, minlength=len(self._in_chunk))
        self._in_chunk += change if last else -change

    def _renumber(self, more: int) -> None:
        blocks = self._block[self._last].tolist()
        self._make_room(2 * (len(blocks) + more))
        self._next = len(blocks)
        self._block[: self._next] = blocks
        self._place = dict(zip(blocks, range(self._next), strict=True))
        self._set(set(range(self._next)), True)

    def _make_room(self, uses: int) -> None:
        chunks = -(-uses // CHUNK)
        self._last = np.zeros(chunks * CHUNK, bool)
        self._block = np.zeros(chunks * CHUNK, np.uint64)
        self._in_chunk = np.zeros(chunks, np.int64)
