"""A server that is away costs nothing after the first deadline, and is used again within a second of its return.

However it goes: killed (the port refuses), stopped (the port takes connections, nobody answers), cut off (no packet
comes or goes, and nobody says so), or both killed and cut off (dials get no answer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import key, keys, payload
from tests.support.deadlines import ends_within, eventually
from tests.support.networks import Distant, distant, missing
from tests.support.servers import CLIENTS, is_native, running, with_client
from tests.support.store_traffic import serves

BACK_WITHIN_S = 1.0
DEADLINE_S = 0.5
FAR_DEADLINE_S = 30.0  # what a batch would wait for, if it waited


@dataclass
class Trouble:
    url: str
    begin: Callable[[], None]
    end: Callable[[], None]
    kills: bool = False  # the server loses its values


def black_hole(server: Distant) -> Trouble:
    """The connections end, and those who dial get no answer."""

    def begin() -> None:
        server.kill()
        server.drop_packets()

    def end() -> None:
        server.pass_packets()
        server.start()

    return Trouble(server.url, begin, end, kills=True)


@pytest.fixture(params=["killed", "stopped", "cut off", "black hole"])
def trouble(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trouble]:
    if request.param in ("killed", "stopped"):
        with running("valkey-server", tmp_path) as near:
            killed = Trouble(near.url, near.kill, near.start, kills=True)
            yield killed if request.param == "killed" else Trouble(near.url, near.stop, near.go_on)
    elif missing():
        pytest.skip(missing())
    else:
        with distant("valkey-server", tmp_path) as far:
            cut_off = Trouble(far.url, far.drop_packets, far.pass_packets)
            yield cut_off if request.param == "cut off" else black_hole(far)


@pytest.fixture(params=CLIENTS)
def store(request: pytest.FixtureRequest, trouble: Trouble) -> Iterator[Store]:
    with open_store(f"{with_client(trouble.url + '?connections=3', request.param)}") as store:
        count = connections(store)
        # Every connection stands, and has served.
        targets = [bytearray(1 << 20) for _ in range(12)]
        assert eventually(
            lambda: (
                store.put_many(keys(12), targets) == [True] * 12
                and store.counters()["up_connections"] == count
            )
        )
        yield store


def connections(store: Store) -> int:
    """Those of three threads: a native one has another for puts."""
    return 6 if is_native(store) else 3


def is_refused_at_once(store: Store) -> None:
    with ends_within(0), pytest.raises(StoreUnavailable):
        store.contains_many([key(1)], timeout_s=FAR_DEADLINE_S)


def test_a_dead_server_costs_one_deadline_and_is_back_within_a_second(
    trouble: Trouble, store: Store, request: pytest.FixtureRequest
) -> None:
    trouble.begin()
    with ends_within(DEADLINE_S), pytest.raises(StoreUnavailable):
        store.contains_many([key(1)], timeout_s=DEADLINE_S)
    # A key goes over one connection: what it learned, the others know.
    for _ in range(20):
        is_refused_at_once(store)
    # While it is dialled, and between; where dials fail at once, until the pauses are as long as they get.
    dials = 27 if request.node.callspec.params["trouble"] == "killed" and is_native(store) else 3
    while store.counters()["failed_dials"] < dials:
        is_refused_at_once(store)
    assert store.counters()["up_connections"] == 0
    assert store.counters()["refused"] >= 10  # most: a call tries the server when that is due
    trouble.end()
    with ends_within(BACK_WITHIN_S):
        assert eventually(lambda: serves(store, 2))
        if is_native(store):  # each connection dials by itself
            assert eventually(lambda: store.counters()["up_connections"] == connections(store))
    value, target = payload(5, 300_000), bytearray(300_000)
    assert store.put_many([key(5)], [value]) == [True]
    assert store.get_many_into([key(5)], [target]) == [True]
    assert target == value
    assert store.counters()["damaged"] == 0


def test_what_is_under_way_ends_in_time_and_is_let_go(trouble: Trouble, store: Store) -> None:
    """Loads on every connection, while the server goes."""
    values = [payload(number, 1 << 20) for number in range(12)]
    assert store.put_many(keys(12), values) == [True] * 12
    targets = [bytearray(1 << 20) for _ in values]
    trouble.begin()
    with ends_within(DEADLINE_S), pytest.raises(StoreUnavailable):
        store.get_many_into(keys(12), targets, timeout_s=DEADLINE_S)
    for target in targets:
        target.extend(b"!")  # refused while somebody holds it
    trouble.end()
    assert eventually(lambda: serves(store, 20))
    targets = [bytearray(1 << 20) for _ in values]
    found = store.get_many_into(keys(12), targets)
    # One that was killed comes back empty.
    assert found == [not trouble.kills] * 12
    assert all(target == value for target, value, hit in zip(targets, values, found, strict=True) if hit)
    assert store.counters()["damaged"] == 0
