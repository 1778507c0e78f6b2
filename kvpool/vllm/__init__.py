"""kvpool inside vLLM: name ``kvpool.vllm`` as ``kv_connector_module_path`` and ``KVPoolConnector`` as the connector."""

from kvpool.vllm.connector import KVPoolConnector

__all__ = ["KVPoolConnector"]
