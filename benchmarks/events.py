"""Events of the index benchmarks, as vLLM would publish them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

EVENT_BLOCKS = 16
BATCH_EVENTS = 64  # about a busy engine's step
BLOCK_TOKENS = 16


def payloads(hashes: Sequence[int], *, tokens: bool, batch_events: int = BATCH_EVENTS) -> list[bytes]:
    events = []
    for at in range(0, len(hashes), EVENT_BLOCKS):
        part = hashes[at : at + EVENT_BLOCKS]
        count = len(part) * BLOCK_TOKENS if tokens else 0
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": part,
                "parent_block_hash": hashes[at - 1] if at else None,
                "token_ids": event_tokens(part[0], count),
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
    return _batches(events, batch_events)


def removals(hashes: Sequence[int], *, batch_events: int = BATCH_EVENTS) -> list[bytes]:
    events = [
        {"type": "BlockRemoved", "block_hashes": list(part), "medium": "GPU", "group_idx": 0}
        for part in (hashes[at : at + EVENT_BLOCKS] for at in range(0, len(hashes), EVENT_BLOCKS))
    ]
    return _batches(events, batch_events)


def _batches(events: Sequence[dict[str, Any]], batch_events: int) -> list[bytes]:
    return [
        msgpack.packb([0.0, events[at : at + batch_events], 0]) for at in range(0, len(events), batch_events)
    ]


def event_tokens(seed: int, count: int) -> list[int]:
    """Token ids of a large vocabulary: mostly three or five bytes each."""
    return [(seed + 7919 * i) % 128_000 for i in range(count)]
