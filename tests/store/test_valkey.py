"""The store on real servers: the conformance kit, what lies on the server, and how it opens."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import (
    MIB,
    LightConformance,
    OtherClientConformance,
    ServerConformance,
    key,
    keys,
    payload,
)
from tests.support.deadlines import eventually
from tests.support.records import fields_of
from tests.support.servers import CLIENTS, NEWER, ON_VALKEY, SERVERS, Server, running, with_client


class TestValkeyStore(ServerConformance):
    pass


@ON_VALKEY
class TestValkeyStoreOnUnixSocket(LightConformance):
    def url(self, server: Server) -> str:
        return f"valkey+unix://{server.socket_path}?connections=1"


@ON_VALKEY
class TestRedisStore(OtherClientConformance):
    client = "redis"


@ON_VALKEY
class TestGlideStore(OtherClientConformance):
    client = "glide"


# ---------------------------------------------------------------------- what lies on the server


# A put sends 512 KiB at a time, with up to a quarter of that as a record's rest.
IN_PARTS = [MIB // 2, 5 * MIB // 8, 5 * MIB // 8 + 1, 3 * MIB + 1]


@pytest.mark.parametrize("nbytes", [1, 1000, 16 * 1024 - 81, 16 * 1024, 64 * 1024, 296_000, *IN_PARTS])
def test_a_record_on_the_server_is_one_hash(server: Server, store: Store, nbytes: int) -> None:
    value = payload(nbytes, nbytes)
    store.put_many([key(1)], [value])
    assert server.client.keys() == [key(1).encode()]
    assert server.client.hgetall(key(1)) == fields_of(key(1), value)


@pytest.mark.parametrize("writer", CLIENTS)
@pytest.mark.parametrize("reader", CLIENTS)
def test_what_one_client_wrote_every_other_reads(server: Server, writer: str, reader: str) -> None:
    values = [
        payload(number, nbytes) for number, nbytes in enumerate([1, 127, 128, 129, 5000, MIB, 3 * MIB + 1])
    ]
    targets = [bytearray(len(value)) for value in values]
    with (
        open_store(with_client(server.url, writer)) as one,
        open_store(with_client(server.url, reader)) as other,
    ):
        assert all(one.put_many(keys(7), values))
        assert other.contains_many(keys(8)) == [True] * 7 + [False]
        assert all(other.get_many_into(keys(7), targets))
        assert targets == values
        assert other.delete_many(keys(7)) == 7
        assert not any(one.contains_many(keys(7)))
        assert one.counters()["damaged"] == other.counters()["damaged"] == 0


def test_a_value_has_a_time_to_live(server: Server, client: str) -> None:
    with (
        open_store(with_client(server.url, client)) as by_default,
        open_store(with_client(f"{server.url}?ttl=90s", client)) as short,
    ):
        by_default.put_many([key(1)], [b"x"])
        short.put_many([key(2)], [b"x"])
        assert 86_000_000 < server.client.pttl(key(1)) <= 86_400_000
        assert 80_000 < server.client.pttl(key(2)) <= 90_000
        short.put_many([key(1)], [b"x"])
        assert server.client.pttl(key(1)) <= 90_000


IN_TWO_FIELDS = 17_000  # 16,372 in "b"; 628 and the header in "h"


@pytest.mark.parametrize("field", ["h", "b"])
@pytest.mark.parametrize("position", [0, 500, 628, 16_371, -1])
def test_a_flipped_bit_is_a_miss_and_the_record_goes(
    server: Server, store: Store, field: str, position: int
) -> None:
    store.put_many(keys(2), [payload(1, IN_TWO_FIELDS)] * 2)
    damaged = bytearray(server.client.hget(key(0), field))
    damaged[min(position, len(damaged) - 1)] ^= 4
    server.client.hset(key(0), field, bytes(damaged))
    assert store.get_many_into(keys(2), [bytearray(IN_TWO_FIELDS), bytearray(IN_TWO_FIELDS)]) == [False, True]
    assert store.contains_many(keys(2)) == [False, True]
    counters = store.counters()
    assert counters["damaged"] == 1
    cause = "magic" if (field, position) == ("h", 628) else "checksum"
    assert counters[f"damaged_{cause}"] == 1


@pytest.mark.parametrize("missing", ["h", "b"])
def test_half_a_record_is_a_miss_and_goes(server: Server, store: Store, missing: str) -> None:
    store.put_many([key(0)], [payload(1, IN_TWO_FIELDS)])
    server.client.hdel(key(0), missing)
    assert store.get_many_into([key(0)], [bytearray(IN_TWO_FIELDS)]) == [False]
    assert store.contains_many([key(0)]) == [False]


def test_a_key_of_another_type_is_a_miss_and_goes(server: Server, store: Store) -> None:
    server.client.set(key(0), "somebody's text")
    assert store.get_many_into([key(0)], [bytearray(1000)], timeout_s=60) == [False]
    assert store.contains_many([key(0)]) == [False]
    assert store.put_many([key(0)], [bytes(1000)]) == [True]


# ---------------------------------------------------------------------- announcements


def test_announcements_are_leased_and_the_keys_are_not_walked(server: Server, store: Store) -> None:
    server.client.config_resetstat()
    store.announce("kvpool:t:worker", b"document", lease_s=60)
    assert store.announcements("kvpool:t:") == {"kvpool:t:worker": b"document"}
    assert not set(server.client.info("commandstats")) & {"cmdstat_keys", "cmdstat_scan", "cmdstat_eval"}
    names = sorted(server.client.keys("*"))
    assert names == [b"kvpool:::announced", b"kvpool:t::announced", b"kvpool:t:worker:announced"]
    assert all(server.client.pttl(name) > 0 for name in names)


def test_a_document_that_the_server_evicted_is_not_listed(server: Server, store: Store) -> None:
    store.announce("kvpool:t:a", b"a", lease_s=60)
    store.announce("kvpool:t:b", b"b", lease_s=60)
    server.client.delete("kvpool:t:a:announced")
    assert store.announcements("kvpool:t:") == {"kvpool:t:b": b"b"}


# ---------------------------------------------------------------------- opening


def test_a_database_of_its_own(server: Server, client: str) -> None:
    with open_store(with_client(f"{server.url}/3", client)) as three, open_store(server.url) as zero:
        three.put_many([key(1)], [b"x"])
        assert zero.contains_many([key(1)]) == [False]
        three.announce("kvpool:t:x", b"x", lease_s=60)
        assert zero.announcements("kvpool:t:") == {}
        assert repr(three) == f"<ValkeyStore {server.url}/3>"


def test_redis_is_another_name(server: Server) -> None:
    with open_store(server.url.replace("valkey", "redis"), threads=3) as store:
        assert store.put_many([key(1)], [b"x"]) == [True]
        assert store.counters()["up_connections"] <= 2 * 3


def test_refusals_are_one_line_without_the_password(server: Server, client: str) -> None:
    for user in ("", "somebody"):
        with pytest.raises(ConfigError, match=r"the server refuses: .*AUTH: ") as caught:
            open_store(with_client(f"valkey://{user}:hunter2@127.0.0.1:{server.port}", client))
        assert "hunter2" not in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="DB index is out of range"):
        open_store(with_client(f"{server.url}/999", client))


def test_nobody_there(client: str, tmp_path: Path) -> None:
    for url in ("valkey://127.0.0.1:1", f"valkey+unix://{tmp_path}/socket"):
        with pytest.raises(StoreUnavailable, match=r"cannot connect: .*check that the server runs there"):
            open_store(with_client(url, client))


def test_every_client_takes_a_unix_socket(server: Server, client: str) -> None:
    with open_store(with_client(f"valkey+unix://{server.socket_path}?connections=1", client)) as store:
        target = bytearray(MIB)
        assert store.put_many([key(1)], [payload(1, MIB)]) == [True]
        assert store.get_many_into([key(1)], [target]) == [True]
        assert target == payload(1, MIB)


def test_glide_that_is_not_installed_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "glide_sync", None)
    for url in (server.url, server.url.replace("valkey:", "valkey+cluster:")):
        with pytest.raises(ConfigError, match="with its extra glide"):
            open_store(f"{url}?client=glide")


def test_a_value_larger_than_the_limit_has_no_room_and_others_go_on(server: Server, store: Store) -> None:
    server.client.config_set("maxmemory", server.info("used_memory") + 3 * MIB)
    assert not store.put_many(keys(2), [b"a", bytes(8 * MIB)])[1]
    # The server counts what it has read of the large one, until it lets that go: until then there is no room for the
    # others either, also for one that travels beside it.
    assert eventually(lambda: store.put_many([key(0), key(2)], [b"a", b"c"]) == [True, True])
    assert store.contains_many(keys(3)) == [True, False, True]
    assert store.counters()["disconnections"] == 0


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


def test_the_threads_of_an_idle_store_do_not_run(server: Server) -> None:
    """Also those that nobody has asked for a put: its connection is not dialled yet."""

    def ran_ns() -> int:
        lanes = [
            task for task in Path("/proc/self/task").iterdir() if "kvpool-io" in (task / "comm").read_text()
        ]
        assert lanes
        return sum(int((task / "schedstat").read_text().split()[0]) for task in lanes)

    def at_rest() -> bool:
        before = ran_ns()
        threading.Event().wait(0.3)
        return ran_ns() == before

    with open_store(server.url) as store:
        assert store.contains_many([key(1)]) == [False]
        assert eventually(at_rest)
        assert store.put_many([key(1)], [b"x"]) == [True]
        assert eventually(at_rest)


# That they take part whatever the load, where a server has a switch for it.
ALWAYS = {
    "valkey-server": ("--events-per-io-thread", "0"),
    "valkey-server-9": ("--io-threads-always-active", "yes"),
    "redis-server": ("--io-threads-do-reads", "yes"),
}


@pytest.mark.parametrize("name", [*SERVERS, *NEWER])
def test_records_pass_through_the_io_threads_of_every_server(name: str, tmp_path: Path) -> None:
    values = [payload(number, (64 << 10) * number + number) for number in range(1, 33)]
    targets = [bytearray(len(value)) for value in values]
    threads = ("--io-threads", "3", *ALWAYS.get(name, ()))
    with running(name, tmp_path, *threads) as server, open_store(f"{server.url}?connections=8") as store:
        assert all(store.put_many(keys(32), values, timeout_s=60))
        assert all(store.get_many_into(keys(32), targets, timeout_s=60))
        assert targets == values
        if name != "redis-server":  # it wants more connections at a time than come for certain
            assert server.info("io_threaded_writes_processed") > 0
