"""``Usage``: how full the servers of a pool are, as they say it themselves (INFO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import redis


class Usage(NamedTuple):
    """Sums over all servers of a pool.

    ``used_nbytes``: what they use for everything, clients and tables of keys among it; ``maxmemory`` bounds the same.
    ``capacity_nbytes``: 0: at least one of them has no limit. ``evicted_keys``: since each was started.
    """

    used_nbytes: int = 0
    capacity_nbytes: int = 0
    evicted_keys: int = 0


def usage_of(server: redis.Redis) -> Usage | None:
    """Of one server; None: its user may not ask. Errors: those of redis-py."""
    import redis

    try:
        memory, stats = server.info("memory"), server.info("stats")
    except redis.exceptions.ResponseError:  # also without the permission
        return None
    return Usage(
        int(memory.get("used_memory", 0)),
        int(memory.get("maxmemory", 0)),
        int(stats.get("evicted_keys", 0)),
    )


def total(usages: list[Usage]) -> Usage:
    """Of one server or more."""
    capacities = [usage.capacity_nbytes for usage in usages]
    return Usage(
        sum(usage.used_nbytes for usage in usages),
        sum(capacities) if all(capacities) else 0,
        sum(usage.evicted_keys for usage in usages),
    )
