"""Workers that announce themselves in real pools."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest

from kvpool import ConfigError, open_store
from kvpool.discovery import announcer as announcer_module
from kvpool.discovery.announcer import Announcer
from kvpool.discovery.worker import Publisher, Worker
from kvpool.discovery.worker_record import pack_worker
from kvpool.key.key import request_key
from kvpool.store.store import Store
from tests.support.announced_workers import KEY, LEASE_S, Watched, announced, records, watching, worker
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore
from tests.support.servers import Server


@pytest.mark.parametrize(
    ("wrong", "lease_s"),
    [
        (worker(name="a b"), 10.0),
        (worker(name="x" * 129), 10.0),
        (worker(tenant="a:b"), 10.0),
        (worker(incarnation=""), 10.0),
        (worker(publishers=()), 10.0),
        (worker(publishers=(Publisher(0, "tcp://h:1"), Publisher(1, "tcp://h:2"))), 10.0),
        (worker(), 0.5),
        (worker(), 4000.0),
    ],
)
def test_what_nobody_could_follow_is_not_announced(wrong: Worker, lease_s: float) -> None:
    with pytest.raises(ConfigError), MemoryStore() as store:
        Announcer(store, wrong, lease_s=lease_s)


def test_an_engine_that_announces_itself_loads_neither_grpc_nor_zmq() -> None:
    program = "import sys, kvpool.discovery.announcer; sys.exit(bool({'grpc', 'zmq', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_two_engines_of_one_name_are_told(store: Store) -> None:
    with announced(store, worker("a", "one")) as first, announced(store, worker("a", "two")) as second:
        assert eventually(lambda: bool(first) and bool(second))
        assert "another process announces a worker a of tenant default" in first[0]
        assert len(first) == 1
        assert len(second) == 1


def test_an_engine_that_fails_at_once_does_not_take_the_name_of_one_that_runs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose ports for events are those of the one that runs."""
    monkeypatch.setattr(announcer_module, "TAKE_OVER_S", 30.0)
    monkeypatch.setattr(announcer_module, "READ_S", 600.0)  # each renewal is another record
    with announced(store, worker("a", "one"), lease_s=600):  # none that ends on a busy machine
        assert eventually(lambda: bool(records(store)))
        record = records(store)
        with closing(Announcer(store, worker("a", "two"))) as second:
            assert eventually(lambda: second._has_waited), "it has seen the one that runs"
            assert records(store) == record
        assert records(store) == record
    assert not records(store)


def test_a_pool_that_is_away_asks_for_nothing(server: Server) -> None:
    with open_store(server.url) as store:
        announcer = Announcer(store, worker("a"), lease_s=LEASE_S)
        try:
            store.announce(request_key(KEY.replace("10.0.0.7:5557", "a")), b"?", lease_s=600)
            assert eventually(lambda: announcer.requested)
            server.kill()
            assert eventually(lambda: not announcer.requested)
        finally:
            announcer.close()


def test_a_record_that_was_evicted_is_written_again_soon(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer_module, "READ_S", 600.0)  # its own thread writes once
    with closing(Announcer(store, worker(), lease_s=600)) as one:
        assert eventually(lambda: one._written)
        assert one._write(), "nothing was missing: the next renewal is as late as ever"
        store.withdraw(KEY)
        assert not one._write(), "it looks again soon"
        assert list(records(store)) == [KEY]
        assert one._write()


def test_a_refused_renewal_is_tried_again_soon(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full server refuses them that evicts nothing."""
    monkeypatch.setattr(announcer_module, "READ_S", 600.0)
    monkeypatch.setattr(announcer_module, "RETRY_S", 0.05)
    with open_store(server.url) as store:
        server.client.config_set("maxmemory", "1")
        with announced(store, worker(), lease_s=600) as said:
            assert eventually(lambda: bool(said))
            assert "OOM" in said[0] or "memory" in said[0]
            server.client.config_set("maxmemory", "0")
            assert eventually(lambda: list(records(store)) == [KEY])


def test_a_pool_that_does_not_let_a_record_be_withdrawn_is_said(server: Server) -> None:
    server.client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~kvpool:default:*", "+@all")
    with open_store(server.url.replace("://", "://u:p@")) as store:
        with announced(store, worker("a"), lease_s=600) as said:  # it is not renewed meanwhile
            assert eventually(lambda: bool(records(store)))
            server.client.execute_command("ACL", "SETUSER", "u", "-set")
        (sentence,) = said
        assert "worker a is not withdrawn, and announced until its lease ends: " in sentence


def test_an_announcer_tells_at_once_that_its_worker_entered_another_namespace(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same start of the worker: what its own memory holds is as it was."""
    monkeypatch.setattr(announcer_module, "READ_S", 600.0)  # it would be told by the next renewal, too
    announcer = Announcer(store, worker(), lease_s=600.0)
    try:
        watched = Watched()
        with watching(store, watched):
            assert eventually(lambda: watched.sees("10.0.0.7:5557"))
            announcer.enter("cd" * 16)
            wanted = worker(namespace="cd" * 16)
            assert eventually(lambda: watched.workers.get(wanted.id) == wanted)
            assert set(watched.starts) == {"one"}
    finally:
        announcer.close()


def asked_of(server: Server, renewals: int) -> tuple[int, int]:
    """Commands and bytes of so many renewals of one record."""
    with open_store(server.url) as store:
        announcer = Announcer(store, worker("a"), lease_s=600)
        assert eventually(lambda: bool(store.announced_under((KEY.replace("10.0.0.7:5557", "a"),))))
        before = server.client.info("stats")
        for _ in range(renewals):
            announcer._renew()
        after = server.client.info("stats")
        announcer.close()
    return tuple(
        int(after[figure]) - int(before[figure])
        for figure in ("total_commands_processed", "total_net_output_bytes")
    )


def test_a_renewal_costs_the_same_however_many_workers_there_are(server: Server) -> None:
    commands, nbytes = asked_of(server, 20)
    with server.client.pipeline(transaction=False) as others:
        for number in range(10_000):
            key, record = pack_worker(worker(f"w{number}"), 600)
            others.set(f"{key}:announced", record, px=600_000)
            others.zadd("kvpool:default::announced", {key: 4e12})
        others.execute()
    more_commands, more_nbytes = asked_of(server, 20)
    # MULTI, SET, ZADD, EXEC, MGET, and sometimes TIME; the announcer's own thread renews meanwhile, too.
    assert max(commands, more_commands) <= 20 * 6 + 60
    assert max(nbytes, more_nbytes) <= 40_000, "10,000 records are megabytes"
