"""PageKeys and Epoch: the keys of this server's pages, valid for the weights of its start.

A page has two forms, each with a namespace: ``parts``, as in host memory, and ``flat``, as one tensor.

SGLang reports neither flushes nor in-place weight updates to a storage backend. kvpool watches both:
``clear`` of the host memory's pool, which ``flush_cache`` calls when the storage threads have ended; and the
functions of ``WeightUpdater``, before they write. Afterwards each rank draws a random epoch, so its
namespaces are its own. With MLA, one rank writes for all; the others then miss its pages, which is safe.

Threads: any; ``PageKeys._lock`` guards ``_namespaces``. The scheduler's thread writes each field of an epoch
atomically, storage threads read.
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
import threading
import weakref
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

from sglang.srt.mem_cache.pool_host import HostKVCache

from kvpool.errors import EngineRefused
from kvpool.key.key import Fact, Namespace
from kvpool.sglang.served import argument, is_published

logger = logging.getLogger(__name__)


_HASH = re.compile(r"(?:[0-9a-f]{2}){8,64}")  # as in keys

Form = Literal["parts", "flat"]


class _Namespaces(NamedTuple):
    epoch: str
    parts: Namespace
    flat: Namespace


class PageKeys:
    """``rank``: this rank's place in keys. ``weights_never_change``: flushes begin no epoch."""

    def __init__(
        self, tenant: str, facts: Mapping[str, Fact], rank: int, epoch: Epoch, *, weights_never_change: bool
    ) -> None:
        self._tenant, self._facts, self._rank = tenant, dict(facts), rank
        self._epoch, self._weights_never_change = epoch, weights_never_change
        self._lock = threading.Lock()
        self._namespaces = self._of_epoch("")

    def namespace(self, form: Form) -> Namespace:
        epoch = self._epoch.since_update if self._weights_never_change else self._epoch.since_flush
        with self._lock:
            left = self._namespaces.epoch != epoch
            if left:
                self._namespaces = self._of_epoch(epoch)
            found: Namespace = getattr(self._namespaces, form)
        if left:
            logger.warning(
                "kvpool: the caches were flushed, or weights changed: until it restarts, rank %d of this server goes "
                "on in a namespace of its own, %s, and shares with no other server; where its weights never change in "
                "place, set weights_never_change to true",
                self._rank, found.hex[:8],
            )  # fmt: skip
        return found

    def keys(self, form: Form, hashes: list[bytes], width: int) -> list[str]:
        """The keys of each page's ``width`` buffers, page after page."""
        namespace = self.namespace(form)
        return list(
            chain.from_iterable(
                zip(*(namespace.keys(hashes, part, self._rank) for part in range(width)), strict=True)
            )
        )

    def _of_epoch(self, epoch: str) -> _Namespaces:
        facts = self._facts | ({"epoch": epoch} if epoch else {})
        parts, flat = (Namespace(self._tenant, {**facts, "page_form": form}) for form in ("parts", "flat"))
        return _Namespaces(epoch, parts, flat)


def is_hash(key: object) -> bool:
    return isinstance(key, str) and _HASH.fullmatch(key) is not None


_UPDATES = (
    "begin_weight_update", "update_weights_from_disk", "update_weights_from_ipc", "update_weights_from_tensor",
    "load_weights_from_distributed",
)  # fmt: skip


class Epoch:
    """``since_update``, ``since_flush``: change with each; "" before the first."""

    def __init__(self) -> None:
        self.since_update = self.since_flush = ""

    def flushed(self) -> None:
        self.since_flush = secrets.token_hex(8)

    def updated(self) -> None:
        self.since_update = self.since_flush = secrets.token_hex(8)


# Outlive a backend: a later backend continues in its host memory's epoch.
_epochs: weakref.WeakKeyDictionary[HostKVCache, Epoch] = weakref.WeakKeyDictionary()


def epoch_of(pool: HostKVCache, *, weights_never_change: bool) -> Epoch:
    """Watch this host memory; returns its epoch. Errors: ``EngineRefused`` if weights can change unwatched."""
    _watch_updates(required=not weights_never_change)
    epoch = _epochs.get(pool)
    if epoch is None:
        epoch = _epochs[pool] = Epoch()
        _watch_flushes(pool, epoch)
        if is_published() and argument("memory.hicache_storage_backend") is None:
            epoch.flushed()  # attached to a running server with an unknown past
    return epoch


def _watch_flushes(pool: HostKVCache, epoch: Epoch) -> None:
    clear = pool.clear

    @functools.wraps(clear)
    def cleared() -> None:
        epoch.flushed()
        clear()

    pool.clear = cleared


def _watch_updates(*, required: bool) -> None:
    try:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        for name in _UPDATES:
            update = getattr(WeightUpdater, name)
            if not hasattr(update, "watched_by_kvpool"):
                setattr(WeightUpdater, name, _watched(update))
    except (ImportError, AttributeError) as error:
        if required:
            raise EngineRefused(
                f"this SGLang changes weights in a way that is not known ({error}): use 0.5.23, or set "
                '"weights_never_change" to true where weights never change while a server runs'
            ) from error


def _watched(update: Any) -> Any:
    @functools.wraps(update)
    def watched(*arguments: Any, **more: Any) -> Any:
        for epoch in list(_epochs.values()):
            epoch.updated()
        return update(*arguments, **more)

    watched.watched_by_kvpool = True  # type: ignore[attr-defined]
    return watched
