"""``EngineAnnouncer``: announces an engine and its namespace to others, in a thread of its own.

A slow pool must not hold up the engine's start, nor a step. Threads: the worker's model thread calls; the announcing
thread, of which there is one at a time, sets ``_announcer`` and ``_announced``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from vllm.logger import init_logger

from kvpool.config import PoolConfig
from kvpool.discovery.announcer import Announcer
from kvpool.discovery.facts import announce_facts
from kvpool.errors import KVPoolError
from kvpool.key.key import EPOCH_FACT, Namespace
from kvpool.store import Store
from kvpool.vllm.announcement import Announcement

logger = init_logger("vllm.kvpool")

CLOSE_S = 5.0  # how long ``close`` waits for the thread


class EngineAnnouncer:
    """``model``: its name, for people. ``describe``: what the engine announces of itself, given its namespace."""

    def __init__(
        self, config: PoolConfig, model: str, describe: Callable[[str], Announcement] | None
    ) -> None:
        self._config, self._model, self._describe = config, model, describe
        self._current: Namespace | None = None  # of the engine
        self._thread: threading.Thread | None = None
        self._closed = False
        self._announcer: Announcer | None = None
        self._announced: Namespace | None = None  # whose facts are in the pool

    @property
    def asked(self) -> bool:
        """Whether an index asks for all that the engine holds."""
        return self._announcer is not None and self._announcer.asked

    def enter(self, store: Store, namespace: Namespace) -> None:
        """The engine goes on in ``namespace``. Does not block."""
        self._current = namespace
        self._thread = threading.Thread(
            target=self._announce_after,
            args=(self._thread, store, namespace),
            name="kvpool-announcing",
            daemon=True,
        )
        self._thread.start()

    def leave(self) -> None:
        """The engine has no namespace; what is announced stays."""
        self._current = None

    def close(self, store: Store) -> None:
        """Withdraw the engine. Blocking, for ``CLOSE_S`` at most and what a withdrawal takes."""
        self._closed = True
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._announcer is not None:
            self._announcer.close()
            self._announcer = None
        self._withdraw_epoch(store)
        self._current = None

    def _announce_after(self, earlier: threading.Thread | None, store: Store, namespace: Namespace) -> None:
        if earlier is not None:
            earlier.join()
        if namespace is not self._current:  # closed meanwhile, or in another namespace
            return
        self._announce_facts(store, namespace)
        if self._announcer is not None:
            self._announcer.enter(namespace.hex)
        elif self._describe is not None:
            self._announce_worker(store, self._describe, namespace)
        if self._closed and self._announcer is not None:  # it took longer than close() waits
            self._announcer.close()

    def _announce_facts(self, store: Store, namespace: Namespace) -> None:
        """Leave a readable record of the facts, and log on which ones this worker differs from earlier ones."""
        self._withdraw_epoch(store)
        self._announced = namespace
        try:
            differences = announce_facts(store, namespace, self._model)
        except KVPoolError as error:
            logger.warning("kvpool could not announce its namespace: %s", error)
            return
        for sentence in differences:
            logger.warning("kvpool: %s", sentence)

    def _withdraw_epoch(self, store: Store) -> None:
        """No other engine will use a namespace that this engine had for itself: its facts need not be kept."""
        if self._announced is not None and EPOCH_FACT in self._announced.facts:
            with contextlib.suppress(KVPoolError):
                store.withdraw(self._announced.facts_key)

    def _announce_worker(
        self, store: Store, describe: Callable[[str], Announcement], namespace: Namespace
    ) -> None:
        """Announce this worker to indexes from now on. What prevents that is logged, no more."""
        try:
            announced = describe(namespace.hex)
            for problem in announced.problems:
                logger.log(logging.INFO if announced.events_off else logging.WARNING, "kvpool: %s", problem)
            worker = announced.worker
            self._announcer = Announcer(
                store,
                worker,
                lease_s=self._config.lease_s,
                say=lambda text: logger.warning("kvpool: %s", text),
            )
        except Exception as error:  # the engine starts all the same
            logger.warning("kvpool could not announce this worker: %s: %s", type(error).__name__, error)
            return
        (publisher,) = worker.publishers
        logger.info(
            "kvpool: announced as worker %s at %s, rank %d, events %s, replay %s",
            worker.id,
            worker.address,
            publisher.dp_rank,
            publisher.events or "none",
            publisher.replay or "none",
        )
