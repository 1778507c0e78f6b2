"""``kvpool doctor``: faults of a pool, its workers and its index."""

from __future__ import annotations

from kvpool.cli.doctor.doctor import run_doctor

__all__ = ["run_doctor"]
