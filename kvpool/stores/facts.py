"""Why two workers do not share: each namespace keeps its facts in the pool, for the others to read."""

from __future__ import annotations

from typing import Any

import msgpack

from kvpool.errors import ConfigError
from kvpool.keys import MAX_FACTS, Fact, Namespace, differing_facts, parse_facts_key, tenant_prefix
from kvpool.stores.store import Store

LEASE_S = 30 * 86400.0
_VERSION = 1


def announce_facts(store: Store, namespace: Namespace, model: str) -> list[str]:
    """Keep the namespace's facts in the pool for 30 days, and name what keeps others from sharing with it.

    Returns one sentence for every other namespace of the same tenant and model, in the order of their
    fingerprints: which facts differ, and how. ``model``: as the fact ``"model"`` of the others says.
    Blocking, for a few small reads and one write. Errors: ``StoreUnavailable``; ``ConfigError`` when the
    facts together are larger than an announcement may be. Records that cannot be read are passed over.
    """
    record = {"version": _VERSION, "model": model, "facts": dict(namespace.facts)}
    store.announce(namespace.facts_key, msgpack.packb(record), lease_s=LEASE_S)
    sentences: list[str] = []
    for key, document in store.announcements(tenant_prefix(namespace.tenant)).items():
        parsed = parse_facts_key(key)
        if parsed is None or parsed[1] == namespace.hex:
            continue
        other = _other(namespace.tenant, document, model)
        if other is not None and other.hex == parsed[1]:
            sentences.append(_sentence(model, namespace, other))
    return sentences


def _other(tenant: str, document: bytes, model: str) -> Namespace | None:
    """The namespace that a facts record of this model describes; None when it is no such record."""
    try:
        record: Any = msgpack.unpackb(document, max_map_len=MAX_FACTS, max_array_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(record, dict) or record.get("version") != _VERSION or record.get("model") != model:
        return None
    facts = record.get("facts")
    if not isinstance(facts, dict):
        return None
    try:
        return Namespace(tenant, facts)
    except ConfigError:
        return None


def _sentence(model: str, ours: Namespace, theirs: Namespace) -> str:
    differences = [_difference(*difference) for difference in differing_facts(ours.facts, theirs.facts)]
    return (
        f'namespace {theirs.hex[:8]} of model "{model}" holds blocks that this worker cannot share: '
        + "; ".join(differences)
    )


def _difference(name: str, ours: Fact | None, theirs: Fact | None) -> str:
    if theirs is None:
        return f"{name} is {_shown(ours)} here and absent there"
    if ours is None:
        return f"{name} is absent here and {_shown(theirs)} there"
    return f"{name} is {_shown(ours)} here and {_shown(theirs)} there"


def _shown(fact: Fact | None) -> str:
    if isinstance(fact, bool):
        return "true" if fact else "false"
    return str(fact) if isinstance(fact, int) else f'"{fact}"'
