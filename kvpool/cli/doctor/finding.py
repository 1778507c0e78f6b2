"""What ``kvpool doctor`` found: one sentence, and what to change about it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """``about``: the part of the system. ``change``: what to do; empty where nothing is to be done.

    A ``problem`` keeps something from working; a ``note`` costs speed, memory or knowledge.
    """

    level: Level
    about: str
    says: str
    change: str = ""


def ok(about: str, says: str) -> Finding:
    """Something is as it should be."""
    return Finding("ok", about, says)


def note(about: str, says: str, change: str) -> Finding:
    """Something could be better."""
    return Finding("note", about, says, change)


def problem(about: str, says: str, change: str) -> Finding:
    """Something does not work."""
    return Finding("problem", about, says, change)
