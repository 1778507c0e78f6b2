"""Connections that end, or fall silent, at any stage of what a store and its server say to each other."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
import redis

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from tests.support.conformance import MIB, key, opened, payload
from tests.support.deadlines import ends_within, eventually
from tests.support.proxy import Harm, Proxy, Way, proxied
from tests.support.servers import Server, with_client
from tests.support.soak import LONG_SOAK
from tests.support.store_traffic import ANOTHER, TIMEOUT_S, Exchange, Traffic, said_undisturbed, serves

# What a dial and one batch of each kind consist of, as words that must have passed before a sweep counts.
STAGES = (
    b"AUTH", b"SELECT", b"PING", b"MULTI", b"HSET", b"PEXPIRE", b"EXEC", b"HMGET", b"EXISTS", b"UNLINK", b"TOUCH"
)  # fmt: skip


# (server, client, harm, of how many cuts one is tried). Cut by cut a sweep takes 20 to 80 s: in a long soak,
# on each server with each harm. Clients in Python read and dial by themselves.
SWEEPS = [
    ("valkey-server", "native", Harm.CLOSE, 3),
    ("redis-server", "native", Harm.RESET, 3),
    ("valkey-server", "redis", Harm.CLOSE, 8),
    ("redis-server", "glide", Harm.CLOSE, 8),
]
LONG_SWEEPS = [
    ("valkey-server", "native", Harm.CLOSE, 1),
    ("redis-server", "native", Harm.RESET, 1),
    ("valkey-server", "native", Harm.RESET, 1),
    ("redis-server", "native", Harm.CLOSE, 1),
    ("valkey-server", "redis", Harm.CLOSE, 1),
    ("redis-server", "glide", Harm.CLOSE, 1),
]


@pytest.fixture
def server(server: Server) -> Server:
    server.client.acl_setuser("worker", enabled=True, passwords=["+hunter2"], keys=["*"], commands=["+@all"])
    return server


@pytest.fixture
def direct(server: Server) -> Iterator[redis.Redis]:
    """The test's own view of the database that the stores here use."""
    with redis.Redis(port=server.port, db=3, protocol=2) as direct:
        direct.flushdb()
        yield direct


def url_through(proxy: Proxy, client: str, connections: int) -> str:
    """With all that a dial can ask for: user, password and database."""
    url = f"valkey://worker:hunter2@127.0.0.1:{proxy.port}/3?connections={connections}"
    return with_client(url, client)


def line_positions(said: bytes) -> list[int]:
    """Where to cut: before each end of line, after it, and in the middle of each line, payloads among them."""
    positions = {0}
    start = 0
    while start < len(said):
        end = said.find(b"\r\n", start) + 2
        if end < 2:
            end = len(said)
        positions |= {(start + end) // 2, end - 1, end}
        start = end
    return sorted(positions)


@pytest.mark.parametrize(
    ("server_of_module", "client", "harm", "one_of"),
    [
        *SWEEPS,
        *(pytest.param(*sweep, marks=[pytest.mark.soak, LONG_SOAK]) for sweep in LONG_SWEEPS),
    ],
    indirect=["server_of_module", "client"],
    scope="module",
)
@pytest.mark.parametrize("way", Way)
def test_a_connection_that_ends_at_every_stage(
    server: Server, direct: redis.Redis, client: str, way: Way, harm: Harm, one_of: int
) -> None:
    with proxied(server.port) as proxy:
        url = url_through(proxy, client, connections=1)
        said = said_undisturbed(url, direct, proxy, way)
        assert all(word in proxy.passed(Way.ASKED) for word in STAGES)
        disturbed = 0
        # Nothing is disturbed where the look at rights is cut, which is most of what is said: some of these cuts do.
        rights_end = said.rfind(b"kvpool::rights")
        minded = [position for position in line_positions(said) if position > rights_end][::one_of]
        for position in [*line_positions(said[: max(rights_end, 0)])[:: 7 * one_of], *minded]:
            harmed = proxy.harmed
            proxy.arm(way, position, harm)
            try:
                disturbed += Exchange(url, direct).run() != []
            except BaseException:
                print(
                    f"{harm.name} after {position} bytes {way.name}: {said[max(0, position - 60) : position]!r}"
                )
                raise
            assert proxy.harmed == harmed + 1, f"nothing was harmed at byte {position}"
        assert disturbed > len(minded) // 2


def test_a_record_is_never_without_a_time_to_live(server: Server, direct: redis.Redis, client: str) -> None:
    """A put is cut before each of its last bytes: all of what is said after the value."""
    value = payload(1, 300)
    with proxied(server.port) as proxy, opened(url_through(proxy, client, connections=1)) as store:
        assert store.put_many([key(1)], [value]) == [True]
        said_nbytes = len(b"".join(proxy.passed(Way.ASKED).rpartition(b"*1\r\n$5\r\nMULTI")[1:]))
        assert store.contains_many([key(1)]) == [True]
        kept = []
        # Clients in Python say it in the same words; GLIDE takes a second or more to dial again.
        for position in range(said_nbytes - 150, said_nbytes + 1, 1 if client == "native" else 25):
            direct.flushdb()
            harmed = proxy.harmed
            proxy.arm(Way.ASKED, position, Harm.CLOSE)
            with contextlib.suppress(StoreUnavailable):
                store.put_many([key(1)], [value], timeout_s=TIMEOUT_S)
            assert eventually(lambda harmed=harmed: proxy.harmed == harmed + 1)
            assert eventually(lambda: serves(store, ANOTHER))
            left_ms = direct.pttl(key(1))
            assert left_ms == -2 or left_ms > 0, f"cut after {position} bytes, it stays for ever"
            kept.append(left_ms > 0)
        assert kept[-1]
        assert not kept[0]


@pytest.mark.parametrize("way", Way)
def test_a_dial_that_falls_silent(server: Server, direct: redis.Redis, client: str, way: Way) -> None:
    with proxied(server.port) as proxy:
        url = url_through(proxy, client, connections=1)
        proxy.arm(way, 3, Harm.SILENCE)
        with ends_within(2.0), pytest.raises(StoreUnavailable, match="cannot connect"):
            open_store(url)
        assert proxy.harmed == 1


def test_connections_that_are_cut_again_and_again_under_traffic(
    server: Server, direct: redis.Redis, client: str
) -> None:
    chance = random.Random(3)
    with (
        proxied(server.port) as proxy,
        opened(url_through(proxy, client, connections=2)) as store,
        Traffic(store, timeout_s=TIMEOUT_S) as traffic,
    ):
        for number in range(60):
            seen = traffic.hits
            way, harm = chance.choice(list(Way)), chance.choice([Harm.CLOSE, Harm.RESET])
            proxy.arm(way, chance.randrange(3 * MIB), harm)
            assert eventually(lambda number=number: proxy.harmed == number + 1)
            assert eventually(lambda seen=seen: traffic.hits > seen)
        assert traffic.longest_s < TIMEOUT_S
        assert store.counters()["damaged"] == 0
        assert eventually(lambda: serves(store))
