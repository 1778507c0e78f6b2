"""A near pool before three far shards through a life in random order, beside a dictionary as the model.

Faults come and go, a shard each: dead, silent, without the right to write, too small a bound for a record, no memory,
emptied. Meanwhile what is near is answered by near, and never a wrong byte. In the end all that near has, and far can
take, is far, nothing waits, and the counters add up.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from kvpool import open_store
from kvpool.errors import StoreUnavailable
from kvpool.store.near_far import NearFarStore
from kvpool.store.store import Store
from tests.support.conformance import MIB, NAMESPACE, hashed, payload
from tests.support.deadlines import eventually
from tests.support.servers import Cluster, Server
from tests.support.soak import SEARCH_S

SMALL_NBYTES, LARGE_NBYTES = 10_000, 3 * MIB // 2  # above the least proto-max-bulk-len
LARGE_EVERY = 12
KEYS = 240
SPAN_S = 3


def name_of(number: int) -> str:
    return NAMESPACE.keys([hashed(number)], 0, 0)[0]


def nbytes_of(number: int) -> int:
    return LARGE_NBYTES if number % LARGE_EVERY == 0 else SMALL_NBYTES + number


class Fault:
    """Of one shard, from when it is made until ``end``."""

    KINDS = ("dead", "silent", "read-only", "small", "full", "emptied")

    def __init__(self, kind: str, server: Server) -> None:
        self.kind, self._server = kind, server
        begin: dict[str, Callable[[], object]] = {
            "dead": server.kill,
            "silent": server.stop,
            "read-only": lambda: self._set("min-replicas-to-write", 1),
            "small": lambda: self._set("proto-max-bulk-len", MIB),
            "full": lambda: self._set("maxmemory", 1),
            "emptied": server.client.flushall,
        }
        begin[kind]()

    def _set(self, name: str, value: int) -> None:
        self._server.client.config_set(name, value)

    def end(self) -> None:
        match self.kind:
            case "dead":
                self._server.start()
            case "silent":
                self._server.go_on()
            case "read-only":
                self._set("min-replicas-to-write", 0)
            case "small":
                self._set("proto-max-bulk-len", 512 * MIB)
            case "full":
                self._set("maxmemory", 0)


class Life:
    """``numbers``: of the values that near has."""

    def __init__(self, store: Store, cluster: Cluster, seed: int) -> None:
        self._store, self._cluster, self._draw = store, cluster, random.Random(seed)
        self.numbers: set[int] = set()
        self._faults: dict[int, Fault] = {}

    def step(self) -> None:
        draw = self._draw
        call = draw.choices(
            (self._put, self._get, self._touch, self._delete, self._harm, self._heal), (6, 6, 3, 1, 2, 2)
        )[0]
        call()

    def _some(self, most: int) -> list[int]:
        known = sorted(self.numbers)
        return self._draw.sample(known, min(len(known), 1 + self._draw.randrange(most)))

    def _put(self) -> None:
        numbers = sorted({self._draw.randrange(KEYS) for _ in range(1 + self._draw.randrange(24))})
        values = [payload(number, nbytes_of(number)) for number in numbers]
        batch = self._store.submit_put_absent(list(map(name_of, numbers)), values, timeout_s=60)
        assert batch.wait() == [True] * len(numbers)
        self.numbers.update(numbers)

    def _get(self) -> None:
        numbers = self._some(60)
        targets = [bytearray(nbytes_of(number)) for number in numbers]
        # Shards may be frozen for all of it: no answer of theirs is needed.
        found = self._store.get_many_into(list(map(name_of, numbers)), targets, timeout_s=60)
        assert all(found), "near has it"
        for number, target in zip(numbers, targets, strict=True):
            assert target == payload(number, len(target))

    def _touch(self) -> None:
        numbers = self._some(120)
        assert all(self._store.touch_many(list(map(name_of, numbers)), timeout_s=60))

    def _delete(self) -> None:
        """It asks both pools, and fails where a shard does not answer: what was near is gone then, too."""
        if any(fault.kind in ("dead", "silent") for fault in self._faults.values()):
            return
        numbers = self._some(3)
        with contextlib.suppress(StoreUnavailable):
            self._store.delete_many(list(map(name_of, numbers)), timeout_s=60)
        self.numbers.difference_update(numbers)

    def _harm(self) -> None:
        shard = self._draw.randrange(len(self._cluster.servers))
        if shard not in self._faults:
            self._faults[shard] = Fault(self._draw.choice(Fault.KINDS), self._cluster.servers[shard])

    def _heal(self) -> None:
        if self._faults:
            self._faults.pop(self._draw.choice(sorted(self._faults))).end()

    def end(self) -> None:
        """All faults end; then all that near has goes far, but for what far refused not long ago."""
        for fault in self._faults.values():
            fault.end()
        self._faults.clear()
        store, wanted = self._store, {name_of(number) for number in self.numbers}

        def is_far() -> bool:
            assert all(store.touch_many(sorted(wanted), timeout_s=60)) or not wanted
            counted = store.counters()
            lacking = len(wanted - self._held())
            refused = counted["no_room_far"] + counted["refused_far"] + counted["lost"]
            return counted["behind_waiting"] == 0 and lacking <= refused

        assert eventually(is_far, within_s=120), (store.counters(), len(wanted - self._held()))

    def _held(self) -> set[str]:
        held = set()
        for server in self._cluster.servers:
            try:
                held.update(name.decode() for name in server.client.keys("kvpool:*"))
            except redis.RedisError:
                return set()
        return held


def live(seed: int, seconds: float, steps: int, folder: Path) -> None:
    folder.mkdir()
    with Cluster("valkey-server", folder) as cluster:
        for server in cluster.servers:
            server.client.config_set("maxmemory-policy", "noeviction")
        urls = [f"file://{folder}/near?capacity=2GiB", f"{cluster.url}?ttl={4 * SPAN_S}s"]
        with open_store(urls) as store:
            assert isinstance(store, NearFarStore)
            life = Life(store, cluster, seed)
            until_s = time.monotonic() + seconds
            try:
                for _ in range(steps):
                    life.step()
                    if time.monotonic() > until_s:
                        break
                life.end()
            except BaseException:
                print(f"seed {seed}")
                raise
            counted = store.counters()
            assert counted["near_faults"] == 0
            assert counted["damaged"] == 0
            ended = sum(
                counted[name] for name in ("behind", "behind_present", "lost", "no_room_far", "refused_far")
            )
            came = counted["puts"] + counted["uses_missing"]
            assert ended <= came, "nothing goes far that neither was put nor was found missing"


def test_a_short_life(tmp_path: Path) -> None:
    live(1, 20, 150, tmp_path / "life")


@pytest.mark.soak
def test_long_lives(tmp_path: Path) -> None:
    until_s = time.monotonic() + SEARCH_S
    seed = time.time_ns()
    while time.monotonic() < until_s:
        live(seed, 60, 2000, tmp_path / str(seed))
        seed += 1
