"""Values into a pool and back, then: which worker holds how much of a prompt?

    pip install '.[index]'  # in a checkout
    python python_client.py valkey://127.0.0.1:6379 127.0.0.1:50051 MODEL TOKEN TOKEN TOKEN...

The pool needs no index, and the index no pool. Neither needs torch or vLLM.
"""

from __future__ import annotations

import sys

import kvpool


def round_trip(pool_url: str) -> None:
    """Put two values, find them, get them into buffers of our own, and delete them."""
    # Whose blocks these are, and of which kind: another tenant, model or layout never meets them.
    namespace = kvpool.Namespace("example", {"model": "none", "format": "bytes"})
    hashes = kvpool.BlockHasher(block_tokens=16).hashes(range(32))  # one for each block of 16 tokens
    keys = namespace.keys(hashes, group=0, rank=0)
    values = [bytes([number]) * 4096 for number in range(len(keys))]
    buffers = [bytearray(4096) for _ in keys]
    with kvpool.open_store(pool_url) as store:
        # A batch is one call, and has a deadline. A fault raises StoreUnavailable; what is missing is no fault.
        stored = store.put_many(keys, values, timeout_s=5.0)
        found = store.get_many_into(keys, buffers, timeout_s=5.0)
        deleted = store.delete_many(keys)
    if not all(found) or buffers != values:
        sys.exit("the pool has not kept what was put")
    print(f"pool: {sum(stored)} put, {sum(found)} found, {deleted} deleted")


def look_up(target: str, model: str, token_ids: list[int]) -> None:
    with kvpool.IndexClient(target, timeout_s=1.0) as index:
        try:
            rows = index.lookup(model, token_ids=token_ids)
        except kvpool.IndexUnavailable as failure:
            # No index, or none in time: place the request as if nothing were known.
            sys.exit(f"no answer: {failure}")
    for row in rows:
        print(
            f"{row.worker} at {row.address}: {row.device_blocks} of {row.prompt_blocks} blocks in its memory, "
            f"{row.pool_blocks} in the pool{', stale' if row.stale else ''}"
        )


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    round_trip(sys.argv[1])
    look_up(sys.argv[2], sys.argv[3], [int(token) for token in sys.argv[4:]])
