"""A near pool before far shards that die, fall silent, refuse or forget: who waits for whom, and what is sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool import _native, open_store
from kvpool.store.near_far import NearFarStore
from kvpool.store.store import Store
from tests.support.conformance import MIB, NAMESPACE, hashed, lookup_group, payload
from tests.support.deadlines import eventually
from tests.support.file_record import read_record, write_record
from tests.support.file_user import record_files
from tests.support.servers import Cluster, Server, running

NBYTES = 4096
SPAN_S = 2  # between two uses of a key that are told, of a pool with the time to live below


def names_of(numbers: range) -> list[str]:
    return NAMESPACE.keys([hashed(number) for number in numbers], 0, 0)


def value_of(number: int, nbytes: int = NBYTES) -> bytes:
    return payload(number, nbytes)


def put(store: Store, numbers: range, nbytes: int = NBYTES) -> None:
    values = [value_of(number, nbytes) for number in numbers]
    assert store.submit_put_absent(names_of(numbers), values, timeout_s=60).wait() == [True] * len(values)


def got(store: Store, numbers: range, timeout_s: float = 60) -> bool:
    """Whether all are there, as they were put."""
    targets = [bytearray(NBYTES) for _ in numbers]
    found = store.get_many_into(names_of(numbers), targets, timeout_s=timeout_s)
    assert all(target == value_of(number) for number, target in zip(numbers, targets, strict=True) if found)
    return all(found)


@pytest.fixture
def far_server(tmp_path: Path) -> Iterator[Server]:
    with running("valkey-server", tmp_path) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path, far_server: Server) -> Iterator[Store]:
    with open_store([f"file://{tmp_path}/near?capacity=1GiB", far_server.url]) as store:
        yield store


@pytest.fixture
def short_lived(tmp_path: Path, far_server: Server) -> Iterator[Store]:
    """What nobody uses goes far in seconds."""
    far = f"{far_server.url}?ttl={4 * SPAN_S}s"
    with open_store([f"file://{tmp_path}/near?capacity=1GiB", far]) as store:
        yield store


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster("valkey-server", tmp_path) as cluster:
        yield cluster


@pytest.fixture
def before_cluster(tmp_path: Path, cluster: Cluster) -> Iterator[Store]:
    with open_store([f"file://{tmp_path}/near?capacity=1GiB", cluster.url]) as store:
        yield store


def waiting(store: Store) -> int:
    return store.counters()["behind_waiting"]


def held(server: Server) -> int:
    return len(server.client.keys("kvpool:*"))


# ---------------------------------------------------------------------- what is used near is used far

USES: dict[str, Callable[[Store, range], object]] = {
    "get": got,
    "touch": lambda store, numbers: store.touch_many(names_of(numbers), timeout_s=60),
    "put absent": put,
    "lookup": lambda store, numbers: store.submit_lookup(
        NAMESPACE, [lookup_group(0, len(numbers))], timeout_s=60
    ).records(),
}


@pytest.mark.parametrize("use", USES)
def test_what_far_lost_is_sent_again_once_it_is_used(
    use: str, short_lived: Store, far_server: Server
) -> None:
    put(short_lived, range(20))
    assert eventually(lambda: held(far_server) == 20)
    far_server.client.flushall()

    def is_back() -> bool:
        USES[use](short_lived, range(20))
        return held(far_server) == 20

    assert eventually(is_back)
    assert short_lived.counters()["uses_missing"] >= 20


def test_what_is_used_near_does_not_expire_far(short_lived: Store, far_server: Server) -> None:
    put(short_lived, range(20))
    assert eventually(lambda: held(far_server) == 20)
    ended_s = far_server.client.time()[0] + 3 * 4 * SPAN_S

    def outlived() -> bool:
        assert got(short_lived, range(20))
        return int(far_server.client.time()[0]) > ended_s

    assert eventually(outlived)
    assert held(far_server) == 20
    counted = short_lived.counters()
    assert counted["uses_told"] + counted["uses_missing"] <= 20 * (4 * 3 + 2), (
        "each once in a quarter of its life"
    )


def test_what_is_let_go_near_is_let_go_far_and_a_use_keeps_it(short_lived: Store, far_server: Server) -> None:
    put(short_lived, range(2))
    assert eventually(lambda: held(far_server) == 2)
    short_lived.expire_many(names_of(range(2)))
    assert eventually(lambda: held(far_server) == 0)
    assert eventually(lambda: got(short_lived, range(1)) and held(far_server) == 1), (
        "used again, it comes back"
    )


def test_what_is_let_go_on_its_way_far_is_let_go_there(store: Store, far_server: Server) -> None:
    """Its put and its end go over two connections: the end may find nothing yet."""
    kept, let_go = names_of(range(2))
    far_server.stop()
    try:
        put(store, range(2))
        ended = store._begin(_native.EXPIRE, "expire", [let_go], None, 60)
        assert got(store, range(2))
    finally:
        far_server.go_on()
    ended.wait()
    assert eventually(lambda: waiting(store) == 0)
    hour_ms = 3_600_000
    assert eventually(lambda: 0 < far_server.client.pttl(let_go) < hour_ms)
    assert far_server.client.pttl(kept) > hour_ms


# ---------------------------------------------------------------------- near waits for nobody


def test_a_batch_near_waits_for_no_dead_far_pool(store: Store, far_server: Server) -> None:
    """More items than are under way near at a time, and keys that wait for far."""
    assert isinstance(store, NearFarStore)
    store._near.put_many(names_of(range(3000)), [value_of(number) for number in range(3000)], timeout_s=60)
    far_server.kill()
    put(store, range(3000, 3001))
    assert eventually(lambda: store.counters()["far_faults"] > 0)
    assert got(store, range(3000), timeout_s=10)
    put(store, range(3001, 3200))
    assert waiting(store) >= 200


def test_what_waits_for_a_silent_shard_keeps_no_answer_of_another(
    before_cluster: Store, cluster: Cluster
) -> None:
    """A caller that asks for a key of a living shard, beside one that asks the silent one."""
    names = names_of(range(60))
    owners = [
        cluster.holder(int(cluster.servers[0].client.execute_command("CLUSTER", "KEYSLOT", name)))
        for name in names
    ]
    silent = owners[0]
    living = [name for name, owner in zip(names, owners, strict=True) if owner is not silent]
    silent.stop()
    try:
        waits = before_cluster.submit_touch(names, timeout_s=60)
        assert before_cluster.contains_many(living, timeout_s=30) == [False] * len(living)
        assert not waits.done()
    finally:
        silent.go_on()
    assert waits.wait() == [False] * len(names)


@pytest.mark.parametrize("fault", ["dead", "silent"])
def test_a_shard_that_takes_nothing_holds_up_no_other(
    fault: str, before_cluster: Store, cluster: Cluster
) -> None:
    harmed = cluster.servers[0]
    names = names_of(range(400))
    slots = [int(cluster.servers[1].client.execute_command("CLUSTER", "KEYSLOT", name)) for name in names]
    of_others = sum(slot >= 16384 // 3 for slot in slots)
    harmed.kill() if fault == "dead" else harmed.stop()
    try:
        put(before_cluster, range(400))
        assert eventually(lambda: held(cluster.servers[1]) + held(cluster.servers[2]) == of_others)
        assert eventually(lambda: waiting(before_cluster) == 400 - of_others)
    finally:
        harmed.start() if fault == "dead" else harmed.go_on()
    assert eventually(lambda: waiting(before_cluster) == 0 and held(harmed) == 400 - of_others)
    assert before_cluster.counters()["lost"] == 0


# ---------------------------------------------------------------------- what far refuses


def test_a_record_that_far_refuses_leaves_the_queue_and_holds_up_no_other(
    store: Store, far_server: Server
) -> None:
    far_server.client.config_set("proto-max-bulk-len", MIB)
    put(store, range(100, 105), 2 * MIB)
    put(store, range(40))
    assert eventually(lambda: waiting(store) == 0)
    assert held(far_server) == 40
    counted = store.counters()
    assert (counted["refused_far"], counted["lost"]) == (5, 0)
    for _ in range(3):  # it is not tried at each use
        store.touch_many(names_of(range(100, 105)), timeout_s=60)
    assert eventually(lambda: waiting(store) == 0)
    assert store.counters()["refused_far"] == 5


def test_a_full_far_pool_is_not_asked_for_room_at_each_use(store: Store, far_server: Server) -> None:
    far_server.client.config_set("maxmemory-policy", "noeviction")
    far_server.client.config_set("maxmemory", 1)
    put(store, range(20))
    assert eventually(lambda: waiting(store) == 0)
    assert store.counters()["no_room_far"] == 20
    far_server.client.config_set("maxmemory", 0)
    put(store, range(20, 21))
    assert eventually(lambda: held(far_server) == 1)
    assert got(store, range(20))
    assert store.counters()["no_room_far"] == 20


def test_a_far_pool_that_writes_nothing_keeps_its_copies_waiting(store: Store, far_server: Server) -> None:
    """What a server says of itself costs no key its place, however often it says so."""
    far_server.client.config_set("min-replicas-to-write", 1)
    put(store, range(3))
    assert eventually(lambda: store.counters()["far_faults"] >= 10)
    assert waiting(store) == 3
    far_server.client.config_set("min-replicas-to-write", 0)
    assert eventually(lambda: held(far_server) == 3 and waiting(store) == 0)
    assert store.counters()["lost"] == 0


def test_what_was_damaged_near_does_not_go_far(tmp_path: Path, store: Store, far_server: Server) -> None:
    far_server.stop()
    try:
        put(store, range(100, 110), MIB)  # what far takes at a time
        put(store, range(20))
        for file in record_files(tmp_path / "near"):
            if file.stat().st_size < MIB:
                content = bytearray(read_record(file))
                content[-1] ^= 1
                write_record(file, content)
    finally:
        far_server.go_on()
    assert eventually(lambda: waiting(store) == 0)
    with open_store(far_server.url) as far:
        targets = [bytearray(NBYTES) for _ in range(20)]
        assert far.get_many_into(names_of(range(20)), targets) == [False] * 20
        assert far.counters()["damaged"] == 0
