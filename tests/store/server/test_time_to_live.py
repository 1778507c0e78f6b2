"""A record's time to live runs from its last use, for every client, without a write at each use."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpool import _native, open_store
from tests.support.conformance import key, keys
from tests.support.deadlines import eventually
from tests.support.misbehaving import misbehaving, to
from tests.support.servers import Server, with_client

TTL_MS = 86_400_000


@pytest.fixture
def url(server: Server, client: str) -> str:
    return with_client(server.url, client)


def put_aged(server: Server, url: str, *, left_ms: int | None) -> None:
    """Four keys, put by somebody else, which have so much left; None: no time to live at all."""
    with open_store(url) as other:
        assert other.put_many(keys(4), [b"value"] * 4) == [True] * 4
    for name in keys(4):
        assert TTL_MS - 60_000 < server.client.pttl(name) <= TTL_MS
        assert server.client.persist(name) if left_ms is None else server.client.pexpire(name, left_ms)


def writes(server: Server) -> int:
    stats = server.client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("pexpire", "hset"))


@pytest.mark.parametrize("left_ms", [None, 1_000_000, TTL_MS * 3 // 4])
def test_lookups_and_loads_renew_it(server: Server, url: str, left_ms: int | None) -> None:
    put_aged(server, url, left_ms=left_ms)
    with open_store(url) as store:
        assert store.touch_many(keys(2)) == [True, True]
        assert store.get_many_into([key(2)], [bytearray(5)]) == [True]
        renewed = [key(0), key(1), key(2)]
        assert eventually(lambda: all(server.client.pttl(name) > TTL_MS - 60_000 for name in renewed))
        assert store.contains_many([key(3)]) == [True]
        assert server.client.pttl(key(3)) <= (left_ms or -1), "to look is no use"


@pytest.mark.parametrize("left_ms", [None, TTL_MS * 3 // 4])
def test_what_is_there_for_a_put_if_absent_is_renewed(server: Server, url: str, left_ms: int | None) -> None:
    put_aged(server, url, left_ms=left_ms)
    puts = writes(server)
    with open_store(url) as store:
        transfer = store.submit_put_absent(keys(4), [b"value"] * 4)
        assert list(transfer.results()) == [_native.PRESENT] * 4
        assert eventually(lambda: all(server.client.pttl(name) > TTL_MS - 60_000 for name in keys(4)))
        assert writes(server) - puts == 4, "the renewals, and no put"


def test_one_that_is_young_is_not_written(server: Server, url: str) -> None:
    """Each write is told to every index that follows the server."""
    put_aged(server, url, left_ms=TTL_MS - 1000)
    before = writes(server)
    with open_store(url) as store:
        for _ in range(20):
            assert store.touch_many(keys(4)) == [True] * 4
            assert store.get_many_into([key(2)], [bytearray(5)]) == [True]
            assert store.submit_put_absent(keys(4), [b"value"] * 4).wait() == [True] * 4
    assert writes(server) == before


def test_a_lookup_again_costs_one_command(server: Server, url: str) -> None:
    put_aged(server, url, left_ms=TTL_MS - 1000)

    def looks() -> int:
        return int(server.client.info("commandstats").get("cmdstat_pttl", {}).get("calls", 0))

    with open_store(url) as store:
        assert store.touch_many(keys(4)) == [True] * 4
        assert store.touch_many(keys(4)) == [True] * 4
        before = looks()
        for _ in range(100):
            assert store.touch_many(keys(4)) == [True] * 4
        # By each of two threads once, at the most.
        assert looks() - before <= 4


def test_what_expires_has_a_short_time_left_until_it_is_used_again(server: Server, url: str) -> None:
    put_aged(server, url, left_ms=TTL_MS - 1000)
    soon_ms = TTL_MS // 48
    with open_store(url, threads=1) as store:
        assert store.touch_many(keys(4)) == [True] * 4, (
            "a use of late does not keep the next one from renewing"
        )
        assert store.expire_many([*keys(4), key(9)]) == 4
        assert all(soon_ms - 60_000 < server.client.pttl(name) <= soon_ms for name in keys(4))
        assert not server.client.exists(key(9))
        assert store.touch_many(keys(2)) == [True, True]
        assert store.get_many_into([key(2)], [bytearray(5)]) == [True]
        used = [key(0), key(1), key(2)]
        assert eventually(lambda: all(server.client.pttl(name) > TTL_MS - 60_000 for name in used))
        assert server.client.pttl(key(3)) <= soon_ms


def test_a_passing_error_does_not_end_renewals(client: str) -> None:
    """As a server says while its cluster changes, or while a script runs."""
    asked: list[bytes] = []

    def once_down(words: Sequence[bytes], good: bytes) -> bytes:
        asked.append(words[1])
        return b"-CLUSTERDOWN The cluster is down\r\n" if len(asked) == 1 else b":1000\r\n"

    with misbehaving() as server, open_store(with_client(f"{server.url}?connections=1", client)) as store:
        for number in range(2):
            server.put(key(number), b"value")
        server.misbehave(to(b"PTTL", once_down))
        assert store.touch_many([key(0)]) == [True]
        assert eventually(lambda: len(asked) == 1)
        assert store.touch_many([key(1)]) == [True]
        assert eventually(lambda: asked == [key(0).encode(), key(1).encode()], within_s=10)
