"""kvpool: a shared KV cache for fleets of vLLM workers, on the Valkey or Redis you already run.

The names below are the public surface; everything else is private. They are loaded on first use, so that
``import kvpool`` costs milliseconds and pulls in neither torch, vllm, grpc nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import (
    ConfigError,
    EngineRefused,
    IndexUnavailable,
    KVPoolError,
    MalformedEvents,
    StoreClosed,
    StoreUnavailable,
    UnknownModel,
)

if TYPE_CHECKING:
    from kvpool.hashing import BlockHasher
    from kvpool.index import PrefixIndex
    from kvpool.keys import Layout, Namespace
    from kvpool.stores import Store, open_store

__version__ = "0.1.0"

__all__ = [
    "BlockHasher",
    "ConfigError",
    "EngineRefused",
    "IndexUnavailable",
    "KVPoolError",
    "Layout",
    "MalformedEvents",
    "Namespace",
    "PrefixIndex",
    "Store",
    "StoreClosed",
    "StoreUnavailable",
    "UnknownModel",
    "__version__",
    "open_store",
]

_HOME = {
    "BlockHasher": "kvpool.hashing",
    "Layout": "kvpool.keys",
    "Namespace": "kvpool.keys",
    "PrefixIndex": "kvpool.index",
    "Store": "kvpool.stores",
    "open_store": "kvpool.stores",
}


def __getattr__(name: str) -> object:
    """Import the module behind a public name when it is first asked for (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
