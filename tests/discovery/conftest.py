"""One pool of each kind, and one server that a test may stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.store.store import Store
from tests.support.memory_store import MemoryStore
from tests.support.servers import Server, running


@pytest.fixture(params=["memory", "file", "valkey-server"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "valkey-server":
        with running(request.param, tmp_path) as server, open_store(server.url) as store:
            yield store
    else:
        memory = request.param == "memory"
        with MemoryStore() if memory else open_store(f"file://{tmp_path}/pool") as store:
            yield store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running("valkey-server", tmp_path) as one:
        yield one
