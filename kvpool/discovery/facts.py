"""Each namespace keeps its facts in the pool, so that workers can say why they do not share."""

from __future__ import annotations

from typing import Any

import msgpack

from kvpool.errors import ConfigError
from kvpool.key.key import (
    EPOCH_FACT,
    FACTS_SUFFIX,
    MAX_FACTS,
    MEMORY_FACT,
    Fact,
    Namespace,
    differing_facts,
    parse_facts_key,
    tenant_prefix,
)
from kvpool.store.store import Store

LEASE_S = 30 * 86400.0
UPDATE_LEASE_S = 2 * 86400.0  # of weights that came later, of which a trainer makes one every few minutes
KEEP_EVERY_S = 60.0  # a server that evicts what is not used takes facts long before their lease ends
_VERSION = 1
# What sets a fact, in the order of a sentence; facts that are not here, such as sizes and digests, follow from these.
_SET_BY = {
    MEMORY_FACT: "an update of the running engine",
    "kv_dtype": "--kv-cache-dtype, else --dtype",
    "weights_dtype": "--dtype",
    "quantization": "--quantization",
    "revision": "--revision",
    "hash_algorithm": "--prefix-caching-hash-algo",
    "hash_seed": "PYTHONHASHSEED",
    "hash_block_tokens": "--block-size",
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
}


def announce_facts(store: Store, namespace: Namespace, model: str) -> list[str]:
    """Keep the namespace's facts in the pool, and describe the similar namespaces.

    Returns the differing facts in a sentence per namespace of the tenant with the same model or weights, by
    fingerprint. Skipped are unreadable records and namespaces of one engine alone (``EPOCH_FACT``) or of weights that
    came later (``MEMORY_FACT``): an update leaves all others. Outputs of encoders are compared among themselves.
    ``model``: its display name in the record. Blocks for a few small reads and a write. Errors: ``StoreUnavailable``;
    ``ConfigError`` when the facts exceed an announcement.
    """
    keep_facts(store, namespace, model)
    weights = namespace.facts.get("weights")
    others = {
        other.hex: (name, other)
        for name, found in announced_namespaces(store, namespace.tenant).items()
        for other in found
        if other != namespace
        and other.facts.get("kind") == namespace.facts.get("kind")
        and (name == model or (weights and other.facts.get("weights") == weights))
    }
    return [
        f'namespace {fingerprint[:8]} of model "{name}" holds blocks that this worker cannot share: '
        + describe_differences(namespace, other)
        for fingerprint, (name, other) in sorted(others.items())
        if not {EPOCH_FACT, MEMORY_FACT} & {*other.facts, *namespace.facts}
    ]


def keep_facts(store: Store, namespace: Namespace, model: str) -> None:
    """Write the namespace's facts, again where they are there, for 30 days, or 2 if its weights came later.

    Blocks for a small write. Errors: as above.
    """
    record = {"version": _VERSION, "model": model, "facts": dict(namespace.facts)}
    lease_s = UPDATE_LEASE_S if MEMORY_FACT in namespace.facts else LEASE_S
    store.announce(namespace.facts_key, msgpack.packb(record), lease_s=lease_s)


def announced_namespaces(store: Store, tenant: str) -> dict[str, list[Namespace]]:
    """The tenant's readable namespaces by model and fingerprint. Small reads. Errors: ``StoreUnavailable``."""
    found: dict[str, list[Namespace]] = {}
    for key, document in store.announcements(tenant_prefix(tenant), FACTS_SUFFIX).items():
        parsed, described = parse_facts_key(key), _described(tenant, document)
        if parsed is not None and described is not None and described[1].hex == parsed[1]:
            found.setdefault(described[0], []).append(described[1])
    return found


def describe_differences(here: Namespace, there: Namespace) -> str:
    """The facts that differ: first those that an option sets, with the option."""
    order = {name: place for place, name in enumerate(_SET_BY)}
    differing = differing_facts(here.facts, there.facts)
    differing.sort(key=lambda one: order.get(one[0], len(order)))
    return "; ".join(_difference(*one) for one in differing)


def _described(tenant: str, document: bytes) -> tuple[str, Namespace] | None:
    """(model, namespace) of a facts record; None for any other document."""
    try:
        record: Any = msgpack.unpackb(document, max_map_len=MAX_FACTS, max_array_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        return None
    model, facts = record.get("model"), record.get("facts")
    if not isinstance(model, str) or not isinstance(facts, dict):
        return None
    try:
        return model, Namespace(tenant, facts, record_version=None)
    except ConfigError:
        return None


def _difference(name: str, here: Fact | None, there: Fact | None) -> str:
    ours, theirs = ("absent" if one is None else _shown(one) for one in (here, there))
    return f"{name} is {ours} here and {theirs} there" + (f" ({_SET_BY[name]})" if name in _SET_BY else "")


def _shown(fact: Fact) -> str:
    if isinstance(fact, bool):
        return "true" if fact else "false"
    return str(fact) if isinstance(fact, int) else f'"{fact}"'
