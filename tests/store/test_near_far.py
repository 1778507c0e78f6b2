"""A near pool before a far one: who is asked, what is copied, and what the death of either costs.

Over 400 lines because all cases share one pair of pools and what reads them.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool import _native, open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.batch import LookupBatch
from kvpool.store.near_far import NearFarStore
from kvpool.store.store import Store
from kvpool.store.url import StoreURL
from tests.support.conformance import (
    MIB,
    NAMESPACE,
    OpenStore,
    StoreConformance,
    hashed,
    key,
    keys,
    lookup_group,
    payload,
)
from tests.support.deadlines import ends_within, eventually
from tests.support.file_record import read_record, write_record
from tests.support.file_user import record_files, run_user
from tests.support.servers import ON_VALKEY, Server, running

ON_VALKEY_OF_ITS_OWN = pytest.mark.parametrize("own_server", ["valkey-server"], indirect=True)
NBYTES = 4096
SOON_S = 5.0  # a small part of what a dead server would cost
VALUES = [payload(number, NBYTES) for number in range(20)]


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Store]:
    """The far pool, as another host has it."""
    with open_store(f"file://{tmp_path}/far?capacity=256MiB") as store:
        yield store


@pytest.fixture
def both(near: Path, far: Store, tmp_path: Path) -> Iterator[Store]:
    with open_store([f"file://{near}?capacity=256MiB", f"file://{tmp_path}/far?capacity=256MiB"]) as store:
        yield store


@pytest.fixture
def before_server(near: Path, own_server: Server) -> Iterator[Store]:
    with open_store([f"file://{near}?capacity=256MiB", own_server.url]) as store:
        yield store


@pytest.mark.parametrize("near_in", ["/dev/shm", None])
@pytest.mark.parametrize("far_is", ["server", "disk"])
def test_memory_and_disks_in_any_order(tmp_path: Path, near_in: str | None, far_is: str) -> None:
    """Near on tmpfs or a disk, far on a disk or a server; near keeps a third, and what it evicts comes from far."""
    names, values = keys(24), [payload(number, MIB) for number in range(24)]
    with contextlib.ExitStack() as opened:
        near = opened.enter_context(tempfile.TemporaryDirectory(dir=near_in or tmp_path))
        far = f"file://{tmp_path}/far?capacity=256MiB"
        if far_is == "server":
            far = opened.enter_context(running("valkey-server", tmp_path)).url
        store = opened.enter_context(open_store([f"file://{near}/near?capacity=8MiB", far]))
        for name, value in zip(names, values, strict=True):
            assert store.put_many([name], [value]) == [True]
            assert all_went_far(store)
        for _ in range(2):
            targets = [bytearray(MIB) for _ in values]
            assert store.get_many_into(names, targets) == [True] * len(names)
            assert targets == values
        found = store.counters()
        assert min(found["near_hits"], found["far_hits"], found["evicted"]) > 0
        assert found["damaged"] == found["lost"] == 0


def got(store: Store, numbers: range, timeout_s: float = 5.0) -> list[bytes | None]:
    targets = [bytearray(NBYTES) for _ in numbers]
    found = store.get_many_into([key(number) for number in numbers], targets, timeout_s=timeout_s)
    return [bytes(target) if hit else None for hit, target in zip(found, targets, strict=True)]


def all_went_far(store: Store) -> bool:
    return eventually(lambda: store.counters()["behind_waiting"] == 0)


class NearFarConformance(StoreConformance):
    def settle(self, store: Store) -> None:
        assert all_went_far(store)

    @pytest.mark.parametrize("asked_nbytes", [1, 5000])
    def test_wrong_length_is_a_miss_and_the_record_goes(self, store: Store, asked_nbytes: int) -> None:
        store.put_many([key(1)], [bytes(100)])
        self.settle(store)
        assert store.get_many_into([key(1)], [bytearray(asked_nbytes)]) == [False]
        assert store.contains_many([key(1)]) == [False]
        assert store.counters()["damaged"] == 2, "one in each"


class TestNearBeforeFar(NearFarConformance):
    @pytest.fixture
    def open_one(self, tmp_path: Path) -> OpenStore:
        near, far = (f"file://{tmp_path}/{name}?capacity=" for name in ("near", "far"))
        return lambda nbytes: open_store([f"{near}{nbytes}", f"{far}{nbytes}"])


@ON_VALKEY
class TestNearBeforeValkey(NearFarConformance):
    test_ten_thousand_keys = None  # type: ignore[assignment]

    @pytest.fixture
    def open_one(self, server: Server, tmp_path: Path) -> OpenStore:
        def open_one(nbytes: int) -> Store:
            server.client.config_set("maxmemory", server.info("used_memory") + nbytes)
            return open_store([f"file://{tmp_path}/near?capacity={nbytes}", server.url])

        return open_one


# ---------------------------------------------------------------------- what goes where


def test_copies_keep_the_name_of_the_writer(both: Store, far: Store, near: Path, tmp_path: Path) -> None:
    """Of far, of what a get then copies near, and of what another host copies near."""

    def writer_in(store: Store) -> bytes:
        got = store.submit_get([key(1)], [bytearray(NBYTES)])
        assert got.wait() == [True]
        return got.writers()[0]

    both.writer = b"who computed it_"
    both.put_many([key(1)], VALUES[1:2])
    assert all_went_far(both)
    assert writer_in(far) == b"who computed it_"
    with open_store(
        [f"file://{tmp_path}/nearer?capacity=256MiB", f"file://{tmp_path}/far?capacity=256MiB"]
    ) as another:
        another.writer = b"who copied it___"
        assert [writer_in(another) for _ in range(2)] == [b"who computed it_"] * 2
        assert eventually(lambda: another.counters()["filled"] >= 1)
    with open_store(f"file://{tmp_path}/nearer?capacity=256MiB") as nearer:
        assert writer_in(nearer) == b"who computed it_"


def test_what_is_put_goes_far_behind_the_put(both: Store, far: Store, near: Path) -> None:
    both.put_many(keys(20), VALUES)
    assert len(record_files(near)) == 20
    assert all_went_far(both)
    assert got(far, range(20)) == VALUES
    assert both.counters()["behind"] == 20


def test_what_was_used_twice_goes_far_where_that_is_asked_for(near: Path, far: Store, tmp_path: Path) -> None:
    urls = [f"file://{near}?capacity=256MiB&far=reused", f"file://{tmp_path}/far?capacity=256MiB"]
    with open_store(urls) as store:
        store.submit_put_absent(keys(20), VALUES).wait()
        assert got(store, range(4)) == VALUES[:4]
        assert got(store, range(4)) == VALUES[:4]
        store.submit_put_absent([key(7)], [VALUES[7]]).wait()  # another engine has computed it
        assert all_went_far(store)
        assert store.counters()["behind"] == 5
    assert far.contains_many(keys(20)) == [number < 4 or number == 7 for number in range(20)]


def test_what_a_get_found_far_is_near_afterwards(both: Store, far: Store, near: Path) -> None:
    far.put_many(keys(20), VALUES)
    assert got(both, range(20)) == VALUES
    assert eventually(lambda: both.counters()["filled"] == 20)
    far.delete_many(keys(20))
    assert got(both, range(20)) == VALUES
    counted = both.counters()
    assert (counted["near_hits"], counted["far_hits"]) == (20, 20)
    assert len(record_files(near)) == 20


def test_a_lookup_goes_on_far_where_near_has_a_gap(both: Store, far: Store) -> None:
    group = lookup_group(0, 12)
    names = NAMESPACE.keys([group.hashes[at : at + 32] for at in range(0, len(group.hashes), 32)], 0, 0)
    near_only = open_store_near(both)
    near_only.put_many([names[number] for number in (0, 1, 2, 5, 6, 11)], VALUES[:6])
    far.put_many([names[number] for number in (3, 4, 7, 9)], VALUES[:4])
    (found,) = both.submit_lookup(NAMESPACE, [group]).records()
    assert found[:8] == bytes([1] * 8)
    assert found[8] == 0


def open_store_near(both: Store) -> Store:
    assert isinstance(both, NearFarStore)
    return both._near


def test_results_say_what_was_near(both: Store, far: Store) -> None:
    names = NAMESPACE.keys([hashed(number) for number in range(3)], 0, 0)
    both.put_many(names[:1], VALUES[:1])
    far.put_many(names[1:2], VALUES[1:2])
    lookup = both.submit_lookup(NAMESPACE, [lookup_group(0, 3)])
    assert lookup.records() == [b"\1\1\0"]
    assert lookup.near() == [b"\1\0\0"]
    read = both.submit_get(names, [bytearray(NBYTES) for _ in names])
    assert list(read.results()) == [_native.NEAR, _native.OK, _native.MISS]
    assert read.wait() == [True, True, False]


def test_a_deleted_value_is_gone_in_both_and_does_not_come_back(both: Store, far: Store) -> None:
    for _ in range(20):  # in the middle of its way far, too
        both.put_many(keys(20), VALUES)
        assert both.delete_many(keys(20)) == 20
        assert all_went_far(both)
        assert eventually(lambda: far.contains_many(keys(20)) == [False] * 20)
        assert both.contains_many(keys(20)) == [False] * 20
    assert both.counters()["lost"] == 0, "a deleted value is none"
    far.put_many(keys(3), VALUES[:3])
    assert both.delete_many(keys(4)) == 3


def test_a_damaged_value_near_is_read_far(both: Store, near: Path) -> None:
    both.put_many(keys(3), VALUES[:3])
    assert all_went_far(both)
    for file in record_files(near):
        content = bytearray(read_record(file))
        content[-1] ^= 1
        write_record(file, content)
    assert got(both, range(3)) == VALUES[:3]
    assert both.counters()["damaged_checksum"] == 3
    assert both.counters()["far_hits"] == 3


def test_values_larger_than_the_memory_of_copies_go_one_by_one(both: Store, far: Store) -> None:
    values = [payload(number, 80 * MIB) for number in range(2)]
    both.put_many(keys(2), values)
    assert all_went_far(both)
    target = bytearray(80 * MIB)
    for number in range(2):
        assert far.get_many_into([key(number)], [target]) == [True]
        assert target == values[number]


def test_a_close_waits_for_what_is_on_its_way(near: Path, far: Store, tmp_path: Path) -> None:
    with open_store([f"file://{near}?capacity=256MiB", f"file://{tmp_path}/far?capacity=256MiB"]) as store:
        store.put_many(keys(20), VALUES)
    assert far.contains_many(keys(20)) == [True] * 20


def test_a_writer_that_is_killed_leaves_whole_records_for_its_host_and_the_fleet(
    near: Path, far: Store, tmp_path: Path
) -> None:
    """In the middle of puts and of copies behind them: the next engine of the host finds near what was stored."""
    urls = [f"file://{near}?capacity=256MiB", f"file://{tmp_path}/far?capacity=256MiB"]
    writer = run_user("put_for_ever", " ".join(urls))
    assert writer.stdout is not None
    assert writer.stdout.readline() == "begun\n"
    nbytes = 8 * MIB // 10
    targets = [bytearray(nbytes) for _ in range(20)]
    assert eventually(lambda: any(far.contains_many(keys(20))))
    writer.kill()
    writer.communicate()
    with open_store(urls) as of_host:
        for store, has_all in ((far, False), (of_host, True)):
            found = store.get_many_into(keys(20), targets)
            for hit, target in zip(found, targets, strict=True):
                assert not hit or target == target[:1] * nbytes
            assert all(found) or not has_all, "what was put is near, whether it went far or not"
            assert store.counters()["damaged"] == 0
    with open_store(urls[0]) as store:
        assert store.put_many(keys(20), VALUES) == [True] * 20
    assert list((near / "tmp").iterdir()) == []


# ---------------------------------------------------------------------- what comes near before it is asked for


def prefetched(store: Store, count: int, timeout_s: float = 5.0) -> LookupBatch:
    group = lookup_group(0, count)._replace(prefetch_nbytes=NBYTES)
    return store.submit_lookup(NAMESPACE, [group], timeout_s=timeout_s)


def names_of(count: int) -> list[str]:
    group = lookup_group(0, count)
    return NAMESPACE.keys([group.hashes[at : at + 32] for at in range(0, len(group.hashes), 32)], 0, 0)


def test_a_prefetch_copies_near_what_only_far_has(both: Store, far: Store) -> None:
    names, near = names_of(12), open_store_near(both)
    near.put_many(names[:3], VALUES[:3])
    far.put_many(names[2:8], VALUES[2:8])
    batch = prefetched(both, 12)
    batch.results()
    assert batch.prefetched() == [5], "neither what was near, nor what far lacks"
    assert near.contains_many(names) == [True] * 8 + [False] * 4
    far.delete_many(names)
    target = bytearray(NBYTES)
    for number in range(8):
        assert both.get_many_into([names[number]], [target]) == [True]
        assert target == VALUES[number]
    assert both.counters()["prefetched"] == 5


@ON_VALKEY_OF_ITS_OWN
def test_prefetches_of_one_value_read_it_once(before_server: Store, own_server: Server) -> None:
    """All four have heard that near lacks it before far answers."""
    with open_store(own_server.url) as far:
        far.put_many(names_of(20), VALUES)
        before_server.put_many([key(20)], VALUES[:1])
        assert all_went_far(before_server)
    own_server.stop()
    try:
        batches = [prefetched(before_server, 20, timeout_s=60) for _ in range(4)]
        near = open_store_near(before_server)
        assert eventually(lambda: near.counters()["contains_misses"] == 80)
        # Answers of near are taken in their order.
        assert got(before_server, range(20, 21), timeout_s=60) == VALUES[:1]
    finally:
        own_server.go_on()
    for batch in batches:
        batch.results()
    assert [batch.prefetched() for batch in batches] == [[20]] * 4
    assert isinstance(before_server, NearFarStore)
    assert before_server._far.counters()["get_hits"] == 20


def test_a_prefetch_of_more_than_the_memory_of_copies_goes_on_as_it_ends(both: Store, far: Store) -> None:
    values = [payload(number, 30 * MIB) for number in range(4)]
    far.put_many(names_of(4), values)
    group = lookup_group(0, 4)._replace(prefetch_nbytes=30 * MIB)
    batch = both.submit_lookup(NAMESPACE, [group], timeout_s=60)
    batch.results()
    assert batch.prefetched() == [4]


@pytest.mark.parametrize("by", ["prefetch", "get"])
def test_what_is_deleted_does_not_come_near(both: Store, far: Store, by: str) -> None:
    names = names_of(20)
    for _ in range(20):  # in the middle of its way
        far.put_many(names, VALUES)
        buffers = [bytearray(NBYTES) for _ in names]
        batch = prefetched(both, 20) if by == "prefetch" else both.submit_get(names, buffers)
        both.delete_many(names)
        batch.wait()
        assert eventually(lambda: open_store_near(both).contains_many(names) == [False] * 20)


@ON_VALKEY_OF_ITS_OWN
def test_a_prefetch_from_a_stopped_far_pool_is_given_up_at_once(
    before_server: Store, own_server: Server
) -> None:
    with open_store(own_server.url) as far:
        far.put_many(names_of(20), VALUES)
        before_server.put_many([key(number) for number in range(20, 23)], VALUES[:3])
        assert all_went_far(before_server)
    own_server.stop()
    try:
        with ends_within(SOON_S):
            batch = prefetched(before_server, 20, timeout_s=60)
            assert got(before_server, range(20, 23), timeout_s=60) == VALUES[:3]
            batch.cancel()
            assert eventually(batch.done)
            assert batch.prefetched() == [0]
    finally:
        own_server.go_on()
    batch = prefetched(before_server, 20, timeout_s=60)
    batch.results()
    assert batch.prefetched() == [20]


# ---------------------------------------------------------------------- when one of them is dead


@ON_VALKEY_OF_ITS_OWN
def test_what_near_has_asks_a_stopped_far_pool_nothing(before_server: Store, own_server: Server) -> None:
    before_server.put_many(keys(10), VALUES[:10])
    assert all_went_far(before_server)
    own_server.stop()
    try:
        with ends_within(SOON_S):
            before_server.submit_put_absent(keys(20), VALUES, timeout_s=60).wait()
            assert got(before_server, range(20), timeout_s=60) == VALUES
            assert before_server.contains_many(keys(20), timeout_s=60) == [True] * 20
        # What neither answers in time is a miss of presence, beside what near has.
        group = lookup_group(0, 4)
        names = NAMESPACE.keys([group.hashes[at : at + 32] for at in range(0, 128, 32)], 0, 0)
        open_store_near(before_server).put_many(names[:2], VALUES[:2])
        (found,) = before_server.submit_lookup(NAMESPACE, [group], timeout_s=2).records()
        assert found == bytes([1, 1, 0, 0])
    finally:
        own_server.go_on()
    assert eventually(lambda: before_server.counters()["behind_waiting"] == 0, within_s=60)
    with open_store(own_server.url) as far:
        assert far.contains_many(keys(20)) == [True] * 20, "it goes on where it stopped"


@ON_VALKEY_OF_ITS_OWN
def test_what_waits_for_a_stopped_far_pool_keeps_nobody_from_near(
    before_server: Store, own_server: Server
) -> None:
    before_server.put_many(keys(10), VALUES[:10])
    assert all_went_far(before_server)
    own_server.stop()
    try:
        with ends_within(SOON_S):
            waiting = [
                before_server.submit_get([key(100 + number)], [bytearray(NBYTES)], timeout_s=60)
                for number in range(600)
            ]
            assert got(before_server, range(10), timeout_s=60) == VALUES[:10]
            before_server.submit_put_absent(keys(20), VALUES, timeout_s=60).wait()
        for batch in waiting:
            batch.abandon()
    finally:
        own_server.go_on()


@ON_VALKEY_OF_ITS_OWN
def test_copies_wait_for_a_dead_far_pool(before_server: Store, own_server: Server) -> None:
    own_server.kill()
    before_server.put_many(keys(20), VALUES)
    assert eventually(lambda: before_server.counters()["far_faults"] > 0)
    assert before_server.counters()["behind_waiting"] == 20
    own_server.start()
    assert eventually(lambda: before_server.counters()["behind"] == 20, within_s=60)
    with open_store(own_server.url) as far:
        assert got(far, range(20)) == VALUES


@ON_VALKEY_OF_ITS_OWN
def test_a_get_that_needs_a_dead_far_pool_says_so(before_server: Store, own_server: Server) -> None:
    before_server.put_many(keys(1), VALUES[:1])
    own_server.kill()
    assert got(before_server, range(1)) == VALUES[:1]
    with pytest.raises(StoreUnavailable):
        got(before_server, range(2))


def test_without_its_directory_near_is_passed_over(both: Store, far: Store, near: Path) -> None:
    far.put_many(keys(5), VALUES[:5])
    shutil.rmtree(near)
    near.touch()  # a file: no directory can be made there again
    assert got(both, range(5)) == VALUES[:5]
    both.put_many([key(9)], [VALUES[9]])
    assert far.contains_many([key(9)]) == [True], "it went far at once"
    assert both.counters()["near_faults"] > 0


def test_a_full_far_pool_refuses_copies_and_no_put(near: Path, tmp_path: Path) -> None:
    with open_store([f"file://{near}?capacity=256MiB", f"file://{tmp_path}/far?capacity=1MiB"]) as store:
        large = payload(1, 2 * MIB)
        assert store.put_many([key(1)], [large]) == [True]
        assert all_went_far(store)
        assert store.counters()["no_room_far"] == 1
        target = bytearray(2 * MIB)
        assert store.get_many_into([key(1)], [target]) == [True]
        assert target == large


# ---------------------------------------------------------------------- its URL


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ("valkey://h file:///a/b", "a near pool is a directory of the host"),
        ("file:///a/b valkey://h?client=redis", "only the native client"),
        ("file:///a/b file:///a//b", "are the same directory"),
        ("file:///a/b file:///c/d file:///e/f", "one URL, or two"),
        ("file:///a/b file:///c/d?far=all", "in the first URL"),
        ("file:///a/b?far=some valkey://h", "known are all, reused"),
    ],
)
def test_two_urls_that_are_no_near_and_far_pool(urls: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StoreURL.parse(urls)


def test_one_directory_under_two_names_is_no_near_and_far_pool(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    with pytest.raises(ConfigError, match="are the same directory"):
        open_store([f"file://{tmp_path}/pool", f"file://{tmp_path}/link"])


def test_no_text_of_two_urls_shows_the_password(tmp_path: Path) -> None:
    for between in (" ", ",", "  ", "\n"):
        with pytest.raises(ConfigError) as refused:
            open_store(f"file://{tmp_path}/near{between}valkey://:geheim@h:1?connections=x")
        assert "geheim" not in str(refused.value)
