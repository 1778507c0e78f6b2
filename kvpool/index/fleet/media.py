"""``Media``: of a prompt's images, clips and sounds, those whose encoder's output the pool has.

The pool's outputs are followed as its blocks are: a namespace is a holder in the table of its workers' partition
(``pool_holder``), and an item's hash stands there as a block's does. So a look asks nobody, and waits for nothing.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from kvpool import _native
from kvpool.index.fleet.rank import pool_holder
from kvpool.index.limits import NotAtOnce
from kvpool.key.hashing import Multimodal, media_hash

# Of an item: one for each rank, kind of encoder and namespace. They take 45 ms at most, and 1 ms at once.
MAX_LOOKS, MAX_LOOKS_AT_ONCE = 1 << 18, 1 << 13


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

    Beyond ``MAX_LOOKS`` the last items are one that nobody has. ``at_once``: ``NotAtOnce`` for many. Errors: as
    ``_native.Table.pooled``.
    """
    looks_of_one = len(kinds) + sum(1 + len(namespaces) for namespaces in encoders)
    if at_once and len(items) * looks_of_one > MAX_LOOKS_AT_ONCE:
        raise NotAtOnce(f"a prompt has {len(items)} items")
    different: dict[str, tuple[int, int]] = {}
    for identifier, offset, length in items:
        end, _ = different.get(identifier, (0, 0))
        different[identifier] = max(end, offset + length), length
    places = list(different.values())
    most = MAX_LOOKS // max(1, looks_of_one)
    looked, rest = places[:most], places[most:]
    beyond = [(max(end for end, _ in rest), sum(length for _, length in rest))] if rest else []
    # As ``BlockHasher.hashes64``.
    hashes = b"".join(media_hash(identifier)[:-9:-1] for identifier in islice(different, most))
    found = []
    for namespaces in encoders:
        held = [False] * len(looked)
        for namespace in namespaces:
            there = table.pooled(pool_holder(namespace), hashes, at_once)
            held = [one or other for one, other in zip(held, there, strict=True)]
        missing = [place for place, is_held in zip(looked, held, strict=True) if not is_held]
        found.append(Found(sum(held), missing + beyond))
    return Media(found, kinds)
