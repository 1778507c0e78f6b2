"""kvpool inside vLLM: ``kvpool.vllm`` is the module path of ``KVPoolConnector``, and of the tier ``KVPoolTier``.

Importing it also registers the connector by name: under ``MultiConnector``, vLLM looks up by name alone who
understands a child's statistics.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvpool.vllm.connector import KVPoolConnector

__all__ = ["KVPoolConnector", "KVPoolTier"]

if "KVPoolConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("KVPoolConnector", "kvpool.vllm", "KVPoolConnector")


def __getattr__(name: str) -> Any:
    """The tier only where it is asked for: versions of vLLM that have none can use the connector."""
    if name != "KVPoolTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool.vllm.tier import KVPoolTier

    return KVPoolTier
