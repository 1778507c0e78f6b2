"""Faults of real servers: whatever happens, an answer in bounded time, and never a wrong byte."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from kvpool import open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.stores.store import Store
from tests.conftest import eventually
from tests.stores.conformance import MIB, key, keys, payload
from tests.stores.servers import SERVERS, Server, running

# Beyond its deadline a batch may take this long: a thread that has to be woken on a busy machine.
MARGIN_S = 0.5


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path) as server:
        yield server


@pytest.fixture
def store(server: Server) -> Iterator[Store]:
    with open_store(server.url) as store:
        yield store


def serves(store: Store, number: int = 1) -> bool:
    """Whether a round trip works now; a wrong byte fails the test."""
    value = payload(number, 100_000)
    target = bytearray(len(value))
    try:
        if store.put_many([key(number)], [value], timeout_s=2) != [True]:
            return False
        if store.get_many_into([key(number)], [target], timeout_s=2) != [True]:
            return False
    except StoreUnavailable:
        return False
    assert target == value
    return True


class Traffic:
    """Puts and gets in a thread, until told to end: every hit is compared, every call is timed."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self.store, self.timeout_s = store, timeout_s
        self.hits = self.faults = 0
        self.longest_s = 0.0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        assert eventually(lambda: self.hits > 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.wrong == []

    def _run(self) -> None:
        values = [payload(number, 300_000 + number) for number in range(8)]
        while not self._stop.is_set():
            self._timed(lambda: self.store.put_many(keys(8), values, timeout_s=self.timeout_s))
            targets = [bytearray(len(value)) for value in values]
            get = functools.partial(self.store.get_many_into, keys(8), targets, timeout_s=self.timeout_s)
            found = self._timed(get)
            for number, hit in enumerate(found):
                self.hits += hit
                if hit and targets[number] != values[number]:
                    self.wrong.append(f"{number} holds something else")

    def _timed(self, call: Callable[[], list[bool]]) -> list[bool]:
        started = time.monotonic()
        try:
            return call()
        except StoreUnavailable:
            self.faults += 1
            return []
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - started)


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
    assert eventually(lambda: store.counters()["up_connections"] == 2)


def test_while_a_server_is_away_a_batch_does_not_wait_for_its_deadline(server: Server, store: Store) -> None:
    server.kill()
    assert eventually(lambda: store.counters()["failed_dials"] >= 2)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"refused|reset|closed"):
        store.get_many_into(keys(100), [bytearray(1000)] * 100, timeout_s=60)
    assert time.monotonic() - started < MARGIN_S


def test_a_server_that_is_stopped_costs_the_deadline(server: Server, store: Store) -> None:
    assert serves(store)
    server.stop()
    try:
        for call in (
            lambda: store.get_many_into(keys(50), [bytearray(100_000) for _ in range(50)], timeout_s=0.3),
            lambda: store.put_many(keys(50), [bytes(MIB)] * 50, timeout_s=0.3),
            lambda: store.contains_many(keys(50), timeout_s=0.3),
        ):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                call()
            assert time.monotonic() - started < 0.3 + MARGIN_S
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
    assert store.counters()["disconnections"] == 0


def test_connections_that_are_killed_during_batches(server: Server, store: Store) -> None:
    with Traffic(store, timeout_s=5.0) as traffic:
        for _ in range(30):
            seen = traffic.hits
            server.client.client_kill_filter(_type="normal", skipme=True)
            assert eventually(lambda seen=seen: traffic.hits > seen)
    assert traffic.longest_s < 5.0
    assert store.counters()["disconnections"] >= 30
    assert store.counters()["damaged"] == 0
    assert eventually(lambda: serves(store))


def test_a_wrong_password_later_is_a_fault_with_the_servers_words(server: Server) -> None:
    server.client.acl_setuser("worker", enabled=True, passwords=["+hunter2"], keys=["*"], commands=["+@all"])
    with pytest.raises(ConfigError, match="AUTH: WRONGPASS") as caught:
        open_store(f"valkey://worker:hunter3@127.0.0.1:{server.port}")
    assert "hunter" not in str(caught.value)
    with open_store(f"valkey://worker:hunter2@127.0.0.1:{server.port}") as store:
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


def test_a_user_may_be_confined_to_a_tenant(server: Server) -> None:
    commands = ["+hset", "+pexpire", "+hmget", "+exists", "+unlink", "+select", "+ping", "+time", "+set", "+mget",
                "+zadd", "+zcard", "+zscore", "+zrange", "+zremrangebyscore", "+zremrangebyrank", "+multi",
                "+exec"]  # fmt: skip
    server.client.acl_setuser(
        "worker", enabled=True, passwords=["+p"], keys=["kvpool:tenant-1:*"], commands=commands
    )
    with open_store(f"valkey://worker:p@127.0.0.1:{server.port}") as store:
        assert serves(store)
        assert store.delete_many([key(1)]) == 1
        store.announce("kvpool:tenant-1:x", b"x", lease_s=60)
        assert store.announcements("kvpool:tenant-1:") == {"kvpool:tenant-1:x": b"x"}
        foreign = key(1).replace("tenant-1", "tenant-2")
        for call in (
            lambda: store.put_many([foreign], [b"x"]),
            lambda: store.get_many_into([foreign], [bytearray(1)]),
            lambda: store.contains_many([foreign]),
            lambda: store.delete_many([foreign]),
            lambda: store.announce("kvpool:tenant-2:x", b"x", lease_s=60),
            lambda: store.announcements("kvpool:tenant-2:"),
            lambda: store.announcements(""),
        ):
            with pytest.raises(StoreUnavailable, match=r"(?i)permission"):
                call()
        assert serves(store)
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
    assert store.counters()["disconnections"] == 0


@pytest.mark.parametrize("value_nbytes", [64 << 10, 512 << 10, 2 << 20, 4 << 20])
def test_memory_of_the_server_per_payload_byte(server: Server, store: Store, value_nbytes: int) -> None:
    room_nbytes = 192 * MIB
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    used_nbytes = server.info("used_memory")
    server.client.config_set("maxmemory", used_nbytes + room_nbytes)
    count = room_nbytes // value_nbytes * 3 // 2
    value = payload(1, value_nbytes)
    for start in range(0, count, 16):
        part = [key(number) for number in range(start, min(count, start + 16))]
        assert all(store.put_many(part, [value] * len(part), timeout_s=30))
    # What it reads a value into takes room as well, for a moment: of 192 MiB a large value notices.
    stays = sum(store.contains_many([key(number) for number in range(count)]))
    assert stays < count
    memory_nbytes = server.client.memory_usage(key(count - 1))
    of_room = room_nbytes / (stays * value_nbytes)
    of_key = memory_nbytes / value_nbytes
    print(
        f"{server.name} {value_nbytes >> 10} KiB: {stays} of {count} stay; {of_room:.4f}, one key {of_key:.4f}"
    )
    assert of_key <= 1.08
    assert of_room <= 1.08


def test_the_client_of_the_test_is_not_the_store(server: Server) -> None:
    """``client_kill_filter`` above leaves the test's own connection alone."""
    assert server.client.client_kill_filter(_type="normal", skipme=True) == 0
    assert isinstance(server.client, redis.Redis)
