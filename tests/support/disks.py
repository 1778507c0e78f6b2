"""A disk of a test's own: ext4 on a file, which can hang or lose its power. For root on a host with loop devices."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.conformance import MIB
from tests.support.deadlines import eventually

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Disk]:
    """Skips the test where none can be mounted."""
    disk = Disk(folder)
    try:
        disk.make()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no ext4 can be mounted from a file here")
    yield disk
    is_gone = eventually(lambda: disk.unmount() or not os.path.ismount(disk.place))
    if not is_gone:
        run("umount", "-l", str(disk.place))  # or it would stand in the way of all later tests
    assert is_gone, "something still uses the disk"


class Disk:
    def __init__(self, folder: Path) -> None:
        self.image, self.place = folder / "image", folder / "disk"
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(256 * MIB)

    def make(self) -> None:
        run("mkfs.ext4", "-q", "-F", str(self.image))
        self.mount()

    def mount(self) -> None:
        run("mount", "-o", "loop,commit=1", str(self.image), str(self.place))

    def unmount(self) -> bool:
        return subprocess.run(["umount", str(self.place)], capture_output=True, check=False).returncode == 0

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Whoever changes something waits."""
        run("fsfreeze", "-f", str(self.place))
        try:
            yield
        finally:
            run("fsfreeze", "-u", str(self.place))

    def lose_power(self) -> None:
        """Nothing that is not on the disk yet will be: ext4's own simulation, as its tests use it."""
        file = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(file, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(file)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
