"""Outputs of encoders in a pool, under the keys that engines give them."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.index.fleet.fleet import Fleet
from kvpool.key.hashing import media_hash
from kvpool.key.key import Namespace
from kvpool.store.store import Store
from tests.support.wire import batch, stored

ENCODER = Namespace("default", {"kind": "encoder", "output_row": "64 float32"})
OTHER_ENCODER = Namespace("default", {"kind": "encoder", "output_row": "64 float32", "weights": "other"})
NBYTES = 256


def output_key(identifier: str, namespace: Namespace = ENCODER) -> str:
    return namespace.key(media_hash(identifier), 0, 0)


def put_outputs(store: Store, identifiers: Iterable[str], namespace: Namespace = ENCODER) -> None:
    keys = [output_key(one, namespace) for one in identifiers]
    store.put_many(keys, [bytes(NBYTES)] * len(keys))


def follow_outputs(fleet: Fleet, identifiers: Iterable[str], namespace: str = ENCODER.hex) -> None:
    """The pool has these outputs, as far as the fleet knows."""
    hashes64 = [int.from_bytes(media_hash(one)[-8:], "big") for one in identifiers]
    for pool in fleet.pools():
        if hashes64 and pool.is_media and pool.namespace == namespace:
            pool.table.apply(pool.holder, batch(stored(hashes64, medium="STORAGE")), pool=pool.holder)
