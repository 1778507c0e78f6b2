"""redis-py and GLIDE on a real cluster: the kit, slots that move, shards that are gone, TLS and users.

What the native client does there: ``tests/store/server/test_cluster.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import _native, open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import MIB, ClusterConformance, key, keys, payload
from tests.support.credentials import Authority
from tests.support.deadlines import MARGIN_S, Stopwatch, eventually
from tests.support.servers import CLIENTS, Cluster, Server, port_of, with_client
from tests.support.store_traffic import Traffic, serves

OTHERS = ("redis", "glide")
MANY = 40  # keys that hold slots of every node
RIGHTS = ["+ping", "+multi", "+exec", "+hset", "+pexpire", "+pttl", "+hmget", "+exists", "+touch", "+unlink",
          "+cluster|slots", "+asking", "+info"]  # fmt: skip


@pytest.fixture(scope="module")
def cluster_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster("valkey-server", tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(params=OTHERS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(cluster: Cluster, client: str) -> Iterator[Store]:
    with open_store(with_client(cluster.url, client)) as store:
        yield store


class TestRedisPyOnACluster(ClusterConformance):
    client = "redis"


class TestGlideOnACluster(ClusterConformance):
    client = "glide"


def holder_of(cluster: Cluster, name: str) -> Server:
    return cluster.holder(int(cluster.servers[0].client.execute_command("CLUSTER", "KEYSLOT", name)))


def moved(cluster: Cluster, name: str) -> None:
    """The slot of ``name`` is another node's now, with all its keys."""
    slot = int(cluster.servers[0].client.execute_command("CLUSTER", "KEYSLOT", name))
    giver = cluster.holder(slot)
    to = next(server for server in cluster.servers if server is not giver)
    cluster.begin_move(slot, to)
    cluster.move_keys(slot, giver, to)
    cluster.end_move(slot, to)


def connections(server: Server) -> list[str]:
    """The links of stores that stand at a server."""
    return [one["name"] for one in server.client.client_list() if one["name"].startswith("kvpool:values")]


def round_trip(store: Store, values: list[bytes]) -> None:
    names, targets = keys(len(values)), [bytearray(len(value)) for value in values]
    assert all(store.put_many(names, values, timeout_s=60))
    assert all(store.get_many_into(names, targets, timeout_s=60))
    assert targets == values


# ---------------------------------------------------------------------- where keys are


def test_a_batch_is_spread_over_all_nodes(cluster: Cluster, store: Store) -> None:
    round_trip(store, [payload(number, 1000 + number) for number in range(300)])
    held = [server.client.keys("kvpool:*") for server in cluster.servers]
    assert all(len(names) > 50 for names in held)
    assert sorted(name.decode() for names in held for name in names) == sorted(keys(300))
    assert store.counters()["moved"] == store.counters()["asked"] == 0


def test_values_of_every_size_travel_together(store: Store) -> None:
    sizes = [1, 127, 128, 129, 65536, 262145, MIB, MIB + 1, 2 * MIB, 4 * MIB]
    round_trip(store, [payload(number, nbytes) for number, nbytes in enumerate(sizes)])
    with pytest.raises(ConfigError, match=r"buffers\[1\] is empty"):
        store.put_many(keys(2), [b"x", b""])


@pytest.mark.parametrize("writer", OTHERS)
def test_what_one_client_wrote_every_other_reads_where_it_is(cluster: Cluster, writer: str) -> None:
    values = [payload(number, 5000 + number) for number in range(MANY)]
    with open_store(with_client(cluster.url, writer)) as store:
        assert all(store.put_many(keys(MANY), values))
    for reader in CLIENTS:
        targets = [bytearray(len(value)) for value in values]
        with open_store(with_client(cluster.url, reader)) as store:
            assert all(store.get_many_into(keys(MANY), targets))
        assert targets == values


def test_one_node_in_the_url_is_enough(cluster: Cluster, client: str) -> None:
    url = f"valkey+cluster://127.0.0.1:1,127.0.0.1:{cluster.servers[2].port}?ttl=60s"
    with open_store(with_client(url, client)) as store:
        round_trip(store, [payload(number, 100) for number in range(MANY)])
        assert 50_000 < holder_of(cluster, key(1)).client.pttl(key(1)) <= 60_000


# ---------------------------------------------------------------------- slots that move


def test_a_moved_slot_is_followed_and_the_map_is_read_again(cluster: Cluster, store: Store) -> None:
    values = [payload(number, 3000) for number in range(MANY)]
    round_trip(store, values)
    moved(cluster, key(1))
    assert store.contains_many(keys(MANY)) == [True] * MANY
    assert store.counters()["moved"] > 0
    round_trip(store, values)
    holder = holder_of(cluster, key(1))
    assert holder.client.pttl(key(1)) > 0

    def map_is_new() -> bool:
        before = store.counters()["moved"]
        assert store.contains_many([key(1)]) == [True]
        return store.counters()["moved"] == before

    assert eventually(map_is_new)
    assert store.counters()["faults"] == 0


def test_slots_move_under_load(cluster: Cluster, store: Store) -> None:
    # A put looks for its key first: only a key that is gone is put at where its slot moves to.
    slots = {int(cluster.servers[0].client.execute_command("CLUSTER", "KEYSLOT", one)) for one in keys(8)}
    with Traffic(store, timeout_s=5.0) as traffic:
        for slot in slots:
            giver = cluster.holder(slot)
            to = next(server for server in cluster.servers if server is not giver)
            cluster.begin_move(slot, to)
            seen = traffic.hits
            assert eventually(lambda seen=seen: traffic.hits > seen + 8)
            cluster.move_keys(slot, giver, to)
            seen = traffic.hits
            assert eventually(lambda seen=seen: traffic.hits > seen + 8)
            cluster.end_move(slot, to)
    counters = store.counters()
    assert traffic.faults == 0
    assert counters["moved"] > 0
    assert counters["asked"] > 0
    assert counters["damaged"] == counters["disconnections"] == 0


# ---------------------------------------------------------------------- a shard that is gone


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_beside_a_dead_shard_the_others_answer(client: str, way: str, tmp_path: Path) -> None:
    timeout_s = 2.0
    with (
        Cluster("valkey-server", tmp_path) as cluster,
        open_store(with_client(cluster.url, client)) as store,
    ):
        values = [payload(number, 20_000) for number in range(MANY)]
        round_trip(store, values)
        dead = holder_of(cluster, key(1))
        lost = [holder_of(cluster, name) is dead for name in keys(MANY)]
        assert any(lost)
        assert not all(lost)
        if way == "killed":
            dead.kill()
        else:
            dead.stop()
        try:
            for _ in range(5):
                targets = [bytearray(20_000) for _ in values]
                watch = Stopwatch()
                get = store.submit_get(keys(MANY), targets, timeout_s=timeout_s)
                with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{dead.port}: "):
                    get.wait(60)
                assert watch.ran_s() < timeout_s + MARGIN_S
                found = [status == _native.OK for status in get.statuses()]
                assert found == [not is_lost for is_lost in lost]
                assert all(
                    target == value for target, value, hit in zip(targets, values, found, strict=True) if hit
                )
                put = store.submit_put(keys(MANY), values, timeout_s=timeout_s)
                with contextlib.suppress(StoreUnavailable):
                    put.wait(60)
                assert [status == _native.OK for status in put.statuses()] == found
            assert store.counters()["up_connections"] > 0
        finally:
            if way == "killed":
                dead.start()
            else:
                dead.go_on()
        assert eventually(lambda: serves(store, 1))
        assert store.counters()["damaged"] == 0


def test_a_cluster_that_is_gone_is_refused_at_once_and_used_when_it_is_back(
    cluster: Cluster, store: Store
) -> None:
    assert serves(store)
    for server in cluster.servers:
        server.stop()
    try:
        watch = Stopwatch()
        with pytest.raises(StoreUnavailable):
            store.contains_many(keys(MANY), timeout_s=1.0)
        assert watch.ran_s() < 1.0 + MARGIN_S

        def at_once() -> bool:
            watch = Stopwatch()
            with contextlib.suppress(StoreUnavailable):
                store.contains_many(keys(MANY), timeout_s=30.0)
            return watch.ran_s() < MARGIN_S

        assert eventually(at_once)
        assert eventually(lambda: store.counters()["up_connections"] == 0)
    finally:
        for server in cluster.servers:
            server.go_on()
    assert eventually(lambda: all(serves(store, number) for number in range(9)))


def test_a_record_that_ends_connections_is_refused_and_the_others_are_kept(
    cluster: Cluster, store: Store
) -> None:
    for server in cluster.servers:
        server.client.config_set("proto-max-bulk-len", 2 * MIB)
    try:
        refused = bytes([_native.REFUSED])
        assert eventually(lambda: store.submit_put([key(99)], [bytes(4 * MIB)]).statuses() == refused)
        round_trip(store, [payload(number, 50_000) for number in range(MANY)])
    finally:
        for server in cluster.servers:
            server.client.config_set("proto-max-bulk-len", 512 * MIB)


def test_a_replica_takes_over(client: str, tmp_path: Path) -> None:
    with (
        Cluster("valkey-server", tmp_path, replicas=1) as cluster,
        open_store(with_client(cluster.url, client)) as store,
    ):
        with Traffic(store, timeout_s=2.0) as traffic:
            holder_of(cluster, key(1)).kill()
            assert eventually(lambda: traffic.faults > 0)
            seen = traffic.hits
            assert eventually(lambda: traffic.hits > seen + 100 and serves(store, 99))
        assert traffic.longest_s < 2.0 + MARGIN_S
        round_trip(store, [payload(number, 3000) for number in range(MANY)])
        assert store.counters()["damaged"] == 0


def test_a_right_that_is_taken_back_is_noticed_beside_a_dead_shard(client: str, tmp_path: Path) -> None:
    """Without TOUCH a look is an EXISTS, whatever befell the batch's first key."""
    with (
        Cluster("valkey-server", tmp_path) as cluster,
        open_store(with_client(f"{cluster.url}?connections=1", client)) as store,
    ):
        assert all(store.put_many(keys(MANY), [b"value"] * MANY))
        dead = holder_of(cluster, key(0))
        is_lost = [holder_of(cluster, name) is dead for name in keys(MANY)]
        for server in cluster.servers:
            server.client.execute_command("ACL", "SETUSER", "default", "-touch")
        dead.kill()
        touch = store.submit_touch(keys(MANY))
        with pytest.raises(StoreUnavailable):
            touch.wait()
        assert [status != _native.OK for status in touch.statuses()] == is_lost


def test_a_node_that_leaves_is_let_go(client: str, tmp_path: Path) -> None:
    """With a thread's next batch: no client of it tries for ever to come back."""
    with (
        Cluster("valkey-server", tmp_path) as cluster,
        open_store(with_client(f"{cluster.url}?connections=1", client)) as store,
    ):
        values = [payload(number, 1000) for number in range(MANY)]
        round_trip(store, values)
        leaves = cluster.servers[-1]
        assert connections(leaves)
        leaves.client.flushall()  # empty slots change hands at once
        heir = cluster.servers[0].client.execute_command("CLUSTER MYID").decode()
        for first, last, primary, *_ in leaves.client.execute_command("CLUSTER SLOTS"):
            for slot in range(first, last + 1) if primary[1] == leaves.port else ():
                for server in reversed(cluster.servers):  # first the one that claims it
                    server.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", heir)

        def is_let_go() -> bool:
            round_trip(store, values)
            return not connections(leaves)

        assert eventually(is_let_go, within_s=30)


def test_a_slot_that_nobody_had_is_used_when_somebody_has_it(client: str, tmp_path: Path) -> None:
    with Cluster("valkey-server", tmp_path) as cluster:
        slot = int(cluster.servers[0].client.execute_command("CLUSTER", "KEYSLOT", key(1)))
        for server in cluster.servers:
            server.client.execute_command("CLUSTER", "DELSLOTS", slot)
        with open_store(with_client(cluster.url, client)) as store:
            assert not serves(store, 1)
            cluster.servers[0].client.execute_command("CLUSTER", "ADDSLOTS", slot)
            assert eventually(lambda: serves(store, 1), within_s=30)


# ---------------------------------------------------------------------- TLS, and users


def test_tls_and_a_user_with_few_rights(client: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with Cluster("valkey-server", tmp_path, authority=authority) as cluster:
        for server in cluster.servers:
            rules = {"enabled": True, "passwords": ["+hunter2"], "keys": ["kvpool:t*"]}
            server.client.acl_setuser("worker", commands=RIGHTS, **rules)
        nodes = ",".join(f"127.0.0.1:{port_of(server)}" for server in cluster.servers)

        def url(userinfo: str, ca: Path) -> str:
            return with_client(f"valkey+cluster://{userinfo}@{nodes}?tls=true&ca={ca}", client)

        with open_store(url("worker:hunter2", authority.ca)) as store:
            values = [payload(number, 50_000 + number) for number in range(MANY)]
            round_trip(store, values)
            assert all(server.client.dbsize() for server in cluster.servers), "every node was reached"
            moved(cluster, key(1))
            round_trip(store, values)
            assert store.counters()["moved"] > 0
            assert "hunter2" not in repr(store)
        with pytest.raises(ConfigError, match=r"the server refuses: .*correct user or password") as caught:
            open_store(url("worker:hunter3", authority.ca))
        assert "hunter3" not in str(caught.value)
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            open_store(url("worker:hunter2", Authority(tmp_path, "another").ca))
        with pytest.raises(ConfigError, match="the file of authorities cannot be read"):
            open_store(url("worker:hunter2", tmp_path / "missing.pem"))


def test_a_node_that_refuses_costs_its_keys_alone(client: str, tmp_path: Path) -> None:
    """Users are each node's own: one that joined may lack them."""
    with Cluster("valkey-server", tmp_path) as cluster:
        for server in cluster.servers:
            server.client.acl_setuser(
                "worker", enabled=True, passwords=["+hunter2"], keys=["kvpool:*"], commands=["+@all"]
            )
        nodes = cluster.url.partition("://")[2]
        url = with_client(f"valkey+cluster://worker:hunter2@{nodes}", client)
        values = [payload(number, 1000) for number in range(MANY)]
        with open_store(url) as store:
            round_trip(store, values)
            refuses = holder_of(cluster, key(1))
            refuses.client.acl_deluser("worker")  # which ends its connections
            lost = [holder_of(cluster, name) is refuses for name in keys(MANY)]
            for _ in range(3):
                for number, is_lost in enumerate(lost):  # a key by itself, too
                    get = store.submit_get([key(number)], [bytearray(1000)])
                    with contextlib.suppress(StoreUnavailable):
                        get.wait(60)
                    assert (get.statuses() == bytes([_native.OK])) == (not is_lost)
                get = store.submit_get(keys(MANY), [bytearray(1000) for _ in values])
                with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{refuses.port}: "):
                    get.wait(60)
                assert [status == _native.OK for status in get.statuses()] == [not one for one in lost]
            kept = [name for name, is_lost in zip(keys(MANY), lost, strict=True) if not is_lost]
            with open_store(url) as another:
                assert all(another.contains_many(kept))

            def says_why() -> bool:
                with pytest.raises(StoreUnavailable) as caught:
                    store.contains_many([key(1)])
                return "WRONGPASS" in str(caught.value)

            assert eventually(says_why)
            refuses.client.acl_setuser(
                "worker", enabled=True, passwords=["+hunter2"], keys=["kvpool:*"], commands=["+@all"]
            )
            assert eventually(lambda: serves(store, 1))


def test_glide_names_the_right_that_it_needs(cluster: Cluster) -> None:
    for server in cluster.servers:
        rights = [one for one in RIGHTS if one != "+info"]
        server.client.acl_setuser("few", enabled=True, passwords=["+p"], keys=["kvpool:t*"], commands=rights)
    nodes = cluster.url.partition("://")[2]
    with pytest.raises(ConfigError, match=r"GLIDE needs \+info"):
        open_store(f"valkey+cluster://few:p@{nodes}?client=glide")
    with open_store(f"valkey+cluster://few:p@{nodes}?client=redis") as store:
        assert serves(store)


def test_what_is_no_cluster_is_told(cluster: Cluster, client: str) -> None:
    with pytest.raises(StoreUnavailable, match="none of its nodes names the servers of the pool"):
        open_store(with_client("valkey+cluster://127.0.0.1:1,127.0.0.1:2", client))
