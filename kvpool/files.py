"""Files by a name that somebody gave: regular ones only, opened without a wait and read up to a bound.

A pipe or a terminal would wait for its writer, and a device never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

UNSAID_NBYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str | Path, *, follow: bool = True) -> BinaryIO:
    """Open it to read, with ``follow`` behind symbolic links; the caller bounds what it reads.

    Errors: ``OSError``, whose ``strerror`` says what is there instead.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a zero byte, or a surrogate
        raise OSError(errno.EINVAL, "this is no path") from error
    except OSError as error:
        if error.errno != errno.ENXIO:  # which a socket has
            raise
        raise OSError(errno.EINVAL, "it is a socket, not a file", str(path)) from error
    try:
        mode = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if mode == stat.S_IFDIR:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if mode != stat.S_IFREG:
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(mode, 'something else')}, not a file", str(path))
        return open(descriptor, "rb")  # noqa: PTH123 - a descriptor
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: str | Path, max_nbytes: int, *, follow: bool = True) -> bytes:
    """All of it. Errors: as ``open_file``; ``OSError`` above ``max_nbytes``, before it is read."""
    with open_file(path, follow=follow) as file:
        nbytes = os.fstat(file.fileno()).st_size
        # A file of /proc has more than it says, and another may grow; room is taken for all that is asked for.
        most = min(max_nbytes, max(nbytes, UNSAID_NBYTES))
        raw = b"" if nbytes > max_nbytes else file.read(most + 1)
    if nbytes > max_nbytes or len(raw) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return raw
