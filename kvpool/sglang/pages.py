"""HostPages: the pages of SGLang's host memory as buffers, and the facts that say what their bytes mean.

SGLang tells where a page lies by pointers and sizes (``HostKVCache.get_page_buffer_meta``): a page of keys and values
is two buffers where the layout puts pages first, two a layer where it puts layers first, and one for MLA. Each
buffer is moved as one record, so nothing is gathered; the record's group is the buffer's place in its page.

Threads: any, once it is made. Nothing here blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from sglang.srt.mem_cache.pool_host import HostKVCache

from kvpool.errors import EngineRefused
from kvpool.key.key import MAX_INDEX, Fact

# What changes the bytes of a page without changing its size. Those that a kind of pool does not have are left out.
_SHAPE = (
    "start_layer", "end_layer", "layer_num", "target_layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank",
    "qk_rope_head_dim", "kv_cache_dim",
)  # fmt: skip


class HostPages:
    """The pages of one host memory pool. ``kv_dtype``: as ``HiCacheConfig`` has it.

    Errors: ``EngineRefused`` for memory of which a page cannot be moved as it lies there.
    """

    def __init__(self, pool: HostKVCache, kv_dtype: str | None) -> None:
        name = type(pool).__name__
        if not isinstance(pool, HostKVCache):
            raise EngineRefused(
                f"{name} keeps no KV pages of its own: kvpool does not support this kind of model"
            )
        if pool.shared_allocation_domain is not None:
            raise EngineRefused(f"{name} may move its pages in memory: start without --enable-unified-memory")
        if pool.dtype == torch.uint8 and kv_dtype is None:
            raise EngineRefused(
                'the host memory holds bare bytes, as for FP8: set "kv_dtype" to what --kv-cache-dtype is, such as '
                "fp8_e4m3, so that servers with another format never read them"
            )
        buffers = pool.kv_buffer if isinstance(pool.kv_buffer, (list, tuple)) else [pool.kv_buffer]
        if not all(isinstance(buffer, torch.Tensor) for buffer in buffers):
            raise EngineRefused(
                f"{name} keeps its memory elsewhere: kvpool does not support this kind of model"
            )
        self._memory = [(buffer.data_ptr(), flat_bytes(buffer)) for buffer in buffers]
        self._pool = pool
        self.page_tokens = int(pool.page_size)
        try:
            self.part_nbytes = tuple(view.nbytes for view in self.views(torch.arange(self.page_tokens)))
        except (ValueError, NotImplementedError) as error:
            raise EngineRefused(
                f"--hicache-mem-layout {pool.layout} has no pages that can be moved as they lie ({error}): use "
                "page_first with --hicache-io-backend kernel, or page_first_direct with direct"
            ) from error
        whole_nbytes = self.page_tokens * int(pool.get_size_per_token())
        if (
            sum(self.part_nbytes) != whole_nbytes
        ):  # MXFP8: its scales lie elsewhere, and SGLang does not name them
            raise EngineRefused(
                f"a page of {name} has {whole_nbytes} bytes, and SGLang says where {sum(self.part_nbytes)} of them "
                "are: use another --kv-cache-dtype"
            )
        if not 1 <= len(self.part_nbytes) <= MAX_INDEX:
            raise EngineRefused(f"a page of {name} is in {len(self.part_nbytes)} pieces: use page_first")
        self.nbytes = sum(self.part_nbytes)
        self.facts: dict[str, Fact] = {
            "host_pool": name,
            "layout": str(pool.layout),
            "dtype": str(pool.dtype).removeprefix("torch."),
            "kv_dtype": kv_dtype or "",
            "page_tokens": self.page_tokens,
            "page_nbytes": run_lengths(self.part_nbytes),
            "page_format": pool.storage_format_tag or "",
        }
        for field in _SHAPE:
            value = getattr(pool, field, None)
            if value is not None:
                self.facts[field] = int(value)

    def views(self, host_indices: torch.Tensor) -> list[memoryview]:
        """The buffers of whole pages, page after page: views of the pool itself, which they keep alive.

        ``host_indices``: one slot a token, page by page. Errors: ``ValueError`` for other indices.
        """
        if len(host_indices) % self.page_tokens:
            raise ValueError(f"{len(host_indices)} slots are not whole pages of {self.page_tokens} tokens")
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        return [self._view(pointer, nbytes) for pointer, nbytes in zip(pointers, sizes, strict=True)]

    def sizes(self, form: str) -> tuple[int, ...]:
        """Bytes of each buffer of a page in this form: ``parts`` or ``flat``."""
        return self.part_nbytes if form == "parts" else (self.nbytes,)

    def empty_page(self) -> torch.Tensor:
        """A flat page of its own, as SGLang's older interface hands over."""
        page: torch.Tensor = self._pool.get_dummy_flat_data_page()
        return page

    def _view(self, pointer: int, nbytes: int) -> memoryview:
        for start, memory in self._memory:
            offset = pointer - start
            if offset >= 0 and offset + nbytes <= memory.nbytes:
                return memory[offset : offset + nbytes]
        raise ValueError(f"a buffer of {nbytes} bytes lies outside of the host memory")


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in CPU memory, where they are, for as long as the view lives.

    Errors: ``EngineRefused`` when it is elsewhere, or not contiguous.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise EngineRefused(
            f"a buffer on {tensor.device} that is not contiguous CPU memory cannot be moved as it is"
        )
    return tensor.view(-1).view(torch.uint8).numpy().data


def run_lengths(part_nbytes: Sequence[int]) -> str:
    """Sizes of a page's buffers, such as ``2*12288``."""
    return " + ".join(f"{count}*{nbytes}" for nbytes, count in Counter(part_nbytes).items())
