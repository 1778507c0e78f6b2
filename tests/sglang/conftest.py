"""The real sglang package, in a process that has no accelerator.

``make test-sglang`` fetches it. It runs on vLLM's torch and transformers; the one thing that it imports and that cannot
be had beside a CPU build of torch is torchvision, of which nothing is called here: an empty module stands in its place.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.server import Server

FOLDER = Path(__file__).parents[2] / ".cache" / "sglang"
ABSENT = "torchvision"


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Absent:
    """Finds ``ABSENT`` and what lies below it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


@pytest.fixture(scope="session", autouse=True)
def sglang() -> Iterator[None]:
    assert (FOLDER / "sglang").is_dir(), f"there is no sglang in {FOLDER}: make test-sglang fetches it"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Transformers looks for torchvision once, and must not find the empty one.
        found = importlib.import_module("transformers.utils.import_utils")
        found.is_torchvision_available()
        found.is_torchvision_v2_available()
        sys.path.append(str(FOLDER))
        sys.meta_path.append(_Absent())  # type: ignore[arg-type]
        importlib.import_module("sglang.srt.managers.cache_controller")
        importlib.import_module("sglang.srt.observability.metrics_collector")
        importlib.import_module("kvpool.sglang")
        # It wants 10 GiB to stay free beside pools of a few MiB: a laptop has less.
        importlib.import_module("sglang.srt.mem_cache.pool_host.base").HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
        distributed = importlib.import_module("torch").distributed
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Makes servers, and closes their backends at the end."""
    with ExitStack() as stack:

        def make(pool: str, **options: Any) -> Server:
            server = Server(pool, **options)
            stack.callback(server.backend.close)
            return server

        yield make
