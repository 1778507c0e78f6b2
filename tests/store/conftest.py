"""The servers and stores of these tests: shared by a module and emptied before each test, or of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import glide_sync
import pytest

from kvpool import open_store
from kvpool.store.store import Store
from tests.support.servers import CLIENTS, NEWER, SERVERS, Cluster, Server, running, with_client
from tests.support.soak import LONG_SOAK

# Clients in Python say the same to both servers: every run has each client on one, a long soak on the other, too.
SOAKED_PAIRS = {("redis-server", "redis"), ("valkey-server", "glide")}
# Every run has these on newer servers, with the native client; a long soak has all.
ON_NEWER = ("test_valkey", "test_rights", "test_time_to_live", "test_connection", "test_memory")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            params = item.callspec.params
            server = params.get("own_server", params.get("server_of_module"))
            is_spared = server in NEWER and (
                params.get("client", "native") != "native"
                or params.get("writer", "native") != params.get("reader", "native")
                or item.module.__name__.rpartition(".")[2] not in ON_NEWER
            )
            if is_spared or (server, params.get("client")) in SOAKED_PAIRS:
                item.add_marker(pytest.mark.soak)
                item.add_marker(LONG_SOAK)


@pytest.fixture(scope="session", autouse=True)
def glide_runtime() -> None:
    """From its first client on, GLIDE keeps a pair of sockets: before anything is counted."""
    where = [glide_sync.NodeAddress("127.0.0.1", 1)]
    glide_sync.GlideClient.create(glide_sync.GlideClientConfiguration(where, lazy_connect=True)).close()


@pytest.fixture(params=(*SERVERS, *NEWER), scope="module")
def server_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def server(server_of_module: Server) -> Server:
    """An empty server without a limit, for tests that leave it running."""
    server_of_module.client.flushall()
    server_of_module.client.config_set("maxmemory", 0)
    server_of_module.client.config_resetstat()
    return server_of_module


@pytest.fixture
def cluster(cluster_of_module: Cluster) -> Cluster:
    """Its empty nodes without a limit: of the module that has a ``cluster_of_module``."""
    for server in cluster_of_module.servers:
        server.client.flushall()
        server.client.config_set("maxmemory", 0)
    return cluster_of_module


@pytest.fixture(params=(*SERVERS, *NEWER))
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """For a test that kills or stops it: a module of such tests has this one as its ``server``."""
    with running(request.param, tmp_path) as server:
        yield server


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(server: Server, client: str) -> Iterator[Store]:
    with open_store(with_client(server.url, client)) as store:
        yield store
