"""``Snapshot``: an index's state at rest, and its bytes in a file or a stream to another index. Pure.

The bytes, little-endian: a header (below), a head in msgpack, then an image of each partition's table
(``_native/index/table_image.h``). The header's checksum covers header and head; each image has its own.

A snapshot's blocks are credited only after the publisher has proved its position: see ``Fleet.restore``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from kvpool import _native
from kvpool.discovery.worker import Position, Publisher, Worker, check_worker
from kvpool.errors import ConfigError, SnapshotRefused

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"KVPINDEX"
VERSION = 1
MAX_NBYTES = 64 << 30
MAX_NUMBER = 1 << 64

_HEADER = struct.Struct(
    "<"
    "8s"  # MAGIC
    "I"  # VERSION
    "I"  # 0
    "Q"  # bytes of the head
    "Q"  # XXH3-64 of the header, with 0 here, and the head
)
assert _HEADER.size == 32
# Of a worker, in their order in the head.
_TEXTS = (
    "tenant", "name", "model", "hash_algorithm", "hash_seed_id", "address", "incarnation", "namespace",
)  # fmt: skip


class RankState(NamedTuple):
    """A rank of a worker. ``holder``: its number in the image. ``position``: the last batch of its blocks;
    None: unknown. ``incomplete_reason``: why its blocks are only a part; empty: complete.
    """

    publisher: Publisher
    holder: str
    position: Position | None
    incomplete_reason: str = ""


class WorkerState(NamedTuple):
    """A worker, its source, and the rest of its lease; None: no lease."""

    worker: Worker
    source: str
    lease_left_s: float | None
    ranks: tuple[RankState, ...]


class PartitionState(NamedTuple):
    """Workers that share a table. ``namespaces``: of the pool blocks in it.

    ``image``: packed, or to be packed.
    """

    workers: tuple[WorkerState, ...]
    namespaces: tuple[str, ...]
    image: Buffer | _native.TableImage

    @property
    def packed_image(self) -> Buffer:
        return self.image.pack() if isinstance(self.image, _native.TableImage) else self.image


class Snapshot(NamedTuple):
    """``written_at_s``: by the wall clock. ``life``: ``Store.server_run_id`` of its pool; empty: none."""

    written_at_s: float
    life: str
    partitions: tuple[PartitionState, ...]


def pack(snapshot: Snapshot) -> list[bytes]:
    """The bytes, in consecutive parts. Doubles their memory."""
    images = [bytes(state.packed_image) for state in snapshot.partitions]
    head = msgpack.packb(
        {
            "written_at_s": float(snapshot.written_at_s),
            "life": snapshot.life,
            "partitions": [
                {
                    "image_nbytes": len(image),
                    "namespaces": list(state.namespaces),
                    "workers": [_pack_worker(one) for one in state.workers],
                }
                for state, image in zip(snapshot.partitions, images, strict=True)
            ],
        }
    )
    unproved = _HEADER.pack(MAGIC, VERSION, 0, len(head), 0)
    header = _HEADER.pack(MAGIC, VERSION, 0, len(head), _native.checksum(unproved + head))
    return [header + head, *images]


def unpack(packed: Buffer) -> Snapshot:
    """Images are checked later, by ``PrefixIndex.of_image``. Errors: ``SnapshotRefused``."""
    view = memoryview(packed).cast("B")
    if len(view) < _HEADER.size:
        raise SnapshotRefused("this is no snapshot of an index: it ends within its header")
    magic, version, _, head_nbytes, checksum = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise SnapshotRefused("this is no snapshot of an index")
    if version != VERSION:
        raise SnapshotRefused(
            f"this snapshot is of version {version}, and this index reads version {VERSION}"
        )
    end = _HEADER.size + head_nbytes
    if end > len(view):
        raise SnapshotRefused("this snapshot is damaged: it ends within its head")
    head = view[_HEADER.size : end]
    if checksum != _native.checksum(bytes(view[: _HEADER.size - 8]) + bytes(8) + bytes(head)):
        raise SnapshotRefused("this snapshot is damaged: its checksum is wrong")
    try:
        return _read(msgpack.unpackb(head), view[end:])
    except (ConfigError, KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        # Its checksum is right: its writer is faulty or hostile.
        raise SnapshotRefused(
            f"this snapshot makes no sense: {str(error) or type(error).__name__}"
        ) from error


def _pack_worker(state: WorkerState) -> list[Any]:
    worker = state.worker
    more = [list(worker.names), worker.near, list(worker.media_namespaces)]
    while more and not more[-1]:
        more.pop()
    return [
        *(getattr(worker, name) for name in _TEXTS),
        worker.block_tokens,
        state.source,
        state.lease_left_s,
        [
            [
                rank.publisher.dp_rank,
                rank.publisher.events,
                rank.publisher.replay,
                rank.holder,
                rank.position and list(rank.position),
                rank.incomplete_reason,
            ]
            for rank in state.ranks
        ],
        # Which an earlier index cannot read.
        *more,
    ]


def _read(head: Any, images: memoryview) -> Snapshot:
    partitions = []
    at = 0
    for one in head["partitions"]:
        nbytes = _whole(one["image_nbytes"])
        partitions.append(
            PartitionState(
                tuple(_read_worker(fields) for fields in one["workers"]),
                tuple(_text(namespace) for namespace in one["namespaces"]),
                images[at : at + nbytes],
            )
        )
        at += nbytes
    if at != len(images):
        raise ValueError(f"its images have {len(images)} bytes, not {at}")
    if not isinstance(head["written_at_s"], float):
        raise TypeError("when it was written is no time")
    return Snapshot(head["written_at_s"], _text(head["life"]), tuple(partitions))


def _read_worker(fields: Sequence[Any]) -> WorkerState:
    texts, (block_tokens, source, lease_left_s, ranks, *more) = fields[: len(_TEXTS)], fields[len(_TEXTS) :]
    states = tuple(map(_read_rank, ranks))
    worker = Worker(
        **dict(zip(_TEXTS, map(_text, texts), strict=True)),
        block_tokens=block_tokens,
        publishers=tuple(state.publisher for state in states),
        names=tuple(map(_text, more[0])) if more else (),  # of an earlier version: none
        near=_text(more[1]) if len(more) > 1 else "",
        media_namespaces=tuple(map(_text, more[2])) if len(more) > 2 else (),
    )
    if not isinstance(lease_left_s, float | None):
        raise TypeError("a lease is no number of seconds")
    return WorkerState(check_worker(worker), _text(source), lease_left_s, states)


def _read_rank(fields: Sequence[Any]) -> RankState:
    dp_rank, events, replay, holder, position, incomplete_reason = fields
    rank = RankState(
        Publisher(dp_rank, _text(events), _text(replay)),
        _text(holder),
        None if position is None else Position(*map(_whole, position)),
        _text(incomplete_reason),
    )
    if rank.position is not None and not (rank.publisher.replay and rank.position.batch_digest):
        raise ValueError("a position that cannot be proved")
    return rank


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise TypeError("a number is none")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is none")
    return value
