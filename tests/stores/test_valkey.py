"""The store on real servers: the conformance kit, what lies on the server, and how it opens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool import open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.record import pack_header
from kvpool.stores.store import Store
from tests.conftest import eventually
from tests.stores.conformance import MIB, OpenStore, StoreConformance, key, keys, payload
from tests.stores.servers import SERVERS, Server, running


@pytest.fixture(params=SERVERS, scope="module")
def server_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(server_of_module: Server) -> Server:
    """An empty server without a limit."""
    server_of_module.client.flushall()
    server_of_module.client.config_set("maxmemory", 0)
    server_of_module.client.config_resetstat()
    return server_of_module


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    with open_store(server.url) as store:
        yield store


class TestValkeyStore(StoreConformance):
    @pytest.fixture
    def open_one(self, server: Server) -> OpenStore:
        def open_one(capacity_nbytes: int) -> Store:
            # What the server itself needs, connections among it, and what it needs to take a value in.
            used_nbytes = server.info("used_memory")
            server.client.config_set("maxmemory", used_nbytes + capacity_nbytes)
            return open_store(server.url)

        return open_one


class TestValkeyStoreOnUnixSocket(StoreConformance):
    @pytest.fixture
    def open_one(self, server: Server) -> OpenStore:
        def open_one(capacity_nbytes: int) -> Store:
            server.client.config_set("maxmemory", server.info("used_memory") + capacity_nbytes)
            return open_store(f"valkey+unix://{server.socket_path}?connections=1")

        return open_one


# ---------------------------------------------------------------------- what lies on the server


@pytest.mark.parametrize("nbytes", [1, 127, 128, 129, 1000, 64 * 1024])
def test_a_record_on_the_server_is_one_hash(server: Server, store: Store, nbytes: int) -> None:
    value = payload(nbytes, nbytes)
    store.put_many([key(1)], [value])
    tail = min(nbytes, 128)
    assert server.client.keys() == [key(1).encode()]
    assert server.client.hgetall(key(1)) == {
        b"h": pack_header(key(1), value) + value[nbytes - tail :],
        b"b": value[: nbytes - tail],
    }


def test_a_record_written_by_another_client_is_read(server: Server, store: Store) -> None:
    value = payload(1, 5000)
    header = pack_header(key(1), value)
    server.client.hset(key(1), mapping={"h": header + value[-128:], "b": value[:-128]})
    target = bytearray(5000)
    assert store.get_many_into([key(1)], [target]) == [True]
    assert target == value


def test_a_value_has_a_time_to_live(server: Server) -> None:
    with open_store(server.url) as by_default, open_store(f"{server.url}?ttl=90s") as short:
        by_default.put_many([key(1)], [b"x"])
        short.put_many([key(2)], [b"x"])
        assert 86_000_000 < server.client.pttl(key(1)) <= 86_400_000
        assert 80_000 < server.client.pttl(key(2)) <= 90_000
        short.put_many([key(1)], [b"x"])
        assert server.client.pttl(key(1)) <= 90_000


@pytest.mark.parametrize("field", ["h", "b"])
@pytest.mark.parametrize("position", [0, 63, 70, 191, 500, -1])
def test_a_flipped_bit_is_a_miss_and_the_record_goes(
    server: Server, store: Store, field: str, position: int
) -> None:
    store.put_many(keys(2), [payload(1, 1000)] * 2)
    damaged = bytearray(server.client.hget(key(0), field))
    damaged[min(position, len(damaged) - 1)] ^= 4
    server.client.hset(key(0), field, bytes(damaged))
    assert store.get_many_into(keys(2), [bytearray(1000), bytearray(1000)]) == [False, True]
    assert store.contains_many(keys(2)) == [False, True]
    assert store.counters()["damaged"] == 1


@pytest.mark.parametrize("missing", ["h", "b"])
def test_half_a_record_is_a_miss_and_goes(server: Server, store: Store, missing: str) -> None:
    store.put_many([key(0)], [payload(1, 1000)])
    server.client.hdel(key(0), missing)
    assert store.get_many_into([key(0)], [bytearray(1000)]) == [False]
    assert store.contains_many([key(0)]) == [False]


def test_a_key_of_another_type_is_a_miss_and_goes(server: Server, store: Store) -> None:
    server.client.set(key(0), "somebody's text")
    assert store.get_many_into([key(0)], [bytearray(1000)]) == [False]
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


def test_a_database_of_its_own(server: Server) -> None:
    with open_store(f"{server.url}/3") as three, open_store(server.url) as zero:
        three.put_many([key(1)], [b"x"])
        assert zero.contains_many([key(1)]) == [False]
        three.announce("kvpool:t:x", b"x", lease_s=60)
        assert zero.announcements("kvpool:t:") == {}
        assert repr(three) == f"<ValkeyStore {server.url}/3>"


def test_redis_is_another_name(server: Server) -> None:
    with open_store(server.url.replace("valkey", "redis"), threads=3) as store:
        assert store.put_many([key(1)], [b"x"]) == [True]
        assert store.counters()["up_connections"] <= 3


def test_refusals_are_one_line_without_the_password(server: Server) -> None:
    for user in ("", "somebody"):
        with pytest.raises(ConfigError, match=r"the server refuses: .*AUTH: ") as caught:
            open_store(f"valkey://{user}:hunter2@127.0.0.1:{server.port}")
        assert "hunter2" not in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="SELECT: ERR"):
        open_store(f"{server.url}/999")


def test_nobody_there() -> None:
    for url in ("valkey://127.0.0.1:1", "valkey+unix:///nonexistent/socket"):
        with pytest.raises(StoreUnavailable, match=r"cannot connect: .*check that the server runs there"):
            open_store(url)


def test_a_value_larger_than_the_limit_has_no_room_and_others_go_on(server: Server, store: Store) -> None:
    server.client.config_set("maxmemory", server.info("used_memory") + 3 * MIB)
    assert store.put_many(keys(2), [b"a", bytes(8 * MIB)]) == [True, False]
    # The server counts what it has read of the large one, until it lets that go.
    assert eventually(lambda: store.put_many([key(2)], [b"c"]) == [True])
    assert store.contains_many(keys(3)) == [True, False, True]
    assert store.counters()["disconnections"] == 0
