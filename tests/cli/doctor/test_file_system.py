"""The file store on file systems that are full, out of inodes, read-only, failing or forbidding.

Real ones are mounted for it, which takes root; elsewhere these tests are skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool.cli.doctor.pool import pool_findings
from kvpool.errors import StoreUnavailable
from kvpool.store import open_store
from kvpool.store.file import FileStore
from kvpool.store.file_system import FileSystem
from tests.support.conformance import MIB, key, keys, payload
from tests.support.deadlines import eventually
from tests.support.file_user import record_files, run_user

VALUE_NBYTES = 100_000


def _may_mount() -> bool:
    """In a mount namespace of its own, so that nothing is left when it may."""
    trial = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return os.getuid() == 0 and subprocess.run(trial, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_mount = pytest.mark.skipif(not _may_mount(), reason="mounting is not allowed here")


needs_disk = pytest.mark.skipif(
    not _may_mount() or shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists(),
    reason="no disk can be made of a file here",
)


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", *arguments, str(place)], check=True)
    try:
        yield place
    finally:
        assert eventually(lambda: subprocess.run(["umount", str(place)], check=False).returncode == 0)


def check_right(store: FileStore, numbers: range) -> None:
    """A batch is put, found and got, every byte of it."""
    names = [key(number) for number in numbers]
    values = [payload(number, VALUE_NBYTES) for number in numbers]
    assert store.put_many(names, values) == [True] * len(names)
    targets = [bytearray(VALUE_NBYTES) for _ in names]
    assert store.get_many_into(names, targets) == [True] * len(names)
    assert targets == values


@needs_mount
@pytest.mark.parametrize(
    "limit", [pytest.param("size=20m", id="no space"), pytest.param("size=64m,nr_inodes=64", id="no inodes")]
)
def test_a_full_file_system_evicts_and_goes_on(tmp_path: Path, limit: str) -> None:
    """Long before the capacity is reached: what was used longest ago goes, and no put fails."""
    with (
        mounted(tmp_path / "small", "-t", "tmpfs", "-o", limit, "kvpool-test") as place,
        FileStore(str(place / "pool"), 256 * MIB, 2) as store,
    ):
        for first in range(0, 150, 3):
            check_right(store, range(first, first + 3))
        counters = store.counters()
        assert counters["evicted"] > 0
        assert counters["faults"] == counters["no_room"] == counters["damaged"] == 0
        assert not store.contains_many([key(0)])[0]
        assert list((place / "pool" / "tmp").iterdir()) == []


@needs_mount
@pytest.mark.parametrize(("size_mib", "reserve_mib"), [(40, 16), (400, 20)])
def test_a_pool_leaves_a_part_of_its_file_system_to_others(
    tmp_path: Path, size_mib: int, reserve_mib: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However large its capacity; and it gives way to what others write."""
    value = bytes(MIB)
    with (
        mounted(tmp_path / "shm", "-t", "tmpfs", "-o", f"size={size_mib}m", "kvpool-test") as place,
        open_store(f"file://{place}/pool?capacity=1GiB") as store,
    ):

        def free_nbytes() -> int:
            system = os.statvfs(place)
            return system.f_bavail * system.f_frsize

        def fill(first: int, count: int) -> None:
            for number in range(first, first + count):
                assert store.put_many([key(number)], [value], timeout_s=60) == [True]
                assert free_nbytes() >= reserve_mib * MIB

        assert f"{place} has room for {size_mib - reserve_mib - 1:,} MiB of it" in caplog.text
        fill(0, size_mib + 10)
        assert store.counters()["evicted"] > 0
        others = free_nbytes() - 2 * MIB  # most of the reserve, and more than that
        (place / "other").write_bytes(bytes(others))
        fill(1000, 1)
        url = f"file://{place}/pool?capacity=1GiB"
        (says,) = [one.says for one in pool_findings(url, "default")[0] if "its capacity" in one.says]
        assert f"the file system {place} holds" in says
        store.set_capacity((size_mib - reserve_mib) * MIB)
        url = f"file://{place}/pool"
        (says,) = [one.says for one in pool_findings(url, "default")[0] if "its capacity" in one.says]
        assert "others leave it room for" in says
        assert str(place) in says
        for number in range(size_mib + 2000):
            store.delete_many([key(number)], timeout_s=60)
        (place / "more").write_bytes(bytes(free_nbytes()))
        (says,) = [one for one in pool_findings(url, "default")[0] if "no room" in one.says]
        assert (says.level, says.change) == ("fail", f"make room on {place}, or move the pool")


@needs_mount
def test_of_a_large_file_system_a_pool_leaves_no_twentieth(tmp_path: Path) -> None:
    """A disk of 252 GB with 12 GB free had no room for a pool of a MiB."""
    with mounted(tmp_path / "large", "-t", "tmpfs", "-o", "size=200g", "kvpool-test") as place:
        assert FileSystem.of(str(place)).reserve_nbytes == 4 << 30


@needs_mount
def test_a_file_system_that_others_filled_is_no_room(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=20m", "kvpool-test") as place,
        FileStore(str(place / "pool"), 256 * MIB, 2) as store,
    ):
        check_right(store, range(3))
        with (place / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
            while other.write(bytes(1 << 16)):
                pass
        # Even without all that we hold there is no place for this one.
        assert store.put_many([key(9)], [bytes(2 * MIB)]) == [False]
        assert store.counters()["no_room"] == 1
        (place / "other").unlink()
        check_right(store, range(10, 13))
        assert list((place / "pool" / "tmp").iterdir()) == []


@needs_mount
def test_a_read_only_file_system_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=24m", "kvpool-test") as place:
        with FileStore(str(place / "pool"), MIB, 2) as store:
            check_right(store, range(3))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(StoreUnavailable) as caught:
            FileStore(str(place / "pool"), MIB, 2)
        assert "Read-only file system" in str(caught.value)
        assert "\n" not in str(caught.value)
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        with FileStore(str(place / "pool"), MIB, 2) as store:
            assert store.contains_many(keys(3)) == [True] * 3
            check_right(store, range(3, 6))


@contextmanager
def disk_of_64_mib(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Where an ext4 is mounted, and the file that is its disk. Reads beyond the end of that file fail with EIO."""
    image = tmp_path / "image"
    with image.open("wb") as disk:
        disk.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,nodiscard", str(image)], check=True)
    with mounted(tmp_path / "disk", "-o", "loop,errors=continue", str(image)) as place:
        yield place, image


@needs_disk
def test_a_record_that_the_disk_cannot_read_is_a_miss_and_goes(tmp_path: Path) -> None:
    with disk_of_64_mib(tmp_path) as (place, image):
        with FileStore(str(place / "pool"), 64 * MIB, 1) as store:
            for first in range(0, 150, 30):
                check_right(store, range(first, first + 30))
        with FileStore(str(place / "pool"), 64 * MIB, 1) as store:
            for file in record_files(place / "pool"):  # the kernel's own copies: the disk shall be asked
                with file.open("rb") as opened:
                    os.fdatasync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.truncate(image, 12 * MIB)
            targets = [bytearray(VALUE_NBYTES) for _ in range(150)]
            found = store.get_many_into(keys(150), targets, timeout_s=60)
            missed = found.count(False)
            assert 0 < missed < 150
            for number, (hit, target) in enumerate(zip(found, targets, strict=True)):
                assert not hit or target == payload(number, VALUE_NBYTES)
            assert store.counters()["damaged"] == missed
            assert store.contains_many(keys(150)) == found
            os.truncate(image, 64 * MIB)
            check_right(store, range(200, 203))


def test_a_record_that_this_user_may_not_read_is_a_miss_and_replaced(everyones: Path) -> None:
    directory = everyones / "pool"
    directory.mkdir()
    if os.getuid() == 0:
        os.chown(directory, 65534, 65534)
    user = run_user("unreadable_as_nobody", str(directory))
    out, err = user.communicate(timeout=60)
    assert out == "miss 1 damaged, then right\n", err
    assert len(record_files(directory)) == 3
