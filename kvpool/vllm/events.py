"""The KV events that kvpool makes: of the pool's records, and of the engine's own cache when an index asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.request import Request

from kvpool.vllm import internals
from kvpool.vllm.plan import Group

EVENT_MEDIUM = "STORAGE"  # vllm/distributed/kv_events.py: MEDIUM_STORAGE
EVENT_OWNER = "kvpool"
_OF_THE_POOL = {"locality": "REMOTE", "ownership": EVENT_OWNER}


def stored_event(
    request: Request, group_index: int, group: Group, index: int, hashes: Sequence[bytes]
) -> BlockStored:
    """The KV event that says: record ``index`` of ``request`` is in the pool now.

    A record of several blocks is told as one block of their size: by its last hash alone can it be found.
    """
    start, end = index * group.record_tokens, (index + 1) * group.record_tokens
    lora = request.lora_request
    fields: dict[str, Any] = {
        "block_hashes": [internals.event_hash(hashes[index])],
        "parent_block_hash": internals.event_hash(hashes[index - 1]) if index else None,
        "token_ids": list(request.all_token_ids[start:end]),
        "block_size": group.record_tokens,
        "lora_id": lora.adapter_id if lora else None,
        "lora_name": lora.name if lora else None,
        "medium": EVENT_MEDIUM,
        "extra_keys": internals.event_extra_keys(request, start, end),
        **_group_fields(group_index, group),
    }
    return BlockStored(**_known(BlockStored, fields | _OF_THE_POOL))


def removed_event(block_hash: bytes, group: int) -> BlockRemoved:
    """The KV event that says: the pool turned out not to hold this record any more."""
    fields = {
        "block_hashes": [internals.event_hash(block_hash)],
        "medium": EVENT_MEDIUM,
        "group_idx": group,
    }
    return BlockRemoved(**_known(BlockRemoved, fields | _OF_THE_POOL))


class DeviceCleared(AllBlocksCleared, tag="AllBlocksCleared"):
    """``AllBlocksCleared`` of the engine's own memory alone; who does not know ``medium`` clears every tier."""

    medium: str


def cleared_event(block_pool: Any) -> DeviceCleared:
    """The KV event that says: what was told of the engine's own cache is told anew from here on."""
    return DeviceCleared(internals.medium(block_pool))


def held_event(block_pool: Any, group_index: int, group: Group, hashes: list[bytes | int]) -> BlockStored:
    """The KV event that says: the engine's own cache holds these blocks, which are of any prompts.

    A block stands in ``hashes`` as often as there are copies of it. An event with a parent is believed whole and adds
    a copy of each (decision 24), and which parent that is is nothing to an index.
    """
    fields: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": hashes[0] if hashes else None,
        "token_ids": [],  # the engine does not keep them
        "block_size": group.block_tokens,
        "lora_id": None,
        "lora_name": None,
        "medium": internals.medium(block_pool),
        **_group_fields(group_index, group),
    }
    return BlockStored(**_known(BlockStored, fields))


def _group_fields(group_index: int, group: Group) -> dict[str, Any]:
    whole = "mla_attention" if group.latent else "full_attention"
    return {
        "group_idx": group_index,
        "kv_cache_spec_kind": whole if group.window is None else "sliding_window",
        "kv_cache_spec_sliding_window": group.window,
    }


def _known(event: type[KVCacheEvent], fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` without those that this version of the event lacks."""
    return {name: value for name, value in fields.items() if name in event.__struct_fields__}
