"""How long loads and stores of a simulated worker take (``Way``), and which loads do not pay (``cost_gate``)."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpool
from benchmarks.agents_model import EngineModel
from kvpool.metrics import Counters


class Way:
    """Moves blocks, one after the other. ``nbytes_s``: of those that follow."""

    def __init__(self, clock: Callable[[], float], model: EngineModel, nbytes_s: float) -> None:
        self._clock, self._model, self.nbytes_s = clock, model, nbytes_s
        self._free_s = 0.0

    def takes_s(self, blocks: int) -> float:
        return self._model.move_s(blocks, self.nbytes_s)

    def take(self, blocks: int, max_s: float = math.inf) -> float:
        """Seconds from now until they have been moved, or their way alone has taken ``max_s``."""
        self._free_s = max(self._clock(), self._free_s) + min(self.takes_s(blocks), max_s)
        return self._free_s - self._clock()


def cost_gate(counters: Counters, clock: Callable[[], float]) -> Any:
    """The connector's ``CostGate``. Its package would import vLLM, which a simulated engine does not need."""
    name = "kvpool_cost_gate"
    if name not in sys.modules:
        path = Path(kvpool.__file__).with_name("vllm") / "load" / "gate.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name].CostGate(counters, clock)
