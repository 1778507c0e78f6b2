"""One cluster for all tests of the folder; whatever happens, it is taken down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    running = Cluster()
    try:
        running.up()
        yield running
    finally:
        running.down()
