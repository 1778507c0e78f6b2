"""Workers whose records a server evicts, and workers that are gone."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest

from kvpool.discovery import announcer
from kvpool.discovery.worker_record import ENDED, pack_worker
from kvpool.store import open_store
from kvpool.store.server import documents
from kvpool.store.store import Store
from tests.support.announced_workers import Watched, announced, leave_facts, records, rounds, watching, worker
from tests.support.deadlines import eventually
from tests.support.servers import Server


class Clock:
    """Of a watch: it moves when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def put(store: Store, name: str, renewal: int, lease_s: float = 10.0) -> str:
    """Its record, which stays in the pool however long the test takes."""
    key, record = pack_worker(worker(name), lease_s, renewal)
    store.announce(key, record, lease_s=3600)
    return key


def test_a_worker_whose_record_is_evicted_is_kept_until_its_lease_ends(store: Store) -> None:
    told, clock = Watched(), Clock()
    leave_facts(store)
    key = put(store, "a", 1)
    with watching(store, told, ["default"], clock=clock) as watch:
        assert eventually(lambda: told.sees("a"))
        store.withdraw(key)  # says nothing, as an eviction
        assert rounds(watch, 2)
        clock.now_s += 9.9
        assert rounds(watch, 2)
        assert told.sees("a")
        put(store, "a", 2)
        assert rounds(watch, 2)
        store.withdraw(key)
        clock.now_s += 9.9
        assert rounds(watch, 2)
        assert (told.gone, told.starts) == ([], ["one"]), "a renewal is another lease"
        clock.now_s += 0.2
        assert eventually(lambda: told.gone == ["default/a"])
        assert told.pool_losses == 0


def test_a_worker_that_renews_no_more_is_gone_when_its_lease_ends_and_no_lease_later(store: Store) -> None:
    told, clock = Watched(), Clock()
    leave_facts(store)
    key = put(store, "dies", 1)
    with watching(store, told, ["default"], clock=clock) as watch:
        assert eventually(lambda: told.sees("dies"))
        for _ in range(4):
            clock.now_s += 2.0
            assert rounds(watch, 2)
        store.withdraw(key)  # seen until now
        clock.now_s += 1.9
        assert rounds(watch, 2)
        assert told.sees("dies")
        clock.now_s += 0.2
        assert eventually(lambda: told.gone == ["default/dies"])


def test_a_worker_that_says_that_it_stops_is_gone_at_once(store: Store) -> None:
    told = Watched()
    leave_facts(store)
    key = put(store, "a", 1)
    with watching(store, told, ["default"], clock=Clock()) as watch:
        assert eventually(lambda: told.sees("a"))
        store.announce(key, ENDED, lease_s=600)
        assert eventually(lambda: told.gone == ["default/a"])
        assert rounds(watch, 2)
        assert (watch.unreadable_records, told.pool_losses) == (0, 0)
        put(store, "a", 1)
        assert eventually(lambda: told.sees("a")), "it started anew"


@pytest.mark.parametrize("policy", ["volatile-ttl", "volatile-random", "allkeys-random"])
def test_no_live_worker_is_gone_where_a_server_evicts_their_records(
    server: Server, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks live for a day, leases here for 30 s, of which a worker renews thirty: only a stopped machine ends one."""
    monkeypatch.setattr(announcer, "READ_S", 1.0)
    told, workers = Watched(), [worker(f"w{number}") for number in range(8)]
    with open_store(server.url) as store, contextlib.ExitStack() as announcers:
        for one in workers:
            announcers.enter_context(announced(store, one, lease_s=30.0))
        assert eventually(lambda: len(records(store)) == len(workers))
        watch = announcers.enter_context(watching(store, told, ["default"]))
        assert eventually(lambda: len(told.workers) == len(workers))
        leave_facts(store)
        server.client.config_set("maxmemory-policy", policy)
        server.client.config_set("maxmemory", server.info("used_memory") + (4 << 20))
        for cycle in range(10):
            # Until a record is evicted; then its worker has its turn.
            number = 0
            while len(records(store)) == len(workers):
                number += 1
                server.client.set(f"block:{cycle}:{number}", bytes(16 << 10), ex=86_400)
            assert rounds(watch, 2)
            assert eventually(lambda: len(records(store)) == len(workers))
        assert rounds(watch, 2)
        assert server.info("evicted_keys") > 10
        assert (told.gone, len(told.starts)) == ([], len(workers))


def test_a_tenant_whose_entry_in_the_list_was_evicted_is_listed_again_a_minute_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    monkeypatch.setattr(documents, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    with open_store(server.url) as store:
        put(store, "a", 1)
        server.client.delete("kvpool:::announced")
        put(store, "a", 2)
        assert store.announcing_tenants() == []
        ahead_s = 61.0
        put(store, "a", 3)
        assert store.announcing_tenants() == ["default"]
