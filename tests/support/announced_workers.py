"""Workers that announce themselves in a pool, and a watch that notes what it reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.discovery.announcer import Announcer
from kvpool.discovery.worker import Publisher, Worker
from kvpool.discovery.worker_record import ENDED
from kvpool.discovery.worker_watch import WorkerWatch
from kvpool.key.key import workers_prefix
from kvpool.store.store import Store
from tests.support.deadlines import eventually

LEASE_S = 1.0
KEY = "kvpool:default:worker:3:10.0.0.7:5557"
FIELDS: dict[str, Any] = {
    "version": 1, "block_tokens": 16, "events": "tcp://10.0.0.7:5560", "replay": "tcp://10.0.0.7:5660",
    "lease_s": 10.0, "model": "m", "hash_algorithm": "sha256_cbor", "hash_seed_id": "0123456789abcdef",
    "address": "http://10.0.0.7:8000", "incarnation": "one", "namespace": "ab" * 16,
}  # fmt: skip


def worker(name: str = "10.0.0.7:5557", incarnation: str = "one", dp_rank: int = 3, **more: Any) -> Worker:
    fields: dict[str, Any] = {
        "name": name,
        "model": "m",
        "block_tokens": 16,
        "hash_seed_id": "0123456789abcdef",
        "publishers": (Publisher(dp_rank, "tcp://10.0.0.7:5560", "tcp://10.0.0.7:5660"),),
        "address": "http://10.0.0.7:8000",
        "incarnation": incarnation,
        "namespace": "ab" * 16,
    }
    return Worker(**{**fields, **more})


class Said(list[str]):
    """What a logger was given; ``levels``: of each."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: list[str] = []
        self.logger = logging.Logger("said")
        handler = logging.Handler()
        handler.emit = self._note  # type: ignore[method-assign]
        self.logger.addHandler(handler)

    def _note(self, record: logging.LogRecord) -> None:
        self.levels.append(record.levelname)
        self.append(record.getMessage())


@contextmanager
def announced(store: Store, one: Worker, lease_s: float = LEASE_S) -> Iterator[Said]:
    said = Said()
    announcer = Announcer(store, one, lease_s=lease_s, log=said.logger)
    try:
        yield said
    finally:
        announcer.close()


def records(store: Store, tenant: str = "default") -> dict[str, bytes]:
    """What is announced of the tenant's workers, without those that withdrew."""
    found = store.announcements(workers_prefix(tenant))
    return {key: record for key, record in found.items() if record != ENDED}


class Watched:
    """What a watch has told."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.gone: list[str] = []
        self.starts: list[str] = []
        self.lost_of: list[str | None] = []  # tenants; None: all
        self.asked: list[tuple[str, int]] = []  # for all they hold
        self.tells = 0
        self.raising: Exception | None = None

    def on_worker(self, one: Worker, keep_s: float) -> None:
        assert keep_s > 5
        if self.raising is not None:
            raise self.raising
        if self.workers.get(one.id) != one:
            self.starts.append(one.incarnation)
        self.workers[one.id] = one
        self.tells += 1

    def on_gone(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.gone.append(worker_id)

    def on_pool_lost(self, tenant: str | None) -> None:
        self.lost_of.append(tenant)

    @property
    def pool_losses(self) -> int:
        return len(self.lost_of)

    def sees(self, *names: str) -> bool:
        return set(self.workers) == {f"default/{name}" for name in names}


@contextmanager
def watching(
    store: Store,
    told: Watched,
    tenants: list[str] | None = None,
    life: str = "",
    incomplete: Any = (),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[WorkerWatch]:
    """``incomplete``: ranks that are asked for all they hold, again and again."""
    watch = WorkerWatch(
        store, on_worker=told.on_worker, on_gone=told.on_gone, on_pool_lost=told.on_pool_lost, tenants=tenants,
        interval_s=0.05, life=life, clock=clock, incomplete=lambda: set(incomplete),
        on_requested=lambda worker_id, dp_rank: told.asked.append((worker_id, dp_rank)),
    )  # fmt: skip
    try:
        yield watch
    finally:
        watch.close()
        assert not watch._thread.is_alive()


def rounds(watch: WorkerWatch, count: int) -> bool:
    """Wait for some more rounds in which the pool answered."""
    until = watch.rounds + count
    return eventually(lambda: watch.rounds >= until)


def leave_facts(store: Store, tenant: str = "default") -> None:
    """As the connector does: so the pool is not empty when workers have stopped."""
    store.announce(f"kvpool:{tenant}:{'ab' * 16}:facts", b"facts", lease_s=600)
