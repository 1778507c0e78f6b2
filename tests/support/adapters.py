"""vLLM's own manager of a worker's adapters, over adapters that no file holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

from kvpool.vllm.engine import internals
from kvpool.vllm.engine.adapter_loads import AdapterLoads, digest_adapter
from kvpool.vllm.plan import AdapterWeights

LORA = ("adapter", "/adapters/a")


def model(number: int, seed: int = 1, scaling: float = 2.0, module: str = "q_proj") -> LoRAModel:
    """An adapter as vLLM's loaders make it."""
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=draw) for shape in ((8, 64), (64, 8)))
    return LoRAModel(number, 8, {module: LoRALayerWeights(module, 8, 16, a, b, scaling)})


class Memory(LRUCacheLoRAModelManager):
    """What of vLLM's holds the adapters that are loaded, two at a time."""

    capacity = 2  # type: ignore[assignment]

    def __init__(self) -> None:
        self._registered_adapters: dict[int, Any] = {}  # type: ignore[assignment]
        self._active_adapters: dict[int, Any] = {}  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._registered_adapters)

    def list_adapters(self) -> dict[int, Any]:
        return self._registered_adapters

    def get_adapter(self, adapter_id: int) -> Any:
        return self._registered_adapters.get(adapter_id)

    def add_adapter(self, lora: Any) -> bool:
        self._add_adapter(lora)
        return True

    def deactivate_adapter(self, adapter_id: int) -> bool:
        return True

    def remove_oldest_adapter(self) -> bool:
        self._registered_adapters.pop(next(iter(self._registered_adapters)))
        return True

    def activate_adapter(self, lora_id: int) -> bool:
        return True


class Vllm:
    """vLLM's manager of a worker's adapters. ``files``: what is to be loaded, by path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, Callable[[int], LoRAModel]] = {}
        self.put()
        self.loaded = 0

        def load(manager: Any, lora_request: LoRARequest) -> LoRAModel:
            self.loaded += 1
            return self.files[lora_request.lora_path](lora_request.lora_int_id)

        def take_in(manager: Any, lora: LoRAModel) -> None:
            manager._registered_adapters[lora.id] = lora

        monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
        monkeypatch.setattr("vllm.lora.model_manager.LoRAModelManager._add_adapter", take_in)
        self.loads = AdapterLoads(0)
        self.manager: Any = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
        self.manager._adapter_manager = Memory()
        self.loads.held = internals.HeldAdapters(self.manager, digest_adapter)

    def put(self, path: str = LORA[1], **of_model: Any) -> None:
        self.files[path] = lambda number: model(number, **of_model)

    def add(
        self, number: int = 1, name: str = LORA[0], path: str = LORA[1], *, in_place: bool = False
    ) -> None:
        self.manager.add_adapter(LoRARequest(name, number, path, load_inplace=in_place))

    def weights(self, number: int = 1) -> AdapterWeights:
        """What is held now."""
        assert self.loads.held is not None
        return AdapterWeights(number, *LORA, (self.loads.held.digests()[number],))
