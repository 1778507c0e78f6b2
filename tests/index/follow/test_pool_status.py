"""How full the pool's servers are, and what its engines were asked for, as an index shows it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvpool.discovery.traffic import Traffic, pack_traffic
from kvpool.index.follow.pool_status import PoolStatus
from kvpool.index.serve.metrics import _of_servers, _of_traffic
from kvpool.key.key import traffic_key
from kvpool.store import open_store
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore
from tests.support.servers import Cluster, running


def shown(status: PoolStatus) -> dict[str, dict[str, float]]:
    """What the metrics page says, by metric and label."""
    families = [*_of_servers(status.servers), *_of_traffic(status.traffic)]
    return {
        family.name: {next(iter(sample.labels.values())): sample.value for sample in family.samples}
        for family in families
    }


def test_a_server_and_its_end(tmp_path: Path) -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    with running("valkey-server", tmp_path, *options) as server, open_store(server.url) as store:
        status = PoolStatus(store, tenants=lambda: (), every_s=0.05)
        assert eventually(lambda: bool(status.servers))
        name = f"127.0.0.1:{server.port}"
        page = shown(status)
        assert page["kvpool_index_pool_up"] == {name: 1.0}
        assert page["kvpool_index_pool_capacity_bytes"] == {name: 64 << 20}
        assert 0 < page["kvpool_index_pool_used_bytes"][name] < 64 << 20
        server.client.set("a", b"x" * 1000)
        assert eventually(lambda: shown(status)["kvpool_index_pool_keys"] == {name: 1.0})
        for number in range(100):
            server.client.set(f"b{number}", bytes(1 << 20))
        assert eventually(lambda: shown(status)["kvpool_index_pool_evicted_keys"][name] > 30)
        server.kill()
        assert eventually(lambda: shown(status)["kvpool_index_pool_up"] == {name: 0.0})
        assert shown(status)["kvpool_index_pool_used_bytes"] == {}
        server.start()
        assert eventually(lambda: shown(status)["kvpool_index_pool_up"] == {name: 1.0})
        status.close()


def test_one_server_of_a_cluster(tmp_path: Path) -> None:
    with Cluster("valkey-server", tmp_path) as cluster, open_store(cluster.url) as store:
        status = PoolStatus(store, tenants=lambda: (), every_s=0.05)
        assert eventually(lambda: len(status.servers) == 3)
        cluster.servers[1].kill()
        down = f"127.0.0.1:{cluster.servers[1].port}"
        assert eventually(lambda: shown(status)["kvpool_index_pool_up"].get(down) == 0.0)
        assert sum(shown(status)["kvpool_index_pool_up"].values()) == 2.0
        status.close()


def test_engines_are_put_together() -> None:
    prompt = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(100))
    with MemoryStore(1 << 20) as store:
        for engine in ("a" * 16, "b" * 16):
            traffic = Traffic()
            traffic.add(prompt, 32, salt=0, block_tokens=16, prompt_tokens=1600)
            traffic.spare(400)
            store.announce(traffic_key("t", engine), pack_traffic(traffic.windows()), lease_s=60)
        store.announce("kvpool:t:traffic:nonsense", b"nonsense", lease_s=60)
        status = PoolStatus(store, tenants=lambda: ("t",), every_s=0.05)
        assert eventually(lambda: bool(status.traffic))
        page = shown(status)
        status.close()
    assert page["kvpool_index_hit_ratio"] == {"15m": 0.25, "1h": 0.25, "24h": 0.25}
    assert page["kvpool_index_hit_ceiling_ratio"]["1h"] == pytest.approx(0.5, abs=0.03)


def test_a_directory(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/pool?capacity=16MiB") as store:
        status = PoolStatus(store, tenants=lambda: (), capacity_nbytes=16 << 20, every_s=0.05)
        assert eventually(lambda: bool(status.servers))
        page = shown(status)
        status.close()
    assert list(page["kvpool_index_pool_capacity_bytes"].values()) == [16 << 20]
    assert list(page["kvpool_index_pool_used_bytes"].values()) == [0.0]
    assert page["kvpool_index_pool_keys"] == {}
