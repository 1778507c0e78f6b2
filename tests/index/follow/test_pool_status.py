"""How full the pool's servers are, and what its engines were asked for, as an index shows it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.discovery.audit_news import AuditNews
from kvpool.discovery.sample import SampleWindow
from kvpool.discovery.traffic import pack_traffic
from kvpool.discovery.traffic_slots import Traffic
from kvpool.index.answer import EngineAudits, HitCurve
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.follow import hit_curves, pool_follower
from kvpool.index.follow.hit_curves import ALL
from kvpool.index.follow.pool_follower import PoolFollower
from kvpool.index.serve.metrics import _of_curves, _of_servers, _of_traffic
from kvpool.key.key import traffic_key
from kvpool.store import open_store
from kvpool.store.store import Usage
from tests.support.deadlines import eventually
from tests.support.servers import Cluster, running


@contextmanager
def following(url: str, **options: Any) -> Iterator[PoolFollower]:
    follower = PoolFollower(url, Fleet(), **options)
    follower.start()
    try:
        yield follower
    finally:
        follower.close()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_follower, "EVERY_S", 0.05)
    monkeypatch.setattr(hit_curves, "HOLD_S", 0.0)


def shown(status: PoolFollower) -> dict[str, dict[str, float]]:
    """What the metrics page says, by metric and label."""
    families = [*_of_servers(status.servers), *_of_traffic(status.traffic), *_of_curves(status.curves)]
    return {
        family.name: {"/".join(sample.labels.values()): sample.value for sample in family.samples}
        for family in families
    }


def test_a_server_and_its_end(tmp_path: Path) -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    with running("valkey-server", tmp_path, *options) as server, following(server.url) as status:
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


def test_one_server_of_a_cluster(tmp_path: Path) -> None:
    with Cluster("valkey-server", tmp_path) as cluster, following(cluster.url) as status:
        assert eventually(lambda: len(status.servers) == 3)
        cluster.servers[1].kill()
        down = f"127.0.0.1:{cluster.servers[1].port}"
        assert eventually(lambda: shown(status)["kvpool_index_pool_up"].get(down) == 0.0)
        assert sum(shown(status)["kvpool_index_pool_up"].values()) == 2.0


def test_engines_are_put_together(tmp_path: Path) -> None:
    prompt = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(100))
    url = f"file://{tmp_path}/pool?capacity=16MiB"
    with open_store(url) as store:
        for engine in ("a" * 16, "b" * 16):
            traffic = Traffic()
            traffic.add(prompt, 32, salt=0, block_tokens=16, prompt_tokens=1600)
            traffic.spare(400)
            sample = SampleWindow().pack(traffic.sampled(), time.monotonic(), time.time())
            news = AuditNews(engine * 2, {"same": 9, "differs": int(engine[0] == "b")}, host="h")
            document = pack_traffic(traffic.windows(), sample, news)
            store.announce(traffic_key("t", engine), document, lease_s=60)
        store.announce("kvpool:t:traffic:nonsense", b"nonsense", lease_s=60)
        with following(url, tenants=("t",)) as status:
            assert eventually(lambda: bool(status.curves))
            page = shown(status)
            assert status.audits == [
                EngineAudits("t", "h", "b" * 32, 9, 1), EngineAudits("t", "h", "a" * 32, 9, 0)
            ]  # fmt: skip
    assert page["kvpool_index_hit_ratio"] == {"15m": 0.25, "1h": 0.25, "24h": 0.25}
    assert page["kvpool_index_hit_ratio_at_size"] == {"all": 0.5}, (
        "the pool has no block yet: no size is known"
    )
    assert page["kvpool_index_tenant_hit_ratio_at_size"] == {"t/all": 0.5}


def test_sizes_are_marked_by_what_the_pool_has_room_for() -> None:
    table = SimpleNamespace(held_by=lambda holder: {"pool": 300 if holder == "a" else 100})
    holders = [("a", False), ("b", False), ("b", False), ("a", True)]  # the last has outputs of encoders
    pools = [
        SimpleNamespace(tenant=name, table=table, holder=name, is_media=is_media)
        for name, is_media in holders
    ]
    follower: Any = SimpleNamespace(
        _fleet=SimpleNamespace(pools=lambda: pools),
        servers=[Usage("s", used_nbytes=5000, capacity_nbytes=20_000)],
    )
    assert PoolFollower._sizes(follower) == ({"a": 300, "b": 200, ALL: 2000}, 10.0)
    follower.servers = [Usage("s", used_nbytes=5000)]
    assert PoolFollower._sizes(follower) == ({"a": 300, "b": 200, ALL: 500}, 10.0)
    follower.servers = [Usage("s", up=False)]
    assert PoolFollower._sizes(follower) == ({"a": 300, "b": 200, ALL: 500}, 0.0)
    pools.clear()
    assert PoolFollower._sizes(follower) == ({ALL: 0}, 0.0)


def test_ratios_at_sizes_are_multiples_of_todays() -> None:
    curve = HitCurve((1, 10, 100), (0.1, 0.2, 0.4), 5, 50, 1.0, 0.0, pool_blocks=20)
    page = {family.name: family for family in _of_curves({ALL: curve})}
    values = {
        sample.labels["size"]: sample.value for sample in page["kvpool_index_hit_ratio_at_size"].samples
    }
    assert values == {"0.25": 0.1, "0.5": 0.2, "1": 0.2, "2": 0.2, "4": 0.2, "all": 0.4}


def test_a_directory(tmp_path: Path) -> None:
    with following(f"file://{tmp_path}/pool?capacity=2MiB") as status:
        assert eventually(lambda: bool(status.servers))
        assert shown(status)["kvpool_index_pool_capacity_bytes"] == {}, "a worker's word, which comes later"
        open_store(f"file://{tmp_path}/pool?capacity=16MiB").close()
        assert eventually(lambda: bool(shown(status)["kvpool_index_pool_capacity_bytes"]))
        page = shown(status)
    assert list(page["kvpool_index_pool_capacity_bytes"].values()) == [16 << 20], (
        "the pool's, not the index's"
    )
    assert page["kvpool_index_pool_evicted_keys"] == {}, "workers evict, and each counts its own"
    assert list(page["kvpool_index_pool_used_bytes"].values()) == [0.0]
    assert page["kvpool_index_pool_keys"] == {}
