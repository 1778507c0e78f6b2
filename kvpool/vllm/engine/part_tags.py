"""PartTags: a rank's records on their way to the pool, each with a tag, and a number for each of its parts.

Threads: the worker's model thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass
class _Record:
    unstaged: int  # parts
    under_way: int
    ok: bool = True


class PartTags:
    """``most_parts``: of any record."""

    def __init__(self, most_parts: int) -> None:
        self._most_parts = most_parts
        self._records: dict[int, _Record] = {}

    def begin(self, parts: Mapping[int, int]) -> list[int]:
        """The numbers of new records' parts, record after record; ``parts``: how many each has, by tag."""
        self._records |= {tag: _Record(count, count) for tag, count in parts.items()}
        return [tag * self._most_parts + part for tag, count in parts.items() for part in range(count)]

    def staged(self, numbers: Iterable[int]) -> Iterator[int]:
        """Of these parts, the tags of records that are now staged as a whole."""
        for tag in (number // self._most_parts for number in numbers):
            self._records[tag].unstaged -= 1
            if not self._records[tag].unstaged:
                yield tag

    def ended(self, stored: Iterable[tuple[int, bool]]) -> Iterator[tuple[int, bool]]:
        """Of these parts, the (tag, all parts are in the pool) of records that ended."""
        for number, ok in stored:
            tag = number // self._most_parts
            record = self._records[tag]
            record.under_way, record.ok = record.under_way - 1, record.ok and ok
            if not record.under_way:
                del self._records[tag]
                yield tag, record.ok

    def of(self, numbers: Iterable[int]) -> set[int]:
        """The tags of the records of these parts."""
        return {number // self._most_parts for number in numbers}

    def give_up(self) -> tuple[list[int], list[int]]:
        """The tags that are not staged as a whole, and all; nothing is under way any more."""
        records, self._records = self._records, {}
        return [tag for tag, record in records.items() if record.unstaged], list(records)

    @property
    def tags(self) -> frozenset[int]:
        """Of records under way."""
        return frozenset(self._records)

    def __len__(self) -> int:
        return len(self._records)
