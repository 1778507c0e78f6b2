"""The pool record of one data-parallel rank, from which an index builds its worker. Pure.

A msgpack map under ``kvpool:TENANT:worker:RANK:NAME``; tenant, rank and name stand only in the key. A rank that
stops writes ``ENDED`` in its place: a server's eviction takes records away, too, and says nothing of the worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgpack

from kvpool.discovery.worker import Publisher, Worker, are_media, check_worker
from kvpool.errors import ConfigError
from kvpool.key.key import is_request_key, parse_worker_key, worker_key, workers_prefix
from kvpool.store.store import Store

VERSION = 1
ENDED = b"ended"
MAX_RECORD_NBYTES = 16 << 10
MIN_LEASE_S = 1.0
MAX_LEASE_S = 3600.0
DEFAULT_LEASE_S = 10.0
RENEWALS = 3  # per lease
READ_S = DEFAULT_LEASE_S / RENEWALS  # longer leases are renewed as often, because each renewal reads requests
# Longer than the pause between two readings, shorter than ``kvpool.vllm.tell.events.INTERVAL_S``, after which a
# rank may be requested again: no request outlives its answer.
REQUEST_LEASE_S = 5.0

NEAR = "near"  # left out if empty
NAMES = "names"  # as lines of one text, left out if empty: an earlier index reads no record with a list
MEDIA = "media_namespaces"  # alike
_TEXTS = ("model", "hash_algorithm", "hash_seed_id", "address", "incarnation", "namespace")
_FIELDS = {"version", "block_tokens", "events", "replay", "lease_s", *_TEXTS}


class WorkerRecord(NamedTuple):
    """One rank as announced: ``worker`` has one publisher. ``renewal``: another number, another lease."""

    worker: Worker
    lease_s: float
    renewal: int = 0

    @property
    def rank(self) -> tuple[str, int]:
        """(worker id, data-parallel rank)."""
        return self.worker.id, self.worker.publishers[0].dp_rank


def pack_worker(worker: Worker, lease_s: float, renewal: int = 0) -> tuple[str, bytes]:
    """(key, record) of a worker with exactly one publisher. Errors: ``ConfigError`` that names the field."""
    check_worker(worker)
    if len(worker.publishers) != 1 or not worker.incarnation:
        raise ConfigError(f"worker {worker.name}: one publisher and an incarnation are announced at a time")
    if not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
        raise ConfigError(
            f"worker {worker.name}: a lease is {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds, not {lease_s:g}"
        )
    (publisher,) = worker.publishers
    record = {
        "version": VERSION,
        "block_tokens": worker.block_tokens,
        "events": publisher.events,
        "replay": publisher.replay,
        "lease_s": float(lease_s),
        "renewal": renewal,
        **{name: getattr(worker, name) for name in _TEXTS},
    }
    if worker.names:
        record[NAMES] = "\n".join(worker.names)
    if worker.near:
        record[NEAR] = worker.near
    if worker.media_namespaces:
        record[MEDIA] = "\n".join(worker.media_namespaces)
    return worker_key(worker.tenant, worker.name, publisher.dp_rank), msgpack.packb(record)


def unpack_worker(key: str, record: bytes) -> WorkerRecord | None:
    """Parse a record, ignoring unknown fields of later versions; None when this version cannot follow it."""
    parsed = parse_worker_key(key)
    if parsed is None or len(record) > MAX_RECORD_NBYTES:
        return None
    try:
        fields: Any = msgpack.unpackb(record, max_map_len=64, max_array_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS or fields["version"] != VERSION:
        return None
    lease_s, renewal, tenant, name, dp_rank = fields["lease_s"], fields.get("renewal", 0), *parsed
    names, near = fields.get(NAMES, ""), fields.get(NEAR, "")
    texts = (*(fields[one] for one in (*_TEXTS, "events", "replay")), names, near)
    if not all(isinstance(text, str) for text in texts):
        return None
    if type(lease_s) is not float or not MIN_LEASE_S <= lease_s <= MAX_LEASE_S or type(renewal) is not int:
        return None
    try:
        worker = Worker(
            name=name,
            tenant=tenant,
            block_tokens=fields["block_tokens"],
            publishers=(Publisher(dp_rank, fields["events"], fields["replay"]),),
            names=tuple(names.split("\n")) if names else (),
            near=near,
            media_namespaces=_media(fields.get(MEDIA)),
            **{text: fields[text] for text in _TEXTS},
        )
        return WorkerRecord(check_worker(worker), lease_s, renewal) if worker.incarnation else None
    except ConfigError:
        return None


def _media(said: object) -> tuple[str, ...]:
    """Nobody needs them to follow a worker: of another form, they are none."""
    namespaces = tuple(said.split("\n")) if isinstance(said, str) else ()
    return namespaces if are_media(namespaces) else ()


def announced_workers(store: Store, tenant: str) -> list[WorkerRecord | None]:
    """Those of a tenant that have not ended; None: of another version. Errors: ``StoreUnavailable``."""
    announced = store.announcements(workers_prefix(tenant)).items()
    return [unpack_worker(key, one) for key, one in announced if one != ENDED and not is_request_key(key)]


def merge_ranks(announced: Iterable[WorkerRecord]) -> tuple[dict[str, Worker], list[str]]:
    """Merge ranks into workers, by id; and a sentence for each rank that contradicts its worker.

    Ranks of one tenant and name form one worker if they agree on all but publisher, incarnation, namespace, media,
    near pool and names; the lowest rank decides. The worker's incarnation changes whenever a rank's does, or a rank
    comes or goes. Ranks whose caches were reset have different namespaces; the worker then has none.
    Ranks of several hosts have no near pool.
    """
    ranks: dict[str, list[Worker]] = {}
    for one in announced:
        ranks.setdefault(one.worker.id, []).append(one.worker)
    workers: dict[str, Worker] = {}
    problems: list[str] = []
    for worker_id, parts in ranks.items():
        parts.sort(key=lambda part: part.publishers[0].dp_rank)
        alike = [part for part in parts if _common(part) == _common(parts[0])]
        workers[worker_id] = replace(
            parts[0],
            publishers=tuple(part.publishers[0] for part in alike),
            namespace=parts[0].namespace if len({part.namespace for part in alike}) == 1 else "",
            near=parts[0].near if len({part.near for part in alike}) == 1 else "",
            incarnation=_incarnation([part.incarnation for part in alike]),
        )
        problems += [
            f"worker {worker_id}: rank {part.publishers[0].dp_rank} is left out, for it is not of one engine "
            f"with rank {parts[0].publishers[0].dp_rank}: {_difference(_common(parts[0]), _common(part))}; "
            'give each engine its own "worker"'
            for part in parts
            if _common(part) != _common(parts[0])
        ]
    return workers, problems


def _common(worker: Worker) -> Mapping[str, object]:
    texts = {name: getattr(worker, name) for name in _TEXTS if name not in ("incarnation", "namespace")}
    return {"block_tokens": worker.block_tokens, **texts}


def _difference(here: Mapping[str, object], there: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name} is {here[name]!r} and {there[name]!r}" for name in here if here[name] != there[name]
    )


def _incarnation(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
