from __future__ import annotations

import pytest

from tests.support.conformance import MIB, EvictionConformance, OpenStore, StoreConformance, key, keys
from tests.support.memory_store import MemoryStore


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
