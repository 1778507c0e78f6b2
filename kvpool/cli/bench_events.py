"""What the benchmarks of the index publish: events of blocks as vLLM would announce them."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

PROMPT_BLOCKS = 8192
MOST_HOLDERS = 8
EVENT_BLOCKS = 16
BATCH_BLOCKS = 1024  # about what a busy engine publishes with one step
BLOCK_TOKENS = 16


def payloads(hashes: Sequence[int], *, tokens: bool) -> list[bytes]:
    """What vLLM would publish for these blocks, in batches."""
    events = []
    for at in range(0, len(hashes), EVENT_BLOCKS):
        part = hashes[at : at + EVENT_BLOCKS]
        count = len(part) * BLOCK_TOKENS if tokens else 0
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": part,
                "parent_block_hash": hashes[at - 1] if at else None,
                "token_ids": _tokens(part[0], count),
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
    step = BATCH_BLOCKS // EVENT_BLOCKS
    return [msgpack.packb([0.0, events[at : at + step], 0]) for at in range(0, len(events), step)]


def _tokens(seed: int, count: int) -> list[int]:
    """Token ids of a large vocabulary: most take three bytes or five."""
    return [(seed + 7919 * i) % 128_000 for i in range(count)]
