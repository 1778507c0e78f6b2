"""``Media``: of a prompt's images, clips and sounds, those whose encoder's output the pool has.

The pool's outputs are followed as its blocks are: a namespace is a holder in the table of its workers' partition
(``pool_holder``), and an item's hash stands there as a block's does. So a look asks nobody, and waits for nothing.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpool import _native
from kvpool.index.fleet.rank import pool_holder
from kvpool.key.hashing import Multimodal, media_hash


class Found(NamedTuple):
    """``held``: outputs that the pool has. ``missing``: (end, length) of the other items, in tokens of the prompt."""

    held: int
    missing: Sequence[tuple[int, int]]


class Media(NamedTuple):
    """``found``: by kind of encoder; ``kinds``: of which each rank is."""

    found: Sequence[Found]
    kinds: Sequence[int]


def find_media(
    table: _native.Table,
    encoders: Sequence[tuple[str, ...]],
    kinds: Sequence[int],
    items: Sequence[Multimodal],
    at_once: bool,
) -> Media:
    """``encoders``, ``kinds``: of ``Members``. An item that is there several times counts once, up to its last end.

    ``at_once``: many items are refused with ``NotAtOnce``. Errors: as ``_native.Table.pooled``.
    """
    different: dict[str, tuple[int, int]] = {}
    for identifier, offset, length in items:
        end, _ = different.get(identifier, (0, 0))
        different[identifier] = max(end, offset + length), length
    hashes = b"".join(
        media_hash(identifier)[:-9:-1] for identifier in different
    )  # as ``BlockHasher.hashes64``
    found = []
    for namespaces in encoders:
        held = [False] * len(different)
        for namespace in namespaces:
            there = table.pooled(pool_holder(namespace), hashes, at_once)
            held = [one or other for one, other in zip(held, there, strict=True)]
        missing = [item for item, is_held in zip(different.values(), held, strict=True) if not is_held]
        found.append(Found(sum(held), missing))
    return Media(found, kinds)
