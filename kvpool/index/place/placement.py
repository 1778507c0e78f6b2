"""``Placement``: where a request should go, and why, as ``Placer`` says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvpool.errors import KVPoolError

Reason = Literal["prefix", "load", "no-tokens", "unknown-model", "unreadable", "failed"]
REASONS: tuple[Reason, ...] = ("prefix", "load", "no-tokens", "unknown-model", "unreadable", "failed")


class NoWorker(KVPoolError):
    """No worker can take the request now."""


class AllBusy(KVPoolError):
    """Each worker has as many requests waiting as it may have."""


class Target(NamedTuple):
    """A worker that can serve a request. ``endpoint``: ``IP:PORT``; ``address``: its URL. ``dp_rank``: None where the
    worker has only one. ``matched_blocks``: of the prompt, those it need not compute.
    """

    endpoint: str
    address: str
    worker: str
    dp_rank: int | None
    matched_blocks: int


@dataclass(frozen=True, slots=True)
class Placement:
    """``targets``: the best first, each with an endpoint of its own; empty: any worker will do. ``prompt_blocks``: 0
    where they are not known. ``detail``: more on the reason; may be empty. ``reservation``: of the best, for
    ``Placer.release``; empty: none. ``held_blocks``: of the prompt, the most that one rank or the pool has.
    """

    tenant: str
    reason: Reason
    targets: tuple[Target, ...] = ()
    prompt_blocks: int = 0
    detail: str = ""
    reservation: str = ""
    made_s: float = 0.0
    held_blocks: int = 0
