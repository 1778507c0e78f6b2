"""A near pool of this host before a far one of the fleet, as one store.

Reads ask near, and far for what near lacks; puts go near, and far behind them (``_native/store/near_far/near_far.h``).
Documents, notices and the servers' run id are the far pool's, since all hosts share it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import cast

from kvpool import _native
from kvpool.store.store import Notices, Store, StoredBlock, Usage, WrittenBlock

DRAIN_S = 2.0  # of a close: for what is still on its way to the far pool
_LOOK_S = 0.01


class NearFarStore(Store):
    """``file:///dir valkey://host``: what near holds asks far nothing, and either may be dead.

    ``all_goes_far``: else only values that are used a second time. ``far_ttl_s``: a value's life far, from its last
    use; 0: for ever. It owns both stores, whose data paths are native. A replaced
    value (``put_many``) is old on other hosts until it went far. Closing waits ``DRAIN_S`` seconds for puts that are on
    their way to far.
    """

    def __init__(self, near: Store, far: Store, *, all_goes_far: bool, far_ttl_s: float) -> None:
        ahead, behind = (cast(_native.IoExecutor, store._engine) for store in (near, far))
        engine = _native.open_near_far_executor(ahead, behind, all_goes_far, far_ttl_s)
        super().__init__(f"{near._name} before {far._name}", engine, far._documents)
        self._near, self._far = near, far
        self.far = far

    @property
    def near_capacity_nbytes(self) -> int | None:
        """As it stands in the near directory; None: none does. Blocks for a small read."""
        return self._near.counters()["capacity_nbytes"] or None

    def counters(self) -> dict[str, int]:
        """Of both: what its callers were told, and of near and far what only they know."""
        found = super().counters()
        near, far = self._near.counters(), self._far.counters()
        for name in (near.keys() | far.keys()) - found.keys():
            found[name] = near.get(name, 0) + far.get(name, 0)
        return found

    def _usage(self) -> list[Usage]:
        return [*self._near.usage(), *self._far.usage()]

    def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
        yield from self._near.scan(prefix)
        yield from self._far.scan(prefix)

    def _scan_writers(self, prefix: str) -> Iterator[list[WrittenBlock]]:
        yield from self._near.scan_writers(prefix)
        yield from self._far.scan_writers(prefix)

    def _scan_keys(self, prefix: str) -> Iterator[list[str]]:
        yield from self._near.scan_keys(prefix)
        yield from self._far.scan_keys(prefix)

    def _server_run_id(self) -> str:
        return self._far.server_run_id()

    def _notices(self) -> Notices | None:
        return self._far.notices()

    def _close(self) -> None:
        end_s = time.monotonic() + DRAIN_S
        while self._engine.counters()["behind_waiting"] and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        try:
            super()._close()
        finally:
            try:
                self._far.close()
            finally:
                self._near.close()
