"""What every store must do: one class, run over every store by a subclass that says how to open one.

Over 400 lines because it is one kit, which every store has to pass whole.

class TestMyStore(StoreConformance):
    @pytest.fixture
    def open_one(self): return lambda capacity_nbytes: MyStore(capacity_nbytes)
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from kvpool import _native, open_store
from kvpool.errors import ConfigError, KVPoolError, StoreClosed, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.store import LookupGroup
from kvpool.store.store import MAX_BATCH_KEYS, MAX_DOCUMENT_NBYTES, Store
from tests.support.deadlines import eventually
from tests.support.servers import Cluster, Server, with_client

MIB = 1 << 20
KEEPERS = ("kvpool.store.file", "kvpool.store.server.documents", "tests.support.memory_store")
NAMESPACE = Namespace("tenant-1", {"model": "tiny", "kv_dtype": "bfloat16"})

OpenStore = Callable[[int], Store]


@contextlib.contextmanager
def opened(url: str) -> Iterator[Store]:
    """``open_store`` on a server that answers, dialled again where a busy machine takes a dial's time."""
    until_s = time.monotonic() + 60
    while True:
        try:
            store = open_store(url)
            break
        except StoreUnavailable:
            if time.monotonic() >= until_s:
                raise
    with store:
        yield store


def key(number: int) -> str:
    return NAMESPACE.key(hashed(number), number % 3, number % 2)


def hashed(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def lookup_group(group: int, records: int, ranks: int = 1, *, sliding_window: bool = False) -> LookupGroup:
    packed = b"".join(map(hashed, range(records)))
    return LookupGroup(packed, 32, group, ranks, 16, sliding_window)


def keys(count: int) -> list[str]:
    return [key(number) for number in range(count)]


def payload(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


def work_done(store: Store) -> dict[str, int]:
    """The counters once nothing is on its way to a far pool, without those of connections, which come and go."""
    assert eventually(lambda: store.counters().get("behind_waiting", 0) == 0)
    return {name: value for name, value in store.counters().items() if "connect" not in name}


class StoreConformance:
    """The behaviour of a store; a subclass has a fixture ``open_one``: capacity in bytes -> an open store."""

    @pytest.fixture
    def open_one(self) -> OpenStore:
        raise NotImplementedError

    @pytest.fixture
    def store(self, open_one: OpenStore) -> Iterator[Store]:
        with open_one(256 * MIB) as store:
            yield store

    def settle(self, store: Store) -> None:
        """Wait until a put is wherever it goes; at once for a store of one place."""

    # ------------------------------------------------------------------ values

    @pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4096, 65536 - 64, 262144, 262145, 2 * MIB, 64 * MIB])
    def test_round_trip(self, store: Store, nbytes: int) -> None:
        value = payload(nbytes, nbytes)
        target = bytearray(nbytes)
        assert store.put_many([key(1)], [value], timeout_s=60) == [True]
        assert store.get_many_into([key(1)], [target], timeout_s=60) == [True]
        assert target == value

    def test_batch_keeps_its_order(self, store: Store) -> None:
        values = [payload(number, 1 + number * 37) for number in range(200)]
        assert store.put_many(keys(200), values) == [True] * 200
        order = list(range(200))
        random.Random(1).shuffle(order)
        targets = [bytearray(len(values[number])) for number in order]
        assert store.get_many_into([key(number) for number in order], targets) == [True] * 200
        assert targets == [values[number] for number in order]

    def test_each_value_has_the_name_of_its_writer(self, store: Store) -> None:
        """In one field or several. A present value keeps its name; a get of none has no name."""
        sizes, nobody = (100, MIB, 5 * MIB // 8 + 1), bytes(16)
        for number, (writer, nbytes) in enumerate(
            zip((bytes(range(16)), b"", b"w" * 16), sizes, strict=True)
        ):
            store.writer = writer
            assert store.put_many([key(number)], [payload(number, nbytes)]) == [True]
            store.writer = b"another writer__"
            store.submit_put_absent([key(number)], [payload(number, nbytes)]).wait()
        targets = [bytearray(nbytes) for nbytes in (*sizes, 7)]
        got = store.submit_get([*keys(3), key(9)], targets)
        assert got.wait() == [True, True, True, False]
        assert got.writers() == [bytes(range(16)), nobody, b"w" * 16, nobody]
        assert targets[:3] == [payload(number, nbytes) for number, nbytes in enumerate(sizes)]
        asked = store.submit_contains(keys(1))
        assert (asked.wait(), asked.writers()) == ([True], [])
        store.writer = b"too short"
        with pytest.raises(ConfigError, match="a writer is 16 bytes"):
            store.put_many([key(1)], [b"x"])

    def test_a_miss_is_a_value(self, store: Store) -> None:
        store.put_many([key(2)], [b"two"])
        targets = [bytearray(3) for _ in range(3)]
        assert store.get_many_into([key(1), key(2), key(3)], targets) == [False, True, False]
        assert targets[1] == b"two"
        assert store.contains_many([key(1), key(2), key(3)]) == [False, True, False]
        assert store.delete_many([key(1), key(3)]) == 0

    def test_keys_that_differ_in_one_part_are_different(self, store: Store) -> None:
        block = bytes(range(32))
        others = [
            NAMESPACE.key(block, 0, 0),
            NAMESPACE.key(block, 1, 0),
            NAMESPACE.key(block, 0, 1),
            NAMESPACE.key(block[:20], 0, 0),  # a header holds 20 bytes of the hash
            NAMESPACE.key(block[:31] + b"x", 0, 0),
            Namespace("tenant-2", dict(NAMESPACE.facts)).key(block, 0, 0),
            Namespace("tenant-1", {"model": "tiny", "kv_dtype": "fp8"}).key(block, 0, 0),
        ]
        values = [bytes([number]) * 100 for number in range(len(others))]
        store.put_many(others, values)
        targets = [bytearray(100) for _ in others]
        assert all(store.get_many_into(others, targets))
        assert targets == values

    def test_overwrite(self, store: Store) -> None:
        store.put_many([key(1)], [b"first"])
        assert store.put_many([key(1)], [b"second value"]) == [True]
        target = bytearray(12)
        assert store.get_many_into([key(1)], [target]) == [True]
        assert target == b"second value"

    def test_delete(self, store: Store) -> None:
        store.put_many(keys(3), [b"a", b"b", b"c"])
        self.settle(store)
        assert store.delete_many([key(0), key(2), key(7)]) == 2
        assert store.contains_many(keys(3)) == [False, True, False]
        assert store.delete_many([key(0)]) == 0

    @pytest.mark.parametrize("asked_nbytes", [1, 99, 101, 5000])
    def test_wrong_length_is_a_miss_and_the_record_goes(self, store: Store, asked_nbytes: int) -> None:
        store.put_many([key(1)], [bytes(100)])
        before = store.counters()
        assert store.get_many_into([key(1)], [bytearray(asked_nbytes)]) == [False]
        assert store.contains_many([key(1)]) == [False]
        assert store.get_many_into([key(1)], [bytearray(100)]) == [False]
        assert store.counters()["damaged"] == before["damaged"] + 1

    def test_empty_batch(self, store: Store) -> None:
        assert store.put_many([], []) == []
        assert store.get_many_into([], []) == []
        assert store.contains_many([]) == []
        assert store.delete_many([]) == 0
        assert store.submit_get([], []).wait() == []
        assert store.submit_put_absent([], []).results() == b""

    def test_ten_thousand_keys(self, store: Store) -> None:
        many = keys(10_000)
        values = [number.to_bytes(8, "little") * 8 for number in range(10_000)]
        assert store.put_many(many, values, timeout_s=60) == [True] * 10_000
        assert store.contains_many([*many, key(10_001)], timeout_s=60) == [True] * 10_000 + [False]
        whole = bytearray(64 * 10_000)
        targets = [memoryview(whole)[64 * number : 64 * number + 64] for number in range(10_000)]
        assert store.get_many_into(many, targets, timeout_s=60) == [True] * 10_000
        assert whole == b"".join(values)
        assert store.delete_many(many, timeout_s=60) == 10_000

    def test_one_key_twice_in_a_batch(self, store: Store) -> None:
        store.put_many([key(1)], [b"same"])
        targets = [bytearray(4), bytearray(4)]
        assert store.get_many_into([key(1), key(1)], targets) == [True, True]
        assert targets == [b"same", b"same"]
        assert store.contains_many([key(1), key(1)]) == [True, True]

    # ------------------------------------------------------------------ put if absent

    def test_put_absent_puts_what_is_missing(self, store: Store) -> None:
        values = [payload(number, 1000 + 50_000 * number) for number in range(6)]
        others = [payload(100 + number, len(value)) for number, value in enumerate(values)]
        before = [2, 4]
        store.put_many([key(number) for number in before], [others[number] for number in before])
        transfer = store.submit_put_absent(keys(6), values)
        assert transfer.wait() == [True] * 6
        ok, present = _native.OK, _native.PRESENT
        assert list(transfer.results()) == [ok, ok, present, ok, present, ok]
        targets = [bytearray(len(value)) for value in values]
        assert store.get_many_into(keys(6), targets) == [True] * 6
        expected = [others[number] if number in before else value for number, value in enumerate(values)]
        assert targets == expected, "a value that was there is left as it is"
        again = store.submit_put_absent(keys(6), values)
        assert list(again.results()) == [present] * 6
        counters = store.counters()
        assert (counters["puts"], counters["present_puts"]) == (2 + 4, 2 + 6)
        assert counters["put_nbytes"] == sum(map(len, expected))

    def test_put_absent_of_one_key_twice_puts_it_once(self, store: Store) -> None:
        value = payload(1, 300_000)
        transfer = store.submit_put_absent([key(1), key(1)], [value, value])
        assert transfer.wait() == [True, True]
        target = bytearray(len(value))
        assert store.get_many_into([key(1)], [target]) == [True]
        assert target == value

    def test_put_absent_of_many_keys(self, store: Store) -> None:
        many = keys(2000)
        values = [number.to_bytes(8, "little") * 1024 for number in range(2000)]
        store.put_many(many[::3], values[::3], timeout_s=60)
        results = store.submit_put_absent(many, values, timeout_s=60).results()
        assert list(results) == [_native.OK if number % 3 else _native.PRESENT for number in range(2000)]
        whole = bytearray(8192 * 2000)
        targets = [memoryview(whole)[8192 * number : 8192 * (number + 1)] for number in range(2000)]
        assert store.get_many_into(many, targets, timeout_s=60) == [True] * 2000
        assert whole == b"".join(values)

    def test_put_absent_by_many_at_once_leaves_one_whole_record(self, store: Store) -> None:
        """Writers of one key, each with bytes of its own, so that a torn record would be seen."""
        values = [payload(number, 300_000) for number in range(8)]
        transfers = [store.submit_put_absent([key(1)], [value], timeout_s=60) for value in values]
        results = [transfer.results()[0] for transfer in transfers]
        assert set(results) <= {_native.OK, _native.PRESENT}
        put = [value for value, result in zip(values, results, strict=True) if result == _native.OK]
        assert put
        target = bytearray(300_000)
        assert store.get_many_into([key(1)], [target]) == [True]
        assert target in put

    def test_put_absent_cancelled(self, store: Store) -> None:
        value = bytes(MIB)
        store.put_many([key(0)], [value])
        transfer = store.submit_put_absent(keys(64), [value] * 64, timeout_s=60)
        transfer.cancel()
        assert eventually(transfer.done)
        with contextlib.suppress(StoreUnavailable):
            assert transfer.wait() == [True] * 64
        assert store.submit_put_absent(keys(64), [value] * 64, timeout_s=60).wait() == [True] * 64

    # ------------------------------------------------------------------ buffers

    def test_element_size_does_not_matter(self, store: Store) -> None:
        halves = numpy.arange(1000, dtype=numpy.float16)
        wide = array.array("d", [1.5, -2.5, 3.5])
        foreign = (ctypes.c_uint32 * 5)(1, 2, 3, 4, 5)
        big_endian = numpy.arange(7, dtype=">i8")
        square = numpy.arange(12, dtype=numpy.int32).reshape(3, 4)
        sources = [halves, wide, foreign, big_endian, square]
        targets = [numpy.zeros_like(halves), array.array("d", [0] * 3), (ctypes.c_uint32 * 5)(),
                   numpy.zeros_like(big_endian), numpy.zeros_like(square)]  # fmt: skip
        assert store.put_many(keys(5), sources) == [True] * 5
        assert store.get_many_into(keys(5), targets) == [True] * 5
        assert [bytes(memoryview(target)) for target in targets] == [bytes(memoryview(it)) for it in sources]
        target = bytearray(2000)
        assert store.get_many_into([key(0)], [target]) == [True]
        assert target == halves.tobytes()

    def test_a_buffer_with_gaps_is_packed(self, store: Store) -> None:
        matrix = numpy.arange(240, dtype=numpy.float16).reshape(12, 20)
        sources = [matrix[:, ::3], matrix.T, matrix[::-1], memoryview(bytes(range(100)))[::7]]
        assert store.put_many(keys(4), sources) == [True] * 4
        targets = [bytearray(memoryview(source).nbytes) for source in sources]
        assert store.get_many_into(keys(4), targets) == [True] * 4
        assert targets == [memoryview(source).tobytes() for source in sources]

    def test_into_a_buffer_with_gaps(self, store: Store) -> None:
        matrix = numpy.arange(240, dtype=numpy.float16).reshape(12, 20)
        store.put_many(keys(3), [matrix[:, ::2], matrix.T, bytes(range(10))])
        target = numpy.zeros((12, 20), dtype=numpy.float16)
        turned = numpy.zeros((12, 20), dtype=numpy.float16)
        flat = bytearray(30)
        targets = [target[:, ::2], turned.T, memoryview(flat)[::3]]
        assert store.get_many_into(keys(3), targets) == [True, True, True]
        assert (target[:, ::2] == matrix[:, ::2]).all()
        assert not target[:, 1::2].any()
        assert (turned == matrix).all()
        assert flat[::3] == bytes(range(10))
        assert not any(flat[1::3])

    def test_a_miss_leaves_a_buffer_with_gaps_alone(self, store: Store) -> None:
        flat = bytearray(b"." * 30)
        assert store.get_many_into([key(1)], [memoryview(flat)[::3]]) == [False]
        assert flat == b"." * 30

    def test_submit_get_refuses_a_buffer_with_gaps(self, store: Store) -> None:
        store.put_many([key(1)], [b"0123456789"])
        with pytest.raises(ConfigError, match=r"buffers\[0\] is not contiguous"):
            store.submit_get([key(1)], [memoryview(bytearray(20))[::2]])

    def test_a_read_only_destination_is_refused_before_anything_is_read(self, store: Store) -> None:
        store.put_many(keys(2), [b"aaaa", b"bbbb"])
        first = bytearray(4)
        before = work_done(store)
        with pytest.raises(ConfigError, match=r"buffers\[1\] is read-only"):
            store.get_many_into(keys(2), [first, b"1234"])
        with pytest.raises(ConfigError, match=r"buffers\[1\] is read-only"):
            store.submit_get(keys(2), [first, b"1234"])
        assert first == bytes(4)
        assert work_done(store) == before

    @pytest.mark.parametrize("empty", [b"", bytearray(), numpy.zeros((3, 0))])
    def test_an_empty_value_is_refused(self, store: Store, empty: object) -> None:
        for put in (store.put_many, store.submit_put_absent):
            with pytest.raises(ConfigError, match=r"buffers\[0\] is empty"):
                put([key(1)], [empty])

    def test_what_is_no_buffer_is_refused(self, store: Store) -> None:
        for thing in (None, 5, "text", [1, 2]):
            with pytest.raises(ConfigError, match=r"buffers\[0\] is no buffer"):
                store.put_many([key(1)], [thing])

    def test_memory_is_free_after_a_batch(self, store: Store) -> None:
        source, target = bytearray(b"value"), bytearray(5)
        put = store.submit_put([key(1)], [source])
        assert put.wait() == [True]
        source.extend(b"!")  # a buffer that is still exported cannot be resized
        get = store.submit_get([key(1)], [target])
        assert get.wait() == [True]
        target.extend(b"!")
        assert put.wait() == get.wait() == [True]

    def test_a_dropped_transfer_goes_on(self, store: Store) -> None:
        store.submit_put([key(1)], [payload(1, 3 * MIB)])
        store.submit_put([key(2)], [payload(2, 3 * MIB)]).wait()
        assert eventually(lambda: store.contains_many(keys(3)) == [False, True, True])
        store.submit_get([key(1)], [bytearray(3 * MIB)])
        target = bytearray(3 * MIB)
        assert store.submit_get([key(1)], [target]).wait() == [True]
        assert target == payload(1, 3 * MIB)

    # ------------------------------------------------------------------ arguments

    def test_numbers_of_keys_and_buffers_must_agree(self, store: Store) -> None:
        for batch in (
            store.put_many, store.get_many_into, store.submit_put, store.submit_get, store.submit_put_absent,
        ):  # fmt: skip
            with pytest.raises(ConfigError, match="2 keys need as many buffers, not 1"):
                batch(keys(2), [bytearray(4)])

    @pytest.mark.parametrize(
        "bad",
        [
            "", "key", key(1) + "0" * 5, key(1).replace("kvpool:", "other:"), key(1).replace("tenant-1", "ten ant"),
            key(1).replace(":1:1", ":01:1"), key(1).replace(":1:1", ":1:65536"), key(1) + "\n", key(1).upper(),
            "kvpool:t:../../../../etc/passwd:00:0:0",
        ],
    )  # fmt: skip
    def test_a_bad_key_is_refused(self, store: Store, bad: str) -> None:
        before = work_done(store)
        for call in (
            lambda: store.put_many([key(1), bad], [b"a", b"b"]),
            lambda: store.get_many_into([key(1), bad], [bytearray(1), bytearray(1)]),
            lambda: store.contains_many([key(1), bad]),
            lambda: store.delete_many([key(1), bad]),
        ):
            with pytest.raises(ConfigError):
                call()
        assert work_done(store) == before

    @pytest.mark.parametrize("bad", [b"kvpool", None, 5])
    def test_a_key_that_is_no_text_is_refused(self, store: Store, bad: object) -> None:
        with pytest.raises(ConfigError):
            store.contains_many([bad])  # type: ignore[list-item]

    def test_one_key_is_no_batch(self, store: Store) -> None:
        with pytest.raises(ConfigError, match="list of keys"):
            store.contains_many(key(1))

    @pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 3601, True, "5", b"5"])
    def test_a_bad_deadline_is_refused(self, store: Store, bad: object) -> None:
        with pytest.raises(ConfigError, match="timeout_s"):
            store.contains_many([key(1)], timeout_s=bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="timeout_s"):
            store.put_many([key(1)], [b"x"], timeout_s=bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="timeout_s"):
            store.submit_contains([key(1)]).wait(bad)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ transfers

    def test_submit_and_wait(self, store: Store) -> None:
        put = store.submit_put(keys(3), [b"aa", b"bb", b"cc"])
        assert put.wait() == [True] * 3
        assert put.done()
        assert put.wait() == [True] * 3
        targets = [bytearray(2) for _ in range(3)]
        get = store.submit_get(keys(3), targets)
        assert get.wait(60) == [True] * 3
        assert targets == [b"aa", b"bb", b"cc"]
        assert store.submit_contains([key(1), key(9)]).wait() == [True, False]
        assert "done" in repr(get)

    def test_cancel(self, store: Store) -> None:
        value = bytes(MIB)
        transfer = store.submit_put(keys(64), [value] * 64, timeout_s=60)
        transfer.cancel()
        transfer.cancel()
        assert eventually(transfer.done)
        try:
            assert transfer.wait() == [True] * 64
        except StoreUnavailable as error:
            assert "cancelled" in str(error)  # noqa: PT017
        # Whatever became of it, the store serves on. Not those keys: what was under way may replace other bytes there.
        assert store.put_many([key(64)], [b"after"]) == [True]
        target = bytearray(5)
        assert store.get_many_into([key(64)], [target]) == [True]
        assert target == b"after"

    # ------------------------------------------------------------------ lookups

    def test_a_lookup_tells_of_records_that_are_there_with_all_parts(self, store: Store) -> None:
        for group, rank, records in ((0, 0, [0, 1, 2, 4]), (0, 1, [0, 1, 3, 4]), (7, 0, [1, 2, 5])):
            names = NAMESPACE.keys([hashed(record) for record in records], group, rank)
            assert all(store.put_many(names, [b"x"] * len(names)))
        both = lookup_group(0, 6, ranks=2)
        (present,) = store.submit_lookup(NAMESPACE, [both]).records()
        assert present.find(0) == 2
        assert store.submit_lookup(NAMESPACE, [lookup_group(0, 3)]).records() == [bytes([1, 1, 1])]
        sliding_window = lookup_group(7, 6, sliding_window=True)
        assert store.submit_lookup(NAMESPACE, [sliding_window]).records() == [bytes([0, 1, 1, 0, 0, 1])]
        other, first = store.submit_lookup(NAMESPACE, [sliding_window, both]).records(60)
        assert (other[:2], first[:3]) == (bytes([0, 1]), bytes([1, 1, 0])), "in the order of the groups"
        foreign = Namespace("tenant-2", dict(NAMESPACE.facts))
        assert store.submit_lookup(foreign, [both]).records() == [bytes(6)]

    def test_a_lookup_of_nothing(self, store: Store) -> None:
        nothing = LookupGroup(b"", 8, 0, 2, 16)
        assert store.submit_lookup(NAMESPACE, []).records() == []
        assert store.submit_lookup(NAMESPACE, [nothing]).records() == [b""]
        store.put_many(NAMESPACE.keys([hashed(0)], 1, 0), [b"x"])
        assert store.submit_lookup(NAMESPACE, [nothing, lookup_group(1, 1)]).records() == [b"", b"\1"]
        assert store.counters().get("queued", 0) == 0

    def test_a_lookup_may_be_longer_than_a_batch_and_asks_for_what_may_be_of_use(self, store: Store) -> None:
        names = [NAMESPACE.key(hashed(record), 0, rank) for record in range(40) for rank in range(8)]
        assert all(store.put_many(names, [b"x"] * len(names)))
        long = lookup_group(0, MAX_BATCH_KEYS // 8 + 1000, ranks=8)
        before = store.counters()
        lookup = store.submit_lookup(NAMESPACE, [long], timeout_s=60)
        (present,) = lookup.records()
        assert lookup.done()
        assert len(present) == long.records
        assert present.find(0) == 40
        after = store.counters()
        assert after["contains_hits"] - before["contains_hits"] == 40 * 8
        asked = sum(after[name] - before[name] for name in ("contains_hits", "contains_misses"))
        assert asked < MAX_BATCH_KEYS // 2, "what is missing ends it, not the prompt's end"
        assert after.get("queued", 0) == 0

    def test_a_long_lookup_may_be_dropped_at_any_time(self, store: Store) -> None:
        sliding_window = lookup_group(0, 20_000, ranks=2, sliding_window=True)
        lookup = store.submit_lookup(NAMESPACE, [sliding_window], timeout_s=60)
        lookup.cancel()
        lookup.cancel()
        assert eventually(lookup.done)
        try:
            assert lookup.records() == [bytes(20_000)]
        except StoreUnavailable as error:
            assert "cancelled" in str(error)  # noqa: PT017
        store.submit_lookup(NAMESPACE, [sliding_window], timeout_s=60)
        assert store.submit_lookup(NAMESPACE, [sliding_window], timeout_s=60).records() == [bytes(20_000)]

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            ({"hashes": bytes(9)}, "9 bytes are no hashes"), ({"hashes": bytearray(16)}, "packed hashes are bytes"),
            ({"hash_nbytes": 7}, "hash_nbytes"), ({"hash_nbytes": 128, "hashes": bytes(256)}, "hash_nbytes"),
            ({"group": 65536}, "group"), ({"group": "0"}, "group"), ({"ranks": 0}, "ranks"),
            ({"ranks": 65537}, "ranks"), ({"record_tokens": 0}, "record_tokens"),
            ({"record_tokens": 1 << 70}, "record_tokens"),
        ],
    )  # fmt: skip
    def test_a_bad_lookup_is_refused(self, store: Store, bad: dict[str, Any], words: str) -> None:
        before = work_done(store)
        with pytest.raises(ConfigError, match=words):
            store.submit_lookup(NAMESPACE, [LookupGroup(bytes(16), 8, 0, 1, 16)._replace(**bad)])
        with pytest.raises(ConfigError, match="timeout_s"):
            store.submit_lookup(NAMESPACE, [], timeout_s=0)
        assert work_done(store) == before

    # ------------------------------------------------------------------ room

    def test_a_value_larger_than_the_store_has_no_room(self, open_one: OpenStore) -> None:
        with open_one(MIB) as store:
            # One after the other: what a server has received of the large one already takes the room of the small one.
            assert store.put_many([key(0)], [b"small"]) == [True]
            assert store.put_many([key(1)], [bytes(4 * MIB)]) == [False]
            assert store.contains_many(keys(2)) == [True, False]
            assert store.counters()["no_room"] == 1

    # ------------------------------------------------------------------ several users

    def test_threads_share_a_store(self, store: Store) -> None:
        failures: list[str] = []

        def use(worker: int) -> None:
            chance = random.Random(worker)
            try:
                for _ in range(40):
                    chosen = chance.sample(range(30), 5)
                    store.put_many(
                        [key(number) for number in chosen], [payload(number, 5000) for number in chosen]
                    )
                    targets = [bytearray(5000) for _ in chosen]
                    found = store.get_many_into([key(number) for number in chosen], targets)
                    for number, hit, target in zip(chosen, found, targets, strict=True):
                        if hit and target != payload(number, 5000):
                            failures.append(f"{number} holds something else")
                    store.delete_many([key(chosen[0])])
            except KVPoolError as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=use, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        counters = store.counters()
        assert counters["damaged"] == counters["faults"] == 0

    # ------------------------------------------------------------------ announcements

    def test_announcements(self, store: Store) -> None:
        assert store.announcements("kvpool:") == {}
        store.announce("kvpool:t:b", b"bee", lease_s=60)
        store.announce("kvpool:t:a", b"\x00\xff", lease_s=60)
        store.announce("kvpool:u:a", b"other", lease_s=60)
        assert list(store.announcements("kvpool:t:").items()) == [
            ("kvpool:t:a", b"\x00\xff"),
            ("kvpool:t:b", b"bee"),
        ]
        assert list(store.announcements("kvpool:t:", ":b")) == ["kvpool:t:b"]
        assert len(store.announcements("")) == 3
        store.announce("kvpool:t:b", b"new", lease_s=60)
        assert store.announcements("kvpool:t:b") == {"kvpool:t:b": b"new"}
        assert store.contains_many([key(1)]) == [False]

    def test_announcements_are_read_by_their_keys(self, store: Store) -> None:
        for tenant, name in (("t", "a"), ("t", "ab"), ("u", "a")):
            store.announce(f"kvpool:{tenant}:{name}", name.encode(), lease_s=60)
        store.announce("kvpool:t:goes", b"x", lease_s=0.02)
        asked = ("kvpool:t:a", "kvpool:t:absent", "kvpool:u:a")
        assert store.announced_under(asked) == {"kvpool:t:a": b"a", "kvpool:u:a": b"a"}
        assert store.announced_under(()) == {}
        assert eventually(lambda: store.announced_under(("kvpool:t:goes",)) == {})
        assert store.announcing_tenants() == ["t", "u"]

    def test_an_announcement_is_withdrawn(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in KEEPERS:
            monkeypatch.setattr(f"{module}.MAX_ANNOUNCEMENTS", 2)
        assert store.withdraw("kvpool:t:a") is False
        store.announce("kvpool:t:a", b"1", lease_s=600)
        store.announce("kvpool:t:b", b"2", lease_s=600)
        assert store.withdraw("kvpool:t:a") is True
        assert store.announcements("kvpool:t:") == {"kvpool:t:b": b"2"}
        assert store.withdraw("kvpool:t:a") is False
        store.announce("kvpool:t:c", b"3", lease_s=600)  # its place is free
        store.announce("kvpool:t:b", b"4", lease_s=0.02)
        assert eventually(lambda: list(store.announcements("kvpool:t:")) == ["kvpool:t:c"])
        assert store.withdraw("kvpool:t:b") is False
        for wrong in ("", "k" * 513, "sp\n", 3):
            with pytest.raises(ConfigError):
                store.withdraw(wrong)  # type: ignore[arg-type]

    def test_an_announcement_has_limits(self, store: Store) -> None:
        store.announce("k" * 512, bytes(MAX_DOCUMENT_NBYTES), lease_s=1e6)
        for name, document, lease_s in [
            ("", b"x", 1.0),
            ("k" * 513, b"x", 1.0),
            ("sp\n", b"x", 1.0),
            ("ü", b"x", 1.0),
            ("k", b"", 1.0),
            ("k", bytes(MAX_DOCUMENT_NBYTES + 1), 1.0),
            ("k", "text", 1.0),
            ("k", b"x", 0.0),
            ("k", b"x", float("nan")),
            ("k", b"x", 1e12),
            ("k", b"x", True),
        ]:
            with pytest.raises(ConfigError):
                store.announce(name, document, lease_s=lease_s)  # type: ignore[arg-type]
        assert list(store.announcements("")) == ["k" * 512]

    def test_announcements_are_bounded(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in KEEPERS:
            monkeypatch.setattr(f"{module}.MAX_ANNOUNCEMENTS", 3)
        store.announce("goes", b"x", lease_s=0.02)
        for name in ("a", "b"):
            store.announce(name, b"x", lease_s=60)
        assert eventually(lambda: "goes" not in store.announcements(""))
        store.announce("c", b"x", lease_s=60)
        with pytest.raises(StoreUnavailable, match="3 announcements are kept already"):
            store.announce("d", b"x", lease_s=60)
        store.announce("a", b"renewed", lease_s=60)
        assert store.announcements("") == {"a": b"renewed", "b": b"x", "c": b"x"}

    # ------------------------------------------------------------------ counters and the end

    def test_counters(self, store: Store) -> None:
        store.put_many(keys(3), [bytes(100)] * 3)
        store.get_many_into([key(0), key(1), key(7)], [bytearray(100) for _ in range(3)])
        store.contains_many([key(0), key(8)])
        assert store.touch_many([key(8), key(1)]) == [False, True]
        store.expire_many([key(9), key(0)])
        store.delete_many([key(2), key(9)])
        counters = store.counters()
        assert all(type(value) is int and value >= 0 for value in counters.values())
        expected = {
            "puts": 3, "put_nbytes": 300, "get_hits": 2, "get_misses": 1, "get_nbytes": 200,
            "contains_hits": 2, "contains_misses": 2, "deletes": 1, "delete_misses": 1,
            "expires": 1, "expire_misses": 1,
            "no_room": 0, "faults": 0, "cancelled": 0, "timed_out": 0, "damaged": 0, "evicted": 0,
        }  # fmt: skip
        assert {name: counters.get(name) for name in expected} == expected

    def test_what_expires_is_there_for_a_while(self, store: Store) -> None:
        store.put_many(keys(3), [b"value"] * 3)
        assert store.expire_many([key(0), key(7), key(2)]) == 2
        assert store.contains_many([*keys(3), key(7)]) == [True] * 3 + [False]
        buffer = bytearray(5)
        assert store.get_many_into([key(0)], [buffer]) == [True]
        assert buffer == b"value"

    def test_nothing_works_after_close(self, open_one: OpenStore) -> None:
        store = open_one(MIB)
        store.put_many([key(1)], [b"x"])
        store.close()
        store.close()
        for call in (
            lambda: store.put_many([key(1)], [b"x"]),
            lambda: store.get_many_into([key(1)], [bytearray(1)]),
            lambda: store.contains_many([key(1)]),
            lambda: store.touch_many([key(1)]),
            lambda: store.delete_many([key(1)]),
            lambda: store.expire_many([key(1)]),
            lambda: store.submit_put([key(1)], [b"x"]),
            lambda: store.submit_get([key(1)], [bytearray(1)]),
            lambda: store.submit_contains([key(1)]),
            lambda: store.submit_put_absent([key(1)], [b"x"]),
            lambda: store.submit_lookup(NAMESPACE, [lookup_group(0, 2)]),
            lambda: store.announce("k", b"x", lease_s=1),
            lambda: store.withdraw("k"),
            lambda: store.announcements(""),
            store.counters,
            store.__enter__,
        ):
            with pytest.raises(StoreClosed):
                call()
        assert "closed" in repr(store)

    def test_close_ends_what_is_under_way(self, open_one: OpenStore) -> None:
        store = open_one(256 * MIB)
        transfer = store.submit_put(keys(64), [bytes(MIB)] * 64, timeout_s=60)
        store.close()
        assert transfer.done()
        try:
            assert transfer.wait() == [True] * 64, "over before the store was closed"
        except StoreUnavailable as error:
            assert "cancelled" in str(error)  # noqa: PT017

    def test_an_idle_store_gives_everything_back(self, open_one: OpenStore) -> None:
        for _ in range(20):
            with open_one(MIB):
                pass


class EvictionConformance:
    """What a store with a capacity of its own does when it is full; ``open_one`` as above, and the capacity holds."""

    @pytest.fixture
    def open_one(self) -> OpenStore:
        raise NotImplementedError

    @pytest.mark.parametrize("way", ["touch", "put absent", "lookup"])
    def test_what_was_used_outlives_what_was_only_asked_for(self, open_one: OpenStore, way: str) -> None:
        names, value = NAMESPACE.keys([hashed(number) for number in range(13)], 0, 0), bytes(100_000)
        with open_one(MIB) as store:
            for name in names[:10]:
                assert store.put_many([name], [value]) == [True]
            assert store.contains_many(names[:10]) == [True] * 10
            if way == "touch":
                assert store.touch_many(names[:2]) == [True, True]
            elif way == "put absent":
                there = store.submit_put_absent(names[:2], [value] * 2)
                assert list(there.results()) == [_native.PRESENT] * 2
            else:
                assert store.submit_lookup(NAMESPACE, [lookup_group(0, 2)]).records() == [bytes([1, 1])]
            for name in names[10:]:
                assert list(store.submit_put_absent([name], [value]).results()) == [_native.OK]
            assert store.contains_many(names[:4]) == [True, True, False, False]
            assert store.contains_many(names[10:]) == [True] * 3

    def test_what_expires_goes_first_unless_it_is_used_again(self, open_one: OpenStore) -> None:
        names, value = NAMESPACE.keys([hashed(number) for number in range(13)], 0, 0), bytes(100_000)
        with open_one(MIB) as store:
            for name in names[:10]:
                assert store.put_many([name], [value]) == [True]
            assert store.expire_many(names[5:9]) == 4
            assert store.touch_many([names[5]]) == [True]
            for name in names[10:]:
                assert store.put_many([name], [value]) == [True]
            assert store.contains_many(names[5:10]) == [True, False, False, False, True]


class ServerConformance(StoreConformance):
    """The kit on a server, through the client that a subclass names."""

    @pytest.fixture
    def open_one(self, server: Server) -> OpenStore:
        def open_one(capacity_nbytes: int) -> Store:
            # What the server itself needs, connections among it, and what it needs to take a value in.
            used_nbytes = server.info("used_memory")
            server.client.config_set("maxmemory", used_nbytes + capacity_nbytes)
            return open_store(self.url(server))

        return open_one

    def url(self, server: Server) -> str:
        return server.url


class OtherClientConformance(ServerConformance):
    client: str

    def url(self, server: Server) -> str:
        return with_client(server.url, self.client)


class ClusterConformance(StoreConformance):
    """The kit on a cluster, whose memory of each node is what a store on one server has."""

    client = "native"

    @pytest.fixture
    def open_one(self, cluster: Cluster) -> OpenStore:
        def open_one(capacity_nbytes: int) -> Store:
            for server in cluster.servers:
                server.client.config_set("maxmemory", server.info("used_memory") + capacity_nbytes)
            return open_store(with_client(cluster.url, self.client))

        return open_one


class LightConformance(OtherClientConformance):
    """Without the two cases that take long; these run on the other server."""

    test_ten_thousand_keys = None  # type: ignore[assignment]

    @pytest.mark.parametrize("nbytes", [1, 128, 129, 65536, 262145])
    def test_round_trip(self, store: Store, nbytes: int) -> None:
        super().test_round_trip(store, nbytes)


class Buffer(bytearray):
    """One that can be watched: it goes when nobody holds it."""

    __slots__ = ("__weakref__",)
