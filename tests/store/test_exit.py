"""The end of a process that leaves stores open, and threads in native calls: its exit code is the program's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.credentials import Authority
from tests.support.exits import IN_THREADS, MOVES, WAITS, exit_of
from tests.support.servers import Cluster, TlsServer, Watched, running, started

ENDS = {"sys.exit(7)": 7, "raise ValueError": 1, "pass": 0}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder, tls = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("tls")
    with (
        running("valkey-server", folder) as server,
        started(TlsServer("valkey-server", tls, Authority(tls))) as tls_server,
        Cluster("valkey-server", tmp_path_factory.mktemp("cluster")) as cluster,
        Watched("valkey-server", tmp_path_factory.mktemp("watched")) as watched,
    ):
        yield {
            "server": server.url,
            "TLS": tls_server.url,
            "redis-py": f"{server.url}?client=redis",
            "cluster": cluster.url,
            "sentinel": watched.url,
            "directory": f"file://{folder}/pool?capacity=64MiB",
        }


@pytest.mark.parametrize("how", list(ENDS))
@pytest.mark.parametrize("pool", ["server", "TLS", "redis-py", "cluster", "sentinel", "directory"])
def test_a_store_that_was_not_closed(urls: dict[str, str], pool: str, how: str) -> None:
    assert exit_of(urls[pool], how) == ENDS[how]


@pytest.mark.parametrize("pool", ["server", "TLS", "cluster", "directory"])
def test_daemon_threads_that_move_values(urls: dict[str, str], pool: str) -> None:
    for _ in range(5):
        assert exit_of(urls[pool], MOVES, IN_THREADS, "sys.exit(7)") == 7


def test_daemon_threads_that_wait_for_a_frozen_server(tmp_path: Path) -> None:
    with running("valkey-server", tmp_path) as server:
        freeze = f"import signal\ndef freeze(): os.kill({server.info('process_id')}, signal.SIGSTOP)"
        try:
            assert exit_of(server.url, freeze, WAITS, IN_THREADS, "sys.exit(7)") == 7
        finally:
            server.go_on()
