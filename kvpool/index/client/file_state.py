"""``file_state``: whether a file is another one than before, without reading it."""

from __future__ import annotations

from pathlib import Path


def file_state(path: str) -> object:
    """Something that changes when the file is replaced or written, goes or comes. Blocking: looks at one file."""
    try:
        found = Path(path).stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
