"""An index counts what tenants with a quota hold, says it in the pool and on its page, and keeps what was said."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool import Namespace, open_store
from kvpool.discovery.quota import Standing, read_standings, write_quota
from kvpool.errors import RepliesTooLarge, StoreUnavailable
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow import quota_keeper
from kvpool.index.follow.pool_follower import PoolFollower
from kvpool.index.follow.quota_keeper import MIN_LEASE_S, QuotaKeeper
from kvpool.index.serve.metrics import _of_standings
from kvpool.key.key import quota_keys
from kvpool.store.store import Store, StoredBlock
from tests.support.credentials import DOCUMENTED
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore
from tests.support.records import HEADER_NBYTES
from tests.support.servers import Cluster, Server, running


def fill(store: Store, tenant: str, records: int, nbytes: int, model: str = "m") -> int:
    """Store so many records; their bytes in the pool."""
    hashes = [hashlib.sha256(f"{model} {number}".encode()).digest() for number in range(records)]
    keys = Namespace(tenant, {"model": model}).keys(hashes, 0, 0)
    assert all(store.put_many(keys, [bytes(nbytes)] * records, timeout_s=60))
    return records * (nbytes + HEADER_NBYTES)


@contextmanager
def keeping(store: Store, tenants: Callable[[], Sequence[str]] = lambda: ["t", "u"]) -> Iterator[QuotaKeeper]:
    """One that takes its turns by hand: its own thread has taken the first."""
    keeper = QuotaKeeper(store, tenants)
    try:
        yield keeper
    finally:
        keeper.close()


@contextmanager
def by_hand(store: Store, tenants: Callable[[], Sequence[str]] = lambda: ["t", "u"]) -> Iterator[QuotaKeeper]:
    with keeping(store, tenants) as keeper:
        keeper.close()
        keeper._closing = False
        yield keeper


def standings(store: Store, *tenants: str) -> dict[str, Standing]:
    return read_standings(store, tenants or ["t", "u"])


@pytest.mark.parametrize("kind", ["file", "valkey-server", "cluster"])
def test_the_sum_is_that_of_the_tenants_records_of_every_model(kind: str, tmp_path: Path) -> None:
    @contextmanager
    def opened() -> Iterator[Store]:
        if kind == "file":
            with open_store(f"file://{tmp_path}/pool?capacity=256MiB") as store:
                yield store
        elif kind == "cluster":
            with Cluster("valkey-server", tmp_path) as cluster, open_store(cluster.url) as store:
                yield store
        else:
            with running(kind, tmp_path) as server, open_store(server.url) as store:
                yield store

    with opened() as store, by_hand(store) as keeper:
        write_quota(store, "t", 1 << 20)
        write_quota(store, "u", 1 << 30)
        nbytes = fill(store, "t", 2500, 1000) + fill(store, "t", 700, 5000, "another")
        fill(store, "tt", 900, 3000)  # begins alike
        other = fill(store, "u", 1200, 2000)
        keeper.turn()
        found = standings(store)
        assert found["t"].held_nbytes == pytest.approx(nbytes, rel=0.1)
        assert found["u"].held_nbytes == pytest.approx(other, rel=0.1)
        assert found["t"].is_over
        assert keeper.standings == found
        assert standings(store, "tt")["tt"] == Standing(), "nobody asked"


def test_without_a_quota_nothing_is_walked() -> None:
    class Walked(MemoryStore):
        def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
            raise AssertionError("walked")

    with Walked() as store, by_hand(store) as keeper:
        write_quota(store, "t", None)
        keeper.turn()
        assert keeper.standings == {}


def test_a_quota_that_is_there_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may write another one between the reading and that."""
    with MemoryStore() as store, by_hand(store) as keeper:
        write_quota(store, "t", 1000)
        written: list[str] = []
        announce = store.announce

        def spied(key: str, document: bytes, *, lease_s: float) -> None:
            written.append(key)
            announce(key, document, lease_s=lease_s)

        monkeypatch.setattr(store, "announce", spied)
        for _ in range(3):
            keeper.turn()
        assert written == 3 * [quota_keys("t")[1]], "the sum alone"


def test_a_lost_quota_is_written_again_and_one_that_was_taken_back_is_not() -> None:
    with MemoryStore() as store, by_hand(store) as keeper:
        write_quota(store, "t", 1000)
        write_quota(store, "u", 2000)
        keeper.turn()
        write_quota(store, "u", None)
        keeper.turn()
        for key in (*quota_keys("t"), *quota_keys("u")):
            store.withdraw(key)  # as a server does that evicts, or starts anew
        keeper.turn()
        assert standings(store) == {"t": Standing(1000, 0, is_said=True), "u": Standing(is_said=True)}
        write_quota(store, "t", 3000)
        keeper.turn()
        assert standings(store)["t"].quota_nbytes == 3000, "what an operator says is not written over"


def test_a_quota_that_makes_no_sense_is_left_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryStore() as store, by_hand(store) as keeper:
        write_quota(store, "u", 1000)
        store.announce(quota_keys("t")[0], b"garbage", lease_s=60)
        for _ in range(2):
            keeper.turn()
        assert set(keeper.standings) == {"u"}
        assert store.announced_under(quota_keys("t")) == {quota_keys("t")[0]: b"garbage"}
    assert caplog.messages == ["the quota of tenant t makes no sense: write it with kvpool quota"]


def test_a_sum_that_makes_no_sense_is_counted_anew() -> None:
    with MemoryStore() as store, by_hand(store) as keeper:
        write_quota(store, "t", 1000)
        store.announce(quota_keys("t")[1], b"garbage", lease_s=60)
        nbytes = fill(store, "t", 2, 100)
        keeper.turn()
        assert standings(store)["t"] == Standing(1000, nbytes, is_said=True)


def test_names_of_one_tenant_keep_nobody_elses_bytes_from_being_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Named(MemoryStore):
        def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
            if prefix == "kvpool:t:":
                raise RepliesTooLarge("its names are too large")
            return super()._scan(prefix)

    with Named() as store, by_hand(store) as keeper:
        write_quota(store, "t", 1000)
        write_quota(store, "u", 1000)
        nbytes = fill(store, "u", 2, 100)
        keeper.turn()
        assert keeper.standings == {
            "t": Standing(1000, is_said=True),
            "u": Standing(1000, nbytes, is_said=True),
        }
    assert caplog.messages == ["what tenant t holds cannot be counted: its names are too large"]


def test_a_pool_that_is_away_is_said_once_and_the_last_sums_are_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_keeper, "PAUSE_S", 0.01)
    with MemoryStore() as store:
        write_quota(store, "t", 1000)
        with keeping(store) as keeper:
            assert eventually(lambda: "t" in keeper.standings)
            turns = [0]

            def away(*_: object, **__: object) -> None:
                turns[0] += 1
                raise StoreUnavailable("gone")

            monkeypatch.setattr(store, "announced_under", away)
            assert eventually(lambda: turns[0] > 3)
            assert keeper.standings["t"].quota_nbytes == 1000
    assert caplog.messages == ["quotas cannot be followed: gone"]


def test_sums_end_without_an_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server, open_store(server.url) as store:
        write_quota(store, "t", 1000)
        with by_hand(store) as keeper:
            keeper.turn()
            assert 0 < server.client.ttl(f"{quota_keys('t')[1]}:announced") <= MIN_LEASE_S
            keeper.turn(0.05)
        assert eventually(lambda: standings(store)["t"].held_nbytes is None)


def test_walks_take_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(MemoryStore):
        def _scan(self, prefix: str) -> Iterator[list[StoredBlock]]:
            time.sleep(0.3)
            yield []

    monkeypatch.setattr(quota_keeper, "PAUSE_S", 0.0)
    with Slow() as store, by_hand(store) as keeper:
        write_quota(store, "t", 1000)
        rest_s = keeper._turn()
        assert rest_s >= 9 * 0.3
        assert keeper._lease_s >= MIN_LEASE_S


def test_the_documented_rights_of_an_index_are_enough(server: Server) -> None:
    server.client.acl_setuser(
        "index", enabled=True, passwords=["+p"], keys=["kvpool:t:*", "kvpool-quota:*", "kvpool::untenanted:*"],
        commands=[*DOCUMENTED, "+scan", "+hstrlen"],
    )  # fmt: skip
    with open_store(server.url) as operator, open_store(server.url.replace("://", "://index:p@")) as store:
        write_quota(operator, "t", 1000)
        nbytes = fill(operator, "t", 3, 100)
        with by_hand(store, lambda: ["t"]) as keeper:
            keeper.turn()
            assert standings(operator)["t"] == Standing(1000, nbytes, is_said=True)
            server.client.delete("kvpool-quota:t:announced", "kvpool-quota:t:held:announced")
            keeper.turn()
            assert standings(operator)["t"] == Standing(1000, nbytes, is_said=True)


def test_an_index_reports_tenants_with_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_keeper, "PAUSE_S", 0.05)
    with running("valkey-server", tmp_path) as server, open_store(server.url) as store:
        nbytes = fill(store, "t", 20, 1000)
        write_quota(store, "t", 5000)
        follower = PoolFollower(server.url, Fleet(), tenants=["t", "u"])
        follower.start()
        try:
            assert eventually(lambda: follower.standings.get("t") == Standing(5000, nbytes, is_said=True))
            page = {
                family.name: {sample.labels["tenant"]: sample.value for sample in family.samples}
                for family in _of_standings(follower.standings)
            }
        finally:
            follower.close()
    assert page == {
        "kvpool_index_tenant_quota_bytes": {"t": 5000.0},
        "kvpool_index_tenant_held_bytes": {"t": float(nbytes)},
    }


def test_what_a_tenant_with_a_quota_and_without_a_worker_holds_is_counted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_keeper, "PAUSE_S", 0.05)
    with open_store(server.url) as store:
        write_quota(store, "t", 5000)
        nbytes = fill(store, "t", 3, 1000)
        follower = PoolFollower(server.url, Fleet())
        follower.start()
        try:
            assert eventually(lambda: standings(store)["t"].held_nbytes == nbytes)
            write_quota(store, "u", 7000)
            assert eventually(lambda: standings(store)["u"].held_nbytes == 0)
        finally:
            follower.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running("valkey-server", tmp_path) as one:
        yield one
