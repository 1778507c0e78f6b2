"""``Standing``: the bytes of records that a tenant may hold in a pool, its quota, and those that it holds.

Both are documents of the pool: an operator writes the quota (``kvpool quota``), an index what it has counted. Their
keys belong to no tenant, so that a server's access rules let a tenant's user read them and not write. Removing a quota
writes none. A missing document means loss; an index that has read it writes it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgpack

from kvpool.key.key import QUOTA_PREFIX, quota_keys
from kvpool.store.store import MAX_LEASE_S, Store
from kvpool.text import MAX_NBYTES

VERSION = 1
MAX_DOCUMENT_NBYTES = 256


class Standing(NamedTuple):
    """``quota_nbytes``: None: no limit. ``held_nbytes``: None: nobody counts.

    ``is_said``: a quota, or that there is none, stands in the pool. ``is_unreadable``: in place of one of the two
    documents stands something else.
    """

    quota_nbytes: int | None = None
    held_nbytes: int | None = None
    is_said: bool = False
    is_unreadable: bool = False

    @property
    def is_over(self) -> bool:
        return self.used >= 1

    @property
    def used(self) -> float:
        """The share of the quota that is held; 0: there is no limit, or nobody counts."""
        if self.quota_nbytes is None or self.held_nbytes is None:
            return 0.0
        return self.held_nbytes / self.quota_nbytes if self.quota_nbytes else 1.0

    def as_json(self, tenant: str) -> dict[str, object]:
        return {"tenant": tenant, "held_nbytes": self.held_nbytes, "quota_nbytes": self.quota_nbytes}


def fullest_first(standings: Iterable[tuple[str, Standing]]) -> list[tuple[str, Standing]]:
    """By tenant; equal ones by name."""
    return sorted(standings, key=lambda pair: (-pair[1].used, pair[0]))


def read_standings(store: Store, tenants: Iterable[str]) -> dict[str, Standing]:
    """By tenant. Blocks for two small reads a tenant. Errors: ``StoreUnavailable``."""
    keys = {tenant: quota_keys(tenant) for tenant in tenants}
    found = store.announced_under([key for pair in keys.values() for key in pair])
    return {tenant: _standing(*(found.get(key) for key in pair)) for tenant, pair in keys.items()}


def tenants_with_quotas(store: Store) -> list[str]:
    """Sorted; those whose quota was taken back are among them. Blocks for small reads. Errors: ``StoreUnavailable``."""
    names = {key.removeprefix(QUOTA_PREFIX).partition(":")[0] for key in store.announcements(QUOTA_PREFIX)}
    return sorted(names)


def write_quota(store: Store, tenant: str, nbytes: int | None) -> None:
    """None: no limit. Blocks for a small write. Errors: ``StoreUnavailable``."""
    store.announce(quota_keys(tenant)[0], _packed(nbytes), lease_s=MAX_LEASE_S)


def write_held(store: Store, tenant: str, nbytes: int, lease_s: float) -> None:
    """Blocks for a small write. Errors: ``StoreUnavailable``."""
    store.announce(quota_keys(tenant)[1], _packed(nbytes), lease_s=min(lease_s, MAX_LEASE_S))


def _packed(nbytes: int | None) -> bytes:
    document: bytes = msgpack.packb({"version": VERSION, "nbytes": nbytes})
    return document


def _standing(quota: bytes | None, held: bytes | None) -> Standing:
    quota_nbytes, is_said = _unpacked(quota)
    held_nbytes, is_counted = _unpacked(held)
    is_unreadable = (quota is not None and not is_said) or (held is not None and not is_counted)
    return Standing(quota_nbytes, held_nbytes, is_said, is_unreadable)


def _unpacked(document: bytes | None) -> tuple[int | None, bool]:
    """The bytes, and whether the document is there and makes sense."""
    if document is None or len(document) > MAX_DOCUMENT_NBYTES:
        return None, False
    try:
        fields: Any = msgpack.unpackb(document, max_map_len=8, max_array_len=0, max_ext_len=0)
        version, nbytes = fields["version"], fields["nbytes"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None, False
    if version != VERSION or not (nbytes is None or (type(nbytes) is int and 0 <= nbytes <= MAX_NBYTES)):
        return None, False
    return nbytes, True
