"""Moves blocks between an engine's KV cache and a store, through staging memory, off the step loop."""

from kvpool.transfer.device import BlockCopier
from kvpool.transfer.mover import Finished, LoadResult, TransferEngine
from kvpool.transfer.staging import Staging

__all__ = ["BlockCopier", "Finished", "LoadResult", "Staging", "TransferEngine"]
