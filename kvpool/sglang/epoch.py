"""Epoch: whether what a server caches still belongs to the weights that it started with.

SGLang tells a storage backend neither that its caches were flushed nor that weights were changed in place. Two places
do tell, and are watched: ``clear`` of the host memory's pool, which ``flush_cache`` calls when the threads of the
storage have ended; and the functions that write weights into the living model (``WeightUpdater``), before they do.

An epoch is random, and each rank has its own: ranks need not agree, for each reads what itself has written. Of MLA one
rank writes what all read; there nothing is found any more, which is safe.

Threads: the scheduler's writes, the storage threads read: each field is one text, set in one step.
"""

from __future__ import annotations

import functools
import logging
import secrets
import weakref
from typing import Any

from sglang.srt.mem_cache.pool_host import HostKVCache

from kvpool.errors import EngineRefused
from kvpool.sglang.served import argument, is_published

logger = logging.getLogger(__name__)

_UPDATES = (
    "begin_weight_update", "update_weights_from_disk", "update_weights_from_ipc", "update_weights_from_tensor",
    "load_weights_from_distributed",
)  # fmt: skip


class Epoch:
    """``since_update``, ``since_flush``: another text after each; "" as long as there was none."""

    def __init__(self) -> None:
        self.since_update = self.since_flush = ""

    def flushed(self) -> None:
        self.since_flush = secrets.token_hex(8)

    def updated(self) -> None:
        self.since_update = self.since_flush = secrets.token_hex(8)


# They outlive a backend: one that is attached later goes on in the epoch of its host memory.
_epochs: weakref.WeakKeyDictionary[HostKVCache, Epoch] = weakref.WeakKeyDictionary()


def epoch_of(pool: HostKVCache, *, weights_never_change: bool) -> Epoch:
    """The epoch of what lies in this host memory, watched from now on.

    Errors: ``EngineRefused`` where weights change by other ways than those that are watched.
    """
    _watch_updates(required=not weights_never_change)
    epoch = _epochs.get(pool)
    if epoch is None:
        epoch = _epochs[pool] = Epoch()
        _watch_flushes(pool, epoch)
        if is_published() and argument("memory.hicache_storage_backend") is None:
            epoch.flushed()  # attached to a running server, whose past is not known
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
