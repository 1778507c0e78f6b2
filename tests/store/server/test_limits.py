"""Limits of a server below a block: it ends the connection in the block's middle, and tells so or not.

The caller reads why and what to raise; the block is refused, others go on, and connections are not made for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.store.store import Store
from tests.support.conformance import MIB, key, keys
from tests.support.deadlines import eventually
from tests.support.misbehaving import HungUp, Peer, misbehaving, to
from tests.support.servers import CLIENTS, NEWER, SERVERS, running, with_client
from tests.support.store_traffic import serves

NBYTES = 4 * MIB
TRIES = 60
# Pauses between trials double: in so many tries of a slow machine only a few fall.
MOST_ENDED = 12


class Limit(NamedTuple):
    setting: str
    low: str
    high: str
    says: str
    reads: bool = False


LIMITS = (
    Limit(
        "proto-max-bulk-len",
        "1mb",
        "512mb",
        r'says "(ERR )?Protocol error: invalid bulk length" and hangs up, with 4194304 bytes of a block under way; '
        "raise the server's proto-max-bulk-len",
    ),
    Limit("client-query-buffer-limit", "1mb", "1gb", "of a block under way; .* client-query-buffer-limit"),
    Limit("maxmemory-clients", "5mb", "0", "of a block under way; .* maxmemory-clients"),
    Limit(
        "client-output-buffer-limit",
        "normal 2mb 0 0",
        "normal 0 0 0",
        "of a block under way; .* client-output-buffer-limit",
        reads=True,
    ),
)


def limits_of(client: str) -> Iterator[tuple[str, str, Limit]]:
    for name in (*SERVERS, *NEWER) if client == "native" else SERVERS[:1]:
        yield from ((name, client, limit) for limit in LIMITS)


def moved(store: Store, number: int, limit: Limit) -> bool:
    """Whether a block is put, or read, under this limit. Errors: ``StoreUnavailable``."""
    if limit.reads:
        return store.get_many_into([key(1)], [bytearray(NBYTES)])[0]
    return store.put_many([key(number)], [bytes(NBYTES)])[0]


@pytest.mark.parametrize(
    ("name", "client", "limit"),
    [
        pytest.param(*row, id=f"{row[0]}-{row[1]}-{row[2].setting}")
        for client in CLIENTS
        for row in limits_of(client)
    ],
)
def test_a_block_above_a_limit_is_refused_with_what_to_raise_and_others_go_on(
    name: str, client: str, limit: Limit, tmp_path: Path
) -> None:
    with (
        running(name, tmp_path) as server,
        open_store(with_client(f"{server.url}?connections=2", client)) as store,
    ):
        assert store.put_many([key(1)], [bytes(NBYTES)]) == [True]
        server.client.config_set(limit.setting, limit.low)
        says = limit.says
        if client == "glide" and limit.setting == "proto-max-bulk-len":
            says = "of a block under way; "  # GLIDE keeps the server's words to itself
        for number in range(TRIES):
            with pytest.raises(StoreUnavailable, match=says):
                moved(store, number, limit)
            assert store.put_many([key(1000 + number)], [bytes(1000)]) == [True]
        assert store.counters()["disconnections"] <= MOST_ENDED
        assert store.counters()["refused"] >= TRIES - MOST_ENDED
        server.client.config_set(limit.setting, limit.high)
        assert eventually(lambda: tries(store, limit))


def tries(store: Store, limit: Limit) -> bool:
    try:
        return moved(store, 2, limit)
    except StoreUnavailable:
        return False


def test_a_server_that_goes_in_the_middle_of_blocks_has_no_limit(tmp_path: Path) -> None:
    """It is away, and whoever dials it knows that: when it is back, it takes blocks of that size at once."""
    count = 4
    blocks = [bytes(32 * MIB)] * count
    with running("valkey-server", tmp_path) as own, open_store(f"{own.url}?connections={count}") as store:
        names = keys(count)
        # A connection for puts is dialled at its first.
        assert eventually(
            lambda: (
                all(store.put_many(names, blocks, timeout_s=60))
                and store.counters()["up_connections"] == 2 * count
            )
        )
        own.stop()
        batch = store.submit_put(names, blocks, timeout_s=60)
        assert eventually(lambda: store.counters()["queued"] == 0)
        own.kill()
        with pytest.raises(StoreUnavailable):
            batch.wait()
        assert eventually(lambda: store.counters()["failed_dials"] >= count)
        own.start()
        assert eventually(lambda: serves(store))
        assert store.put_many([key(1)], blocks[:1]) == [True]


@pytest.mark.parametrize("client", ["native", "redis"])
def test_an_error_before_good_replies_is_not_why_a_connection_ends_later(client: str) -> None:
    """A proxy may say such a thing and go on; hours later its end says nothing of a limit."""

    def complains(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        peer.send(b"-ERR Protocol error: of a proxy\r\n" if words[0] == b"HSET" else good)

    def ends(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        if words[0] == b"HSET":
            raise HungUp
        peer.send(good)

    with misbehaving() as server, open_store(with_client(f"{server.url}?connections=1", client)) as store:
        server.misbehave(complains)
        with pytest.raises(StoreUnavailable, match="of a proxy"):
            store.put_many([key(1)], [bytes(NBYTES)])
        server.misbehave(to(b"none", lambda words, good: good))
        assert store.put_many([key(2)], [bytes(NBYTES)]) == [True]
        server.misbehave(ends)
        with pytest.raises(StoreUnavailable, match="of a block under way") as caught:
            store.put_many([key(3)], [bytes(NBYTES)])
        assert "of a proxy" not in str(caught.value)
        server.misbehave(to(b"none", lambda words, good: good))
        assert store.put_many([key(4)], [bytes(NBYTES)]) == [True]


@pytest.mark.parametrize("client", ["native", "redis"])
def test_a_block_for_which_a_server_has_no_room_has_come_through(client: str) -> None:
    """A full server is not one that ends connections, though it did so before."""

    def ends(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        if words[0] == b"HSET":
            raise HungUp
        peer.send(good)

    with misbehaving() as server, open_store(with_client(f"{server.url}?connections=1", client)) as store:

        def says_no_room() -> bool:
            try:
                return store.put_many([key(1)], [bytes(NBYTES)]) == [False]
            except StoreUnavailable:
                return False

        server.misbehave(ends)
        for _ in range(3):
            assert not says_no_room()
        server.misbehave(to(b"HSET", lambda words, good: b"-OOM command not allowed\r\n"))
        assert eventually(says_no_room)
        assert says_no_room()
        assert says_no_room()
