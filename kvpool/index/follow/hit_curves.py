"""``HitCurves``: the hit rates of pools of any size, from what a pool's engines sampled of their requests.

One curve counts all engines as one stream of requests; each tenant has a curve of its own. A request waits for
``HOLD_S``, until all engines have written theirs of that time; then they are in order. A curve begins without blocks
and lives for twice ``LIFE_S``. Two overlap; the older is shown, so at least ``LIFE_S`` of history counts.

Bounds: ``MAX_TENANTS`` curves beside that of all, two lives each of ``reuse.MOST_BLOCKS`` blocks (13 MB); of a tenant
``MAX_ENGINES`` documents a round; of a curve ``BLOCKS_PER_S`` sampled uses a second, about 5 us each in a life: a
hundredth of a core; of more, its sample gets thinner. A tenant's documents change its own curve, and that of all.

Threads: one.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvpool.discovery.reuse import HASHES, ReuseCurve
from kvpool.discovery.sample import KEEP_S, MAX_SHIFT, Sample, largest, unpack_sample
from kvpool.discovery.traffic import MAX_ENGINES, WINDOWS, Seen, unpack_traffic
from kvpool.index.answer import HitCurve

ALL = ""  # the name of the curve of all tenants
LIFE_S = 86_400.0
MAX_TENANTS = 16
BLOCKS_PER_S = 2048.0
MAX_BLOCKS = 1 << 15  # at once
REQUEST_COST = 16  # in blocks: 80 us
HOLD_S = 25.0  # longer than between two writes of an engine and two readings together


class HitCurves:
    """``clock``: monotonic seconds. ``wall``: seconds since the epoch, for people."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall = clock, wall
        self._curves: dict[str, _Curve] = {}
        self._known: dict[str, OrderedDict[str, _Known]] = {}  # by tenant and key
        self._seen: dict[str, Seen] = {}  # of the longest window
        self._only = ""  # the tenant that alone has asked: its curve is that of all

    def read(self, documents: Mapping[str, Mapping[str, bytes]]) -> dict[str, Seen]:
        """Take what is new in engines' documents, by tenant and key. Returns all tenants' traffic by window.

        Unreadable documents are skipped.
        """
        now_s = self._clock()
        windows = {name: Seen() for name in WINDOWS}
        samples: dict[str, list[Sample]] = {}
        for tenant, of_tenant in documents.items():
            seen, parts = Seen(), {}
            for key, raw in islice(of_tenant.items(), MAX_ENGINES):
                if (document := unpack_traffic(raw)) is None:
                    continue
                for name, in_window in document.windows.items():
                    windows[name].include(in_window)
                seen.include(document.windows["24h"])
                if document.sample is not None:
                    parts[key] = document.sample
            self._seen[tenant] = seen
            samples[tenant] = self._new(tenant, parts, now_s)
        self._known = {tenant: known for tenant, known in self._known.items() if tenant in documents}
        self._seen = {tenant: seen for tenant, seen in self._seen.items() if tenant in documents}
        self._seen[ALL] = windows["24h"]
        self._add(samples, now_s)
        return windows

    def shown(self, pool_blocks: Mapping[str, int], block_nbytes: float) -> dict[str, HitCurve]:
        """By tenant and ``ALL``, those with requests. ``pool_blocks``: today's sizes."""
        found = {}
        curves = dict(self._curves)
        if self._only and ALL in curves:
            curves[self._only] = curves[ALL]
        for name, curve in curves.items():
            if not curve.requests:
                continue
            seen = self._seen.get(name, Seen())
            block_tokens = seen.block_tokens / seen.blocks if seen.blocks else 0.0
            found[name] = curve.shown(block_tokens, pool_blocks.get(name, 0), block_nbytes)
        return found

    def _new(self, tenant: str, parts: Mapping[str, Any], now_s: float) -> list[Sample]:
        """What is new of this tenant's engines, timed by ``clock``."""
        known, salt, wall_s = self._known.setdefault(tenant, OrderedDict()), _salt(tenant), self._wall()
        found = []
        for key, part in parts.items():
            before = known.get(key, _Known())
            try:
                sample, counts = unpack_sample(part, before.counts)
            except (ValueError, TypeError, KeyError):
                continue
            known[key] = _Known(counts, now_s)
            known.move_to_end(key)
            if len(sample.sampled):
                # Clocks are compared only as far as the last reading leaves room for it.
                ago_s = max(0.0, min(wall_s - part["written_s"], now_s - before.read_at_s, KEEP_S))
                at_s = sample.at_s - part["written_s"] + now_s - ago_s
                found.append(sample._replace(at_s=at_s, numbers=sample.numbers ^ salt))
        while len(known) > 2 * MAX_ENGINES:
            known.popitem(last=False)
        return found

    def _add(self, samples: Mapping[str, list[Sample]], now_s: float) -> None:
        for name in [name for name, curve in self._curves.items() if not curve.lives_on(now_s)]:
            del self._curves[name]
        of_all = [sample for found in samples.values() for sample in found]
        asking = {name for name, found in samples.items() if found}
        if ALL not in self._curves:
            self._only = next(iter(asking)) if len(asking) == 1 else ""
        elif self._only and asking - {self._only}:
            self._curves[self._only], self._only = copy.deepcopy(self._curves[ALL]), ""
        for name, found in {ALL: of_all, **samples}.items():
            if name == self._only != ALL:
                continue
            if found and name not in self._curves and len(self._curves) <= MAX_TENANTS:
                self._curves[name] = _Curve(now_s, self._wall)
            if name in self._curves:
                self._curves[name].add(found, now_s)


class _Known(NamedTuple):
    """Of an engine: requests and blocks, and the last reading."""

    counts: tuple[int, int] = (0, 0)
    read_at_s: float = -math.inf


class _Curve:
    """``_lives``: the older first. ``_waiting``: the requests of the last ``HOLD_S``, the oldest first."""

    def __init__(self, now_s: float, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._lives = [_Life(ReuseCurve(), now_s, wall())]
        self._waiting: Sample | None = None
        self._unsampled = (0, 0)  # requests and blocks, which the next sampled one stands for
        self._room, self._room_at_s = float(MAX_BLOCKS), now_s  # for sampled blocks

    @property
    def requests(self) -> int:
        return self._lives[0].curve.requests

    def lives_on(self, now_s: float) -> bool:
        """Begin a new life when due; false: the older one had no request."""
        if now_s - self._lives[-1].began_s >= LIFE_S:
            self._lives.append(_Life(ReuseCurve(), now_s, self._wall()))
        if len(self._lives) > 2:
            del self._lives[0]
        return len(self._lives) < 2 or self.requests > 0

    def add(self, samples: Sequence[Sample], now_s: float) -> None:
        """Take requests, and count those before the last ``HOLD_S``."""
        self._room = min(float(MAX_BLOCKS), self._room + (now_s - self._room_at_s) * BLOCKS_PER_S)
        self._room_at_s = now_s
        waiting = [] if self._waiting is None else [self._waiting]
        if samples:
            waiting += self._thinned(_merged(samples))
        if not waiting:
            return
        merged = _merged(waiting)
        due = int(np.searchsorted(merged.at_s, now_s - HOLD_S, side="right"))
        for life in self._lives:
            _follow(life.curve, _cut(merged, 0, due))
        rest = _cut(merged, due, len(merged.sampled))
        self._waiting = rest if len(rest.sampled) else None

    def _thinned(self, sample: Sample) -> list[Sample]:
        """As many of its blocks as there is room for, without requests that have none then."""
        owners = np.repeat(np.arange(len(sample.sampled)), sample.sampled)
        requests, blocks = self._unsampled
        for shift in range(sample.shift, MAX_SHIFT + 1):
            kept = sample.numbers <= largest(shift)
            sampled = np.bincount(owners[kept], minlength=len(sample.sampled))
            rows = np.flatnonzero(sampled)
            cost = int(sampled.sum()) + REQUEST_COST * len(rows)
            if cost <= self._room:
                break
        if not 0 < cost <= self._room:
            self._unsampled = (requests + int(sample.requests.sum()), blocks + int(sample.blocks.sum()))
            return []
        self._room -= cost
        self._unsampled = (0, 0)
        stands_for = np.minimum(np.searchsorted(rows, np.arange(len(sampled))), len(rows) - 1)
        of_requests, of_blocks = (
            np.bincount(stands_for, weights=column).astype(np.int64)
            for column in (sample.requests, sample.blocks)
        )
        of_requests[0] += requests
        of_blocks[0] += blocks
        return [Sample(shift, sample.at_s[rows], of_requests, of_blocks, sampled[rows], sample.numbers[kept])]

    def shown(self, block_tokens: float, pool_blocks: int, block_nbytes: float) -> HitCurve:
        life = self._lives[0]
        sizes, rates = zip(*life.curve.points(), strict=True)
        return HitCurve(
            sizes, rates, life.curve.requests, life.curve.asked_blocks, life.curve.share, life.since_s, block_tokens,
            pool_blocks, block_nbytes,
        )  # fmt: skip


class _Life(NamedTuple):
    """``began_s``: by the clock. ``since_s``: for people."""

    curve: ReuseCurve
    began_s: float
    since_s: float


def _follow(curve: ReuseCurve, sample: Sample) -> None:
    curve.lower(HASHES >> sample.shift)
    curve.count(int(sample.requests.sum()), int(sample.blocks.sum()))
    followed = sample.numbers <= np.uint64(curve.threshold - 1)
    owners = np.repeat(np.arange(len(sample.sampled)), sample.sampled)[followed]
    numbers, at = sample.numbers[followed].tolist(), 0
    for count in np.unique(owners, return_counts=True)[1].tolist():
        curve.follow(numbers[at : at + count])
        at += count


def _cut(sample: Sample, begin: int, end: int) -> Sample:
    first, last = int(sample.sampled[:begin].sum()), int(sample.sampled[:end].sum())
    here = slice(begin, end)
    return Sample(
        sample.shift,
        sample.at_s[here],
        sample.requests[here],
        sample.blocks[here],
        sample.sampled[here],
        sample.numbers[first:last],
    )


def _merged(samples: Sequence[Sample]) -> Sample:
    """The requests of several, the oldest first."""
    shifts, *columns, numbers = zip(*samples, strict=True)
    at_s, requests, blocks, sampled = map(np.concatenate, columns)
    order = np.argsort(at_s, kind="stable")
    first = np.cumsum(sampled) - sampled
    sampled, first = sampled[order], first[order]
    places = np.repeat(first - (np.cumsum(sampled) - sampled), sampled) + np.arange(int(sampled.sum()))
    return Sample(
        max(shifts), at_s[order], requests[order], blocks[order], sampled, np.concatenate(numbers)[places]
    )


def _salt(tenant: str) -> np.uint64:
    """Keeps tenants' blocks apart: low bits, which decide over no sample."""
    return np.uint64(int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=4).digest(), "big"))
