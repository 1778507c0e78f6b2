"""Outputs of encoders in a pool, under the keys that engines give them."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.key.hashing import media_hash
from kvpool.key.key import Namespace
from kvpool.store.store import Store

ENCODER = Namespace("default", {"kind": "encoder", "output_row": "64 float32"})
OTHER_ENCODER = Namespace("default", {"kind": "encoder", "output_row": "64 float32", "weights": "other"})
NBYTES = 256


def output_key(identifier: str, namespace: Namespace = ENCODER) -> str:
    return namespace.key(media_hash(identifier), 0, 0)


def put_outputs(store: Store, identifiers: Iterable[str], namespace: Namespace = ENCODER) -> None:
    keys = [output_key(one, namespace) for one in identifiers]
    store.put_many(keys, [bytes(NBYTES)] * len(keys))
