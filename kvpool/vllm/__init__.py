"""kvpool inside vLLM: the module path of ``KVPoolConnector``, ``KVPoolECConnector`` and the tier ``KVPoolTier``.

Its import registers the connector: ``MultiConnector`` resolves a child's statistics by name.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvpool.vllm.connector import KVPoolConnector
from kvpool.vllm.encoder.connector import KVPoolECConnector
from kvpool.vllm.tier import KVPoolTier

__all__ = ["KVPoolConnector", "KVPoolECConnector", "KVPoolTier"]

if "KVPoolConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("KVPoolConnector", "kvpool.vllm", "KVPoolConnector")
