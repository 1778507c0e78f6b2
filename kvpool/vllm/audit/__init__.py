"""Audited hits: a part of a hit is computed and compared with what the pool has of it."""
