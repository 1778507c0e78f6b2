"""A get over a thin link: bytes that arrive are progress, however many others wait behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.metrics import Counters
from kvpool.transfer import Block, KVCacheMover
from kvpool.transfer.copier import BlockCopier
from tests.support.conformance import keys, opened
from tests.support.deadlines import ends_within
from tests.support.mover import run
from tests.support.proxy import Harm, Proxy, Way, proxied
from tests.support.servers import CLIENTS, Cluster, Server, running, with_client

COUNT, NBYTES = 32, 256 << 10
TIMEOUT_S, NBYTES_PER_S = 3.0, 1.4e6  # 8 MiB take six seconds
LONG_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("valkey-server", tmp_path_factory.mktemp("slow")) as server:
        with open_store(server.url) as store:
            store.put_many(keys(COUNT), [bytes([number]) * NBYTES for number in range(COUNT)], timeout_s=60)
        yield server


@pytest.fixture
def link(server: Server) -> Iterator[Proxy]:
    with proxied(server.port, nbytes_per_s=NBYTES_PER_S) as link:
        yield link


def url_of(link: Proxy, client: str = "native") -> str:
    return with_client(f"valkey://127.0.0.1:{link.port}?connections=1", client)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("timeout_s", "max_s", "arrives"),
    [(TIMEOUT_S, LONG_S, True), (TIMEOUT_S, None, False), (TIMEOUT_S / 2, TIMEOUT_S, False)],
    ids=["in time", "as long as it may stand still", "longer than its time in all"],
)
def test_a_get_may_take_longer_than_it_may_stand_still(
    link: Proxy, client: str, timeout_s: float, max_s: float | None, arrives: bool
) -> None:
    targets = [bytearray(NBYTES) for _ in range(COUNT)]
    with opened(url_of(link, client)) as store:
        get = store.submit_get(keys(COUNT), targets, timeout_s=timeout_s, max_s=max_s)
        if arrives:
            assert get.wait() == [True] * COUNT
            assert all(target == bytes([number]) * NBYTES for number, target in enumerate(targets))
        else:
            with pytest.raises(StoreUnavailable):
                get.wait()


def test_a_load_may_take_longer_than_it_may_stand_still(link: Proxy) -> None:
    cache = torch.zeros(COUNT + 1, NBYTES, dtype=torch.uint8)
    blocks = [Block(name, 0, (number + 1,)) for number, name in enumerate(keys(COUNT))]
    with opened(url_of(link)) as store:
        mover = KVCacheMover(
            store,
            [BlockCopier([cache], 1)],
            staging_nbytes=2 * COUNT * NBYTES,
            max_store_nbytes_per_s=0,
            counters=Counters(),
        )
        mover.load("all", blocks, timeout_s=TIMEOUT_S, max_s=LONG_S)
        (load,) = run(mover).loads
        mover.close()
    assert load.cause == ""
    assert [int(row[0]) for row in cache[1:]] == [*range(COUNT)]
    assert bool((cache == cache[:, :1]).all())


@pytest.mark.parametrize("client", CLIENTS)
def test_a_link_that_falls_silent_ends_a_get_that_had_time_left(link: Proxy, client: str) -> None:
    with opened(url_of(link, client)) as store:
        link.arm(Way.ANSWERED, 1 << 20, Harm.SILENCE)
        get = store.submit_get(
            keys(COUNT), [bytearray(NBYTES) for _ in range(COUNT)], timeout_s=TIMEOUT_S, max_s=LONG_S
        )
        # What is before the silence takes less than a second; GLIDE's calls end by a clock of their own.
        with ends_within(2 * TIMEOUT_S), pytest.raises(StoreUnavailable):
            get.wait(LONG_S)


def test_a_silent_node_ends_a_get_though_others_move_bytes(tmp_path: Path) -> None:
    with Cluster("valkey-server", tmp_path) as cluster, open_store(cluster.url) as store:
        names = keys(60)
        store.put_many(names, [b"v" * 1000] * 60)
        still = cluster.servers[0]
        moving = [name for name in names if name.encode() not in set(still.client.keys("*"))]
        assert 0 < len(moving) < len(names)
        still.stop()
        try:
            get = store.submit_get(names, [bytearray(1000) for _ in names], timeout_s=TIMEOUT_S, max_s=LONG_S)
            with ends_within(TIMEOUT_S):
                while not get.done():
                    assert store.get_many_into(moving, [bytearray(1000) for _ in moving]) == [True] * len(
                        moving
                    )
            with pytest.raises(StoreUnavailable):
                get.wait()
        finally:
            still.go_on()
        assert store.contains_many(moving[:1]) == [True]
