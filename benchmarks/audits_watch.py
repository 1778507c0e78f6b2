"""A plugin of vLLM's in the engines of ``python -m benchmarks audits``: each audit's distances go to the engine's log.

Threads: the engine's scheduler thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvpool.vllm.audit import floor
from kvpool.vllm.plan import AuditedPart

MARK = "AUDITED "
_judge = floor.Floor.judge


def watch() -> None:
    """vLLM calls it in each of its processes."""
    floor.Floor.judge = _judged  # type: ignore[method-assign]


def _judged(self: floor.Floor, parts: Sequence[AuditedPart]) -> floor.Judged:
    floors = {
        layer.name: max(self._least(layer), self._largest.get(layer.name, 0.0))
        for part in parts
        for layer in part.layers
    }
    found = _judge(self, parts)
    said = {
        "verdict": found.verdict,
        "own": found.writers == {self._learns_from},
        "distance": found.distance,
        "what": found.what,
        "far": len(found.far),
        "layers": {name: [distance, floors[name]] for name, distance in found.layers.items()},
    }
    print(MARK + json.dumps(said), flush=True)
    return found
