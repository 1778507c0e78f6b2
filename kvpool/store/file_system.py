"""``FileSystem``: where a directory is mounted, and the room there for a pool."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from kvpool import _native
from kvpool.text import MAX_NBYTES

MOUNTS = Path("/proc/mounts")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a space, tab, line's end or backslash of a place


class FileSystem(NamedTuple):
    """Of a pool: where it is mounted, and its bytes.

    ``kind``: as in ``mount``; empty: unknown. ``huge``: pages of tmpfs. ``reserve_nbytes``: left free for others.
    """

    place: str
    kind: str
    huge: str
    total_nbytes: int
    free_nbytes: int
    reserve_nbytes: int

    @classmethod
    def of(cls, path: str, mounts: Path = MOUNTS) -> FileSystem:
        """Blocks for some system calls. Zeros where the system does not tell."""
        return cls(*_mount(Path(path).resolve(), mounts), *_native.file_system(os.fsencode(path)))

    def room_nbytes(self, stored_nbytes: int) -> int:
        """How large a pool of ``stored_nbytes`` can become beside what others keep now."""
        if not self.reserve_nbytes:
            return MAX_NBYTES
        return max(0, stored_nbytes + self.free_nbytes - self.reserve_nbytes)


def _mount(path: Path, mounts: Path) -> tuple[str, str, str]:
    """Place, kind and huge pages; of several mounts over each other, of the last."""
    found = "/", "", "never"
    with contextlib.suppress(OSError):
        for line in filter(None, mounts.read_bytes().split(b"\n")):
            _, escaped, kind, options, *_ = os.fsdecode(line).split(" ")
            place = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), escaped)
            if path.is_relative_to(place) and len(place) >= len(found[0]):
                given = dict(one.partition("=")[::2] for one in options.split(","))
                found = place, kind, given.get("huge", "never")
    return found
