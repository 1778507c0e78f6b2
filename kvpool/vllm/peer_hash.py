"""vLLM's own block hashing of a token list, as the peer of ``python -m benchmarks hash``."""

from __future__ import annotations

from collections.abc import Callable

from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils


def vllm_hasher(token_ids: list[int], block_tokens: int) -> Callable[[], list[bytes]]:
    """A function that hashes the full blocks of ``token_ids`` as vLLM's scheduler does, without extra keys."""
    kv_cache_utils.init_none_hash(sha256_cbor)

    def run() -> list[bytes]:
        hashes: list[bytes] = []
        parent = None
        for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
            parent = kv_cache_utils.hash_block_tokens(
                sha256_cbor, parent, token_ids[start : start + block_tokens], None
            )
            hashes.append(parent)
        return hashes

    return run
