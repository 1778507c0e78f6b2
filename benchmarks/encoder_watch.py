"""A plugin of vLLM's in the engines of ``python -m benchmarks encoder``: each run of an encoder goes to the log.

Threads: the worker's model thread.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

MARK = "ENCODED "


class Runs(NamedTuple):
    """Of an engine's encoder: items that it computed, and the seconds that they took."""

    items: int
    took_s: float


def watch() -> None:
    """vLLM calls it in each of its processes."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    encode = GPUModelRunner._execute_mm_encoder

    def encoded(self: Any, scheduler_output: Any) -> Any:
        started = time.perf_counter()
        outputs = encode(self, scheduler_output)
        if outputs:
            said = {"items": len(outputs), "took_s": time.perf_counter() - started}
            print(MARK + json.dumps(said), flush=True)
        return outputs

    GPUModelRunner._execute_mm_encoder = encoded  # type: ignore[method-assign]


def runs(log: Path) -> Runs:
    """All that have ended so far, from the log of an engine."""
    found = [
        json.loads(text)
        for text in re.findall(re.escape(MARK) + r"(\{.*?\})", log.read_text(errors="replace"))
    ]
    return Runs(sum(one["items"] for one in found), sum(one["took_s"] for one in found))
