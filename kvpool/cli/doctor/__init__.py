"""``kvpool doctor``: what keeps a pool, its workers and its index from working."""
