"""What a full server keeps: filled far beyond ``maxmemory``, how many blocks stay, and is each of them whole?

What a block costs is (maxmemory - what the empty server uses) / (blocks that stay x payload). The empty server is
measured with the connections of the store and the test open, and nothing put yet. The buffers into which it reads
values while they arrive are not subtracted: they push blocks out.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvpool import open_store
from kvpool.store.store import Store
from tests.support.conformance import MIB, NAMESPACE
from tests.support.records import fields_of
from tests.support.servers import SERVERS, running

KIB = 1 << 10
MOST_COST = 1.08
BATCH_NBYTES = 16 * MIB


def _keys(numbers: range) -> list[str]:
    return NAMESPACE.keys([number.to_bytes(32, "big") for number in numbers], 0, 0)


def _fill(store: Store, blocks: int, payload: bytes) -> int:
    """Put this many blocks, each with its number in front; returns how many were taken."""
    taken = 0
    at_once = max(1, BATCH_NBYTES // len(payload))
    for first in range(0, blocks, at_once):
        numbers = range(first, min(blocks, first + at_once))
        values = [number.to_bytes(8, "big") + payload[8:] for number in numbers]
        taken += sum(store.put_many(_keys(numbers), values))
    return taken


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(
    ("payload_nbytes", "maxmemory_nbytes"),
    [
        pytest.param(64 * KIB, 192 * MIB, id="64KiB"),
        pytest.param(MIB, 256 * MIB, id="1MiB"),
        pytest.param(4 * MIB, 256 * MIB, id="4MiB"),
    ],
)
def test_a_full_server_keeps_whole_blocks_at_little_cost(
    name: str, payload_nbytes: int, maxmemory_nbytes: int, tmp_path: Path
) -> None:
    evictions = maxmemory_nbytes // payload_nbytes  # as many as it can hold
    blocks = 2 * evictions
    payload = random.Random(payload_nbytes).randbytes(payload_nbytes)
    options = ("--maxmemory", str(maxmemory_nbytes), "--maxmemory-policy", "allkeys-lru")
    with running(name, tmp_path, *options) as server, open_store(server.url) as store:
        client = server.client
        empty_nbytes = server.info("used_memory")
        _fill(store, blocks, payload)
        assert server.info("evicted_keys") >= evictions
        client.config_set("maxmemory", 0)  # what is asked from here on must not evict

        numbers = {key.encode(): number for number, key in enumerate(_keys(range(blocks)))}
        kept = sorted(numbers[key] for key in client.scan_iter(count=1000))
        cost = (maxmemory_nbytes - empty_nbytes) / (len(kept) * payload_nbytes)
        print(
            f"{name} {payload_nbytes >> 10} KiB: {len(kept)} of {blocks} blocks stay in "
            f"{maxmemory_nbytes >> 20} MiB, {cost:.3f} a payload byte, empty {empty_nbytes / MIB:.2f} MiB"
        )
        assert cost <= MOST_COST

        # Asked before they are read, so that nothing is mended on the way.
        for number in kept:
            (key,) = _keys(range(number, number + 1))
            fields = client.hgetall(key)
            value = number.to_bytes(8, "big") + payload[8:]
            assert fields == fields_of(key, value)
            assert client.pttl(key) > 0
        assert client.memory_usage(key) / payload_nbytes <= MOST_COST
        buffer = bytearray(payload_nbytes)
        for number in kept:
            assert store.get_many_into(_keys(range(number, number + 1)), [buffer]) == [True]
            assert buffer == number.to_bytes(8, "big") + payload[8:]
        assert store.counters()["damaged"] == store.counters()["faults"] == 0
