"""What a server does not allow: told when a store is opened, a fault of the command that needs it, and of no other."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvpool import _native, open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store import StoreURL, open_for_inspection
from kvpool.store.server.server import COSTS, refused_commands
from tests.support.conformance import key, keys, payload
from tests.support.credentials import url_of
from tests.support.deadlines import eventually
from tests.support.servers import CLIENTS, Server, running, with_client
from tests.support.store_traffic import serves


def test_the_documented_rights_are_enough(server: Server, client: str) -> None:
    url = url_of(server)
    server.client.execute_command("ACL LOG RESET")
    assert refused_commands(StoreURL.parse(url)) == []
    with open_store(with_client(url, client)) as store:
        assert store.put_many([key(1)], [b"value"]) == [True]
        assert store.touch_many(keys(2)) == [False, True]
        assert store.get_many_into([key(1)], [bytearray(5)]) == [True]
        assert store.delete_many([key(1)]) == 1
        store.announce("kvpool:tenant-1:x", b"x", lease_s=60)
        assert store.announcements("kvpool:tenant-1:") == {"kvpool:tenant-1:x": b"x"}
        assert store.withdraw("kvpool:tenant-1:x") is True
        refused = {entry["object"] for entry in server.client.acl_log()}
        # Of a tenant's user: the list of tenants is not its own, and the key by which rights are asked is nobody's.
        expected = {"kvpool:::announced", "kvpool::rights"}
        assert refused <= expected, refused
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


def test_what_is_refused_for_its_key_is_told_from_what_the_server_takes_from_nobody(
    server: Server, client: str
) -> None:
    foreign = key(1).replace("tenant-1", "tenant-2")
    with open_store(with_client(url_of(server), client)) as store:
        one_is_foreign = store.submit_put_absent([key(1), foreign], [b"x", b"x"])
        assert list(one_is_foreign.statuses()) == [_native.OK, _native.REFUSED]
        server.client.config_set("min-replicas-to-write", 1)
        try:
            assert list(store.submit_put([key(1)], [b"x"]).statuses()) == [_native.FAULT]
        finally:
            server.client.config_set("min-replicas-to-write", 0)


def test_a_wrong_password_later_is_a_fault_with_the_servers_words(server: Server, client: str) -> None:
    url = url_of(server, keys="*").replace(":p@", ":hunter2@")
    server.client.acl_setuser("worker", enabled=True, passwords=["+hunter2"])
    with open_store(with_client(url, client)) as store:
        assert serves(store)
        assert "hunter" not in repr(store)
        server.client.acl_setuser("worker", enabled=True, passwords=["-hunter2"])
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


@pytest.mark.parametrize("command", sorted(COSTS))
def test_looking_at_rights_names_what_is_missing_and_leaves_nothing(server: Server, command: str) -> None:
    url = url_of(server, without=(command.lower(),), keys="*")
    assert [refused.command for refused in refused_commands(StoreURL.parse(url))] == [command]
    assert server.client.dbsize() == 0
    assert server.client.info("clients")["connected_clients"] >= 1


def test_a_missing_right_is_told_when_a_store_is_opened(
    server: Server, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = with_client(url_of(server, without=("hset",)), client)
    with caplog.at_level(logging.WARNING, "kvpool.store"), open_store(url):
        (line,) = [record.getMessage() for record in caplog.records if record.name == "kvpool.store"]
    assert "nothing can be put: the server refuses HSET to this user" in line
    assert "kvpool doctor" in line
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvpool.store"), open_for_inspection(url):
        assert not [record for record in caplog.records if record.name == "kvpool.store"]


def test_a_full_server_refuses_no_user(server: Server, client: str, caplog: pytest.LogCaptureFixture) -> None:
    """What it says of its memory has the word "command" in it, as what it says of rights has."""
    server.client.config_set("maxmemory-policy", "noeviction")
    server.client.config_set("maxmemory", "1")
    url = url_of(server, keys="*")  # else keys are refused first
    assert refused_commands(StoreURL.parse(url)) == []
    with caplog.at_level(logging.WARNING, "kvpool.store"), open_store(with_client(url, client)) as store:
        assert store.put_many([key(1)], [b"value"]) == [False], "no room, and no fault"
        assert store.touch_many([key(1)]) == [False]
    assert not [record for record in caplog.records if record.name == "kvpool.store"]


def test_a_full_server_that_refuses_a_command_too_is_told_of_that_one(server: Server) -> None:
    server.client.config_set("maxmemory-policy", "noeviction")
    server.client.config_set("maxmemory", "1")
    (refused,) = refused_commands(StoreURL.parse(url_of(server, without=("hset",))))
    assert refused.command == "HSET"
    assert refused.words.startswith("NOPERM ")


def test_a_refused_put_harms_no_load(server: Server, client: str) -> None:
    """An error reply is an answer: the connections stay, and so does all else on them."""
    value = payload(1, 100_000)
    with open_store(server.url) as other:
        assert other.put_many(keys(8), [value] * 8) == [True] * 8
    with open_store(with_client(url_of(server, without=("hset",)), client)) as store:
        for _ in range(20):
            put = store.submit_put([key(number) for number in range(20, 28)], [value] * 8)
            targets = [bytearray(len(value)) for _ in range(8)]
            assert store.get_many_into(keys(8), targets) == [True] * 8
            assert all(target == value for target in targets)
            with pytest.raises(StoreUnavailable, match=r"(?i)permission"):
                put.wait()
        assert store.contains_many([key(20)]) == [False]
        assert store.counters().get("disconnections", 0) == 0


def test_who_may_not_touch_looks_up_all_the_same(server: Server, client: str) -> None:
    with open_store(with_client(url_of(server, without=("touch", "pttl")), client)) as store:
        assert store.put_many([key(1)], [b"value"]) == [True]
        for _ in range(3):
            assert store.touch_many(keys(3)) == [False, True, False]
        assert store.get_many_into([key(1)], [bytearray(5)]) == [True]
        assert store.counters()["faults"] == 0
        assert store.counters().get("disconnections", 0) == 0


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_does_not_know_touch_is_looked_up_all_the_same(tmp_path: Path, client: str) -> None:
    """As some managed ones: unknown is refused, too."""
    with (
        running("valkey-server", tmp_path, "--rename-command", "TOUCH", "") as server,
        open_store(with_client(server.url, client)) as store,
    ):
        assert store.put_many([key(1)], [b"value"]) == [True]
        assert store.touch_many(keys(3)) == [False, True, False]


def test_glide_without_the_right_to_info_says_which_right_it_needs(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        url = url_of(server)
        server.client.execute_command("ACL SETUSER worker -info")
        with pytest.raises(ConfigError, match=r"GLIDE needs \+info"):
            open_store(with_client(url, "glide"))
