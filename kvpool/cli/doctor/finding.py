"""What ``kvpool doctor`` found: one sentence, and what to change about it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]  # as --json says it; a table has OK, WARN and FAIL


class Finding(NamedTuple):
    """``about``: the part of the system. ``change``: what to do; empty where nothing is to be done.

    ``fail``: something is not there or does not work. ``warn``: it costs speed, memory or knowledge.
    """

    level: Level
    about: str
    says: str
    change: str = ""


def ok(about: str, says: str) -> Finding:
    """Something is as it should be."""
    return Finding("ok", about, says)


def warn(about: str, says: str, change: str) -> Finding:
    """Something could be better."""
    return Finding("warn", about, says, change)


def fail(about: str, says: str, change: str) -> Finding:
    """Something does not work."""
    return Finding("fail", about, says, change)
