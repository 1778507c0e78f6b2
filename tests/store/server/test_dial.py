"""Dials in Python of a name with several addresses."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import redis

from kvpool import open_store
from kvpool.store import StoreURL
from kvpool.store.server import documents, topology
from kvpool.store.server.connection import KeptServer, connect
from kvpool.store.server.topology import Primaries
from tests.support.conformance import key
from tests.support.deadlines import ends_within
from tests.support.networks import silent, two_addresses
from tests.support.servers import ON_VALKEY, Server

pytestmark = ON_VALKEY
STEP_S = 6.0  # of which the silent address has a half; the rest is hundreds of dials


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a server behind a name whose first address drops packets, as a dead pod of a headless service does."""
    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    with silent(server.port):
        yield f"valkey://two.test:{server.port}"


def test_a_silent_address_has_its_share_of_a_dial_and_no_more(url: str) -> None:
    with connect(StoreURL.parse(url), timeout_s=STEP_S, role="test") as asked:
        began_s = time.monotonic()
        assert asked.ping()
        assert time.monotonic() - began_s >= STEP_S / 2


def test_values_and_announcements_find_the_second_address(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptServer, "STEP_S", STEP_S)
    monkeypatch.setattr(documents, "WRITE_S", STEP_S)
    with open_store(url + "?client=redis", threads=1) as store:
        assert store.put_many([key(0)], [b"value"], timeout_s=60) == [True]
        store.announce("kvpool:t:x", b"x", lease_s=60)


def test_a_topology_is_asked_at_the_second_address(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "TIMEOUT_S", STEP_S)
    monkeypatch.setattr(topology, "FIND_S", 10 * STEP_S)
    cluster = Primaries(StoreURL.parse(url.replace("://", "+cluster://")), "it")
    with pytest.raises(Exception, match="is no node of a cluster"):
        cluster.find()


def test_a_name_whose_addresses_are_all_silent_takes_one_step(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **_: two_addresses(*where)[:1] * 30)
    with silent(server.port):
        url = StoreURL.parse(f"valkey://silent.test:{server.port}")
        with (
            connect(url, timeout_s=1.0, role="test") as asked,
            ends_within(1.0),
            pytest.raises(redis.TimeoutError),
        ):
            asked.ping()
