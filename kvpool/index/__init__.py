"""The prefix index: which worker holds which blocks, and how far a prompt reaches with each of them.

``PrefixIndex`` is one partition of it, in one process. ``kvpool index`` serves a fleet's, ``IndexClient`` asks it.
"""

from __future__ import annotations

from kvpool.index.answer import FleetStatus, IndexStatus, Lookup, PublisherStatus, Row, WorkerStatus
from kvpool.index.chat import Chat
from kvpool.index.load import Load
from kvpool.index.route import Pick, Route
from kvpool.index.table import Applied, Match, Matches, PrefixIndex, Tier
from kvpool.index.worker import Publisher, Worker

__all__ = [
    "Applied",
    "Chat",
    "FleetStatus",
    "IndexStatus",
    "Load",
    "Lookup",
    "Match",
    "Matches",
    "Pick",
    "PrefixIndex",
    "Publisher",
    "PublisherStatus",
    "Route",
    "Row",
    "Tier",
    "Worker",
    "WorkerStatus",
]
