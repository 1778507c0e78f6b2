"""The host side of one SGLang server: its real memory pools and its real factory, around a backend of ours."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

PAGE_TOKENS = 16
LAYERS = 3


def extra(pool: str, **more: Any) -> dict[str, Any]:
    """What ``--hicache-storage-backend-extra-config`` holds."""
    return {
        "backend_name": "kvpool", "module_path": "kvpool.sglang", "class_name": "KVPoolHiCache", "interface_v1": 1,
        "pool": pool, "model_id": "tiny", "lookup_timeout_s": 60.0, **more,
    }  # fmt: skip


def device_pool(kind: str, dtype: torch.dtype, page_tokens: int, heads: int, layers: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common: dict[str, Any] = {
        "size": 8 * page_tokens, "page_size": page_tokens, "dtype": dtype, "layer_num": layers, "device": "cpu",
        "enable_memory_saver": False,
    }  # fmt: skip
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **common)
    return MHATokenToKVPool(
        head_num=heads, head_dim=32, v_head_dim=16 if kind == "asymmetric" else 32, **common
    )


def host_pool(device: Any, layout: str, page_tokens: int, pages: int) -> Any:
    """Host memory of a device pool, as SGLang builds it, but not pinned."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    info = device.get_device_pool_infos()[0].buffer_info
    common: dict[str, Any] = {
        "host_to_device_ratio": 0, "host_size": 0, "page_size": page_tokens, "layout": layout, "pin_memory": False,
        "device_capacity_tokens": device.size, "start_layer": 0, "end_layer": device.layer_num,
        "host_token_capacity": pages * page_tokens,
    }  # fmt: skip
    if isinstance(device, MLATokenToKVPool):
        return MLATokenToKVPoolHost(info, target_layer_num=device.layer_num, **common)
    return get_mha_host_pool_cls(info)(info, **common)


def storage_config(extra_config: dict[str, Any], **parallel: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        **{
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True,
            "model_name": "/models/tiny", "extra_config": extra_config, **parallel,
        }
    )  # fmt: skip


class Server:
    """One rank: host memory of random bytes, and the backend that SGLang's factory makes."""

    def __init__(
        self,
        pool: str,
        *,
        layout: str = "page_first",
        kind: str = "mha",
        dtype: torch.dtype = torch.bfloat16,
        page_tokens: int = PAGE_TOKENS,
        heads: int = 4,
        layers: int = LAYERS,
        pages: int = 24,
        parallel: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        self.page_tokens = page_tokens
        self.device = device_pool(kind, dtype, page_tokens, heads, layers)
        self.host = host_pool(self.device, layout, page_tokens, pages)
        for buffer in self.host.kv_buffer:
            buffer.view(torch.uint8).random_(0, 256)
        config = storage_config(extra(pool, **settings), is_mla_model=kind == "mla", **(parallel or {}))
        self.backend: Any = StorageBackendFactory.create_backend("dynamic", config, self.host)
        self.backend.register_mem_pool_host(self.host)

    def slots(self, pages: int) -> torch.Tensor:
        slots: torch.Tensor = self.host.alloc(pages * self.page_tokens)
        return slots

    def page(self, slots: torch.Tensor, place: int) -> bytes:
        """What lies in one of the pages of ``slots``."""
        pointers, sizes = self.host.get_page_buffer_meta(slots)
        width = len(pointers) // (len(slots) // self.page_tokens)
        part = slice(place * width, (place + 1) * width)
        return b"".join(map(ctypes.string_at, pointers[part], sizes[part]))

    def contents(self, slots: torch.Tensor) -> list[bytes]:
        return [self.page(slots, place) for place in range(len(slots) // self.page_tokens)]


def hashes(pages: int, *, page_tokens: int = PAGE_TOKENS, start: int = 0) -> list[str]:
    """Those that SGLang has for a prompt of so many pages."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    found = get_storage_hash_str(tokens(pages, page_tokens=page_tokens, start=start), page_size=page_tokens)
    assert isinstance(found, list)
    return found


def tokens(pages: int, *, page_tokens: int = PAGE_TOKENS, start: int = 0) -> list[int]:
    return list(range(start, start + pages * page_tokens))


class Controller:
    """SGLang's real cache controller: the threads that look pages up, prefetch them and back them up."""

    def __init__(self, pool: str, **settings: Any) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
        from sglang.srt.runtime_context import get_parallel

        self.device = device_pool("mha", torch.bfloat16, PAGE_TOKENS, 4, LAYERS)
        self.host = host_pool(self.device, "page_first", PAGE_TOKENS, 600)
        self.host.kv_buffer.view(-1).view(torch.uint8).random_(0, 256)
        group = HostPoolGroup([PoolEntry(PoolName.KV, self.host, self.device, lambda layer: layer, True)])
        self.controller = HybridCacheController(
            self, group, PAGE_TOKENS, torch.distributed.group.WORLD, threading.Event()
        )
        with get_parallel().override(
            attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
        ):
            self.controller.attach_storage_backend(
                "dynamic", PAGE_TOKENS, "/models/tiny", extra(pool, **settings), group.entries
            )

    def get_kvcache(self) -> Any:
        """The controller asks its allocator for the device's memory."""
        return self.device

    def back_up(self, prompt: Sequence[int], slots: torch.Tensor) -> int:
        """How many tokens of ``prompt`` got to storage."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        self.controller.write_storage(
            slots, list(prompt), get_storage_hash_str(list(prompt), page_size=PAGE_TOKENS)
        )
        completed: int = self.controller.ack_backup_queue.get(timeout=60).completed_tokens
        return completed

    def prefetch(self, prompt: Sequence[int]) -> tuple[torch.Tensor, int, int]:
        """The slots, how many tokens were said to be there, and how many came."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        self.controller.prefetch(CacheRequestHandle("request", 0), list(prompt))
        operation = self.controller.prefetch_hit_queue.get(timeout=60)
        operation.host_indices = slots = self.host.alloc(operation.storage_hit_count)
        if not operation.storage_hit_count:
            return slots, 0, 0
        self.controller.prefetch_buffer.put(operation)
        came = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            if ack.completed_req:
                return slots, operation.storage_hit_count, came
            came = ack.completed_tokens

    def close(self) -> None:
        self.controller.detach_storage_backend()
