"""The store on a real cluster: keys find their nodes, slots move, nodes go, and nothing wrong is ever read."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.cli.doctor.doctor import run_doctor
from kvpool.cli.settings import DoctorOptions
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import ClusterConformance, key, keys, payload
from tests.support.credentials import Authority
from tests.support.deadlines import MARGIN_S, eventually
from tests.support.servers import NEWER, SERVERS, Cluster, Server
from tests.support.store_traffic import Traffic, serves

# Keys that hold several slots of every node.
MANY = 40
OTHER = 99  # a key that Traffic does not use


@pytest.fixture(params=SERVERS, scope="module")
def cluster_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with Cluster(request.param, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    with open_store(cluster.url) as store:
        yield store


@pytest.fixture(params=SERVERS)
def with_replicas(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(request.param, tmp_path, replicas=1) as cluster:
        yield cluster


@pytest.mark.parametrize("cluster_of_module", ["valkey-server"], indirect=True)
class TestClusterStore(ClusterConformance):
    pass


def slot(cluster: Cluster, name: str) -> int:
    return int(cluster.servers[0].client.execute_command("CLUSTER", "KEYSLOT", name))


def held(server: Server) -> list[str]:
    return sorted(name.decode() for name in server.client.keys("kvpool:*"))


def puts_and_gets(store: Store, count: int = MANY, timeout_s: float = 5) -> None:
    """Everything goes in, and comes out as it was."""
    values = [payload(number, 50_000 + number) for number in range(count)]
    targets = [bytearray(len(value)) for value in values]

    def puts() -> bool:
        with contextlib.suppress(StoreUnavailable):  # a dial may take longer than it waits: a busy machine
            return all(store.put_many(keys(count), values, timeout_s=timeout_s))
        return False

    assert eventually(puts)
    assert all(store.get_many_into(keys(count), targets, timeout_s=timeout_s))
    assert targets == values


# ---------------------------------------------------------------------- where keys are


def test_every_node_holds_the_keys_of_its_slots(cluster: Cluster, store: Store) -> None:
    puts_and_gets(store, 300)
    holdings = [held(server) for server in cluster.servers]
    assert all(len(holding) > 50 for holding in holdings)
    assert sorted(name for holding in holdings for name in holding) == sorted(keys(300))
    assert store.counters()["moved"] == store.counters()["asked"] == 0
    # Of two threads to three nodes, and those for puts of who has put something there.
    assert 2 * 3 < store.counters()["up_connections"] <= 2 * 3 * 2


def test_one_node_in_the_url_is_enough(cluster: Cluster) -> None:
    with open_store(f"valkey+cluster://127.0.0.1:1,127.0.0.1:{cluster.servers[2].port}?ttl=60s") as store:
        puts_and_gets(store)
        assert 50_000 < cluster.holder(slot(cluster, key(1))).client.pttl(key(1)) <= 60_000


def test_scan_life_and_announcements_are_of_all_nodes(cluster: Cluster, store: Store) -> None:
    puts_and_gets(store, 100)
    assert sorted(block.key for blocks in store.scan() for block in blocks) == sorted(keys(100))
    assert sorted(block.key for blocks in store.scan_writers() for block in blocks) == sorted(keys(100))
    store.announce("kvpool:t:one", b"1", lease_s=60)
    store.announce("kvpool:u:two", b"2", lease_s=60)
    assert store.announcements("") == {"kvpool:t:one": b"1", "kvpool:u:two": b"2"}
    assert store.withdraw_all("") == 2
    assert store.announcements("") == {}
    life = store.server_run_id()
    assert life
    assert store.server_run_id() == life


def test_the_doctor_names_the_nodes(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    run_doctor(DoctorOptions(pool=cluster.url, as_json=True))
    said = capsys.readouterr().out
    assert all(f"127.0.0.1:{server.port}" in said for server in cluster.servers)
    assert "cannot be reached" not in said


def test_slots_move_under_load(cluster: Cluster, store: Store) -> None:
    moving = {slot(cluster, name) for name in keys(8)}
    with Traffic(store, timeout_s=5.0) as traffic:
        for _ in range(4):
            for one in moving:
                giver = cluster.holder(one)
                to = next(server for server in cluster.servers if server is not giver)
                cluster.begin_move(one, to)
                seen = traffic.hits
                assert eventually(lambda seen=seen: traffic.hits > seen + 8)
                cluster.move_keys(one, giver, to)
                cluster.end_move(one, to)
    counters = store.counters()
    assert traffic.faults == 0
    assert counters["moved"] > 0
    assert counters["asked"] > 0
    assert counters["damaged"] == counters["disconnections"] == 0


def test_a_primary_is_killed_under_load_and_its_replica_takes_over(with_replicas: Cluster) -> None:
    cluster = with_replicas
    with open_store(cluster.url) as store:
        with Traffic(store, timeout_s=2.0) as traffic:
            cluster.holder(slot(cluster, key(1))).kill()
            assert eventually(lambda: traffic.faults > 0)
            seen = traffic.hits
            assert eventually(lambda: traffic.hits > seen + 100 and serves(store, OTHER))
        assert traffic.longest_s < 2.0 + MARGIN_S
        puts_and_gets(store)
        assert store.counters()["damaged"] == 0


def test_a_store_that_is_dropped_leaves_no_thread(cluster: Cluster) -> None:
    store = open_store(cluster.url)
    puts_and_gets(store)
    del store
    gc.collect()  # the fixture for every test looks for what is left


# ---------------------------------------------------------------------- opening


def test_what_is_no_cluster_is_told(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"none of its nodes names the servers of the pool"):
        open_store("valkey+cluster://127.0.0.1:1,127.0.0.1:2")
    alone = Server(cluster.servers[0].name, tmp_path)
    try:
        alone.start()
        with pytest.raises(ConfigError, match=r"is no node of a cluster; write valkey://"):
            open_store(f"valkey+cluster://127.0.0.1:{alone.port}")
    finally:
        alone.kill()


def test_users_and_their_rights(cluster: Cluster) -> None:
    rules = {"enabled": True, "passwords": ["+hunter2"], "keys": ["kvpool:t*"]}
    commands = ["+ping", "+multi", "+exec", "+hset", "+pexpire", "+pttl", "+hmget", "+exists", "+touch", "+unlink",
                "+cluster|slots"]  # fmt: skip
    for server in cluster.servers:
        server.client.acl_setuser("worker", commands=commands, **rules)
        server.client.acl_setuser("few", commands=["+ping"], **rules)
    hosts = cluster.url.partition("://")[2]
    with open_store(f"valkey+cluster://worker:hunter2@{hosts}") as store:
        puts_and_gets(store)
    with pytest.raises(ConfigError, match=r"allow \+cluster\|slots"):
        open_store(f"valkey+cluster://few:hunter2@{hosts}")
    with pytest.raises(ConfigError, match=r"the server refuses: .*correct user or password") as caught:
        open_store(f"valkey+cluster://worker:hunter3@{hosts}")
    assert "hunter3" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tls"), [*((name, True) for name in SERVERS), *((name, False) for name in NEWER)]
)
def test_a_slot_moves_between_nodes_of_each_version(name: str, tls: bool, tmp_path: Path) -> None:
    authority = Authority(tmp_path) if tls else None
    with Cluster(name, tmp_path, authority=authority) as cluster:
        with open_store(cluster.url) as store:
            puts_and_gets(store)
            assert all(held(server) for server in cluster.servers), "every node was reached"
            moved = slot(cluster, keys(1)[0])
            giver = cluster.holder(moved)
            to = next(server for server in cluster.servers if server is not giver)
            cluster.begin_move(moved, to)
            cluster.move_keys(moved, giver, to)
            cluster.end_move(moved, to)
            puts_and_gets(store)
            assert store.counters()["moved"] + store.counters()["asked"] > 0
        if authority is not None:
            stranger = Authority(tmp_path, "another")
            with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                open_store(cluster.url.replace(str(authority.ca), str(stranger.ca)))


def test_shards_go_on_as_a_newer_version_one_after_the_other_and_back(tmp_path: Path) -> None:
    """As when their image changes: the folder of each stays, with its place in the cluster and no block."""
    older, newer = "valkey-server", "valkey-server-9"
    with Cluster(older, tmp_path) as cluster, open_store(cluster.url) as store:
        for name, servers in ((newer, cluster.servers), (older, cluster.servers[:1])):
            for server in servers:
                server.kill()
                server.name = name
                server.start()
                assert eventually(lambda: all(cluster.is_well(one) for one in cluster.servers))
                puts_and_gets(store)
        assert len({server.info("valkey_version") for server in cluster.servers}) == 2
