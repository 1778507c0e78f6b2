"""A link that carries little is no dead server: nothing is hung up, and nobody waits for others' bytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.store import Batch
from kvpool.store.clients import executor
from kvpool.store.store import Store
from tests.support.conformance import MIB, key, payload
from tests.support.deadlines import eventually
from tests.support.proxy import Way, proxied
from tests.support.servers import ON_VALKEY, Cluster, Server, with_client

LINK_NBYTES_PER_S = 8e6
VALUE_NBYTES = 256 << 10
PUT_S = 4.0  # a connection is silent after half of it: longer than a busy machine holds a process up


class Flood:
    """Puts without end, of which the link carries a part before their deadline."""

    def __init__(self, store: Store, *, value_nbytes: int) -> None:
        self._store, self._value = store, payload(7, value_nbytes)
        self._over = threading.Event()
        self.batches = 0  # written by its thread
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            first = 1000 + 256 * self.batches
            numbers = [key(number) for number in range(first, first + 256)]
            with contextlib.suppress(StoreUnavailable):  # more than the link carries in that time
                self._store.put_many(numbers, [self._value] * 256, timeout_s=PUT_S)
            self.batches += 1

    @contextmanager
    def flowing(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()


@ON_VALKEY
@pytest.mark.parametrize("value_nbytes", [VALUE_NBYTES, 4 * MIB])
def test_a_thin_link_full_of_puts_carries_loads_and_hangs_up_on_nobody(
    server: Server, value_nbytes: int
) -> None:
    wanted = [payload(number, VALUE_NBYTES) for number in range(4)]
    names = [key(number) for number in range(4)]
    with open_store(server.url) as direct:
        assert direct.put_many(names, wanted) == [True] * 4
    with (
        proxied(server.port, nbytes_per_s=LINK_NBYTES_PER_S) as proxy,
        open_store(f"valkey://127.0.0.1:{proxy.port}") as store,
    ):
        flood = Flood(store, value_nbytes=value_nbytes)
        with flood.flowing():
            assert eventually(lambda: flood.batches >= 1)
            before = store.counters()  # on a busy machine its first puts come before a connection stands
            for _ in range(10):
                targets = [bytearray(VALUE_NBYTES) for _ in names]
                assert store.get_many_into(names, targets, timeout_s=60) == [True] * 4
                assert targets == wanted
            assert eventually(lambda: flood.batches >= 2)
        counters = store.counters()
        assert counters["timed_out"] > 0, "the link carried all: nothing was tried"
        assert counters["disconnections"] == counters["damaged"] == 0
        assert counters["refused"] == before["refused"]
        assert counters["get_hits"] == 40


SLOW_NBYTES_PER_S = 0.7e6
SLOW_COUNT = 160  # values: 40 MiB, a minute of that link


def of_each(cluster: Cluster, slow: Server, count: int) -> tuple[list[str], list[str]]:
    """``count`` keys of a server, and some of the others."""
    slots = {
        number: cluster.servers[1].client.execute_command("CLUSTER", "KEYSLOT", key(number))
        for number in range(4 * count)
    }
    first, last, *_ = next(
        row for row in slow.client.execute_command("CLUSTER SLOTS") if row[2][1] == slow.port
    )
    own = [key(number) for number, slot in slots.items() if first <= int(slot) <= last]
    others = [key(number) for number, slot in slots.items() if not first <= int(slot) <= last]
    assert len(own) >= count
    return own[:count], others[:10]


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_shard_behind_a_thin_link_holds_up_no_other(operation: str, tmp_path: Path) -> None:
    """More waits for it than may wait, and its bytes move all the time."""
    value = payload(7, VALUE_NBYTES)
    with Cluster("valkey-server", tmp_path) as cluster:
        slow = cluster.servers[0]
        own, others = of_each(cluster, slow, SLOW_COUNT)
        with open_store(cluster.url) as direct:
            direct.put_many([*own, *others], [value] * (len(own) + len(others)), timeout_s=60)
        with proxied(slow.port, nbytes_per_s=SLOW_NBYTES_PER_S) as link:
            slow.client.config_set("cluster-announce-port", link.port)
            assert eventually(lambda: all(_knows_port(server, link.port) for server in cluster.servers))
            with open_store(f"{cluster.url}?connections=1") as store:
                way = Way.ANSWERED if operation == "get" else Way.ASKED

                def begin(names: list[str], timeout_s: float) -> Batch:
                    if operation == "put":
                        return store.submit_put(names, [value] * len(names), timeout_s=timeout_s)
                    return store.submit_get(
                        names, [bytearray(VALUE_NBYTES) for _ in names], timeout_s=timeout_s
                    )

                waits = begin(own, 300)
                assert eventually(lambda: link.passed_nbytes(way) > 1 << 20)
                before = link.passed_nbytes(way)
                assert begin(others, 60).wait() == [True] * len(others)
                assert not waits.done()
                assert link.passed_nbytes(way) - before < SLOW_COUNT * VALUE_NBYTES // 3
                waits.cancel()


def _knows_port(server: Server, port: int) -> bool:
    return any(row[2][1] == port for row in server.client.execute_command("CLUSTER SLOTS"))


@ON_VALKEY
@pytest.mark.parametrize("client", ["redis", "glide"])
def test_a_call_with_little_time_left_is_no_silence_of_the_server(
    server: Server, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its end would be one of all that others wait for."""
    monkeypatch.setattr(executor, "PATIENCE_S", 20.0)
    with (
        proxied(server.port) as link,
        open_store(with_client(f"valkey://127.0.0.1:{link.port}?connections=2", client)) as store,
    ):
        assert store.contains_many([key(number) for number in range(2)]) == [False] * 2
        link.delay_s = 0.05
        for _ in range(5):
            with contextlib.suppress(StoreUnavailable):
                store.contains_many([key(1)], timeout_s=0.02)
            assert store.contains_many([key(1)], timeout_s=60) == [False]
        assert store.counters()["refused"] == 0
