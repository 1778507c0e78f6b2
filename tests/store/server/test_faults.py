"""Faults of real servers: whatever happens, an answer in bounded time, and never a wrong byte.

Not every client counts its connections: where one does not, there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from kvpool import open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import MIB, key, keys, payload
from tests.support.deadlines import MARGIN_S, ends_within, eventually
from tests.support.servers import Server, is_native, running, with_client
from tests.support.store_traffic import Traffic, serves


@pytest.fixture
def server(own_server: Server) -> Server:
    return own_server


def test_a_server_that_is_killed_and_comes_back(server: Server, store: Store) -> None:
    with Traffic(store, timeout_s=2.0) as traffic:
        for _ in range(3):
            server.kill()
            assert eventually(lambda: traffic.faults > 50)  # at once, not after 2 s each
            seen = traffic.hits
            server.start()
            assert eventually(lambda seen=seen: traffic.hits > seen + 20)
            traffic.faults = 0
    assert traffic.longest_s < 2.0 + MARGIN_S
    assert store.counters()["damaged"] == 0
    # Two threads; a native one has another connection for puts.
    stand = 4 if is_native(store) else 2
    assert eventually(lambda: store.counters().get("up_connections", stand) == stand)


def test_while_a_server_is_away_a_batch_does_not_wait_for_its_deadline(server: Server, store: Store) -> None:
    server.kill()
    # With GLIDE the first call on each connection may run into its timeout before the loss is known.
    assert eventually(lambda: not serves(store) and store.counters()["up_connections"] == 0)
    with ends_within(0), pytest.raises(StoreUnavailable, match=r"refused|reset|closed|timed out"):
        store.get_many_into(keys(100), [bytearray(1000)] * 100, timeout_s=60)


def test_a_server_that_is_stopped_costs_the_deadline(server: Server, store: Store) -> None:
    assert serves(store)
    server.stop()
    try:
        for call in (
            lambda: store.get_many_into(keys(50), [bytearray(100_000) for _ in range(50)], timeout_s=0.3),
            lambda: store.put_many(keys(50), [bytes(MIB)] * 50, timeout_s=0.3),
            lambda: store.contains_many(keys(50), timeout_s=0.3),
        ):
            with ends_within(0.3), pytest.raises(StoreUnavailable):
                call()
    finally:
        server.go_on()
    assert eventually(lambda: serves(store, 2))
    assert serves(store, 3)
    assert store.counters()["damaged"] == 0


def test_a_stop_shorter_than_the_deadline_is_not_noticed(server: Server, store: Store) -> None:
    value = payload(1, 2 * MIB)
    store.put_many([key(1)], [value])
    server.stop()
    target = bytearray(2 * MIB)
    transfer = store.submit_get([key(1)], [target], timeout_s=20)
    server.go_on()
    assert transfer.wait() == [True]
    assert target == value
    assert store.counters().get("disconnections", 0) == 0


def test_connections_that_are_killed_during_batches(server: Server, store: Store) -> None:
    with Traffic(store, timeout_s=5.0) as traffic:
        for _ in range(30):
            seen = traffic.hits
            server.client.client_kill_filter(_type="normal", skipme=True)
            assert eventually(lambda seen=seen: traffic.hits > seen)
    assert traffic.longest_s < 5.0
    # The native client hears of each end; one in Python only of those that a request of its meets.
    least = 30 if is_native(store) else 1
    assert store.counters().get("disconnections", least) >= least
    assert store.counters()["damaged"] == 0
    assert eventually(lambda: serves(store))


def test_a_wrong_password_later_is_a_fault_with_the_servers_words(server: Server, client: str) -> None:
    server.client.acl_setuser("worker", enabled=True, passwords=["+hunter2"], keys=["*"], commands=["+@all"])
    with pytest.raises(ConfigError, match="AUTH: WRONGPASS") as caught:
        open_store(with_client(f"valkey://worker:hunter3@127.0.0.1:{server.port}", client))
    assert "hunter" not in str(caught.value)
    with open_store(with_client(f"valkey://worker:hunter2@127.0.0.1:{server.port}", client)) as store:
        assert serves(store)
        assert "hunter" not in repr(store)
        server.client.acl_setuser("worker", enabled=True, passwords=["-hunter2", "+other"])
        server.client.client_kill_filter(_type="normal", skipme=True)

        texts: list[str] = []

        def refused() -> bool:
            try:
                store.contains_many([key(1)])
            except StoreUnavailable as error:
                texts.append(str(error))
            return any("AUTH: WRONGPASS" in text for text in texts)

        assert eventually(refused)
        assert not any("hunter" in text for text in texts)
        server.client.acl_setuser("worker", enabled=True, passwords=["+hunter2"])
        assert eventually(lambda: serves(store))


# What a server takes to read its data in is up to the test: until it sets this to 0, seconds.
SLOW = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")


def fill(server: Server) -> None:
    """So much that a server that is slowed down loads it for at least 20 s."""
    with server.client.pipeline(transaction=False) as together:
        for number in range(1000):
            together.set(f"filler:{number}", payload(number, 1100))
        together.execute()


def refusal(call: Callable[[], object]) -> str:
    """What the store says to a call that has to fail at once."""
    with ends_within(4.5), pytest.raises(StoreUnavailable) as caught:
        call()
    return str(caught.value)


def refusals(store: Store) -> list[str]:
    """What the store says to one batch of each kind."""
    return [
        refusal(lambda: store.get_many_into(keys(4), [bytearray(1000) for _ in range(4)], timeout_s=60)),
        refusal(lambda: store.put_many(keys(4), [bytes(1000)] * 4, timeout_s=60)),
        refusal(lambda: store.contains_many(keys(4), timeout_s=60)),
        refusal(lambda: store.delete_many(keys(4), timeout_s=60)),
    ]


def reads(store: Store, values: list[bytes]) -> bool:
    """Whether the first keys hold ``values``; a fault is a no, a miss or a wrong byte fails the test."""
    targets = [bytearray(len(value)) for value in values]
    try:
        found = store.get_many_into(keys(len(values)), targets)
    except StoreUnavailable:
        return False
    assert found == [True] * len(values)
    assert targets == values
    return True


def test_a_server_that_comes_back_and_loads_its_data(server: Server, client: str) -> None:
    values = [payload(number, 1000) for number in range(4)]
    url = with_client(server.url, client)
    with open_store(url) as store:
        assert store.put_many(keys(4), values) == [True] * 4
        fill(server)
        server.client.save()
        server.kill()
        server.options = (*server.options, *SLOW)
        server.start()
        assert eventually(lambda: all("LOADING" in words for words in refusals(store)))
        with pytest.raises(StoreUnavailable, match="is loading"):
            store.announce("kvpool:t:x", b"x", lease_s=60)
        with pytest.raises(StoreUnavailable, match="LOADING"):
            open_store(url)
        assert server.info("loading") == 1
        server.client.config_set("key-load-delay", 0)
        assert eventually(lambda: serves(store, 5))
        targets = [bytearray(1000) for _ in values]
        assert store.get_many_into(keys(4), targets) == [True] * 4
        assert targets == values
        assert store.counters()["damaged"] == 0


def test_a_server_that_begins_to_load_while_connections_stand(
    server: Server, client: str, store: Store, tmp_path: Path
) -> None:
    """It becomes a replica, and takes all of its primary's data over connections that stay.

    To redis-py LOADING is the end of a connection, and GLIDE makes none to a replica: these dial again in pauses.
    """
    values = [payload(number, 1000) for number in range(4)]
    (tmp_path / "primary").mkdir()
    with running(server.name, tmp_path / "primary", "--repl-diskless-sync-delay", "0") as primary:
        with open_store(primary.url) as other:
            assert other.put_many(keys(4), values) == [True] * 4
        fill(primary)
        assert store.put_many(keys(4), [payload(9, 1000)] * 4) == [True] * 4
        server.client.config_set("key-load-delay", SLOW[1])
        server.client.config_set("loading-process-events-interval-bytes", SLOW[3])
        server.client.replicaof("127.0.0.1", primary.port)
        assert eventually(lambda: server.info("loading") == 1)
        get, put, contains, delete = refusals(store)
        assert "LOADING" in get
        assert "LOADING" in contains
        assert all("LOADING" in words or "READONLY" in words for words in (put, delete))
        assert server.info("loading") == 1
        server.client.config_set("key-load-delay", 0)
        assert eventually(lambda: server.info("master_link_status") == "up")
        words = ("READONLY", "No primary node found") if client == "glide" else ("READONLY",)
        assert eventually(
            lambda: any(word in refusal(lambda: store.put_many([key(5)], [b"x"])) for word in words)
        )
        if client == "glide":
            server.client.replicaof("NO", "ONE")
            assert eventually(lambda: serves(store, 5))
        assert eventually(lambda: reads(store, values))
        server.client.replicaof("NO", "ONE")
        assert eventually(lambda: serves(store, 5))
        assert store.counters()["damaged"] == 0
        if client == "native":
            assert store.counters()["disconnections"] == 0


def test_a_user_may_be_confined_to_a_tenant(server: Server, client: str) -> None:
    commands = ["+hset", "+pexpire", "+pttl", "+hmget", "+exists", "+touch", "+unlink", "+select", "+ping",
                "+time", "+set", "+mget",
                "+zadd", "+zcard", "+zscore", "+zrange", "+zrem", "+zremrangebyscore", "+zremrangebyrank",
                "+multi", "+exec"]  # fmt: skip
    if client == "glide":
        commands += ["+info"]
    server.client.acl_setuser(
        "worker", enabled=True, passwords=["+p"], keys=["kvpool:tenant-1:*"], commands=commands
    )
    with open_store(with_client(f"valkey://worker:p@127.0.0.1:{server.port}", client)) as store:
        assert serves(store)
        assert store.delete_many([key(1)]) == 1
        store.announce("kvpool:tenant-1:x", b"x", lease_s=60)
        assert store.announcements("kvpool:tenant-1:") == {"kvpool:tenant-1:x": b"x"}
        assert store.withdraw("kvpool:tenant-1:x") is True
        assert (store.server_run_id() == "") is (client != "glide"), "INFO is not among the others' rights"
        foreign = key(1).replace("tenant-1", "tenant-2")
        for call in (
            lambda: store.put_many([foreign], [b"x"]),
            lambda: store.get_many_into([foreign], [bytearray(1)]),
            lambda: store.contains_many([foreign]),
            lambda: store.delete_many([foreign]),
            lambda: store.announce("kvpool:tenant-2:x", b"x", lease_s=60),
            lambda: store.withdraw("kvpool:tenant-2:x"),
            lambda: store.announcements("kvpool:tenant-2:"),
            lambda: store.announcements(""),
        ):
            with pytest.raises(StoreUnavailable, match=r"(?i)permission"):
                call()
        assert serves(store)
        assert store.counters().get("disconnections", 0) == 0


def test_a_full_server_that_evicts_nothing_has_no_room(server: Server, store: Store) -> None:
    server.client.config_set("maxmemory-policy", "noeviction")
    server.client.config_set("maxmemory", server.info("used_memory") + 10 * MIB)
    value = payload(1, MIB)
    kept = store.put_many(keys(30), [value] * 30)
    assert 3 <= sum(kept) <= 10
    assert store.counters()["no_room"] == 30 - sum(kept)
    targets = [bytearray(MIB) for _ in range(30)]
    assert store.get_many_into(keys(30), targets) == kept
    assert all(target == value for target, hit in zip(targets, kept, strict=True) if hit)
    assert store.counters().get("disconnections", 0) == 0


def test_the_client_of_the_test_is_not_the_store(server: Server) -> None:
    """``client_kill_filter`` above leaves the test's own connection alone."""
    assert server.client.client_kill_filter(_type="normal", skipme=True) == 0
    assert isinstance(server.client, redis.Redis)
