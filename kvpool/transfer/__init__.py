"""Moves blocks between memory and a store: host memory as it lies, or a KV cache through staging."""

from kvpool.transfer.copier import BlockCopier
from kvpool.transfer.job import Moved, Need
from kvpool.transfer.kv_cache import Block, KVCacheMover
from kvpool.transfer.memory import HostMemory, Record, Staging
from kvpool.transfer.mover import BlockMover, Finished

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
