"""Blank the code for other GPUs in a CUDA shared library, so that it packs to a fraction: blank_fatbin.py FILE SM

In place; the file keeps its size and addresses. Kept is machine code for SM (90: Hopper). The section .nv_fatbin is a
row of containers, each a head (magic, version, size of the head, size of what follows) and entries, each a head (kind 1
is PTX and 2 machine code, size of the head, size of the code, SM at byte 28) and its code.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTAINER = 0xBA55ED50
MACHINE_CODE = 2
ELF_64 = b"\x7fELF\x02"


class Code(NamedTuple):
    kind: int
    sm: int
    start: int
    nbytes: int


def fatbins(library: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of the sections .nv_fatbin of an ELF file."""
    if library[:5] != ELF_64:
        sys.exit("this is no 64-bit ELF file")
    (heads_at,) = struct.unpack_from("<Q", library, 40)
    head_nbytes, count, names_head = struct.unpack_from("<HHH", library, 58)
    heads = [struct.unpack_from("<IIQQQQ", library, heads_at + at * head_nbytes) for at in range(count)]
    names_at = heads[names_head][4]
    for name, _, _, _, start, nbytes in heads:
        end = library.index(b"\0", names_at + name)
        if library[names_at + name : end] == b".nv_fatbin":
            yield start, start + nbytes


def codes(library: bytes) -> Iterator[Code]:
    for start, end in fatbins(library):
        at = start
        while at < end:
            magic, _, head_nbytes, nbytes = struct.unpack_from("<IHHQ", library, at)
            if magic != CONTAINER:
                at += 8  # containers are separated by zeros, to a multiple of 8
                continue
            inside, at = at + head_nbytes, at + head_nbytes + nbytes
            while inside < at:
                kind, _, own_nbytes, code_nbytes = struct.unpack_from("<HHIQ", library, inside)
                (sm,) = struct.unpack_from("<I", library, inside + 28)
                yield Code(kind, sm, inside + own_nbytes, code_nbytes)
                inside += own_nbytes + code_nbytes
            at = -(-at // 8) * 8


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path, kept_sm = Path(sys.argv[1]), int(sys.argv[2])
    library = bytearray(path.read_bytes())
    found = list(codes(bytes(library)))
    kept = [code for code in found if code.kind == MACHINE_CODE and code.sm == kept_sm]
    if not kept:
        sys.exit(f"{path} has no code for sm_{kept_sm}")
    for code in set(found) - set(kept):
        library[code.start : code.start + code.nbytes] = bytes(code.nbytes)
    path.write_bytes(library)
    print(f"{path.name}: {len(kept)} of {len(found)} pieces of code kept")


if __name__ == "__main__":
    main()
