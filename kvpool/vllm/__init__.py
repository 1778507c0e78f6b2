"""kvpool inside vLLM: name ``kvpool.vllm`` as ``kv_connector_module_path`` and ``KVPoolConnector`` as the connector.

Importing it also registers the connector by name: under ``MultiConnector``, vLLM looks up by name alone who
understands a child's statistics.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvpool.vllm.connector import KVPoolConnector

__all__ = ["KVPoolConnector"]

if "KVPoolConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("KVPoolConnector", "kvpool.vllm", "KVPoolConnector")
