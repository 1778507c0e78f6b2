"""Faults of real servers: whatever happens, an answer in bounded time, and never a wrong byte.

Not every client counts its connections: where one does not, there is nothing to compare.
"""

from __future__ import annotations

import pytest

from kvpool import open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import MIB, key, keys, payload
from tests.support.deadlines import ends_within, eventually
from tests.support.servers import Server, with_client
from tests.support.store_traffic import serves


@pytest.fixture
def server(own_server: Server) -> Server:
    return own_server


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
