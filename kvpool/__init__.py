"""kvpool: a shared KV cache for fleets of vLLM workers, on the Valkey or Redis you already run.

The names below are the public surface; everything else is private. They load on first use, so that ``import
kvpool`` costs milliseconds and imports neither torch, vllm, grpc nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import (
    AccessDenied,
    ConfigError,
    EngineRefused,
    IndexUnavailable,
    KVPoolError,
    MalformedEvents,
    SnapshotRefused,
    StoreClosed,
    StoreUnavailable,
    UnknownModel,
)

if TYPE_CHECKING:
    from kvpool.index import Chat, Load, PrefixIndex, Publisher, Worker
    from kvpool.index.client.async_client import AsyncIndexClient
    from kvpool.index.client.client import IndexClient
    from kvpool.key.hashing import BlockHasher
    from kvpool.key.key import Layout, Namespace
    from kvpool.store import Store, open_store

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AsyncIndexClient",
    "BlockHasher",
    "Chat",
    "ConfigError",
    "EngineRefused",
    "IndexClient",
    "IndexUnavailable",
    "KVPoolError",
    "Layout",
    "Load",
    "MalformedEvents",
    "Namespace",
    "PrefixIndex",
    "Publisher",
    "SnapshotRefused",
    "Store",
    "StoreClosed",
    "StoreUnavailable",
    "UnknownModel",
    "Worker",
    "__version__",
    "open_store",
]

_HOME = {
    "AsyncIndexClient": "kvpool.index.client.async_client",
    "BlockHasher": "kvpool.key.hashing",
    "Chat": "kvpool.index",
    "IndexClient": "kvpool.index.client.client",
    "Layout": "kvpool.key.key",
    "Load": "kvpool.index",
    "Namespace": "kvpool.key.key",
    "PrefixIndex": "kvpool.index",
    "Publisher": "kvpool.index",
    "Store": "kvpool.store",
    "Worker": "kvpool.index",
    "open_store": "kvpool.store",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
    import importlib

    from kvpool.text import missing_extra

    try:
        value: object = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        raise missing_extra(error, ("client", "index", "tokenize")) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
