"""HostPages and PageMover: SGLang's pages as buffers of its host memory, moved to and from the pool.

SGLang locates a page by pointers and sizes (``HostKVCache.get_page_buffer_meta``): two buffers in a
page-first layout, two a layer in a layer-first layout, one for MLA. Each buffer is one record, whose group is
its place in the page; nothing is gathered.

SGLang's threads wait inside ``PageMover``, so every batch has a deadline. SGLang reuses the pages after a
call, so it returns only when nothing touches the host memory. Each call has its own ``BlockMover``.

Threads: any, several at once; ``_lock`` guards ``_speeds``. ``HostPages`` does not block.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from sglang.srt.mem_cache.pool_host import HostKVCache

from kvpool import metrics
from kvpool.config import HiCacheConfig
from kvpool.errors import EngineRefused, StoreUnavailable
from kvpool.key.key import MAX_INDEX, Fact
from kvpool.sglang.metrics import PoolState
from kvpool.sglang.namespace import Form, PageKeys, is_hash
from kvpool.store import Store
from kvpool.transfer import BlockMover, HostMemory, Moved, Need, Record
from kvpool.transfer.mover import PART_NBYTES

# Attributes that change a page's bytes but not its size; pools lack some.
_SHAPE = (
    "start_layer", "end_layer", "layer_num", "target_layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank",
    "qk_rope_head_dim", "kv_cache_dim",
)  # fmt: skip


class HostPages:
    """The pages of one host memory pool. Errors: ``EngineRefused`` if they cannot move as they lie."""

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
        if sum(self.part_nbytes) != whole_nbytes:  # MXFP8: its scales lie elsewhere, unnamed by SGLang
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
        """The buffers of whole pages, page after page: views that keep the pool alive.

        ``host_indices``: a slot per token, page by page. Errors: ``ValueError`` for other indices.
        """
        if len(host_indices) % self.page_tokens:
            raise ValueError(f"{len(host_indices)} slots are not whole pages of {self.page_tokens} tokens")
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        return [self._view(pointer, nbytes) for pointer, nbytes in zip(pointers, sizes, strict=True)]

    def sizes(self, form: str) -> tuple[int, ...]:
        return self.part_nbytes if form == "parts" else (self.nbytes,)

    def empty_page(self) -> torch.Tensor:
        """A new flat page, as in SGLang's older interface."""
        page: torch.Tensor = self._pool.get_dummy_flat_data_page()
        return page

    def _view(self, pointer: int, nbytes: int) -> memoryview:
        for start, memory in self._memory:
            offset = pointer - start
            if offset >= 0 and offset + nbytes <= memory.nbytes:
                return memory[offset : offset + nbytes]
        raise ValueError(f"a buffer of {nbytes} bytes lies outside of the host memory")


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, uncopied; the view owns them. Errors: ``EngineRefused``."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise EngineRefused(
            f"a buffer on {tensor.device} that is not contiguous CPU memory cannot be moved as it is"
        )
    return tensor.view(-1).view(torch.uint8).numpy().data


def run_lengths(part_nbytes: Sequence[int]) -> str:
    """Sizes of a page's buffers, such as ``2*12288``."""
    return " + ".join(f"{count}*{nbytes}" for nbytes, count in Counter(part_nbytes).items())


ASK_KEYS = 16384  # per existence check: a layer-first page has many
SETTLE_STEP_S = 1.0
MAX_SPEEDS = 1024  # kept until SGLang collects them

Way = Literal["prefetch", "backup"]


class PageMover:
    """Moves ``pages`` of one server. Errors of its calls: ``StoreUnavailable``, already counted.

    ``over_quota``: whether to store nothing.
    """

    def __init__(
        self,
        store: Store,
        pages: HostPages,
        keys: PageKeys,
        config: HiCacheConfig,
        state: PoolState,
        over_quota: Callable[[], bool],
    ) -> None:
        self._over_quota = over_quota
        self._store, self._pages, self._keys = store, pages, keys
        self._config, self._state = config, state
        self._count = state.counters.add
        self._lock = threading.Lock()
        self._speeds: dict[Way, deque[tuple[int, float]]] = {
            way: deque(maxlen=MAX_SPEEDS) for way in ("prefetch", "backup")
        }

    def leading(self, form: Form, hashes: Sequence[str]) -> int:
        """How many leading pages the pool has. Blocks for at most ``lookup_timeout_s``."""
        width = len(self._pages.sizes(form))
        names = self._names(form, self._valid(hashes))
        self._count(metrics.LOOKUP_REQUESTS)
        try:
            found = self._leading(names, width)
        except StoreUnavailable:
            self._count(metrics.LOOKUP_FAILURES, 1, "store_unavailable")
            raise
        self._state.answered()
        return found

    def _leading(self, names: list[str], width: int) -> int:
        end = time.monotonic() + self._config.lookup_timeout_s
        found, step = 0, max(1, ASK_KEYS // width) * width
        for first in range(0, len(names), step):
            asked = names[first : first + step]
            timeout_s = end - time.monotonic()
            if timeout_s <= 0:
                raise StoreUnavailable(f"no answer within {self._config.lookup_timeout_s:g} s")
            self._count(metrics.LOOKUP_BLOCKS, len(asked))
            there = self._store.touch_many(asked, timeout_s=timeout_s)
            found += (there.index(False) if False in there else len(there)) // width
            if False in there:
                break
        return found

    def load(self, form: Form, hashes: Sequence[str], views: Sequence[memoryview]) -> int:
        """Load pages into ``views``; returns how many leading pages arrived and passed verification.

        Blocks for at most ``max_load_s``, or ``lookup_timeout_s`` without progress.
        """
        width = self._width(form, hashes, views)
        valid = self._valid(hashes)
        records = [
            Record(*pair) for pair in zip(self._names(form, valid), views[: len(valid) * width], strict=True)
        ]
        moved = self._move(
            form,
            lambda mover: mover.load(
                "pages",
                records,
                timeout_s=self._config.lookup_timeout_s,
                max_s=self._config.max_load_s,
                width=width,
                need=Need.LEADING,
                short=len(valid) < len(hashes),
            ),
        )
        self._measure("prefetch", moved)
        return sum(moved.moved)

    def save(self, form: Form, hashes: Sequence[str], views: Sequence[memoryview]) -> list[bool]:
        """Store the pages that the pool lacks; which of all it has afterwards.

        Blocks while the pool makes progress; only other stores wait for it.
        """
        width = self._width(form, hashes, views)
        if self._over_quota():
            self._count(metrics.STORE_SKIPPED_BLOCKS, len(hashes), "quota")
            return [False] * len(hashes)
        valid = [place for place, key in enumerate(hashes) if is_hash(key)]
        if len(valid) < len(hashes):
            self._count(metrics.STORE_SKIPPED_BLOCKS, len(hashes) - len(valid), "fault")
        names = self._names(form, [hashes[place] for place in valid])
        sent = [view for place in valid for view in views[place * width : (place + 1) * width]]
        records = [Record(*pair) for pair in zip(names, sent, strict=True)]
        moved = self._move(form, lambda mover: mover.store("pages", records, width=width))
        self._measure("backup", moved)
        saved = [False] * len(hashes)
        for place, ok in zip(valid, moved.moved, strict=True):
            saved[place] = ok
        return saved

    def take_speeds(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """(pages, GB/s) of each load, and of each store, since the last call."""
        with self._lock:
            prefetched, backed_up = ([*self._speeds[way]] for way in ("prefetch", "backup"))
            for speeds in self._speeds.values():
                speeds.clear()
        return prefetched, backed_up

    def _move(self, form: Form, begin: Callable[[BlockMover[Record]], None]) -> Moved:
        """Run one job, and wait until it touches no buffer any more, even after an exception."""
        sizes = self._pages.sizes(form)
        part_items = len(sizes) * max(1, PART_NBYTES // sum(sizes))
        mover = BlockMover(self._store, HostMemory(part_items), self._state.counters)
        try:
            begin(mover)
            while not mover.drain(SETTLE_STEP_S):
                pass
            finished = mover.poll()
        finally:
            mover.close()
        (moved,) = finished.loads or finished.stores
        if isinstance(moved.error, StoreUnavailable):
            self._state.unavailable(moved.error)
        elif moved.error is not None:
            self._state.fault(f"{type(moved.error).__name__}: {moved.error}", moved.error)
        else:
            self._state.answered()
        return moved

    def _width(self, form: Form, hashes: Sequence[str], views: Sequence[memoryview]) -> int:
        """Buffers per page. Errors: ``ValueError`` when keys and buffers do not match."""
        sizes = self._pages.sizes(form)
        if [view.nbytes for view in views] != list(sizes) * len(hashes):
            raise ValueError(f"{len(views)} buffers are not those of {len(hashes)} pages of {sizes} bytes")
        return len(sizes)

    def _valid(self, hashes: Sequence[str]) -> Sequence[str]:
        """The hashes before the first invalid one."""
        place = next((place for place, key in enumerate(hashes) if not is_hash(key)), len(hashes))
        if place < len(hashes):
            self._state.fault(f"{hashes[place]!r:.80} is no hash of a page", None)
            self._count(metrics.LOOKUP_FAILURES, 1, "fault")
        return hashes[:place]

    def _names(self, form: Form, hashes: Sequence[str]) -> list[str]:
        return self._keys.keys(form, [bytes.fromhex(key) for key in hashes], len(self._pages.sizes(form)))

    def _measure(self, way: Way, moved: Moved) -> None:
        if moved.sent:
            with self._lock:
                self._speeds[way].append((moved.sent, moved.nbytes / max(moved.seconds, 1e-9) / 1e9))
