"""A store of which a test writes how blocks move: it keeps no documents, counts nothing and has nothing to list."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.store import Store
from kvpool.store.store import StoredBlock


class BlockStore(Store):
    def counters(self) -> dict[str, int]:
        return {}

    def _announce(self, key: str, document: bytes, lease_s: float) -> None: ...

    def _announcements(self, prefix: str, suffix: str = "") -> dict[str, bytes]:
        return {}

    def _withdraw(self, key: str) -> bool:
        return False

    def _withdraw_all(self, prefix: str) -> int:
        return 0

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        return iter(())
