"""``kvpool doctor``: faults of a pool, its workers and its index."""
