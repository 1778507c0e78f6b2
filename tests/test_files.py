"""Files by names that somebody gave: a pipe, a device or a file without end is refused at once, in a sentence."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.files import open_file, read_file


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.fixture
def a_socket(tmp_path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        yield tmp_path / "socket"


def why(path: Path | str, max_nbytes: int = 100) -> str:
    with pytest.raises(OSError) as caught:
        read_file(path, max_nbytes)
    return str(caught.value.strerror)


def test_what_is_no_file_is_refused_without_a_wait(pipe: Path, a_socket: Path, tmp_path: Path) -> None:
    assert why(pipe) == "it is a pipe, not a file"
    assert why("/dev/zero") == "it is a device, not a file"
    assert why(tmp_path) == os.strerror(errno.EISDIR)
    assert why(a_socket) == "it is a socket, not a file"
    assert why(tmp_path / "missing") == os.strerror(errno.ENOENT)
    assert why("a\0b") == "this is no path"


def test_a_file_is_read_up_to_its_bound_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_file(path, 100) == b"x" * 100
    assert why(path, 99) == "it is larger than 99 bytes"
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert why(path) == "it is larger than 100 bytes"
    assert read_file("/proc/self/stat", 1 << 16), "it says that it has no bytes"
    assert why("/proc/self/stat", 3) == "it is larger than 3 bytes"


def test_a_link_is_followed_unless_it_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_file(tmp_path / "link") as opened:
        assert opened.read() == b"x"
    with pytest.raises(OSError, match="symbolic link") as caught:
        open_file(tmp_path / "link", follow=False)
    assert caught.value.errno == errno.ELOOP
