"""What the servers of a cluster say of its nodes: one bad entry costs its slots, and a large map costs little."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.store import StoreURL
from kvpool.store.server import topology
from kvpool.store.server.topology import Primaries, Primary
from tests.support.conformance import keys
from tests.support.misbehaving import Harm, Misbehaving, Peer, misbehaving
from tests.support.servers import SERVERS, Cluster

LAST = 16383
GOOD = [b"10.0.0.1", 6379, b"id", [b"hostname", b"a.test"]]


def packed(reply: Any) -> bytes:
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(map(packed, reply))
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    return b"$-1\r\n" if reply is None else b"$%d\r\n%b\r\n" % (len(reply), reply)


def maps(reply: Any) -> Harm:
    """Answers CLUSTER SLOTS with this."""
    slots = packed(reply)

    def say(peer: Peer, words: Sequence[bytes], good: bytes) -> None:
        peer.send(slots if words[0].startswith(b"CLUSTER") else good)

    return say


def read_from(server: Misbehaving) -> list[Primary]:
    return Primaries(StoreURL.parse(f"valkey+cluster://127.0.0.1:{server.port}"), "it").find()


@pytest.mark.parametrize(
    "node",
    [
        [b"?", 6379, b"id", []],
        [b"?", 6379, b"id"],
        [b"?", 6379, b"id", [b"ip", b""]],
        [b"?", 6379, b"id", [b"ip", b"?"]],
        [b"?", 6379, b"id", [b"ip"]],
        [b"h\xffst", 6379, b"id", []],
        [b"a host", 6379, b"id", []],
        [b"x" * 254, 6379, b"id", []],
        [b"10.0.0.2", 0, b"id", []],
        [b"10.0.0.2", 65536, b"id", []],
        [b"10.0.0.2", b"6379", b"id", []],
        [7, 6379, b"id", []],
    ],
)
def test_a_node_without_an_address_leaves_the_map_of_the_others(node: list[Any]) -> None:
    with misbehaving() as server:
        server.misbehave(maps([[0, 99, GOOD], [100, LAST, node]]))
        assert read_from(server) == [Primary("10.0.0.1", 6379, [(0, 99)])]
        server.misbehave(maps([[0, LAST, node]]))
        with pytest.raises(StoreUnavailable, match="its nodes have no address: "):
            read_from(server)


@pytest.mark.parametrize("host", [None, b""])
def test_a_node_without_a_host_is_at_the_one_that_was_asked(host: bytes | None) -> None:
    with misbehaving() as server:
        server.misbehave(maps([[0, LAST, [host, 6379, b"id", []]]]))
        assert read_from(server) == [Primary("127.0.0.1", 6379, [(0, LAST)])]


def test_a_node_whose_name_is_not_known_yet_is_at_its_number() -> None:
    with misbehaving() as server:
        server.misbehave(maps([[0, LAST, [b"?", 6379, b"id", [b"hostname", b"", b"ip", b"10.0.0.2"]]]]))
        assert read_from(server) == [Primary("10.0.0.2", 6379, [(0, LAST)])]


@pytest.mark.parametrize("name", SERVERS)
def test_a_cluster_that_prefers_names_serves_all_keys_before_it_knows_them_all(
    name: str, tmp_path: Path
) -> None:
    with Cluster(name, tmp_path) as cluster:
        cluster.servers[0].client.config_set("cluster-announce-hostname", "localhost")
        for server in cluster.servers:
            server.client.config_set("cluster-preferred-endpoint-type", "hostname")
        with open_store(cluster.url) as store:
            assert store.put_many(keys(40), [b"value"] * 40, timeout_s=60) == [True] * 40
            assert all(server.client.dbsize() for server in cluster.servers)


def test_a_map_of_all_slots_is_read_without_a_call_for_each_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of Python takes its turn beside busy threads, and there are 230,000 parts."""
    ranges = [[slot, slot, [b"10.0.0.%d" % (slot % 100), 6379, b"i" * 40, [b"hostname", b"a.test"]]]
              for slot in range(LAST + 1)]  # fmt: skip
    monkeypatch.setattr(topology, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(topology, "FIND_S", 60.0)
    calls = 0

    def count(frame: Any, event: str, of: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with misbehaving() as server:
        server.misbehave(maps(ranges))
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            found = read_from(server)
        finally:
            sys.setprofile(before)
    assert (len(found), sum(len(one.slots) for one in found)) == (100, LAST + 1)
    assert calls < 5 * (LAST + 1)
