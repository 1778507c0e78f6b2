from __future__ import annotations

import pytest

from kvpool.errors import ConfigError
from kvpool.store import open_store
from kvpool.store.memory import MemoryStore
from tests.support.conformance import MIB, EvictionConformance, OpenStore, StoreConformance, key, keys


class TestMemoryStore(EvictionConformance, StoreConformance):
    @pytest.fixture
    def open_one(self) -> OpenStore:
        return MemoryStore


def test_least_recently_used_goes_first() -> None:
    with MemoryStore(4 * (1000 + 64)) as store:
        store.put_many(keys(4), [bytes(1000)] * 4)
        store.get_many_into([key(0)], [bytearray(1000)])
        assert store.put_many([key(4), key(5)], [bytes(1000)] * 2) == [True, True]
        assert store.contains_many(keys(6)) == [True, False, False, True, True, True]
        counters = store.counters()
        assert counters["evicted"] == 2
        assert counters["held_nbytes"] == 4 * 1064
        assert counters["held_keys"] == 4


@pytest.mark.parametrize("position", [0, 4, 6, 8, 16, 32, 52, 54, 56, 64, 163])
def test_a_flipped_bit_is_a_miss_and_the_record_goes(position: int) -> None:
    with MemoryStore(MIB) as store:
        store.put_many(keys(2), [bytes(100)] * 2)
        damaged = bytearray(store._records[key(0)])
        damaged[position] ^= 1
        store._records[key(0)] = bytes(damaged)
        assert store.get_many_into(keys(2), [bytearray(100), bytearray(100)]) == [False, True]
        assert store.contains_many(keys(2)) == [False, True]
        assert store.counters()["damaged"] == 1


def test_a_record_under_another_key_is_a_miss() -> None:
    with MemoryStore(MIB) as store:
        store.put_many([key(0)], [bytes(100)])
        store._records[key(6)] = store._records[key(0)]  # the same group and rank
        assert store.get_many_into([key(6)], [bytearray(100)]) == [False]
        assert store.counters()["damaged"] == 1


def test_every_memory_store_is_its_own() -> None:
    with open_store("memory://?capacity=1MiB") as one, open_store("memory://?capacity=1MiB") as other:
        one.put_many([key(1)], [b"x"])
        assert other.contains_many([key(1)]) == [False]
        assert repr(one) == "<MemoryStore memory://?capacity=1MiB>"


def test_threads_are_checked() -> None:
    for threads in (0, 65, True, 2.0):
        with pytest.raises(ConfigError, match="threads is a whole number from 1 to 64"):
            open_store("memory://", threads=threads)  # type: ignore[arg-type]
