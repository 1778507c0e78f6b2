"""Moves blocks between memory and a store: host memory as it lies, or a KV cache through staging."""

from kvpool.transfer.copier import BlockCopier
from kvpool.transfer.job import Finished, Moved, Need
from kvpool.transfer.kv_cache import KVCacheMover
from kvpool.transfer.kv_memory import Block
from kvpool.transfer.memory import HostMemory, Record, Staging
from kvpool.transfer.mover import BlockMover

__all__ = [
    "Block",
    "BlockCopier",
    "BlockMover",
    "Finished",
    "HostMemory",
    "KVCacheMover",
    "Moved",
    "Need",
    "Record",
    "Staging",
]
