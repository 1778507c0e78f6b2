"""The file store: records, capacity, announcements, and directories that are not ours.

Over 400 lines because what may lie in a directory of others is one long list.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from kvpool import open_store
from kvpool.errors import ConfigError, StoreUnavailable
from kvpool.store.file import ORPHAN_AGE_S, FileDocuments, FileStore
from kvpool.store.store import Store
from tests.support.conformance import (
    MIB,
    EvictionConformance,
    OpenStore,
    StoreConformance,
    key,
    keys,
    payload,
)
from tests.support.deadlines import eventually
from tests.support.file_record import file_nbytes, held_nbytes, read_record, write_record
from tests.support.file_user import (
    HOT,
    RECORD_NBYTES,
    REPOSITORY,
    SMALL_CAPACITY_NBYTES,
    record_files,
    run_user,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with FileStore(str(root), 64 * MIB, 2) as store:
        yield store


class TestFileStore(EvictionConformance, StoreConformance):
    @pytest.fixture
    def open_one(self, root: Path) -> OpenStore:
        return lambda capacity_nbytes: FileStore(str(root), capacity_nbytes, 2)

    @pytest.fixture
    def store(self, open_one: OpenStore) -> Iterator[Store]:
        with open_one(256 * MIB) as store:
            yield store


def held_and_counted_nbytes(root: Path) -> tuple[int, int] | None:
    """Sizes of all files and the shared counter, under the lock of an eviction pass: nothing moves meanwhile.

    None: it took so long that others took this process for a stopped one, and count anew.
    """
    with (root / "usage").open("rb") as usage:

        def locked() -> bool:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(usage, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        assert eventually(locked)
        files = [path for folder in ("tmp", "free", "blocks") for path in (root / folder).rglob("*")]
        held = sum(held_nbytes(path) for path in files if path.is_file())
        counts = usage.read()[24:]  # bytes << 16 | check, for each bucket, tmp/ and free/
        if (root / "usage").stat().st_ino != os.fstat(usage.fileno()).st_ino:
            return None
        return held, sum(int.from_bytes(counts[at + 2 : at + 8], "little") for at in range(0, len(counts), 8))


# ---------------------------------------------------------------------- what the records must survive


def test_a_damaged_record_is_a_miss_and_goes(root: Path, store: Store) -> None:
    """Field by field: tests/native/store/file_test.cpp."""
    store.put_many([key(1)], [bytes(1000)])
    (path,) = record_files(root)
    record = bytearray(read_record(path))
    record[-1] ^= 0x10
    write_record(path, record)
    assert store.get_many_into([key(1)], [bytearray(1000)]) == [False]
    assert record_files(root) == []
    assert store.counters()["damaged"] == 1


def test_a_record_in_another_records_place_is_a_miss(root: Path, store: Store) -> None:
    store.put_many([key(0)], [bytes(1000)])
    (first,) = record_files(root)
    record = first.read_bytes()
    store.put_many([key(6)], [b"!" * 1000])  # the same group and rank
    (second,) = [path for path in record_files(root) if path != first]
    second.write_bytes(record)
    assert store.get_many_into([key(0), key(6)], [bytearray(1000), bytearray(1000)]) == [True, False]


def test_a_killed_writer_leaves_nothing_torn(root: Path) -> None:
    writer = run_user("put_for_ever", f"file://{root}?capacity=256MiB&threads=4")
    assert writer.stdout is not None
    assert writer.stdout.readline() == "begun\n"
    with FileStore(str(root), 256 * MIB, 2) as store:
        nbytes = 8 * MIB // 10
        targets = [bytearray(nbytes) for _ in range(20)]
        for _ in range(3):  # while it writes
            for hit, target in zip(store.get_many_into(keys(20), targets), targets, strict=True):
                assert hit
                assert target == target[:1] * nbytes
        writer.kill()
        writer.communicate()
        for hit, target in zip(store.get_many_into(keys(20), targets), targets, strict=True):
            assert hit
            assert target == target[:1] * nbytes
        assert store.counters()["damaged"] == 0
        assert store.put_many(keys(20), [b"anew"] * 20) == [True] * 20
    with FileStore(str(root), 256 * MIB, 2):
        assert len(record_files(root)) == 20
        assert list((root / "tmp").iterdir()) == []


# ---------------------------------------------------------------------- several processes


def test_the_capacity_and_what_is_used_hold_under_many_writers(root: Path) -> None:
    """A put reserves its bytes before it writes: the files never exceed the capacity, by nothing."""
    writers = 4
    with FileStore(str(root), SMALL_CAPACITY_NBYTES, 1) as store:
        names, values = [key(number) for number in HOT], [payload(number, 10_000) for number in HOT]
        assert all(store.put_many(names, values))
        users = [run_user("fill", str(root), str(number * 1000)) for number in range(writers)]
        looks, is_counted = 0, True
        try:
            while any(user.poll() is None for user in users):
                if is_counted and (look := held_and_counted_nbytes(root)) is not None:
                    held, counted = look
                    assert held <= counted <= SMALL_CAPACITY_NBYTES
                    looks += 1
                else:
                    is_counted = False
                threading.Event().wait(0.01)  # the writers need the lock, too
        finally:
            for user in users:
                if looks == 0 or user.poll() is None:
                    user.kill()
            outs = [user.communicate(timeout=120) for user in users]
        assert [user.returncode for user in users] == [0] * writers, outs
        assert looks > 3 or not is_counted
        targets = [bytearray(10_000) for _ in names]
        assert store.get_many_into(names, targets) == [True] * len(names)
        assert targets == values

        # Each record was evicted once, and no pass followed another for the same need: each frees a tenth.
        evicted, passes = (sum(int(out.split()[column]) for out, _ in outs) for column in (0, 1))
        assert evicted + len(record_files(root)) == writers * 400 + len(names)
        opened = writers  # each passes once when it opens
        assert passes - opened <= evicted * RECORD_NBYTES / (SMALL_CAPACITY_NBYTES / 10) + 1


@pytest.mark.parametrize("nbytes", [0, 100, 4095])
def test_a_record_that_was_cut_has_no_negative_size(root: Path, store: Store, nbytes: int) -> None:
    store.put_many([key(1)], [payload(1, 10_000)])
    (path,) = record_files(root)
    os.truncate(path, nbytes)
    assert [[block.nbytes >= 0 for block in found] for found in store.scan()] == [[True]]


def test_what_was_put_outlives_the_process(root: Path) -> None:
    with open_store(f"file://{root}?capacity=8MiB") as store:
        store.put_many([key(1)], [b"value"])
        store.announce("kvpool:t:x", b"hello", lease_s=60)
    with open_store(f"file://{root}?capacity=8MiB") as store:
        assert store.get_many_into([key(1)], [bytearray(5)]) == [True]
        assert store.announcements("") == {"kvpool:t:x": b"hello"}


# ---------------------------------------------------------------------- what may happen to the directory


def test_the_directory_is_removed_while_open(root: Path, store: Store) -> None:
    store.put_many(keys(3), [b"value"] * 3)
    store.announce("kvpool:t:x", b"hello", lease_s=60)
    shutil.rmtree(root)
    assert store.get_many_into(keys(3), [bytearray(5) for _ in range(3)]) == [False] * 3
    assert store.contains_many(keys(3)) == [False] * 3
    assert store.delete_many(keys(3)) == 0
    assert store.announcements("") == {}
    assert store.put_many([key(1)], [b"value"]) == [True]
    assert store.get_many_into([key(1)], [bytearray(5)]) == [True]
    store.announce("kvpool:t:x", b"hello", lease_s=60)
    assert store.announcements("") == {"kvpool:t:x": b"hello"}


def test_the_directory_becomes_a_file_while_open(root: Path, store: Store) -> None:
    store.put_many([key(1)], [b"value"])
    shutil.rmtree(root)
    root.write_text("no directory")
    with pytest.raises(StoreUnavailable, match=rf"^file://{root}: put of 1 keys: put .*: Not a directory"):
        store.put_many([key(1)], [b"value"])
    with pytest.raises(StoreUnavailable, match=rf"^file://{root}: cannot keep an announcement"):
        store.announce("kvpool:t:x", b"hello", lease_s=60)


def test_a_directory_that_may_not_be_written(everyones: Path) -> None:
    directory = everyones / "pool"
    directory.mkdir(mode=0o555)
    user = run_user("open_as_nobody", str(directory))
    out, err = user.communicate(timeout=60)
    assert out == (
        f"ConfigError: file://{directory}: cannot write: Permission denied; "
        "give this user write access or choose another directory\n"
    ), err


@pytest.mark.parametrize("below", ["", "/deeper/still"])
def test_a_path_that_is_a_file(tmp_path: Path, below: str) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises(ConfigError) as caught:
        FileStore(f"{path}{below}", MIB, 1)
    assert (
        str(caught.value)
        == f"file://{path}{below}: cannot write: Not a directory; choose a directory, not a file"
    )
    assert path.read_text() == "text"


def test_a_directory_with_odd_characters(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/a%20b%3F%23%C3%BC?capacity=1MiB&threads=3") as store:
        store.put_many([key(1)], [b"x"])
        assert store.contains_many([key(1)]) == [True]
    assert record_files(tmp_path / "a b?#ü")


def test_a_fault_is_no_miss(root: Path, store: Store) -> None:
    store.put_many([key(1)], [b"value"])
    (path,) = record_files(root)
    directory = path.parent
    shutil.rmtree(directory)
    directory.write_text("in the way")
    with pytest.raises(StoreUnavailable, match=rf"^file://{root}: get of 2 keys: get .*Not a directory"):
        store.get_many_into(keys(2), [bytearray(5), bytearray(5)])
    assert store.counters()["faults"] == 1
    assert store.put_many([key(2)], [b"value"]) == [True]


@pytest.mark.parametrize("which", ["change", "counts", "eviction"])
def test_a_process_that_is_stopped_with_the_lock_stops_nobody(root: Path, which: str) -> None:
    """As by SIGSTOP, a frozen container or a debugger: the kernel keeps its lock."""
    values = [bytes(100_000)] * 8
    with FileStore(str(root), MIB, 2) as store:
        assert store.put_many(keys(8), values) == [True] * 8
        holder = run_user("stop_with_lock", str(root), which)
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            stat = Path(f"/proc/{holder.pid}/stat")
            assert eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
            for first in range(100, 124, 8):
                numbers = range(first, first + 8)
                assert store.put_many([key(n) for n in numbers], values, timeout_s=30) == [True] * 8
            with FileStore(str(root), MIB, 1) as later:
                assert later.put_many([key(200)], values[:1], timeout_s=30) == [True]
        finally:
            holder.send_signal(signal.SIGCONT)
            _, said = holder.communicate(timeout=60)
        assert (holder.returncode, said) == (0, "")
        assert store.counters()["evicted"] >= 16
        assert store.put_many(keys(8), values, timeout_s=30) == [True] * 8
        held, counted = held_and_counted_nbytes(root)
        assert held == counted <= MIB


def test_a_deadline_or_a_wait_that_is_too_short(root: Path) -> None:
    with FileStore(str(root), MIB, 1) as store, (root / "usage").open("rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)  # as another process that evicts: puts wait for it
        late = store.submit_put([key(1)], [b"value"], timeout_s=0.02)
        with pytest.raises(StoreUnavailable, match=r"put of 1 keys: no answer within 0\.02 s"):
            late.wait()
        waited_for = store.submit_put([key(2)], [b"value"], timeout_s=60)
        with pytest.raises(StoreUnavailable, match="still under way"):
            waited_for.wait(0.001)
        fcntl.flock(usage, fcntl.LOCK_UN)
        assert waited_for.wait() == [True]
        assert store.counters()["timed_out"] == 1
        assert store.contains_many(keys(3)) == [False, False, True]


def test_a_store_does_not_survive_a_fork(root: Path, store: Store) -> None:
    program = (
        "import os, sys\n"
        "from kvpool.store.file import FileStore\n"
        "from kvpool.errors import StoreUnavailable\n"
        f"store = FileStore({str(root)!r}, 1 << 20, 1)\n"
        "if (child := os.fork()) == 0:\n"
        "    try:\n"
        "        store.contains_many([])\n"
        "    except StoreUnavailable as error:\n"
        "        os._exit(7 if 'fork' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "store.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------- whose directory it is


def refused(path: Path, capacity_nbytes: int | None = MIB) -> str:
    with pytest.raises(ConfigError) as caught:
        FileStore(str(path), capacity_nbytes, 1)
    text = str(caught.value)
    assert text.startswith(f"file://{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"file://{path}: ")


def tree(path: Path) -> dict[str, bytes | None]:
    return {
        str(one.relative_to(path)): one.read_bytes() if one.is_file() else None for one in path.rglob("*")
    }


def foreign_directory(path: Path) -> Path:
    """Everything in it has a name that a pool has, too."""
    for folder in ("tmp", "announcements", "blocks"):
        (path / folder).mkdir(parents=True)
    (path / "tmp" / "thesis.txt").write_text("years of work")
    (path / "tmp" / "1.2.3.4").write_text("of another program")
    (path / "usage").write_text("how to use it")
    old = path / "announcements" / "2019.txt"
    old.write_text("party")
    os.utime(old, (0, 0))
    return path


@pytest.mark.parametrize("capacity_nbytes", [MIB, None])
def test_a_foreign_directory_is_refused_and_nothing_in_it_is_touched(
    tmp_path: Path, capacity_nbytes: int | None
) -> None:
    place = foreign_directory(tmp_path / "home")
    before = tree(place)
    says = refused(place, capacity_nbytes)
    assert "it is not empty (" in says
    assert "name a directory that is empty or not there yet" in says
    assert tree(place) == before


def test_an_empty_directory_is_made_a_pool_and_says_so(root: Path) -> None:
    root.mkdir()
    (root / "lost+found").mkdir()  # a file system of its own
    with FileStore(str(root), MIB, 1) as store:
        assert store.put_many([key(1)], [b"x"]) == [True]
    marker = (root / "kvpool-pool").read_text()
    assert marker.startswith("kvpool pool, format 2\n")
    assert "Delete the whole directory" in marker


def test_a_missing_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    FileStore(str(tmp_path / "a" / "pool"), MIB, 1).close()
    modes = {
        str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")
    }
    assert modes == {
        "a/pool": 0o700, "a/pool/blocks": 0o700, "a/pool/kvpool-pool": 0o600,
        "a/pool/capacity": 0o600, "a/pool/tmp": 0o700, "a/pool/free": 0o700,
        "a/pool/usage": 0o600,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        (b"kvpool pool, format 3\n", "it is a pool of format 3, and this kvpool has format 2"),
        (b"kvpool pool, format 1\nx", "it is a pool of format 1"),
        (b"kvpool pool, for", "is cut short"),
        (b"", "is cut short"),
        (b"kvpool pool, format two\n", "none that kvpool wrote"),
        (b"kvpool pool, format 3", "none that kvpool wrote"),
        (b"\0" * 4097, "none that kvpool wrote"),
        (b"\xff\xfe", "none that kvpool wrote"),
    ],
)
@pytest.mark.parametrize("capacity_nbytes", [MIB, None])
def test_a_marker_that_is_not_ours_is_refused(
    tmp_path: Path, marker: bytes, says: str, capacity_nbytes: int | None
) -> None:
    place = foreign_directory(tmp_path / "home")
    (place / "kvpool-pool").write_bytes(marker)
    before = tree(place)
    assert says in refused(place, capacity_nbytes)
    assert tree(place) == before


def test_a_marker_that_is_a_link_a_folder_a_pipe_or_huge_is_refused(root: Path, tmp_path: Path) -> None:
    FileStore(str(root), MIB, 1).close()
    marker = root / "kvpool-pool"
    whole = tmp_path / "whole"
    marker.rename(whole)
    for make, remove in (
        (lambda: marker.symlink_to(whole), marker.unlink),
        (marker.mkdir, marker.rmdir),
        (lambda: os.mkfifo(marker), marker.unlink),
        (lambda: (marker.touch(), os.truncate(marker, 1 << 30)), marker.unlink),
    ):
        make()
        assert "none that kvpool wrote" in refused(root)
        remove()
    whole.rename(marker)
    FileStore(str(root), MIB, 1).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a link to another user")
@pytest.mark.parametrize("place", ["link", "link/pool", "link/not/yet/there", "mine/pool"])
@pytest.mark.parametrize("capacity_nbytes", [MIB, None])
def test_a_link_of_another_user_on_the_way_is_refused(
    tmp_path: Path, place: str, capacity_nbytes: int | None
) -> None:
    """Who made it decides where the pool is, and may turn it to elsewhere later."""
    (tmp_path / "real").mkdir()
    FileStore(str(tmp_path / "real" / "pool"), MIB, 1).close()
    (tmp_path / "link").symlink_to("real")
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    (tmp_path / "mine").symlink_to("link")
    before = tree(tmp_path / "real")
    assert "link is a symbolic link of user 65534" in refused(tmp_path / place, capacity_nbytes)
    assert tree(tmp_path / "real") == before
    os.chown(tmp_path / "link", 0, 0, follow_symlinks=False)
    FileStore(str(tmp_path / "mine" / "pool"), MIB, 1).close()


def test_a_maker_that_was_killed_is_finished_by_the_next(root: Path) -> None:
    FileStore(str(root), MIB, 1).close()
    whole = (root / "kvpool-pool").read_bytes()
    shutil.rmtree(root)
    for cut in range(len(whole)):
        root.mkdir()
        (root / "kvpool-pool").write_bytes(whole[:cut])
        FileStore(str(root), MIB, 1).close()
        if cut <= whole.index(b"\n"):
            assert (root / "kvpool-pool").read_bytes() == whole
        shutil.rmtree(root)


def test_processes_that_make_the_pool_at_once_all_succeed(tmp_path: Path) -> None:
    for attempt in range(30):
        root, failed = tmp_path / str(attempt), []
        barrier = threading.Barrier(6)

        def make(
            root: Path = root, failed: list[BaseException] = failed, barrier: threading.Barrier = barrier
        ) -> None:
            try:
                barrier.wait()
                FileStore(str(root), MIB, 1).close()
            except BaseException as error:
                failed.append(error)

        makers = [threading.Thread(target=make) for _ in range(6)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        assert not failed


@pytest.mark.parametrize("part", ["tmp", "blocks", "announcements", "usage"])
@pytest.mark.parametrize("kind", ["link", "pipe", "other"])
def test_a_part_of_the_pool_that_is_something_else_is_refused(
    root: Path, tmp_path: Path, part: str, kind: str
) -> None:
    """Through a link, files elsewhere would be written and deleted."""
    FileStore(str(root), MIB, 1).close()
    elsewhere = foreign_directory(tmp_path / "home")
    before = tree(elsewhere)
    place = root / part
    with contextlib.suppress(FileNotFoundError):
        place.unlink() if part == "usage" else place.rmdir()
    if kind == "link":
        place.symlink_to(elsewhere / part)
    elif kind == "pipe":
        os.mkfifo(place)
    elif part == "usage":
        place.mkdir()
    else:
        place.write_text("x")
    assert f"its {part} is no " in refused(root)
    assert tree(elsewhere) == before


def test_a_directory_that_everyone_may_write_is_refused(root: Path) -> None:
    root.mkdir()
    for mode in (0o777, 0o1777, 0o702):
        root.chmod(mode)
        assert "everyone may write in it: name a directory in it" in refused(root)
        assert list(root.iterdir()) == []
        FileStore(f"{root}/own", MIB, 1).close()
        shutil.rmtree(root / "own")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(root: Path) -> None:
    root.mkdir()
    os.chown(root, 65534, 65534)
    assert "it belongs to user 65534 and this process is user 0: name a directory in it" in refused(root)
    assert list(root.iterdir()) == []
    FileStore(f"{root}/own", MIB, 1).close()


def test_a_directory_that_a_group_shares_stays_so_whatever_the_umask(root: Path) -> None:
    root.mkdir()
    root.chmod(0o2770)
    old = os.umask(0o077)
    try:
        with FileStore(str(root), MIB, 1) as store:
            store.put_many([key(1)], [b"x"])
            store.announce("kvpool:t:x", b"hello", lease_s=60)
    finally:
        os.umask(old)
    folders = {path.stat().st_mode & 0o7777 for path in root.rglob("*") if path.is_dir()}
    files = {path.stat().st_mode & 0o777 for path in root.rglob("*") if path.is_file()}
    assert folders == {0o2770}
    assert files == {0o660}


def test_cutting_the_counts_kills_nobody(root: Path, store: Store) -> None:
    for number in range(50):
        os.truncate(root / "usage", 0)
        assert store.put_many([key(number)], [b"value"]) == [True]
        assert store.counters()["stored_nbytes"] == (number + 1) * file_nbytes(5)


def test_hits_are_about_those_of_an_exact_order(root: Path) -> None:
    """Requests distributed as Zipf's law says, beside a model that evicts the least recently used one exactly."""
    held, asked, value = 2000, 12_000, bytes(100)
    chance = random.Random(1)
    weights = [1 / (rank + 1) for rank in range(8000)]
    exact: dict[int, None] = {}
    hits = exact_hits = 0
    with FileStore(str(root), held * file_nbytes(100), 1) as store:
        for number in chance.choices(range(8000), weights, k=asked):
            exact_hits += number in exact
            exact.pop(number, None)
            exact[number] = None
            if len(exact) > held:
                del exact[next(iter(exact))]
            (hit,) = store.get_many_into([key(number)], [bytearray(100)])
            hits += hit
            if not hit:
                assert store.put_many([key(number)], [value]) == [True]
        assert store.counters()["evicted"] > held / 2
    assert hits > exact_hits * 0.97


# ---------------------------------------------------------------------- announcements on disk


def announcement_file(root: Path) -> Path:
    (path,) = (root / "announcements").iterdir()
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        b"x" * 200_000,
        msgpack.packb({"key": "kvpool:t:x", "document": b"forged", "expires_unix_s": "never"}),
        msgpack.packb({"key": "kvpool:t:other", "document": b"forged", "expires_unix_s": 1e12}),
        msgpack.packb({"key": "kvpool:t:x", "document": [[[[]]]], "expires_unix_s": 1e12}),
        msgpack.packb({"document": b"forged", "expires_unix_s": 1e12}),
        msgpack.packb({"key": "kvpool:t:x", "document": b"f", "expires_unix_s": 1e12})[:-2],
        msgpack.packb(msgpack.ExtType(5, b"x" * 100)),
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5000,
    ],
)
def test_an_unreadable_announcement_is_passed_over(root: Path, store: Store, content: bytes) -> None:
    store.announce("kvpool:t:x", b"hello", lease_s=60)
    announcement_file(root).write_bytes(content)
    assert store.announcements("") == {}
    store.announce("kvpool:t:x", b"hello again", lease_s=60)
    assert store.announcements("") == {"kvpool:t:x": b"hello again"}


def test_an_expired_announcement_is_removed_by_the_next_new_one(root: Path, store: Store) -> None:
    store.announce("kvpool:t:x", b"hello", lease_s=60)
    path = announcement_file(root)
    fields = msgpack.unpackb(path.read_bytes())
    assert fields.keys() == {"key", "document", "expires_unix_s"}
    assert 50 < fields["expires_unix_s"] - time.time() <= 60
    path.write_bytes(msgpack.packb({**fields, "expires_unix_s": time.time() - 0.001}))
    assert store.announcements("") == {}
    assert path.exists(), "who only reads deletes nothing"
    store.announce("kvpool:t:y", b"hello", lease_s=60)
    assert not path.exists()
    assert list(store.announcements("")) == ["kvpool:t:y"]


def test_an_announcement_renewed_while_it_is_removed_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root / "announcements"
    root.mkdir()
    announced = FileDocuments(directory.parent, "a pool")
    announced.put("kvpool:t:x", b"old", 60.0)
    path = announcement_file(root)
    path.write_bytes(msgpack.packb({"key": "kvpool:t:x", "document": b"old", "expires_unix_s": 1.0}))
    remove_expired = announced._remove_expired

    def renewed_just_before(folder: int, name: str, now_unix_s: float) -> None:
        announced.put("kvpool:t:x", b"renewed", 60.0)
        remove_expired(folder, name, now_unix_s)

    monkeypatch.setattr(announced, "_remove_expired", renewed_just_before)
    announced.put("kvpool:t:y", b"new", 60.0)
    assert announced.all("") == {"kvpool:t:x": b"renewed", "kvpool:t:y": b"new"}
    assert len(list(directory.iterdir())) == 2


def test_what_a_dead_writer_left_is_removed_in_time_and_nothing_else(root: Path, store: Store) -> None:
    store.announce("kvpool:t:x", b"hello", lease_s=60)
    folder = root / "announcements"
    young, old = (folder / f".{'0' * 32}.17.{end * 16}" for end in "ab")
    foreign, link = folder / ".thesis", folder / f".{'0' * 32}.17.{'c' * 16}"
    for path in (young, old, foreign):
        path.write_bytes(b"half an announ")
    link.symlink_to(foreign)
    long_ago_s = time.time() - ORPHAN_AGE_S - 1
    for path in (old, foreign):
        os.utime(path, (long_ago_s, long_ago_s))
    os.utime(link, (long_ago_s, long_ago_s), follow_symlinks=False)
    store.announce("kvpool:t:y", b"hello", lease_s=60)
    assert list(store.announcements("")) == ["kvpool:t:x", "kvpool:t:y"]
    assert young.exists()
    assert not old.exists()
    assert foreign.read_bytes() == b"half an announ"
    assert link.is_symlink()


def test_a_pipe_among_announcements_holds_nobody_up(root: Path, store: Store) -> None:
    store.announce("kvpool:t:x", b"hello", lease_s=60)
    path = announcement_file(root)
    path.unlink()
    os.mkfifo(path)
    assert store.announcements("") == {}
    store.announce("kvpool:t:x", b"hello", lease_s=60)
    assert list(store.announcements("")) == ["kvpool:t:x"]


def test_its_text_is_its_url(root: Path, store: Store) -> None:
    assert repr(store) == f"<FileStore file://{root}>"
