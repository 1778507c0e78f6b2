"""The command line: ``kvpool``."""

from __future__ import annotations

from kvpool.cli.app import main

__all__ = ["main"]
