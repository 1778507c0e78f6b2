"""Records of a pool by number, and a reconciler that follows them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvpool import Namespace
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow.pool_reconciler import PoolReconciler
from kvpool.store.store import Store
from tests.support.deadlines import eventually
from tests.support.wire import Hash, packed64

NAMESPACE = Namespace("default", {"model": "m"})
NEVER_S = 3600.0  # a pause in which nothing but notices can help
NBYTES = 2000


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def keys(
    numbers: Iterable[int], group: int = 0, rank: int = 0, namespace: Namespace = NAMESPACE
) -> list[str]:
    return namespace.keys([digest(number) for number in numbers], group, rank)


def put(store: Store, numbers: Iterable[int], group: int = 0, rank: int = 0) -> None:
    names = keys(numbers, group, rank)
    assert all(store.put_many(names, [bytes(NBYTES)] * len(names), timeout_s=60))


def hashes64(numbers: Iterable[int]) -> list[Hash]:
    return [int.from_bytes(digest(number)[-8:], "big") for number in numbers]


def credited(fleet: Fleet, numbers: Iterable[int], namespace: Namespace = NAMESPACE) -> set[int]:
    """Which of these could be loaded from the pool, each asked by itself."""
    (pool,) = (one for one in fleet.pools() if one.namespace == namespace.hex)
    return {
        number
        for number in numbers
        if any(pool.table.match(packed64(hashes64([number])), workers=[pool.holder]).pool_blocks)
    }


@contextmanager
def following(
    fleet: Fleet, store: Store, *, pause_s: float = NEVER_S, **more: Any
) -> Iterator[PoolReconciler]:
    reconciler = PoolReconciler(fleet, store, pause_s=pause_s, **more)
    try:
        yield reconciler
    finally:
        reconciler.close()
        assert not reconciler._thread.is_alive()


def rests(reconciler: PoolReconciler) -> bool:
    """Wait until servers are listened to, and no round goes on or is to come soon."""
    return eventually(
        lambda: (
            reconciler.totals().missed_notices > 0
            and not reconciler._again.is_set()
            and reconciler._round is None
            and reconciler.totals().rounds > 0
        )
    )


def another_round(reconciler: PoolReconciler) -> None:
    """Wait for a round that begins after this call."""
    before = reconciler.totals().rounds
    reconciler._again.set()
    assert eventually(
        lambda: (
            reconciler.totals().rounds > before
            and reconciler._round is None
            and not reconciler._again.is_set()
        )
    )
