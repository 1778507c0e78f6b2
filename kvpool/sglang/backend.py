"""KVPoolHiCache: the pool as the storage (L3) behind SGLang's hierarchical cache.

Interface: ``sglang/srt/mem_cache/hicache_storage.py`` (``HiCacheStorage``). SGLang copies pages between the device and
its own host memory; this moves pages between that memory and the pool, and nothing is copied on the way. SGLang's
threads wait inside these calls, so every batch has a deadline, and a call returns only when nothing touches the host
memory any more: SGLang gives the pages of a call that has returned to somebody else.

Pages come in two forms that never meet, each with a namespace of its own: as they lie in host memory (``*_v1``), and as
one flat tensor each (the older calls, where ``interface_v1`` is not set).

Whatever a call is handed, what cannot be done is a miss and is counted (``fault``), and the next call is served as
ever: nothing is raised into SGLang's threads, but by ``clear``, whose caller wants to know.

When SGLang flushes its caches, or is given other weights, the namespaces become this rank's own (``epoch.py``).

Threads: any may call, and SGLang calls from four at once. ``_lock`` guards ``_counters``, ``_speeds``, ``_away``,
``_faulty`` and ``_spaces``. ``_pages``, ``_facts`` and ``_epoch`` are set once, by ``register_mem_pool_host``, before
the threads are started.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

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
from kvpool.errors import ConfigError, EngineRefused, StoreUnavailable
from kvpool.key.key import Fact, Namespace, namespace_prefix
from kvpool.metrics import Counters, Metric
from kvpool.sglang.epoch import Epoch, epoch_of
from kvpool.sglang.faults import Faults
from kvpool.sglang.metrics_page import show
from kvpool.sglang.pages import HostPages, flat_bytes, run_lengths
from kvpool.sglang.served import served_facts
from kvpool.store import Transfer, open_store
from kvpool.transfer.mover import PART_NBYTES, STORE_TIMEOUT_S

logger = logging.getLogger(__name__)

# In the extra config, and not ours. SGLang takes others out of it before a backend sees it.
SGLANG_KEYS = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"}
)
MAX_PARTS = 8  # of one call under way at a time
ASK_KEYS = 16384  # in one existence check: a page is many where the layout puts layers first
SETTLE_STEP_S = 1.0
CLEAR_TIMEOUT_S = 60.0
MAX_SPEEDS = 1024  # kept until SGLang asks for them
_HASH = re.compile(r"(?:[0-9a-f]{2}){8,64}")  # as a key of kvpool has it

_T = TypeVar("_T")
Form = Literal["parts", "flat"]  # as pages lie in host memory; one tensor each
_Submit = Callable[[Sequence[str], Sequence[memoryview], float], Transfer]


class _Spaces(NamedTuple):
    """The namespaces of one epoch, by the form of pages."""

    epoch: str
    parts: Namespace
    flat: Namespace


class KVPoolHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps SGLang's pages in a shared pool.

    Settings: ``kvpool.config.HiCacheConfig``, in ``--hicache-storage-backend-extra-config``. Refuses to start, with one
    sentence, when the pool, a setting or the kind of model is wrong.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._config = HiCacheConfig.load({name: extra[name] for name in extra.keys() - SGLANG_KEYS})
        self._zero_copy = bool(extra.get("interface_v1"))
        self._parallel = storage_config
        self._rank = _rank(storage_config)
        if self._config.pool.startswith("memory:"):
            raise EngineRefused(
                "a memory:// pool is this process's own; use file:///dir or valkey://host:6379"
            )
        self._pages: HostPages | None = None
        self._faults = Faults(self._config)
        self._lock = threading.Lock()
        self._counters = Counters()
        self._speeds: dict[str, deque[tuple[int, float]]] = {
            way: deque(maxlen=MAX_SPEEDS) for way in ("prefetch", "backup")
        }
        self._away = False
        self._faulty = False
        self._store = open_store(self._config.pool, threads=self._config.threads)

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Learn where pages lie, and with it the namespace. Errors: ``ConfigError``; the store is closed then."""
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
            self._facts = facts
            self._epoch: Epoch = epoch_of(
                mem_pool_host, weights_never_change=self._config.weights_never_change
            )
            self._spaces = self._spaces_of("")
            self._start(pages)
        except ConfigError:
            self.close()
            raise
        super().register_mem_pool_host(mem_pool_host)
        self._pages = pages

    def _start(self, pages: HostPages) -> None:
        namespace = self._namespace(self._form())
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
            "kvpool HiCache: namespace %s of tenant %s on %r, rank %d, %d tokens a page in %s bytes, budget %g s",
            namespace.hex[:8], self._config.tenant, self._store, self._rank, pages.page_tokens,
            run_lengths(pages.part_nbytes if self._zero_copy else (pages.nbytes,)), self._config.lookup_timeout_s,
        )  # fmt: skip
        if not self._zero_copy:
            logger.warning(
                'kvpool: set "interface_v1": 1 in the extra config; without it SGLang copies each page twice'
            )
        if self._faults:
            logger.warning("kvpool: FAULT INJECTION IS ON: %s. Never serve users like this.", self._faults)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """Refuse what is not keys and values of full attention. Errors: ``EngineRefused``; the store is closed."""
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
        """Load pages into their slots; True for those before the first that did not come.

        Blocking, for at most ``max_load_s``; a pool that makes no progress for ``lookup_timeout_s`` ends it.
        """
        keys = _listed(keys)
        loaded = self._guarded(
            lambda pages: self._load("parts", keys, pages.views(host_indices)), 0, metrics.LOAD_REQUESTS
        )
        return [place < loaded for place in range(len(keys))]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages from their slots; True for those that are in the pool now.

        Blocking, for as long as the pool makes progress; nothing but other stores waits for it.
        """
        keys = _listed(keys)
        return self._guarded(
            lambda pages: self._save("parts", keys, pages.views(host_indices)),
            [False] * len(keys),
            metrics.STORE_SKIPPED_BLOCKS,
            len(keys),
        )

    # Which pages are there.

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages the pool has. Blocking, for at most ``lookup_timeout_s``."""
        return self._guarded(lambda pages: self._leading(_listed(keys), pages), 0, metrics.LOOKUP_FAILURES)

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
        """Load flat pages into tensors of theirs; None for the first that did not come, and for all behind it."""

        def load(pages: HostPages) -> list[torch.Tensor | None]:
            targets = target_locations or [pages.empty_page() for _ in keys]
            loaded = self._load("flat", keys, [flat_bytes(target) for target in targets])
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
        """Store flat pages; whether all of them are in the pool now."""

        def save(pages: HostPages) -> bool:
            return all(self._save("flat", keys, [flat_bytes(value.contiguous()) for value in values or ()]))

        keys = _listed(keys)
        return self._guarded(save, False, metrics.STORE_SKIPPED_BLOCKS, len(keys))

    # The rest.

    def clear(self) -> None:
        """Delete what the pool has under the namespaces of this server: the pages of every server that shares them.

        After a flush, or other weights, those are this rank's own.

        Blocking, for at most a minute. Errors: ``StoreUnavailable``, also when that was not enough.
        """
        if self._pages is None:
            return
        end = time.monotonic() + CLEAR_TIMEOUT_S
        for namespace in (self._namespace("parts"), self._namespace("flat")):
            for blocks in self._store.scan(namespace_prefix(namespace.tenant, namespace.hex)):
                if time.monotonic() > end:
                    raise StoreUnavailable(
                        f"there is more than can be deleted in {CLEAR_TIMEOUT_S:g} s: kvpool purge --namespace "
                        f"{namespace.hex} deletes the rest"
                    )
                self._store.delete_many([block.key for block in blocks])

    def get_stats(self) -> Any:
        """SGLang's own ``StorageMetrics``; kvpool's counters go to the metrics page on the way. None after a fault."""
        return self._guarded(lambda _: self._statistics(), None, metrics.LOOKUP_FAILURES, 0)

    def _statistics(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        refused = self._store.counters().get("refused", 0)
        with self._lock:
            self._counters.add_growth(metrics.REFUSED_KEYS, refused)
            samples = self._counters.take()
            prefetched, backed_up = ([*self._speeds[way]] for way in ("prefetch", "backup"))
            for speeds in self._speeds.values():
                speeds.clear()
        show(samples, self._rank)
        return StorageMetrics(
            prefetch_pgs=[count for count, _ in prefetched],
            backup_pgs=[count for count, _ in backed_up],
            prefetch_bandwidth=[speed for _, speed in prefetched],
            backup_bandwidth=[speed for _, speed in backed_up],
        )

    def close(self) -> None:
        """Cancel what is under way, wait for it, and give everything back; a later call is a miss."""
        self._faults.end()
        self._store.close()

    # How pages move.

    def _leading(self, keys: list[str], pages: HostPages) -> int:
        form = self._form()
        width = len(pages.sizes(form))
        hashes = self._leading_hashes(keys)
        names = self._names(form, hashes, width)
        self._count(metrics.LOOKUP_REQUESTS)
        end = time.monotonic() + self._config.lookup_timeout_s
        found = 0
        try:
            self._faults.delay(self._config.lookup_timeout_s)
            step = max(1, ASK_KEYS // width)
            for first in range(0, len(hashes), step):
                asked = names[first * width : (first + step) * width]
                timeout_s = end - time.monotonic()
                if timeout_s <= 0:
                    raise StoreUnavailable(f"no answer within {self._config.lookup_timeout_s:g} s")
                self._count(metrics.LOOKUP_BLOCKS, len(asked))
                answers = self._store.touch_many(asked, timeout_s=timeout_s)
                there = _whole(answers, width)
                found += there
                if there * width < len(asked):
                    break
        except StoreUnavailable:
            self._count(metrics.LOOKUP_FAILURES, 1, "store_unavailable")
            raise
        self._answered()
        return next((place for place in range(found) if self._faults.miss()), found)

    def _load(self, form: Form, keys: list[str], views: list[memoryview]) -> int:
        """Load pages into ``views``; how many leading ones have come, and proved themselves."""
        width = self._width(form, keys, views)
        hashes = self._leading_hashes(keys)
        names = self._names(form, hashes, width)
        wanted = next((place for place in range(len(hashes)) if self._faults.miss()), len(hashes))
        started = time.monotonic()
        nbytes = sum(view.nbytes for view in views[:width])
        loaded, cause = 0, "ok" if wanted == len(keys) else "missing"
        try:
            self._faults.delay(self._config.lookup_timeout_s)
            parts = self._in_parts(
                lambda part, into, timeout_s: self._store.submit_get(part, into, timeout_s=timeout_s),
                names[: wanted * width], views[: wanted * width], width * max(1, PART_NBYTES // max(1, nbytes)),
                self._config.lookup_timeout_s, started + self._config.max_load_s,
            )  # fmt: skip
            with closing(parts):
                for answers in parts:
                    there = _whole(answers, width)
                    loaded += there
                    if there * width < len(answers):
                        cause = "missing"
                        break
            if cause == "ok" and loaded < wanted:
                cause = "too_slow"
            self._answered()
        except StoreUnavailable as error:
            cause = "store_unavailable"
            self._unavailable(error)
        seconds = time.monotonic() - started
        self._count(metrics.LOAD_REQUESTS, 1, cause)
        self._count(metrics.LOADED_BLOCKS, loaded)
        self._count(metrics.LOADED_BYTES, loaded * nbytes)
        self._count(metrics.LOAD_SECONDS, seconds)
        self._measure("prefetch", loaded, loaded * nbytes, seconds)
        return loaded

    def _save(self, form: Form, keys: list[str], views: list[memoryview]) -> list[bool]:
        """Store the pages that the pool does not have; which of them it has now."""
        width = self._width(form, keys, views)
        spelled = [place for place, key in enumerate(keys) if _is_hash(key)]
        if len(spelled) < len(keys):
            self._count(metrics.STORE_SKIPPED_BLOCKS, len(keys) - len(spelled), "fault")
            saved = [False] * len(keys)
            if spelled:
                pages = [view for place in spelled for view in views[place * width : (place + 1) * width]]
                for place, kept in zip(
                    spelled, self._save(form, [keys[place] for place in spelled], pages), strict=True
                ):
                    saved[place] = kept
            return saved
        names = self._names(form, [bytes.fromhex(key) for key in keys], width)
        started = time.monotonic()
        there = [False] * len(names)
        known = nbytes = 0
        cause = "pool_full"
        try:
            self._faults.delay(STORE_TIMEOUT_S)
            there = [
                present
                for first in range(0, len(names), ASK_KEYS)
                for present in self._store.touch_many(
                    names[first : first + ASK_KEYS], timeout_s=STORE_TIMEOUT_S
                )
            ]
            known = sum(_pages(there, width))
            missing = [place for place, present in enumerate(there) if not present]
            damaged = {page for page in range(len(keys)) if self._faults.corrupt()}
            sent = [views[place][: -1 if place // width in damaged else None] for place in missing]
            parts = self._in_parts(
                lambda part, out, timeout_s: self._store.submit_put(part, out, timeout_s=timeout_s),
                [names[place] for place in missing], sent,
                max(1, PART_NBYTES // max((view.nbytes for view in sent), default=1)), STORE_TIMEOUT_S, float("inf"),
            )  # fmt: skip
            with closing(parts):
                places = iter(zip(missing, sent, strict=True))
                for answers in parts:
                    for kept, (place, view) in zip(answers, places, strict=False):
                        there[place] = kept
                        nbytes += kept * view.nbytes
            self._answered()
        except StoreUnavailable as error:
            cause = "store_unavailable"
            self._unavailable(error)
        saved = _pages(there, width)
        self._count(metrics.STORE_SKIPPED_BLOCKS, known, "already_there")
        self._count(metrics.STORE_SKIPPED_BLOCKS, len(saved) - sum(saved), cause)
        self._count(metrics.STORED_BLOCKS, sum(saved) - known)
        self._count(metrics.STORED_BYTES, nbytes)
        self._measure("backup", sum(saved) - known, nbytes, time.monotonic() - started)
        return saved

    def _in_parts(
        self,
        submit: _Submit,
        names: Sequence[str],
        views: Sequence[memoryview],
        part_keys: int,
        timeout_s: float,
        end: float,
    ) -> Generator[list[bool], None, None]:
        """Submit in parts, a few at a time, each with its own deadline, none after ``end``; yield their answers.

        However it is left, nothing of it touches a buffer any more. Errors: ``StoreUnavailable``.
        """
        under_way: deque[Transfer] = deque()
        first = 0
        try:
            while True:
                while first < len(names) and len(under_way) < MAX_PARTS and time.monotonic() < end:
                    part = slice(first, first + part_keys)
                    under_way.append(submit(names[part], views[part], timeout_s))
                    first += part_keys
                if not under_way:
                    return
                answers = under_way[0].wait()
                under_way.popleft()
                yield answers
        finally:
            for transfer in under_way:
                transfer.cancel()
            for transfer in under_way:
                _settle(transfer)

    def _form(self) -> Form:
        """The form of pages that SGLang asks for."""
        return "parts" if self._zero_copy else "flat"

    def _namespace(self, form: Form) -> Namespace:
        """That of the current epoch."""
        epoch = self._epoch.since_update if self._config.weights_never_change else self._epoch.since_flush
        with self._lock:
            left = self._spaces.epoch != epoch
            if left:
                self._spaces = self._spaces_of(epoch)
            found: Namespace = getattr(self._spaces, form)
        if left:
            logger.warning(
                "kvpool: the caches were flushed, or weights changed: until it restarts, rank %d of this server goes "
                "on in a namespace of its own, %s, and shares with no other server; where its weights never change in "
                "place, set weights_never_change to true",
                self._rank, found.hex[:8],
            )  # fmt: skip
        return found

    def _spaces_of(self, epoch: str) -> _Spaces:
        facts = self._facts | ({"epoch": epoch} if epoch else {})
        parts, flat = (
            Namespace(self._config.tenant, {**facts, "page_form": form}) for form in ("parts", "flat")
        )
        return _Spaces(epoch, parts, flat)

    def _width(self, form: Form, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Buffers of a page. Errors: ``ValueError`` when keys and buffers do not belong together."""
        assert self._pages is not None
        sizes = self._pages.sizes(form)
        if [view.nbytes for view in views] != list(sizes) * len(keys):
            raise ValueError(f"{len(views)} buffers are not those of {len(keys)} pages of {sizes} bytes")
        return len(sizes)

    def _leading_hashes(self, keys: Sequence[str]) -> list[bytes]:
        """The hashes of the pages before the first that has none."""
        place = next((place for place, key in enumerate(keys) if not _is_hash(key)), len(keys))
        if place < len(keys):
            self._fault(f"{keys[place]!r:.80} is no hash of a page", None)
            self._count(metrics.LOOKUP_FAILURES, 1, "fault")
        return [bytes.fromhex(key) for key in keys[:place]]

    def _names(self, form: Form, hashes: list[bytes], width: int) -> list[str]:
        """The keys of all buffers of the pages: those of one page follow each other."""
        namespace = self._namespace(form)
        return list(
            chain.from_iterable(
                zip(*(namespace.keys(hashes, part, self._rank) for part in range(width)), strict=True)
            )
        )

    # What becomes of faults.

    def _guarded(
        self, call: Callable[[HostPages], _T], instead: _T, counter: Metric, amount: float = 1
    ) -> _T:
        """The result of ``call``; ``instead`` before there is host memory, and when it raises."""
        if self._pages is None:
            return instead
        try:
            return call(self._pages)
        except StoreUnavailable as error:
            self._unavailable(error)
        except Exception as error:
            self._fault(f"{type(error).__name__}: {error}", error)
            self._count(counter, amount, "fault")
        return instead

    def _fault(self, what: str, error: Exception | None) -> None:
        """Tell the log of the first thing that could not be done; all of them are counted."""
        with self._lock:
            first, self._faulty = not self._faulty, True
        if first:
            logger.error(
                "kvpool could not do what SGLang asked for, a miss (%s); more of this is counted and not logged",
                what, exc_info=error,
            )  # fmt: skip

    def _unavailable(self, error: StoreUnavailable) -> None:
        with self._lock:
            first, self._away = not self._away, True
        if first:
            logger.warning("kvpool: the pool is away, and everything a miss until it is back: %s", error)

    def _answered(self) -> None:
        with self._lock:
            back, self._away = self._away, False
        if back:
            logger.warning("kvpool: the pool is back")

    def _count(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        with self._lock:
            self._counters.add(metric, amount, label)

    def _measure(self, way: str, pages: int, nbytes: int, seconds: float) -> None:
        if pages and self._parallel.enable_storage_metrics:
            with self._lock:
                self._speeds[way].append((pages, nbytes / max(seconds, 1e-9) / 1e9))


def _rank(parallel: HiCacheStorageConfig) -> int:
    """This rank's place in keys. Ranks that hold the same bytes have the same one; stages hold other layers.

    Errors: ``EngineRefused``.
    """
    if parallel.dcp_size > 1:
        raise EngineRefused("decode context parallelism is not supported: start without --dcp-size")
    if parallel.should_split_heads:
        raise EngineRefused(
            "pages are not split by heads for other tensor-parallel sizes: remove tp_lcm_size from the extra config"
        )
    tp_rank, tp_size = (0, 1) if parallel.is_mla_model else (parallel.tp_rank, parallel.tp_size)
    place = (parallel.pp_rank * tp_size + tp_rank) * parallel.attn_cp_size + parallel.attn_cp_rank
    return int(place)


def _is_hash(key: object) -> bool:
    return isinstance(key, str) and _HASH.fullmatch(key) is not None


def _listed(keys: Any) -> list[Any]:
    """Whatever is handed over as keys; nothing where that is none."""
    try:
        return list(keys)
    except TypeError:
        return []


def _pages(answers: Sequence[bool], width: int) -> list[bool]:
    """Of each page, whether it has all its buffers."""
    return [all(answers[first : first + width]) for first in range(0, len(answers), width)]


def _whole(answers: Sequence[bool], width: int) -> int:
    """How many leading pages have all their buffers."""
    return next((place for place, there in enumerate(answers) if not there), len(answers)) // width


def _settle(transfer: Transfer) -> None:
    """Wait until a cancelled batch uses its buffers no more: its deadline and the cancellation see to it."""
    waited = 0
    while not transfer.done():
        transfer.settle(SETTLE_STEP_S)
        waited += 1
        if waited == 3 and not transfer.done():
            logger.warning(
                "kvpool: %r does not stop; SGLang's pages are kept from others until it does", transfer
            )
