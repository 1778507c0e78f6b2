"""Moves blocks between memory and a store: host memory as it lies, or a KV cache through staging."""

from kvpool.transfer.device import BlockCopier
from kvpool.transfer.job import Moved, Need
from kvpool.transfer.kv_cache import Block, KVCacheMover
from kvpool.transfer.memory import HostMemory, Record
from kvpool.transfer.mover import BlockMover, Finished
from kvpool.transfer.staging import Staging

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
