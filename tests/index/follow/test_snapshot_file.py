"""The snapshot in a file: whole or not at all, whatever goes wrong with the disk or the clock."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvpool import ConfigError, SnapshotRefused
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import Snapshot, pack
from kvpool.index.follow import snapshot_file as module
from kvpool.index.follow.snapshot_file import SnapshotFile, age, lock, read, write
from tests.support.deadlines import ends_within, eventually
from tests.support.fleets import a_worker, say
from tests.support.wire import batch, stored

Packed = Callable[[], AbstractContextManager[list[bytes]]]


def packer(fleet: Fleet, life: str = "") -> Packed:
    return lambda: fleet.packed(lambda: Snapshot(time.time(), life, fleet.snapshot()))


def a_fleet() -> Fleet:
    fleet = Fleet()
    fleet.add(a_worker(), "call")
    say(fleet, "default/w", 0, 1, batch(stored([1, 2])))
    return fleet


def test_it_is_written_again_and_again_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    assert read(path) is None
    fleet = a_fleet()
    file = SnapshotFile(path, packer(fleet, "1"), every_s=0.1)
    try:
        assert eventually(path.exists)
        first = path.stat().st_ino
        assert eventually(lambda: path.stat().st_ino != first)
        say(fleet, "default/w", 0, 2, batch(stored([3])))
    finally:
        file.close()
        file.close()
    snapshot = read(path)
    assert snapshot is not None
    assert snapshot.life == "1"
    assert age(snapshot) < 60
    position = snapshot.partitions[0].workers[0].ranks[0].position
    assert position is not None
    assert position.sequence == 2
    assert list(tmp_path.iterdir()) == [path]


def test_the_last_one_is_written_although_the_interval_is_long(tmp_path: Path) -> None:
    SnapshotFile(tmp_path / "s", packer(a_fleet()), every_s=86400).close()
    assert read(tmp_path / "s") is not None


def test_what_was_written_half_does_not_take_the_place_of_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    write(path, pack(Snapshot(time.time(), "", a_fleet().snapshot())))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, [b"half"])
    assert path.read_bytes() == before
    monkeypatch.undo()
    write(path, [b"a", b"b"])
    assert path.read_bytes() == b"ab"


def test_an_outage_of_the_disk_is_said_once_and_its_end_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tries = threading.Semaphore(0)
    packed = packer(a_fleet())
    caplog.set_level(logging.INFO, "kvpool.index")

    def counted() -> AbstractContextManager[list[bytes]]:
        tries.release()
        return packed()

    file = SnapshotFile(folder / "s", counted, every_s=0.1)
    try:
        assert eventually((folder / "s").exists)
        folder.rename(tmp_path / "away")
        assert eventually(lambda: len(caplog.messages) == 1)
        for _ in range(20):
            assert tries.acquire(timeout=60)
        folder.mkdir()
        assert eventually((folder / "s").exists)
    finally:
        file.close()
    assert caplog.messages == [
        f"no snapshot can be written to {folder / 's'}: No such file or directory",
        f"snapshots are written to {folder / 's'} again",
    ]


def test_a_fault_of_ours_does_not_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvpool.index")
    faults = [ZeroDivisionError("first")]
    packed = packer(a_fleet())

    def broken() -> AbstractContextManager[list[bytes]]:
        if faults:
            raise faults.pop()
        return packed()

    file = SnapshotFile(tmp_path / "s", broken, every_s=0.1)
    try:
        assert eventually((tmp_path / "s").exists)
    finally:
        file.close()
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"something else")
    with pytest.raises(SnapshotRefused, match=f"^{path}: this is no snapshot of an index"):
        read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(SnapshotRefused, match="cannot be read: Is a directory"):
        read(path)
    old = tmp_path / "old"
    write(old, pack(Snapshot(time.time() - 500, "", a_fleet().snapshot())))
    with pytest.raises(SnapshotRefused, match=r"this snapshot is 500 s old, and 400 s is the limit"):
        read(old, max_age_s=400)
    assert read(old, max_age_s=600) is not None
    write(old, pack(Snapshot(time.time() + 500, "", a_fleet().snapshot())))
    future = read(old)
    assert future is not None
    assert age(future) == 0


def test_only_its_owner_can_read_it_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.touch(0o666)
    (tmp_path / "s.new").touch(0o666)  # of an index that was killed
    write(path, [b"a"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(one.name for one in tmp_path.iterdir()) == ["s"]


def test_it_is_never_written_or_read_through_a_symbolic_link(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "s"
    target.write_bytes(b"of another program")
    (tmp_path / "s.new").symlink_to(target)
    path.symlink_to(target)
    with pytest.raises(SnapshotRefused, match="cannot be read: it is a symbolic link"):
        read(path)
    with pytest.raises(ConfigError, match="this is a symbolic link: name the file itself"):
        SnapshotFile(path, packer(a_fleet()))
    write(path, [b"a"])  # one that was put there while the index ran
    assert target.read_bytes() == b"of another program"
    assert not path.is_symlink()
    assert path.read_bytes() == b"a"
    (tmp_path / "t.lock").symlink_to(target)
    with pytest.raises(ConfigError, match=r"t\.lock cannot be opened"), lock(tmp_path / "t"):
        pass


def test_one_index_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with lock(path):
        with (
            pytest.raises(ConfigError, match=f"--snapshot {path}: another index writes this file"),
            lock(path),
        ):
            pass
        with lock(tmp_path / "t"):
            pass
    with lock(path):
        pass


def test_an_index_that_is_stopped_with_its_file_delays_no_other(tmp_path: Path) -> None:
    path = tmp_path / "s"
    # It becomes the program, so that one process holds the lock.
    holder = subprocess.Popen(["flock", "--exclusive", "--no-fork", f"{path}.lock", "sleep", "600"])
    try:
        assert eventually(lambda: is_locked(path))
        holder.send_signal(signal.SIGSTOP)
        with (
            ends_within(0),
            pytest.raises(ConfigError, match=r"or end that one; one that is stopped .* still counts"),
        ):
            lock(path).__enter__()
    finally:
        holder.kill()
        holder.wait()
    with lock(path):
        pass


def is_locked(path: Path) -> bool:
    try:
        with lock(path):
            return False
    except ConfigError:
        return True


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder", tmp_path / "s" / "x"):
        (tmp_path / "s").touch()
        with pytest.raises(ConfigError, match=r"name a file in a folder that is there|this is not a file"):
            SnapshotFile(path, packer(a_fleet()))
    with pytest.raises(ConfigError, match=r"every 0\.1 to 86400 seconds"):
        SnapshotFile(tmp_path / "t", packer(a_fleet()), every_s=0)


def test_a_pipe_or_a_device_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(SnapshotRefused, match=r"cannot be read: it is a .*, not a file"):
            read(path, max_nbytes=1 << 20)
        with pytest.raises(ConfigError, match="this is not a file"), lock(path):
            pass
