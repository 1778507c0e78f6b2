"""``LookupKeys``: a lookup for an engine in Python."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool import _native
from kvpool.store.batch import END_OF_ALL, LookupGroup


class LookupKeys:
    """A lookup's keys, spelled on access: group by group, record by record, rank by rank.

    The Python twin of ``_native/store/lookup.h``. ``prefix``: of every key. The queue's lock guards it.
    """

    def __init__(self, prefix: str, groups: Sequence[LookupGroup]) -> None:
        self._prefix, self.groups = prefix, groups
        self._ends: list[int] = []  # of each group's keys
        self._end_tokens = END_OF_ALL  # of the usable prefix
        count = 0
        for group in groups:
            count += group.records * group.ranks
            self._ends.append(count)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, part: slice) -> list[str]:
        return [self._key(*self._place(index)) for index in range(*part.indices(len(self)))]

    def next_wanted(self, index: int) -> int:
        """First key from ``index`` on that is still worth asking; the number of keys: none is."""
        while index < len(self):
            group, end, record, _ = self._place(index)
            if (record + 1) * group.record_tokens <= self._end_tokens:
                return index
            index = end
        return index

    def take(self, start: int, statuses: Sequence[int]) -> None:
        """Learn from the answers to keys from ``start`` on which later keys are useless."""
        for index, status in enumerate(statuses, start):
            if status == _native.MISS:
                group, _, record, _ = self._place(index)
                if not group.sliding_window:
                    self._end_tokens = min(self._end_tokens, record * group.record_tokens)
            elif status != _native.OK:
                self._end_tokens = 0  # no answer will come

    def records(self, statuses: bytes) -> bytes:
        """Fold a status per key into a status per record; an unanswered part makes its record a miss."""
        for bad in (_native.FAULT, _native.REFUSED, _native.TIMED_OUT, _native.CANCELLED):
            if bad in statuses:
                return bytes([bad]) * sum(group.records for group in self.groups)
        whole = []
        start = 0
        for group, end in zip(self.groups, self._ends, strict=True):
            both = (1 << 8 * group.records) - 1
            for rank in range(group.ranks):
                both &= int.from_bytes(statuses[start + rank : end : group.ranks], "little")
            whole.append(both.to_bytes(group.records, "little"))
            start = end
        return b"".join(whole)

    def _key(self, group: LookupGroup, _: int, record: int, rank: int) -> str:
        block_hash = group.hashes[record * group.hash_nbytes : (record + 1) * group.hash_nbytes]
        return f"{self._prefix}{block_hash.hex()}:{group.group}:{rank}"

    def _place(self, index: int) -> tuple[LookupGroup, int, int, int]:
        """(group, end of its keys, record, rank)."""
        start = 0
        for group, end in zip(self.groups, self._ends, strict=True):
            if index < end:
                return group, end, *divmod(index - start, group.ranks)
            start = end
        raise IndexError(index)
