"""Records of a file pool that are wrong under a right name and a right checksum, as faults of engines have left them.

Payloads are those of vLLM's CPU attention: layer by layer, and in each the keys and then the values of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import numpy.typing as npt

from kvpool._native import pack_header
from kvpool.key.key import FACTS_SUFFIX
from kvpool.store import open_store
from tests.support.file_record import read_record, write_record
from tests.support.records import HEADER_NBYTES

KV_HEADS = 4  # of a small model
SHARED_DIGITS = 16  # of a hash, which it has in common with those of the tokens under other adapters
Bytes = npt.NDArray[np.uint8]
Spoil = Callable[[Bytes], Bytes]  # of layers, heads, keys and values, bytes


def payload(record: Path) -> bytes:
    return read_record(record)[:-HEADER_NBYTES]


def put(record: Path, content: bytes) -> None:
    """Give a record this payload, under the right checksum. Nobody has written it."""
    key = "kvpool:" + record.name.replace(".", ":")
    write_record(record, content + pack_header(key, content))


def spoilt(content: bytes, layers: int, spoil: Spoil) -> bytes:
    parts = np.frombuffer(content, np.uint8).reshape(layers, KV_HEADS, 2, -1)
    return np.ascontiguousarray(spoil(parts)).tobytes()


def keys_as_values(parts: Bytes) -> Bytes:
    return parts[:, :, ::-1]


def keys_before_values(parts: Bytes) -> Bytes:
    """As a version that keeps the keys of all heads in front of the values."""
    return parts.transpose(0, 2, 1, 3)


def heads_exchanged(parts: Bytes) -> Bytes:
    return parts[:, [1, 0, *range(2, KV_HEADS)]]


def layers_exchanged(parts: Bytes) -> Bytes:
    return parts[[0, 2, 1, *range(3, len(parts))]]


def last_layer_missing(parts: Bytes) -> Bytes:
    missing = parts.copy()
    missing[-1] = 0
    return missing


def attention_of(pool: Path, namespace: str) -> dict[str, str]:
    """What the layers of each group see: ``full``, ``state``, a window."""
    with open_store(f"file://{pool}") as store:
        announced = store.announcements("kvpool:default:")
    for key, document in announced.items():
        if key.endswith(FACTS_SUFFIX) and namespace in key:
            facts = msgpack.unpackb(document)["facts"]
            return {
                name.removeprefix("group").removesuffix(".attention"): str(value)
                for name, value in facts.items()
                if name.endswith(".attention")
            }
    raise AssertionError(f"no facts of {namespace}")


def namesake(pool: Path, record: Path) -> Path:
    """The record of the same tokens in another pool, in whatever namespace, of whatever adapter of that name."""
    _, block_hash, group, rank = record.name.rsplit(".", 3)
    (found,) = (pool / "blocks").glob(f"*/*{block_hash[-SHARED_DIGITS:]}.{group}.{rank}")
    return found


def group_of(record: Path) -> str:
    return record.name.split(".")[-2]
