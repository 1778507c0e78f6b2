"""What a request hints at: keep its prefix in the pool for a time, or let it go.

Hints come as actions of an envelope: vLLM's ``Request.kv_hints`` (``vllm/v1/kv_hints/protocol.py``), and the same as
JSON in ``kv_transfer_params.kv_hint``, where Dynamo's router puts it. ``RequestParams`` has kvpool's own words for
them. Hints are wishes: unknown and invalid ones are counted and ignored.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvpool import metrics
from kvpool.metrics import Counters

FIELD = "kv_hint"
MAX_KEEP_S = 86_400.0
MAX_ACTIONS = 16  # of an envelope; the others are not read


class Hints(NamedTuple):
    """``keep_s``: keep the prefix for so long; 0: no wish. ``done``: the caller expects no use soon."""

    keep_s: float = 0.0
    done: bool = False
    prefetch: bool = False
    priority: int = 0


NO_HINTS = Hints()


def read_hints(own: Hints, transfer_params: object, envelope: object, counters: Counters) -> Hints:
    """A request's hints, counted; ``own``: of kvpool's parameters, which come first. Never raises.

    Of two actions of a kind in the envelopes the last one counts.
    """
    hints = NO_HINTS
    inside = transfer_params.get(FIELD) if isinstance(transfer_params, Mapping) else None
    for action, payload in [*_actions(inside), *_actions(envelope)]:
        read = _READERS.get(action)
        fields = read(payload) if read is not None else None
        if fields is None:
            counters.add(metrics.HINTS, 1, "unknown" if read is None else "invalid")
        else:
            hints = hints._replace(**fields)
    hints = Hints(
        keep_s=own.keep_s or hints.keep_s,
        done=own.done or hints.done,
        prefetch=own.prefetch or hints.prefetch,
        priority=own.priority or hints.priority,
    )
    for action, wanted in zip(("keep", "done", "prefetch", "priority"), hints, strict=True):
        counters.add(metrics.HINTS, bool(wanted), action)
    return hints


def _actions(envelope: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Type and payload of each action; ("", {}) for what is none."""
    if envelope is None:
        return
    actions = _part(envelope, "actions")
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        yield "", {}
        return
    for action in actions[:MAX_ACTIONS]:
        kind, payload = _part(action, "action_type"), _part(action, "payload")
        known = isinstance(kind, str) and isinstance(payload, Mapping | None)
        yield (kind, payload or {}) if known else ("", {})


def _part(whole: object, name: str) -> Any:
    return whole.get(name) if isinstance(whole, Mapping) else getattr(whole, name, None)


def _keep(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    seconds = payload.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    return {"keep_s": float(seconds)} if 0 < seconds <= MAX_KEEP_S else None  # no NaN is


def _priority(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    priority = payload.get("priority")
    if isinstance(priority, bool) or not isinstance(priority, int):
        return None
    return {"priority": priority} if -(1 << 31) <= priority < 1 << 31 else None


_READERS = {
    "keep": _keep,
    "done": lambda payload: {"done": True},
    "prefetch": lambda payload: {"prefetch": True},
    "priority": _priority,
}
