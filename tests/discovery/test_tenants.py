"""One tenant's announcements cost another tenant nothing, and a confined tenant is found by its name."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from kvpool import Namespace, open_store
from kvpool.discovery import worker_watch
from kvpool.discovery.facts import announce_facts, announced_namespaces
from kvpool.discovery.worker_record import pack_worker
from kvpool.errors import AnnouncementsRefused
from kvpool.store.server import documents
from kvpool.store.store import MAX_DOCUMENT_NBYTES
from tests.support.announced_workers import Watched, announced, leave_facts, rounds, watching, worker
from tests.support.deadlines import eventually
from tests.support.proxy import proxied
from tests.support.servers import Cluster, Server


def spoil(server: Server, way: str) -> None:
    """As a user of tenant t may do with its own keys."""
    if way == "another kind":
        server.client.delete("kvpool:t::announced")
        server.client.set("kvpool:t::announced", "not a sorted set")
    elif way == "huge records":
        for number in range(2):
            key = f"kvpool:t:worker:{number}:huge"
            server.client.zadd("kvpool:t::announced", {key: 4e12})
            server.client.setrange(f"{key}:announced", 60 << 20, b"x")
    elif way == "many records":
        announce_many(server, 1000)
    else:
        server.client.zadd("kvpool:t::announced", {b"x" * (40 << 20): 4e12})


def announce_many(server: Server, count: int) -> None:
    """Records of the largest size, of tenant t."""
    with server.client.pipeline(transaction=False) as together:
        for number in range(count):
            key = f"kvpool:t:worker:{number}:large"
            together.zadd("kvpool:t::announced", {key: 4e12})
            together.set(f"{key}:announced", b"x" * MAX_DOCUMENT_NBYTES)
        together.execute()


@pytest.mark.parametrize("way", ["another kind", "huge records", "many records", "huge names"])
def test_a_tenant_that_spoils_its_announcements_hurts_itself_alone(
    server: Server, way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kvpool.index")
    monkeypatch.setattr(worker_watch, "REFUSED_S", 0.2)
    told = Watched()
    with open_store(server.url) as store, watching(store, told, ["t", "u"]) as watch:
        leave_facts(store, "t")
        leave_facts(store, "u")
        key, record = pack_worker(worker("a", tenant="t"), 600)
        store.announce(key, record, lease_s=600)
        assert eventually(lambda: "t/a" in told.workers)
        spoil(server, way)
        assert eventually(
            lambda: any("workers of tenant t cannot be read" in text for text in caplog.messages)
        )
        with announced(store, worker("c", tenant="u")):
            assert eventually(lambda: "u/c" in told.workers), "its neighbour comes"
        assert eventually(lambda: "u/c" not in told.workers), "and goes"
        assert "t/a" in told.workers, "kept, for it may live"
        assert told.lost_of == []
        server.client.delete("kvpool:t::announced")
        store.announce(key, record, lease_s=600)
        assert eventually(lambda: any("of tenant t can be read again" in text for text in caplog.messages))
        assert rounds(watch, 3)
        assert "t/a" in told.workers
    assert sum("workers of tenant t cannot be read" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("way", ["two of 200 MiB", "4,000 of 64 KiB"])
def test_reading_what_a_tenant_spoiled_takes_bounded_memory(server: Server, way: str) -> None:
    """In a process of its own: what it takes at most is known then."""
    if way == "two of 200 MiB":
        for number in range(2):
            key = f"kvpool:t:worker:{number}:huge"
            server.client.zadd("kvpool:t::announced", {key: 4e12})
            server.client.setrange(f"{key}:announced", (200 << 20) - 1, b"x")
    else:
        announce_many(server, 4000)
    program = f"""
import resource
from kvpool import open_store
from kvpool.errors import AnnouncementsRefused
from kvpool.store.server import connection, documents
documents.READ_S = 120.0  # a busy machine takes more than 8 s for 32 MiB
connection.KeptServer.STEP_S = 60.0
with open_store("{server.url}") as store:
    store.announcements("kvpool:u:")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        store.announcements("kvpool:t:")
    except AnnouncementsRefused as error:
        print(error)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    sentence, more_mib = ended.stdout.splitlines()
    assert "its replies are too large" in sentence
    assert int(more_mib) < 160, "five times the limit of 32 MiB"


def test_facts_are_read_however_much_the_workers_of_a_tenant_announce(server: Server) -> None:
    """What 3,000 engines were asked for has more bytes than one reading may bring, and is none of it."""
    namespace = Namespace("t", {"model": "m"})
    with open_store(server.url) as store:
        announce_facts(store, namespace, "m")
        announce_many(server, 1000)
        with pytest.raises(AnnouncementsRefused):
            store.announcements("kvpool:t:")
        assert announced_namespaces(store, "t") == {"m": [namespace]}


def test_a_tenant_whose_reading_takes_too_long_delays_itself_alone(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 25 MiB are fewer than a reading may bring, and more than this link carries meanwhile."""
    monkeypatch.setattr(documents, "READ_S", 2.0)
    announce_many(server, 400)
    told = Watched()
    with (
        proxied(server.port, nbytes_per_s=2e6) as proxy,
        open_store(f"valkey://127.0.0.1:{proxy.port}") as store,
        open_store(server.url) as direct,
        watching(store, told, ["t", "u"]) as watch,
    ):
        assert eventually(
            lambda: any("workers of tenant t cannot be read" in text for text in caplog.messages)
        )
        (line,) = [text for text in caplog.messages if "workers of tenant t cannot be read" in text]
        assert "while the server answers others" in line
        later_s = worker_watch.REFUSED_S + 1  # ten times as long as it took, from its end on
        assert eventually(lambda: watch._tenants["t"].next_s > time.monotonic() + later_s)
        with announced(direct, worker("c", tenant="u")):
            assert eventually(lambda: "u/c" in told.workers)
        assert eventually(lambda: "u/c" not in told.workers)


def test_a_name_of_another_slot_hides_no_worker_of_a_cluster(tmp_path: Path) -> None:
    told = Watched()
    with (
        Cluster("valkey-server", tmp_path) as cluster,
        open_store(cluster.url) as store,
        watching(store, told, ["t", "u"]),
        announced(store, worker("a", tenant="t"), 600),
        announced(store, worker("c", tenant="u"), 600),
    ):
        assert eventually(lambda: set(told.workers) == {"t/a", "u/c"})
        index = "kvpool:t::{announced}"
        (owner,) = [one for one in cluster.servers if is_owner(one, index)]
        owner.client.zadd(index, {f"kvpool:t:worker:0:{name}": 4e12 for name in ("{x}", "{", "{}")})
        announced_now = set(store.announcements("kvpool:t:worker:"))
        assert announced_now == {"kvpool:t:worker:3:a"}
        with announced(store, worker("b", tenant="t"), 600):
            assert eventually(lambda: set(told.workers) == {"t/a", "t/b", "u/c"})


def is_owner(server: Server, key: str) -> bool:
    try:
        return bool(server.client.exists(key))
    except redis.exceptions.ResponseError:  # MOVED
        return False


def test_a_tenant_that_is_emptied_is_told_alone(server: Server) -> None:
    told = Watched()
    with (
        open_store(server.url) as store,
        watching(store, told, ["t", "u"]) as watch,
        announced(store, worker("a", tenant="t")),
        announced(store, worker("b", tenant="u")),
    ):
        assert eventually(lambda: set(told.workers) == {"t/a", "u/b"})
        store.withdraw_all("kvpool:t:")
        assert eventually(lambda: told.lost_of == ["t"])
        assert rounds(watch, 3)
        assert told.gone == []


def test_a_rank_is_asked_though_another_tenant_refuses(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_watch, "REQUEST_EVERY_S", 0.1)
    told = Watched()
    with open_store(server.url) as store:
        for tenant in "tu":
            key, record = pack_worker(worker("a", tenant=tenant), 600)
            store.announce(key, record, lease_s=600)
        with watching(store, told, ["t", "u"], incomplete={("t/a", 3), ("u/a", 3)}):
            assert eventually(lambda: set(told.asked) == {("t/a", 3), ("u/a", 3)})
            server.client.delete("kvpool:t::announced")
            server.client.set("kvpool:t::announced", "not a sorted set")
            assert eventually(lambda: any("worker t/a cannot be asked" in text for text in caplog.messages))
            told.asked.clear()
            assert eventually(lambda: told.asked.count(("u/a", 3)) > 2)
            assert ("t/a", 3) not in told.asked


def test_workers_of_a_user_that_is_confined_to_its_tenant_are_found_by_name(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~kvpool:team:*", "+@all")
    confined = server.url.replace("://", "://u:p@")
    told, named = Watched(), Watched()
    with (
        open_store(server.url) as full,
        open_store(confined) as own,
        watching(full, told) as watch,
        announced(own, worker("a", tenant="team")) as said,
    ):
        assert eventually(lambda: any("--tenant team" in text for text in caplog.messages)), "it is said"
        with watching(full, named, ["team"]):
            assert eventually(lambda: set(named.workers) == {"team/a"})
        assert rounds(watch, 2)
        assert told.workers == {}
    assert said == []
    assert sum("--tenant team" in text for text in caplog.messages) == 1, "once"


def test_an_index_that_may_not_list_tenants_says_what_to_do(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~kvpool:team:*", "+@all")
    told = Watched()
    with open_store(server.url.replace("://", "://u:p@")) as store, watching(store, told) as watch:
        assert rounds(watch, 2)
    (line,) = [text for text in caplog.messages if "cannot be listed" in text]
    assert "name them with --tenant" in line
