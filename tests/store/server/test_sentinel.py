"""The store on a server that sentinels watch: it follows the primary wherever that goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvpool import open_store
from kvpool.cli.doctor.doctor import run_doctor
from kvpool.cli.settings import DoctorOptions
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import OpenStore, StoreConformance, key
from tests.support.credentials import Authority
from tests.support.deadlines import MARGIN_S, eventually
from tests.support.misbehaving import bulk, misbehaving, says
from tests.support.servers import NEWER, SERVERS, Server, Watched, with_client
from tests.support.store_traffic import Traffic, serves

OTHER = 99  # a key that Traffic does not use
# The native client on every server, each of the others on one.
OTHERS = [("redis-server", "glide"), ("valkey-server", "redis")]
EACH = [*((name, "native") for name in SERVERS), *OTHERS]


def role(server: Server) -> str:
    """What it says to be; empty while it says nothing."""
    try:
        return str(server.info("role"))
    except redis.ConnectionError:  # a primary that becomes a replica hangs up on everybody
        return ""


@pytest.fixture(params=SERVERS, scope="module")
def watched_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    with Watched(request.param, tmp_path_factory.mktemp("watched")) as watched:
        yield watched


@pytest.fixture
def watched(watched_of_module: Watched) -> Watched:
    watched_of_module.primary.client.flushall()
    watched_of_module.primary.client.config_set("maxmemory", 0)
    return watched_of_module


@pytest.mark.parametrize("watched_of_module", ["redis-server"], indirect=True)
class TestSentinelStore(StoreConformance):
    @pytest.fixture
    def open_one(self, watched: Watched) -> OpenStore:
        def open_one(capacity_nbytes: int) -> Store:
            server = watched.primary
            server.client.config_set("maxmemory", server.info("used_memory") + capacity_nbytes)
            return open_store(watched.url)

        return open_one


def test_a_database_of_its_own(watched: Watched) -> None:
    with open_store(f"{watched.url}/3") as three, open_store(watched.url) as zero:
        three.put_many([key(1)], [b"x"])
        assert zero.contains_many([key(1)]) == [False]
        three.announce("kvpool:t:x", b"x", lease_s=60)
        assert zero.announcements("kvpool:t:") == {}
        assert [len(blocks) for blocks in three.scan()] == [1]
        assert three.server_run_id() == zero.server_run_id() == watched.primary.info("run_id")
        assert repr(three) == f"<ValkeyStore {watched.url}/3>"


def test_what_cannot_be_is_told(watched: Watched) -> None:
    with pytest.raises(ConfigError, match=r"knows no service 'other'"):
        open_store(watched.url.replace("/pool", "/other"))
    with pytest.raises(StoreUnavailable, match=r"none of its sentinels names the servers of the pool"):
        open_store("valkey+sentinel://127.0.0.1:1/pool")
    hosts = watched.url.partition("://")[2]
    with pytest.raises(ConfigError, match=r"the server refuses: .*correct user or password") as caught:
        open_store(f"valkey+sentinel://u:hunter2@{hosts}")
    assert "hunter2" not in str(caught.value)


def test_sentinels_may_want_a_password_of_their_own(watched: Watched) -> None:
    for one in watched.sentinels:
        one.client.execute_command(
            "ACL", "SETUSER", "asks", "on", ">hunter2", "resetkeys", "-@all", "+sentinel", "+auth"
        )
    with open_store(f"{watched.url}?sentinel_user=asks&sentinel_password=hunter2") as store:
        assert serves(store)
    with pytest.raises(ConfigError, match="correct user or password"):
        open_store(f"{watched.url}?sentinel_user=asks&sentinel_password=hunter3")


def test_the_doctor_names_the_primary(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    run_doctor(DoctorOptions(pool=watched.url, as_json=True))
    assert f"127.0.0.1:{watched.primary.port}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "client"), EACH)
def test_the_primary_is_killed_under_load(name: str, client: str, tmp_path: Path) -> None:
    with Watched(name, tmp_path) as watched, open_store(with_client(watched.url, client)) as store:
        with Traffic(store, timeout_s=2.0) as traffic:
            watched.kill_primary()
            assert eventually(lambda: traffic.faults > 0)
            seen = traffic.hits
            assert eventually(lambda: traffic.hits > seen + 100 and serves(store, OTHER))
        assert traffic.longest_s < 2.0 + MARGIN_S
        assert role(watched.replica) == "master"
        assert watched.replica.client.exists(key(OTHER)) == 1
        # The old one comes back as a replica, and nobody writes to it.
        watched.primary.start()
        assert eventually(lambda: role(watched.primary) == "slave")
        assert serves(store)


@pytest.mark.parametrize(
    ("name", "client"), [*((name, "native") for name in (*SERVERS[1:], *NEWER)), *OTHERS]
)
def test_a_primary_that_hands_over_is_left(name: str, client: str, tmp_path: Path) -> None:
    """It lives on as a replica, and says READONLY to whoever has not noticed."""
    with Watched(name, tmp_path) as watched, open_store(with_client(watched.url, client)) as store:
        assert serves(store)
        watched.sentinels[0].client.execute_command("SENTINEL", "FAILOVER", Watched.SERVICE)
        assert eventually(lambda: role(watched.replica) == "master")
        assert eventually(lambda: role(watched.primary) == "slave")
        assert eventually(lambda: serves(store))
        assert watched.replica.client.exists(key(1)) == 1


@pytest.mark.parametrize(("name", "client"), EACH)
def test_everybody_speaks_tls(name: str, client: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with Watched(name, tmp_path, authority=authority) as watched:
        with open_store(with_client(watched.url, client)) as store:
            assert serves(store)
            watched.kill_primary()
            assert eventually(lambda: role(watched.replica) == "master")
            assert eventually(lambda: serves(store, OTHER))
            assert watched.replica.client.exists(key(OTHER)) == 1
        stranger = Authority(tmp_path, "another")
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            open_store(with_client(watched.url, client).replace(str(authority.ca), str(stranger.ca)))


def test_a_sentinel_that_names_a_replica_is_not_believed(watched: Watched) -> None:
    """As one does that has not heard of a failover yet."""

    def named(port: int) -> bytes:
        return b"*2\r\n" + bulk(b"127.0.0.1") + bulk(b"%d" % port)

    with misbehaving() as sentinel:
        url = f"valkey+sentinel://127.0.0.1:{sentinel.port}/pool"
        sentinel.misbehave(says(named(watched.replica.port)))
        with pytest.raises(StoreUnavailable, match="which sentinels name, is no primary yet"):
            open_store(url)
        sentinel.misbehave(says(named(watched.primary.port)))
        with open_store(url) as store:
            assert serves(store)
