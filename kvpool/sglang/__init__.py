"""kvpool inside SGLang: the module path of ``KVPoolHiCache``, a storage backend of HiCache."""

from kvpool.sglang.backend import KVPoolHiCache

__all__ = ["KVPoolHiCache"]
