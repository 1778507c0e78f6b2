"""What the file system below a pool in a directory means for its speed, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvpool.cli.doctor.finding import Finding, warn

MOUNTS = Path("/proc/mounts")


class Mount(NamedTuple):
    """A file system as the kernel lists it."""

    place: str
    kind: str
    options: tuple[str, ...]


def file_system_findings(path: str, mounts: Path = MOUNTS) -> Iterator[Finding]:
    """Look at what holds the directory ``path``."""
    mount = _mount_of(path, mounts)
    if mount is None or mount.kind != "tmpfs":
        yield warn(
            "pool", "it is on a disk", "a folder on tmpfs, such as one in /dev/shm, is as fast as memory"
        )
        return
    huge = next((one.partition("=")[2] for one in mount.options if one.startswith("huge=")), "never")
    change = (
        f"mount -o remount,huge=within_size {mount.place} (and the same option where it is mounted at boot)"
    )
    if huge == "always":
        yield warn(
            "pool",
            f"{mount.place} is mounted with huge=always: a block smaller than 2 MiB takes 2 MiB of memory",
            change,
        )
    elif huge != "within_size":
        # Measured on Linux 6.18: benchmarks/journal.md.
        yield warn(
            "pool",
            f"{mount.place} is mounted with huge={huge}: with larger pages than 4 KiB, puts of 512 "
            "KiB or more were 2.5 times as fast, and gets twice",
            change,
        )


def _mount_of(path: str, mounts: Path) -> Mount | None:
    best: Mount | None = None
    for line in mounts.read_text().splitlines():
        _, escaped, kind, options, *_ = line.split(" ")
        place = escaped.replace("\\040", " ")
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and (best is None or len(place) >= len(best.place)):
            best = Mount(place, kind, tuple(options.split(",")))
    return best
