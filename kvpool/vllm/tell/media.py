"""In which namespaces the engines of this process have their encoder's outputs, for their announcements.

vLLM makes the connectors of blocks and of encoders beside each other, and neither knows the other: the second one says
here what the first one's announcement tells.

Threads: any; an engine's namespaces are replaced whole.
"""

from __future__ import annotations

_said: dict[str, tuple[str, ...]] = {}  # by ``VllmConfig.instance_id``


def say(engine: str, namespaces: tuple[str, ...]) -> None:
    """``namespaces``: 32 hex digits each; empty: none now."""
    if namespaces:
        _said[engine] = namespaces
    else:
        _said.pop(engine, None)


def said(engine: str) -> tuple[str, ...]:
    return _said.get(engine, ())
