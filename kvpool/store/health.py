"""What a store's own counters say of its health, as kvpool's metrics."""

from __future__ import annotations

from kvpool import metrics
from kvpool.metrics import Counters
from kvpool.store.store import Store

_GROWTH = {
    "refused": metrics.REFUSED_KEYS,
    "connections": metrics.CONNECTIONS,
    "disconnections": metrics.DISCONNECTIONS,
    "failed_dials": metrics.FAILED_CONNECTIONS,
    "evicted": metrics.EVICTED_BLOCKS,
}
_DAMAGED = "damaged_"


def count_health(store: Store, counters: Counters) -> None:
    """Add to ``counters`` what ``store`` has counted since the last call, and whether it is connected now.

    A store without a server is never up or down. Does not block. Errors: ``StoreClosed``.
    """
    found = store.counters()
    for name, metric in _GROWTH.items():
        counters.add_growth(metric, found.get(name, 0))
    for name, total in found.items():
        if name.startswith(_DAMAGED) and total:
            counters.add_growth(metrics.DAMAGED_BLOCKS, total, name.removeprefix(_DAMAGED))
    if "up_connections" in found:
        counters.set(metrics.UP, float(found["up_connections"] > 0))
