"""``kvpool doctor``: what works in a deployment, what keeps it from working, and what to change.

On a server it writes one small block and takes it away again; everything else it only reads.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvpool.cli.doctor.file_system import file_system_findings
from kvpool.cli.doctor.finding import Finding, fail, ok, warn
from kvpool.cli.doctor.fronts import front_findings, picker_findings
from kvpool.cli.doctor.host_settings import host_findings
from kvpool.cli.doctor.http_page import check_url
from kvpool.cli.doctor.indexes import index_findings, replica_findings
from kvpool.cli.doctor.server_settings import server_findings
from kvpool.cli.doctor.serving import serving_findings
from kvpool.cli.doctor.workers import announced_workers, worker_findings
from kvpool.cli.index_connection import IndexConnection
from kvpool.cli.tables import console, show
from kvpool.discovery.facts import announced_namespaces, describe_differences
from kvpool.discovery.worker import Worker
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.key.names import check_tenant
from kvpool.store import Store, StoreURL, open_for_inspection
from kvpool.store.url import SERVER_SCHEMES
from kvpool.text import format_nbytes, redact

TRIAL_NBYTES = 64 << 10
MAX_DIFFERENCES_SHOWN = 8

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run_doctor(
    *,
    pool: str | None,
    indexes: Sequence[IndexConnection],
    tenant: str,
    fronts: Sequence[str] = (),
    pickers: Sequence[IndexConnection] = (),
    tls_ca: str | None = None,
    as_json: bool,
) -> bool:
    """Examine what is named and print what was found; True where nothing fails, and all that is named is there.

    ``tls_ca``: authority of fronts and workers at ``https://``. Blocking, for some seconds. Errors: ``ConfigError`` for
    a URL or tenant that is none.
    """
    urls = [check_url(url, "--front") for url in fronts]
    findings: list[Finding] = []
    announced: list[Worker] | None = None
    if pool is not None:
        examined = _Pool(StoreURL.parse(pool), pool, check_tenant(tenant))
        findings += examined.findings()
        announced = examined.workers
    workers = {worker.id: worker for worker in announced or ()}
    for index in indexes:
        told, followed = index_findings(index, announced, tenant)
        findings += told
        workers = {worker.id: worker for worker in followed} | workers
    for replica in indexes[1:]:
        findings += replica_findings(indexes[0], replica)
    findings += serving_findings(list(workers.values()), tls_ca)
    for url in urls:
        findings += front_findings(url, list(workers.values()), tls_ca)
    for picker in pickers:
        findings += picker_findings(picker)
    left_out = [
        option
        for option, given in (
            ("--pool", pool),
            ("--index", indexes),
            ("--front", fronts),
            ("--picker", pickers),
        )
        if not given
    ]
    good = all(finding.level != "fail" for finding in findings)
    if as_json:
        report = {
            "ok": good,
            "findings": [finding._asdict() for finding in findings],
            "not_examined": [option.removeprefix("--") for option in left_out],
        }
        print(json.dumps(report))
    else:
        _print(findings, left_out)
    return good


class _Pool:
    """``workers``: those that announce themselves, once ``findings`` has been read; None: not known."""

    def __init__(self, url: StoreURL, text: str, tenant: str) -> None:
        self._url, self._text, self._tenant = url, text, tenant
        self.workers: list[Worker] | None = None

    def findings(self) -> Iterator[Finding]:
        try:
            store = open_for_inspection(self._text)
        except KVPoolError as error:
            yield fail(
                "pool",
                str(error),
                "correct that and run the doctor again: until then nothing else of the pool is examined",
            )
            return
        with store:
            if self._url.scheme == "memory":
                yield fail(
                    "pool",
                    "memory:// is private to one process",
                    "name a pool that all workers reach: valkey://HOST:6379, or file:///PATH on one host",
                )
                return
            if self._url.scheme == "file":
                yield from _directory(self._url, store.counters()["stored_nbytes"])
            else:
                yield _trial(store, redact(self._text), self._tenant)
            if self._url.scheme in SERVER_SCHEMES:
                yield from server_findings(self._url)
                if self._url.scheme != "valkey+unix":
                    yield from host_findings()
            try:
                yield from _namespaces(store, self._tenant)
                self.workers, problems = announced_workers(store, self._tenant)
            except StoreUnavailable as error:
                yield fail("pool", f"announcements cannot be read: {error}", _ACL.format(tenant=self._tenant))
                return
        yield from worker_findings(self.workers, problems, self._tenant)


_ACL = "allow this user all commands on kvpool:{tenant}:* (docs/how-to/valkey.md has the rule)"


def _trial(store: Store, name: str, tenant: str) -> Finding:
    """Put, find, get and delete one block of random bytes under a key of its own."""
    namespace = Namespace(tenant, {"doctor": secrets.token_hex(16)})
    keys = [namespace.key(secrets.token_bytes(32), 0, 0)]
    value, copy = os.urandom(TRIAL_NBYTES), bytearray(TRIAL_NBYTES)
    started = time.perf_counter()
    try:
        if not store.put_many(keys, [value])[0]:
            return fail("pool", "it is full and keeps nothing new", "raise its capacity, or let it evict")
        found = store.contains_many(keys)[0] and store.get_many_into(keys, [copy])[0] and copy == value
        took_s = time.perf_counter() - started
        store.delete_many(keys)
    except StoreUnavailable as error:
        return fail("pool", f"a block cannot be put and read back: {error}", _ACL.format(tenant=tenant))
    if not found:
        return fail("pool", "a block that was just put is not there", "see whether it has any memory left")
    return ok(
        "pool",
        f"{name:.200} keeps blocks: {TRIAL_NBYTES >> 10} KiB written and read back in {took_s * 1e3:.1f} ms",
    )


def _directory(url: StoreURL, stored_nbytes: int) -> Iterator[Finding]:
    closed = [
        str(folder)
        for folder in (Path(url.path), *(Path(url.path) / part for part in ("tmp", "blocks")))
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    ]
    if closed:
        yield fail(
            "pool",
            f"this user cannot write in {', '.join(closed)}",
            "run as the user of the workers, or give this one the right; mount it writable",
        )
    else:
        yield ok("pool", f"{url.path} is a pool, with {stored_nbytes / 2**20:,.1f} MiB in it")
    usage = shutil.disk_usage(url.path)
    capacity, free = format_nbytes(url.capacity_nbytes), f"{usage.free / 2**30:,.1f} GiB"
    if usage.total < url.capacity_nbytes:
        yield fail(
            "pool",
            f"its capacity is {capacity}, and the file system holds {usage.total / 2**30:,.1f} GiB in all",
            "write a smaller ?capacity= in the pool's URL",
        )
    else:
        yield ok("pool", f"capacity {capacity}; {free} are free on the file system")
    yield from file_system_findings(url.path)


def _namespaces(store: Store, tenant: str) -> Iterator[Finding]:
    """Workers of one model that do not share, and on which facts they differ."""
    for model, namespaces in announced_namespaces(store, tenant).items():
        first, *others = namespaces
        if not others:
            yield ok("sharing", f'workers of model "{model}" have one namespace, {first.hex[:8]}: they share')
        for other in others[:MAX_DIFFERENCES_SHOWN]:
            yield warn(
                "sharing",
                f'model "{model}" has workers that do not share, in namespaces {first.hex[:8]} (here) and '
                f"{other.hex[:8]} (there): {describe_differences(first, other)}",
                "make these the same where they should share; records of past set-ups go after 30 days",
            )
        if len(others) > MAX_DIFFERENCES_SHOWN:
            yield warn("sharing", f"{len(others) - MAX_DIFFERENCES_SHOWN} more namespaces of it differ", "")


def _print(findings: list[Finding], left_out: list[str]) -> None:
    out = console()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        says = f"{finding.says}\n-> {finding.change}" if finding.change else finding.says
        table.add_row(Text(finding.level.upper(), _STYLE[finding.level]), Text(finding.about), Text(says))
    count = Counter(finding.level for finding in findings)
    show(out, table, f"{count['fail']} FAIL, {count['warn']} WARN, {count['ok']} OK.")
    if left_out:
        show(out, f"Not examined, since not named: {', '.join(left_out)}.")
