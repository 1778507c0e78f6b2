"""A store that opens before its servers do, and takes part when they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import key, payload
from tests.support.deadlines import eventually
from tests.support.servers import Cluster, Group, Server, Watched, started

VALUE = payload(1, 1000)


def test_one_that_must_answer_is_an_error(tmp_path: Path) -> None:
    server = Server("valkey-server", tmp_path)
    with pytest.raises(StoreUnavailable, match="cannot connect"):
        open_store(server.url)


def test_a_server_that_comes_late_is_used(tmp_path: Path) -> None:
    server = Server("valkey-server", tmp_path)
    with open_store(server.url, must_answer=False) as store:
        with pytest.raises(StoreUnavailable):
            store.put_many([key(1)], [VALUE])
        with started(server):
            assert eventually(lambda: put(store))
            assert store.get_many_into([key(1)], [bytearray(len(VALUE))]) == [True]
            store.announce("kvpool:t:x", b"x", lease_s=60)


@pytest.mark.parametrize("kind", [Cluster, Watched])
def test_servers_that_come_late_are_used(tmp_path: Path, kind: type[Group]) -> None:
    with kind("valkey-server", tmp_path) as group:  # type: ignore[call-arg]
        for server in group.servers:
            server.kill()
        with open_store(group.url, must_answer=False) as store:  # type: ignore[attr-defined]
            for server in group.servers:
                server.start()
            assert eventually(lambda: put(store))


def test_a_wrong_password_is_an_error_all_the_same(tmp_path: Path) -> None:
    server = Server("valkey-server", tmp_path, "--requirepass", "right")
    with started(server), pytest.raises(ConfigError, match="the server refuses"):
        open_store(server.url.replace("//", "//:wrong@"), must_answer=False)


def put(store: Store) -> bool:
    try:
        return bool(store.put_many([key(1)], [VALUE]) == [True])
    except StoreUnavailable:
        return False
