"""KV-event batches as vLLM's publisher sends them, written without vLLM; a test compares the two byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack

Hash = int | bytes

# Fields that vLLM leaves out when they have their default.
_OPTIONAL = (
    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership",
    "session_id", "lookahead_token_ids",
)  # fmt: skip


def stored(
    hashes: Sequence[Hash],
    *,
    parent: Hash | None = None,
    medium: str | None = "GPU",
    token_ids: Sequence[int] = (),
    block_size: int = 16,
    lora_id: int | None = None,
    lora_name: str | None = None,
    **optional: Any,
) -> dict[str, Any]:
    """A ``BlockStored``: in vLLM's order of fields, without those that have their default."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": block_size,
        "lora_id": lora_id,
        "medium": medium,
        "lora_name": lora_name,
        **{name: optional[name] for name in _OPTIONAL if optional.get(name) is not None},
    }


def removed(hashes: Sequence[Hash], *, medium: str | None = "GPU", **optional: Any) -> dict[str, Any]:
    """A ``BlockRemoved``."""
    return {
        "type": "BlockRemoved",
        "block_hashes": list(hashes),
        "medium": medium,
        **{name: optional[name] for name in _OPTIONAL if optional.get(name) is not None},
    }


def cleared(medium: str | None = None) -> dict[str, Any]:
    """An ``AllBlocksCleared``; with a medium, as kvpool's connector sends it."""
    return {"type": "AllBlocksCleared", **({} if medium is None else {"medium": medium})}


def batch(*events: dict[str, Any], dp_rank: int | None = None, at_s: float = 1.5) -> bytes:
    """The last frame of a message."""
    packed: bytes = msgpack.packb([at_s, list(events), dp_rank])
    return packed


def packed64(hashes: Sequence[int]) -> bytes:
    """What ``match`` takes."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)
