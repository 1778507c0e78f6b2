"""The prefix index: which worker holds which blocks, and how many leading blocks of a prompt each has.

``PrefixIndex`` is one partition, in one process. ``kvpool index`` serves a fleet; ``IndexClient`` calls it.
"""

from __future__ import annotations

from kvpool.discovery.worker import Publisher, Worker
from kvpool.index.answer import (
    EngineAudits,
    FleetStatus,
    HitCurve,
    IndexStatus,
    Lookup,
    Pick,
    PublisherStatus,
    Ranking,
    Row,
    WorkerStatus,
)
from kvpool.index.fleet.table import Applied, Match, Matches, PrefixIndex, Tier
from kvpool.index.prompt import Chat, Load, Prompt

__all__ = [
    "Applied",
    "Chat",
    "EngineAudits",
    "FleetStatus",
    "HitCurve",
    "IndexStatus",
    "Load",
    "Lookup",
    "Match",
    "Matches",
    "Pick",
    "PrefixIndex",
    "Prompt",
    "Publisher",
    "PublisherStatus",
    "Ranking",
    "Row",
    "Tier",
    "Worker",
    "WorkerStatus",
]
