"""``SeenRecords``: what this engine knows of records that the pool lacks.

It knows whether an earlier request had a record, and when the pool last had it: a lookup found it, or this engine
stored it. Each hash has one slot, which the newest record takes. Records that this engine never saw, or forgot, count
as new.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from kvpool.store import LookupGroup

SLOTS = 1 << 20  # 8 MiB
# Of its time to live, what a used record has left at least: stores renew it once a quarter of it is over.
LEAST_LEFT = 0.75
# A name is the first bytes of a hash, which also tell weights of an adapter apart (``pool_hash`` keeps the last).
# A slot holds the first 40 bits of a name, and the second in which the pool had it; 0: it never did. One word,
# because a request of 1,000 records waits for 1,000 lines of memory.
_SECONDS = (1 << 24) - 1
_NAME = (1 << 64) - 1 - _SECONDS

Record = tuple[bytes, int]
"""Hash and group."""


class SeenRecords:
    """``ttl_s``: of an unused record in the pool; 0: no limit. Hashes are those in the pool's keys.

    ``now_s``: of a clock that does not go back.
    """

    def __init__(self, ttl_s: float, now_s: float, slots: int = SLOTS) -> None:
        assert slots & (slots - 1) == 0, "a power of two"
        assert slots <= _SECONDS + 1, "the bits of a name that a slot leaves out are the slot's number"
        self._least_left_s = LEAST_LEFT * ttl_s or math.inf
        self._began_s = now_s - 1
        self._left_s = 0  # until then it was in another namespace
        self._slots = np.full(slots, 0, np.uint64)  # written, so that no request waits for its pages
        self._mask = slots - 1

    def looked_up(self, asked: LookupGroup, present: bytes, now_s: float) -> None:
        """A request had these records; ``present``: a byte for each, 1: the pool has it."""
        nbytes = asked.hash_nbytes
        first = np.ndarray((asked.records,), "<u8", asked.hashes, 0, (nbytes,))
        names = first ^ np.uint64(_of_group(asked.group))
        places = names & np.uint64(self._mask)
        names &= np.uint64(_NAME)
        words = self._slots[places]
        words *= (words & np.uint64(_NAME)) == names
        words |= names
        found = np.frombuffer(present, np.bool_)
        words[found] = names[found] | np.uint64(self._second(now_s))
        self._slots[places] = words

    def why_missed(
        self, lacking: Iterable[Record], answers: Iterable[tuple[LookupGroup, bytes]], now_s: float
    ) -> str:
        """Why a request's lookup led to no longer hit, of which it lacked some records. Call it once a request."""
        why = self.why_absent(lacking, now_s)
        for asked, present in answers:
            self.looked_up(asked, present, now_s)
        return why

    def stored(self, records: Sequence[Record], now_s: float) -> None:
        """The pool has these."""
        if records:
            names = [_name(*record) for record in records]
            second = self._second(now_s)
            words = np.array([name & _NAME | second for name in names], np.uint64)
            self._slots[[name & self._mask for name in names]] = words

    def leave(self, now_s: float) -> None:
        """The engine goes on in another namespace."""
        self._left_s = self._second(now_s)

    def why_absent(self, lacking: Iterable[Record], now_s: float) -> str:
        """Of ``metrics.MISS_REASONS``, for a few records of a prompt that the pool lacks: of the best known one."""
        seconds = []
        for record in lacking:
            name = _name(*record)
            word = self._slots.item(name & self._mask)
            if word and word & _NAME == name & _NAME:
                seconds.append(word & _SECONDS)
        if not seconds:
            return "new"
        if (last_s := max(seconds)) == 0:
            return "not_stored"
        if last_s <= self._left_s:
            return "other_namespace"
        return "evicted" if self._second(now_s) - last_s < self._least_left_s else "expired"

    def _second(self, now_s: float) -> int:
        """Of this table, from 1; it ends after 194 days."""
        return min(int(now_s - self._began_s), _SECONDS)


def _name(block_hash: bytes, group: int) -> int:
    return int.from_bytes(block_hash[:8], "little") ^ _of_group(group)


def _of_group(group: int) -> int:
    """Tells a hash's records in several groups apart."""
    return group * 0x9E3779B97F4A7C15 % (1 << 64)
