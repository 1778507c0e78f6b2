"""kvpool's KV events: of the pools' records, and of the engine's own cache when an index requests it.

vLLM publishes each block's arrival and departure. An index that lost batches for good knows only a part.
``CacheResync`` publishes the whole cache in one batch: a clear, then every block, as often as it has copies.
vLLM appends our events to its own batch (``Scheduler.update_from_output``), so a resync is the cache as of
that batch: it clears earlier events, and later events have later numbers. A complete index learns nothing
new.

Threads: the engine's scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.request import Request

from kvpool.discovery.worker_record import READ_S, REQUEST_LEASE_S
from kvpool.vllm.engine import internals
from kvpool.vllm.geometry import Group

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = init_logger("vllm.kvpool")


EVENT_MEDIUM = "STORAGE"  # vllm/distributed/kv_events.py: MEDIUM_STORAGE
EVENT_OWNER = "kvpool"
_OF_THE_POOL = {"locality": "REMOTE", "ownership": EVENT_OWNER}


def stored_event(
    request: Request, group_index: int, group: Group, index: int, hashes: Sequence[bytes]
) -> BlockStored:
    """Record ``index`` of ``request`` is in the pool: a block of the record's size, under its last hash."""
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
    fields = {
        "block_hashes": [internals.event_hash(block_hash)],
        "medium": EVENT_MEDIUM,
        "group_idx": group,
    }
    return BlockRemoved(**_known(BlockRemoved, fields | _OF_THE_POOL))


# Without it an index would take them for the engine's own.
TELLS_NEAR = "ownership" in BlockStored.__struct_fields__


def near_event(
    kind: type[BlockStored | BlockRemoved], medium: str, group_index: int, group: Group, hashes: list[int]
) -> BlockStored | BlockRemoved:
    """Records came to, or went from, the near pool: each under its last block's hash, as 64 bits."""
    fields = _of_no_request(hashes, group.record_tokens, medium, group_index, group)
    return kind(**_known(kind, fields | {"locality": "LOCAL", "ownership": EVENT_OWNER}))


class DeviceCleared(AllBlocksCleared, tag="AllBlocksCleared"):
    """``AllBlocksCleared`` of the engine's own memory; readers unaware of ``medium`` clear every tier."""

    medium: str


def cleared_event(block_pool: Any) -> DeviceCleared:
    """Void all earlier events of the engine's own cache; the events after it repeat the rest."""
    return DeviceCleared(internals.medium(block_pool))


def held_event(block_pool: Any, group_index: int, group: Group, hashes: list[bytes | int]) -> BlockStored:
    """The engine's own cache holds these blocks."""
    medium = internals.medium(block_pool)
    fields = _of_no_request(hashes, group.block_tokens, medium, group_index, group)
    return BlockStored(**_known(BlockStored, fields))


def _of_no_request(
    hashes: Sequence[bytes | int], block_tokens: int, medium: str, group_index: int, group: Group
) -> dict[str, Any]:
    """Of blocks whose tokens nobody keeps. An index needs a parent; any non-null one will do."""
    return {
        "block_hashes": hashes,
        "parent_block_hash": hashes[0] if hashes else None,
        "token_ids": [],
        "block_size": block_tokens,
        "lora_id": None,
        "lora_name": None,
        "medium": medium,
        **_group_fields(group_index, group),
    }


def _group_fields(group_index: int, group: Group) -> dict[str, Any]:
    kind = "mla_attention" if group.latent else "full_attention"
    if group.window is not None:
        kind = "mamba" if group.state else "sliding_window_mla" if group.latent else "sliding_window"
    elif group.chunk is not None:
        kind = "chunked_local_attention"
    return {
        "group_idx": group_index,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": None if group.state else group.window,
    }


def _known(event: type[KVCacheEvent], fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` that this version of the event has."""
    return {name: value for name, value in fields.items() if name in event.__struct_fields__}


INTERVAL_S = 10.0  # between two resyncs
MAX_BLOCKS = 1 << 21  # including copies; half an index's limit for a batch

# So that a request read before the last resync does not count as a new one.
assert INTERVAL_S > REQUEST_LEASE_S + READ_S


class CacheResync:
    def __init__(self, groups: Sequence[Group], clock: Callable[[], float] = time.monotonic) -> None:
        self._groups, self._clock = groups, clock
        self._block_pool: BlockPool | None = None
        self._made_at_s: float | None = None
        self._warned = False

    def bind(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def events(self) -> list[KVCacheEvent]:
        """The whole cache as events; empty within ``INTERVAL_S`` of the last call, or when it is unreadable.

        Takes about 0.1 ms per 1,000 blocks, inside the engine's step.
        """
        now_s = self._clock()
        if self._made_at_s is not None and now_s - self._made_at_s < INTERVAL_S:
            return []
        self._made_at_s = now_s
        if self._block_pool is None or (cached := internals.cached_blocks(self._block_pool)) is None:
            self._warn("this version of vLLM does not show its cache to connectors")
            return []
        keys = list(cached)
        more = [
            key for key, blocks in cached.items() if blocks.__class__ is dict for _ in range(len(blocks) - 1)
        ]
        if len(keys) + len(more) > MAX_BLOCKS:
            self._warn(f"it holds more than {MAX_BLOCKS} blocks")
            return []
        events: list[KVCacheEvent] = [cleared_event(self._block_pool)]
        by_group = internals.event_hashes_by_group(keys + more, len(self._groups))
        for index, (group, hashes) in enumerate(zip(self._groups, by_group, strict=True)):
            # An empty group still counts for the rank if it needs the whole prefix.
            if hashes or group.needs_all:
                events.append(held_event(self._block_pool, index, group, hashes))
        logger.info(
            "kvpool: an index asked for it: published all %d blocks that this engine holds", len(keys)
        )
        return events

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvpool: an index asks for all that this engine holds, which is not published: %s", why
            )
