"""One tenant's announcements cost another tenant nothing, and a confined tenant is found by its name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvpool import open_store
from kvpool.discovery import worker_watch
from kvpool.discovery.worker_record import pack_worker
from kvpool.discovery.worker_watch import WorkerWatch
from tests.conftest import eventually
from tests.discovery.workers import Watched, announced, leave_facts, rounds, watching, worker
from tests.store.servers import Server


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
    else:
        server.client.zadd("kvpool:t::announced", {b"x" * (40 << 20): 4e12})


@pytest.mark.parametrize("way", ["another kind", "huge records", "huge names"])
def test_a_tenant_that_spoils_its_announcements_hurts_itself_alone(
    server: Server, way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_reading_what_a_tenant_spoiled_takes_bounded_memory(server: Server) -> None:
    """Two values of 200 MiB, in a process of its own: what it takes at most is known then."""
    for number in range(2):
        key = f"kvpool:t:worker:{number}:huge"
        server.client.zadd("kvpool:t::announced", {key: 4e12})
        server.client.setrange(f"{key}:announced", (200 << 20) - 1, b"x")
    program = f"""
import resource
from kvpool import open_store
from kvpool.errors import AnnouncementsRefused
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
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    sentence, more_mib = ended.stdout.splitlines()
    assert "its replies are too large" in sentence
    assert int(more_mib) < 160, "five times the limit of 32 MiB"


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
    monkeypatch.setattr(worker_watch, "ASK_S", 0.1)
    told, asked = Watched(), []
    with open_store(server.url) as store:
        for tenant in "tu":
            key, record = pack_worker(worker("a", tenant=tenant), 600)
            store.announce(key, record, lease_s=600)
        incomplete = {("t/a", 3), ("u/a", 3)}
        watch = WorkerWatch(
            store, on_worker=told.on_worker, on_gone=told.on_gone, incomplete=lambda: incomplete,
            on_asked=lambda worker_id, _: asked.append(worker_id), tenants=["t", "u"], interval_s=0.05,
        )  # fmt: skip
        try:
            assert eventually(lambda: set(asked) == {"t/a", "u/a"})
            server.client.delete("kvpool:t::announced")
            server.client.set("kvpool:t::announced", "not a sorted set")
            assert eventually(lambda: any("worker t/a cannot be asked" in text for text in caplog.messages))
            asked.clear()
            assert eventually(lambda: asked.count("u/a") > 2)
            assert "t/a" not in asked
        finally:
            watch.close()


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
