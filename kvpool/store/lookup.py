"""A lookup: which leading records of a prompt are in the pool. Its keys are spelled where they are sent.

``LookupKeys`` is for stores whose data path is Python; the native one has it in ``_native/store/lookup.h``. It belongs
to one batch, and ``take`` to the holder of that batch's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

from kvpool import _native
from kvpool.errors import ConfigError
from kvpool.key.key import MAX_HASH_NBYTES, MAX_INDEX, MIN_HASH_NBYTES, Namespace
from kvpool.store.batch import Batch, Running

NOWHERE = 1 << 63  # tokens; behind the end of every prompt


class LookupGroup(NamedTuple):
    """The records of a prompt in one KV-cache group: neighbours, from its first token on.

    ``hashes``: their block hashes, packed, each of ``hash_nbytes``. ``ranks``: a record is there when the parts of
    ranks 0 to ``ranks`` - 1 are. ``sliding_window``: records behind a missing one are of use.
    """

    group: int
    hashes: bytes
    hash_nbytes: int
    ranks: int
    record_tokens: int
    sliding_window: bool = False

    @property
    def records(self) -> int:
        return len(self.hashes) // self.hash_nbytes

    def check(self) -> None:
        """Errors: ``ConfigError``."""
        if not isinstance(self.hashes, bytes):
            raise ConfigError(f"packed hashes are bytes, not {type(self.hashes).__name__}")
        for name, low, high in (
            ("group", 0, MAX_INDEX),
            ("hash_nbytes", MIN_HASH_NBYTES, MAX_HASH_NBYTES),
            ("ranks", 1, MAX_INDEX + 1),
            ("record_tokens", 1, NOWHERE - 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} is a whole number from {low} to {high}, not {value!r:.40}")
        if len(self.hashes) % self.hash_nbytes:
            raise ConfigError(f"{len(self.hashes)} bytes are no hashes of {self.hash_nbytes} bytes each")


class LookupKeys(Sequence[str]):
    """The keys of a lookup, spelled when they are asked for: group by group, record by record, rank by rank."""

    def __init__(self, namespace: Namespace, groups: Sequence[LookupGroup]) -> None:
        self.namespace, self.groups = namespace, groups
        self._ends: list[int] = []  # of each group's keys
        self._end_tokens = NOWHERE  # of what may be used
        count = 0
        for group in groups:
            count += group.records * group.ranks
            self._ends.append(count)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        group, _, record, rank = self._place(index)
        start = record * group.hash_nbytes
        return self.namespace.key(group.hashes[start : start + group.hash_nbytes], group.group, rank)

    def next_wanted(self, index: int) -> int:
        """The first key from ``index`` on that is still worth asking; the number of keys: none is."""
        while index < len(self):
            group, end, record, _ = self._place(index)
            if (record + 1) * group.record_tokens <= self._end_tokens:
                return index
            index = end
        return index

    def take(self, start: int, statuses: Sequence[int]) -> None:
        """Learn from the answers to the keys from ``start`` on what is not worth asking any more."""
        for index, status in enumerate(statuses, start):
            if status == _native.MISS:
                group, _, record, _ = self._place(index)
                if not group.sliding_window:
                    self._end_tokens = min(self._end_tokens, record * group.record_tokens)
            elif status != _native.OK:
                self._end_tokens = 0  # there will be no answer

    def records(self, statuses: bytes) -> bytes:
        """One status a record, of one a key. A part that was not answered makes its record a miss."""
        for bad in (_native.FAULT, _native.TIMED_OUT, _native.CANCELLED):
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

    def _place(self, index: int) -> tuple[LookupGroup, int, int, int]:
        """(group, end of its keys, record, rank)."""
        start = 0
        for group, end in zip(self.groups, self._ends, strict=True):
            if index < end:
                return group, end, *divmod(index - start, group.ranks)
            start = end
        raise IndexError(index)


class RecordBatch:
    """A batch of ``LookupKeys`` that tells of records instead of keys."""

    def __init__(self, batch: Running, keys: LookupKeys) -> None:
        self._batch, self._keys = batch, keys
        self.done, self.wait, self.cancel, self.error = batch.done, batch.wait, batch.cancel, batch.error

    def results(self) -> bytes:
        return self._keys.records(self._batch.results())


class Lookup:
    """A lookup under way. Any thread may call any method."""

    def __init__(self, transfer: Batch, records: Sequence[int], order: Sequence[int]) -> None:
        self._transfer, self._records, self._order = transfer, records, order

    def done(self) -> bool:
        """Whether it has ended; never blocks."""
        return self._transfer.done()

    def cancel(self) -> None:
        """Give up what is not answered; never blocks."""
        self._transfer.cancel()

    def wait(self, timeout_s: float | None = None) -> list[bytes]:
        """By group, in the order in which they were given, a byte for each record: 1: all its parts are there, else 0.

        A 0 behind the first missing record of a group without a sliding window, and in any group beyond the last
        token that such groups can serve, says nothing: the record may not have been asked for.
        ``timeout_s``, blocking and errors: as ``Batch.wait``.
        """
        present = self._transfer.results(timeout_s)
        groups: list[bytes] = [b""] * len(self._order)
        start = 0
        for place, count in zip(self._order, self._records, strict=True):
            groups[place] = present[start : start + count]
            start += count
        return groups

    def __repr__(self) -> str:
        return f"<Lookup, {self._transfer!r}>"
