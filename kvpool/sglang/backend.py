"""KVPoolHiCache: the pool as the storage (L3) behind SGLang's hierarchical cache.

Interface: ``sglang/srt/mem_cache/hicache_storage.py`` (``HiCacheStorage``). SGLang copies pages between the
device and its host memory; this module moves them between that memory and the pool without a copy
(``pages.py``). SGLang's threads block in these calls.

Pages arrive as they lie in host memory (``*_v1``), or as a flat tensor each (the older calls, without
``interface_v1``).

A failed call is a miss and counted (``fault``); the next call works as before. Only ``clear`` raises into
SGLang's threads, because its caller needs to know.

Threads: any; SGLang calls from four at once. ``register_mem_pool_host`` sets ``_pages``, ``_keys`` and
``_mover`` once, before the threads start.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)
from sglang.srt.mem_cache.pool_host import HostKVCache

from kvpool import metrics
from kvpool.config import HiCacheConfig
from kvpool.discovery.facts import announce_facts
from kvpool.discovery.quota_watch import QuotaWatch
from kvpool.errors import ConfigError, EngineRefused, NoThread, StoreUnavailable
from kvpool.key.key import Fact, namespace_prefix, writer_name
from kvpool.metrics import Metric
from kvpool.sglang.metrics import PoolState, show
from kvpool.sglang.namespace import Form, PageKeys, epoch_of
from kvpool.sglang.pages import HostPages, PageMover, flat_bytes, run_lengths
from kvpool.sglang.served import served_facts
from kvpool.store import open_store

logger = logging.getLogger(__name__)

# SGLang's own keys in the extra config. It removes others before a backend sees them.
SGLANG_KEYS = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"}
)
CLEAR_TIMEOUT_S = 60.0

_T = TypeVar("_T")


class KVPoolHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps SGLang's pages in a shared pool.

    Settings: ``kvpool.config.HiCacheConfig``, in ``--hicache-storage-backend-extra-config``. A wrong pool,
    setting or kind of model refuses the start in one sentence.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._config = HiCacheConfig.load({name: extra[name] for name in extra.keys() - SGLANG_KEYS})
        self._zero_copy = bool(extra.get("interface_v1"))
        self._parallel = storage_config
        self._rank = _rank(storage_config)
        self._pages: HostPages | None = None
        self._mover: PageMover | None = None
        self._state = PoolState()
        self._store = open_store(
            self._config.pool,
            threads=self._config.threads,
            must_answer=not self._config.start_without_pool,
        )
        self._store.writer = writer_name(secrets.token_hex(16))  # of this rank alone
        self._quota = QuotaWatch(self._store, self._config.tenant, self._state.counters, logger)

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Take the pages' host memory, and complete the namespace.

        Errors: ``ConfigError``, ``NoThread``; both close the store.
        """
        try:
            pages = HostPages(mem_pool_host, self._config.kv_dtype)
            parallel = self._parallel
            facts: dict[str, Fact] = {
                **pages.facts,
                **served_facts(self._config),
                "engine": "sglang",
                "hash": "sglang_sha256",
                "ranks_share": bool(parallel.is_mla_model),
                "tp_size": int(parallel.tp_size),
                "pp_size": int(parallel.pp_size),
                "attn_cp_size": int(parallel.attn_cp_size),
            }
            epoch = epoch_of(mem_pool_host, weights_never_change=self._config.weights_never_change)
            self._keys = PageKeys(
                self._config.tenant,
                facts,
                self._rank,
                epoch,
                weights_never_change=self._config.weights_never_change,
            )
            self._start(pages)
        except (ConfigError, NoThread):
            self.close()
            raise
        super().register_mem_pool_host(mem_pool_host)
        self._quota.start()
        self._pages = pages
        self._mover = PageMover(
            self._store, pages, self._keys, self._config, self._state, self._quota.is_over
        )

    def _start(self, pages: HostPages) -> None:
        namespace = self._keys.namespace(self._form())
        stage = f" stage {self._parallel.pp_rank}" if self._parallel.pp_size > 1 else ""
        name = self._config.model_id or self._parallel.model_name or "unnamed"
        try:
            for sentence in announce_facts(self._store, namespace, name + stage):
                logger.warning("kvpool: %s", sentence)
        except StoreUnavailable as error:
            logger.warning(
                "kvpool: the facts of this server are not in the pool, so doctor cannot show them: %s", error
            )
        logger.info(
            "kvpool HiCache: namespace %s of tenant %s on %r, rank %d, %d tokens a page in %s bytes, timeout %g s",
            namespace.hex[:8], self._config.tenant, self._store, self._rank, pages.page_tokens,
            run_lengths(pages.part_nbytes if self._zero_copy else (pages.nbytes,)), self._config.lookup_timeout_s,
        )  # fmt: skip
        if not self._zero_copy:
            logger.warning(
                'kvpool: set "interface_v1": 1 in the extra config; without it SGLang copies each page twice'
            )

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Refuse anything but keys and values of full attention. Errors: ``EngineRefused``; closes the store."""
        if host_pool_name != PoolName.KV:
            self.close()
            raise EngineRefused(
                f"this model keeps a second kind of cache ({host_pool_name}), which kvpool does not support in SGLang: "
                "it serves models of full attention (MHA, GQA, MLA), without a draft model of its own cache"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # Pages as they lie in host memory.

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into their slots; True for those before the first failure.

        Blocks for at most ``max_load_s``, or ``lookup_timeout_s`` without progress.
        """
        keys = _listed(keys)
        loaded = self._guarded(
            lambda pages, mover: mover.load("parts", keys, pages.views(host_indices)),
            0,
            metrics.LOAD_REQUESTS,
        )
        return [place < loaded for place in range(len(keys))]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages from their slots; True for those in the pool afterwards.

        Blocks while the pool makes progress; only other stores wait for it.
        """
        keys = _listed(keys)
        return self._guarded(
            lambda pages, mover: mover.save("parts", keys, pages.views(host_indices)),
            [False] * len(keys),
            metrics.STORE_SKIPPED_BLOCKS,
            len(keys),
        )

    # Which pages are there.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages the pool has. Blocks for at most ``lookup_timeout_s``."""
        return self._guarded(
            lambda _, mover: mover.leading(self._form(), _listed(keys)), 0, metrics.LOOKUP_FAILURES
        )

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # Flat pages: the older calls.

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load flat pages into their tensors; None from the first failure on."""

        def load(pages: HostPages, mover: PageMover) -> list[torch.Tensor | None]:
            targets = target_locations or [pages.empty_page() for _ in keys]
            loaded = mover.load("flat", keys, [flat_bytes(target) for target in targets])
            return [target if place < loaded else None for place, target in enumerate(targets)]

        keys = _listed(keys)
        missed: list[torch.Tensor | None] = [None] * len(keys)
        return self._guarded(load, missed, metrics.LOAD_REQUESTS)

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat pages; whether the pool has all of them afterwards."""

        def save(_: HostPages, mover: PageMover) -> bool:
            return all(mover.save("flat", keys, [flat_bytes(value.contiguous()) for value in values or ()]))

        keys = _listed(keys)
        return self._guarded(save, False, metrics.STORE_SKIPPED_BLOCKS, len(keys))

    # The rest.

    def clear(self) -> None:
        """Delete this server's namespaces from the pool, for every server that shares them.

        After a flush or a weights update the namespaces are this rank's own. Blocks for at most a minute.
        Errors: ``StoreUnavailable``, also when time ran out.
        """
        if self._pages is None:
            return
        end = time.monotonic() + CLEAR_TIMEOUT_S
        for namespace in (self._keys.namespace("parts"), self._keys.namespace("flat")):
            for blocks in self._store.scan(namespace_prefix(namespace.tenant, namespace.hex)):
                if time.monotonic() > end:
                    raise StoreUnavailable(
                        f"there is more than can be deleted in {CLEAR_TIMEOUT_S:g} s: kvpool purge --namespace "
                        f"{namespace.hex} deletes the rest"
                    )
                self._store.delete_many([block.key for block in blocks])

    def get_stats(self) -> Any:
        """SGLang's ``StorageMetrics``; also updates kvpool's metrics page. None after a fault."""
        return self._guarded(lambda _, mover: self._statistics(mover), None, metrics.LOOKUP_FAILURES, 0)

    def _statistics(self, mover: PageMover) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        counters = self._state.counters
        self._store.count_health(counters)
        show(counters.take(), self._rank)
        prefetched, backed_up = mover.take_speeds()
        return StorageMetrics(
            prefetch_pgs=[count for count, _ in prefetched],
            backup_pgs=[count for count, _ in backed_up],
            prefetch_bandwidth=[speed for _, speed in prefetched],
            backup_bandwidth=[speed for _, speed in backed_up],
        )

    def close(self) -> None:
        """Cancel pending work, wait for it, and release everything; later calls are misses."""
        self._quota.close()
        self._store.close()

    def _form(self) -> Form:
        return "parts" if self._zero_copy else "flat"

    def _guarded(
        self, call: Callable[[HostPages, PageMover], _T], instead: _T, counter: Metric, amount: float = 1
    ) -> _T:
        """The result of ``call``; ``instead`` before registration of host memory, and after an exception."""
        if self._pages is None or self._mover is None:
            return instead
        try:
            return call(self._pages, self._mover)
        except StoreUnavailable as error:
            self._state.unavailable(error)
        except Exception as error:
            self._state.fault(f"{type(error).__name__}: {error}", error)
            self._state.counters.add(counter, amount, "fault")
        return instead


def _rank(parallel: HiCacheStorageConfig) -> int:
    """This rank's place in keys: ranks with equal bytes share it, stages differ. Errors: ``EngineRefused``."""
    if parallel.dcp_size > 1:
        raise EngineRefused("decode context parallelism is not supported: start without --dcp-size")
    if parallel.should_split_heads:
        raise EngineRefused(
            "pages are not split by heads for other tensor-parallel sizes: remove tp_lcm_size from the extra config"
        )
    tp_rank, tp_size = (0, 1) if parallel.is_mla_model else (parallel.tp_rank, parallel.tp_size)
    place = (parallel.pp_rank * tp_size + tp_rank) * parallel.attn_cp_size + parallel.attn_cp_rank
    return int(place)


def _listed(keys: Any) -> list[Any]:
    """``keys`` as a list; empty for anything else."""
    try:
        return list(keys)
    except TypeError:
        return []
