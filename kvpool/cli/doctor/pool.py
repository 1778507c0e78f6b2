"""A pool for ``kvpool doctor``: its store or directory, and its announced workers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvpool.cli.doctor import rules
from kvpool.cli.doctor.audits import audit_findings
from kvpool.cli.doctor.disk import look_at_disk
from kvpool.cli.doctor.rules import Finding, judge
from kvpool.cli.doctor.server import host_findings, server_findings
from kvpool.cli.doctor.subjects import Directory, Pool, Quota, Sharing, Trial
from kvpool.discovery.facts import announced_namespaces, describe_differences
from kvpool.discovery.quota import Standing, read_standings
from kvpool.discovery.worker import Worker
from kvpool.discovery.worker_record import announced_workers, merge_ranks
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.key.key import MEMORY_FACT, Namespace
from kvpool.store import Store, StoreURL, open_for_inspection
from kvpool.store.file_system import FileSystem
from kvpool.store.url import SERVER_SCHEMES
from kvpool.text import far_url, format_nbytes, format_size, listed, redact

TRIAL_NBYTES = 64 << 10
MAX_DIFFERENCES_SHOWN = 8
MAX_NAMES_SHOWN = 3


def pool_findings(text: str, tenant: str) -> tuple[list[Finding], list[Worker] | None]:
    """Findings of a pool, and its announced workers; None: unknown. Blocking, for some seconds."""
    *near, url = StoreURL.parse(text).pools()
    found = [finding for one in near for finding in _near_findings(one)]
    more, workers = _findings(url, redact(far_url(text)), tenant)
    return [*found, *more], workers


def _near_findings(url: StoreURL) -> list[Finding]:
    """Of this host's near pool: a directory that no worker needs for its announcement."""
    try:
        with open_for_inspection(url) as store:
            found = list(_directory(url, store.counters()))
            return [one._replace(about="near pool") for one in found]
    except KVPoolError as error:
        return list(judge("near pool", rules.POOL, Pool(error=str(error))))


def _findings(url: StoreURL, name: str, tenant: str) -> tuple[list[Finding], list[Worker] | None]:
    try:
        store = open_for_inspection(url)
    except KVPoolError as error:
        return list(judge("pool", rules.POOL, Pool(tenant, error=str(error)))), None
    with store:
        if url.scheme == "file":
            found = list(_directory(url, store.counters()))
        else:
            found = list(judge("pool", rules.TRIAL, _trial(store, name, tenant), first=True))
        if url.scheme in SERVER_SCHEMES:
            found += server_findings(url)
            if url.scheme != "valkey+unix":
                found += host_findings()
        try:
            records = announced_workers(store, tenant)
            by_id, problems = merge_ranks([one for one in records if one is not None])
            workers = list(by_id.values())
            found += _sharing(store, tenant, workers)
            found += _quota(store, tenant)
            found += audit_findings(store, name, tenant)
        except StoreUnavailable as error:
            return [*found, *judge("pool", rules.POOL, Pool(tenant, unreadable=str(error)))], None
    if unreadable := records.count(None):
        problems.append(f"{unreadable} records of workers cannot be read: of another version?")
    if not workers:
        found += judge("workers", rules.WORKERS, tenant)
    for sentence in problems:
        found += judge("workers", rules.RECORD, sentence)
    return found, workers


def _trial(store: Store, name: str, tenant: str) -> Trial:
    """Put, find, get and delete one block of random bytes under a key of its own."""
    namespace = Namespace(tenant, {"doctor": secrets.token_hex(16)})
    keys = [namespace.key(secrets.token_bytes(32), 0, 0)]
    value, copy = os.urandom(TRIAL_NBYTES), bytearray(TRIAL_NBYTES)
    started = time.perf_counter()
    try:
        if not store.put_many(keys, [value])[0]:
            return Trial(name, tenant)
        found = store.contains_many(keys)[0] and store.get_many_into(keys, [copy])[0] and copy == value
        took_ms = (time.perf_counter() - started) * 1e3
        store.delete_many(keys)
        return Trial(name, tenant, kept=True, found=found, took_ms=took_ms)
    except StoreUnavailable as error:
        return Trial(name, tenant, error=str(error))


def _directory(url: StoreURL, counters: Mapping[str, int]) -> Iterator[Finding]:
    stored_nbytes, in_pool_nbytes = counters["stored_nbytes"], counters["capacity_nbytes"]
    capacity_nbytes = (
        in_pool_nbytes or url.capacity_nbytes
    )  # of a pool of an older kvpool: each process has its own
    folders = (Path(url.path), *(Path(url.path) / part for part in ("tmp", "blocks")))
    system = FileSystem.of(url.path)
    directory = Directory(
        path=url.path,
        closed=", ".join(str(one) for one in folders if not os.access(one, os.R_OK | os.W_OK | os.X_OK)),
        stored_mib=stored_nbytes / 2**20,
        capacity=format_nbytes(capacity_nbytes),
        of_url=format_nbytes(url.capacity_nbytes),
        is_said=in_pool_nbytes > 0,
        differs=url.says_capacity and capacity_nbytes != url.capacity_nbytes,
        place=system.place,
        too_large=0 < system.total_nbytes < capacity_nbytes + system.reserve_nbytes,
        too_full=system.room_nbytes(stored_nbytes) < capacity_nbytes,
        total_gib=system.total_nbytes / 2**30,
        free_gib=system.free_nbytes / 2**30,
        reserve_gib=system.reserve_nbytes / 2**30,
        room_mib=system.room_nbytes(stored_nbytes) / 2**20,
    )
    yield from judge("pool", rules.DIRECTORY, directory)
    if system.kind == "tmpfs":
        yield from judge("pool", rules.TMPFS, system, first=True)
    elif system.kind:
        yield from judge("pool", rules.DISK, look_at_disk(Path(url.path), system), first=True)


def _sharing(store: Store, tenant: str, workers: Sequence[Worker]) -> Iterator[Finding]:
    """Workers of one model that do not share, with the facts that differ.

    The model has the name that its workers announce, for which requests ask; a record of facts may have another.
    Where weights are updated, namespaces that all workers have left are no difference.
    """
    entered = {worker.namespace for worker in workers}
    for recorded, found in announced_namespaces(store, tenant).items():
        announced = [one for one in found if "kind" not in one.facts]  # outputs of encoders are no blocks
        namespaces = [one for one in announced if one.hex in entered]
        if not any(MEMORY_FACT in one.facts for one in namespaces):
            namespaces = [one for one in announced if MEMORY_FACT not in one.facts]
        if not namespaces:
            continue
        first, *others = sorted(namespaces, key=lambda one: one.hex not in entered)
        known = {namespace.hex for namespace in namespaces}
        names = sorted({worker.model for worker in workers if worker.namespace in known}) or [recorded]
        model = " and ".join(f'"{name}"' for name in names)
        for other in (*others[:MAX_DIFFERENCES_SHOWN],) or (None,):
            differences = "" if other is None else describe_differences(first, other)
            is_left = other is not None and first.hex in entered and other.hex not in entered
            here, there = (_some_in(one, workers) for one in (first, other))
            pair = Sharing(model, first, other, differences, is_left, here, there)
            yield from judge("sharing", rules.SHARING, pair, first=True)
        if len(others) > MAX_DIFFERENCES_SHOWN:
            more = len(others) - MAX_DIFFERENCES_SHOWN
            yield Finding("warn", "sharing", f"{more} more namespaces of it differ")


def _some_in(namespace: Namespace | None, workers: Sequence[Worker]) -> str:
    names = listed(
        (one.name for one in workers if namespace is not None and one.namespace == namespace.hex),
        MAX_NAMES_SHOWN,
    )
    return f": {names}" if names else ""


def _quota(store: Store, tenant: str) -> Iterator[Finding]:
    error, standing = "", Standing()
    try:
        standing = read_standings(store, [tenant])[tenant]
    except StoreUnavailable as refused:  # a user of rules before there were quotas
        error = str(refused)
    subject = Quota(
        tenant=tenant,
        error=error,
        standing=standing,
        quota=format_size(standing.quota_nbytes or 0),
        held=format_size(standing.held_nbytes or 0),
    )
    return judge("quota", rules.QUOTA, subject, first=True)
