"""``kvpool doctor``: what keeps a pool, its workers and its index from working, and what to change.

On a server it writes one small block and takes it away again; everything else it only reads.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.cli.doctor.file_system import file_system_findings
from kvpool.cli.doctor.finding import Finding, note, ok, problem
from kvpool.cli.doctor.host_settings import host_findings
from kvpool.cli.doctor.indexes import index_findings, replica_findings
from kvpool.cli.doctor.server_settings import server_findings
from kvpool.cli.doctor.workers import announced_workers, worker_findings
from kvpool.cli.index_connection import IndexConnection
from kvpool.discovery.facts import announced_namespaces, describe_differences
from kvpool.discovery.worker import Worker
from kvpool.errors import KVPoolError, StoreUnavailable
from kvpool.key.key import Namespace
from kvpool.key.names import check_tenant
from kvpool.store import Store, StoreURL, open_for_inspection
from kvpool.store.url import SERVER_SCHEMES
from kvpool.text import format_nbytes

TRIAL_NBYTES = 64 << 10
MAX_DIFFERENCES_SHOWN = 8

_STYLE = {"ok": "green", "note": "yellow", "problem": "bold red"}


def run_doctor(*, pool: str | None, indexes: Sequence[IndexConnection], tenant: str, as_json: bool) -> bool:
    """Examine what is named and print what was found; True without a problem.

    Blocking, for some seconds. Errors: ``ConfigError`` for a URL or tenant that is none.
    """
    findings: list[Finding] = []
    announced: list[Worker] | None = None
    if pool is not None:
        examined = _Pool(StoreURL.parse(pool), pool, check_tenant(tenant))
        findings += examined.findings()
        announced = examined.workers
    for index in indexes:
        findings += index_findings(index, announced, tenant)
    for replica in indexes[1:]:
        findings += replica_findings(indexes[0], replica)
    good = all(finding.level != "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": good, "findings": [finding._asdict() for finding in findings]}))
    else:
        _print(findings, good)
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
            yield problem("pool", str(error), "nothing can be shared before this works")
            return
        with store:
            if self._url.scheme == "file":
                yield from _directory(self._url, store.counters()["stored_nbytes"])
            else:
                yield _trial(store, self._tenant)
            if self._url.scheme in SERVER_SCHEMES:
                yield from server_findings(self._url)
                if self._url.scheme != "valkey+unix":
                    yield from host_findings()
            try:
                yield from _namespaces(store, self._tenant)
                self.workers, problems = announced_workers(store, self._tenant)
            except StoreUnavailable as error:
                yield problem(
                    "pool", f"announcements cannot be read: {error}", _ACL.format(tenant=self._tenant)
                )
                return
        yield from worker_findings(self.workers, problems, self._tenant)


_ACL = "allow this user all commands on kvpool:{tenant}:* (docs/how-to/valkey.md has the rule)"


def _trial(store: Store, tenant: str) -> Finding:
    """Put, find, get and delete one block of random bytes under a key of its own."""
    namespace = Namespace(tenant, {"doctor": secrets.token_hex(16)})
    keys = [namespace.key(secrets.token_bytes(32), 0, 0)]
    value, copy = os.urandom(TRIAL_NBYTES), bytearray(TRIAL_NBYTES)
    started = time.perf_counter()
    try:
        if not store.put_many(keys, [value])[0]:
            return problem("pool", "it is full and keeps nothing new", "raise its capacity, or let it evict")
        found = store.contains_many(keys)[0] and store.get_many_into(keys, [copy])[0] and copy == value
        took_s = time.perf_counter() - started
        store.delete_many(keys)
    except StoreUnavailable as error:
        return problem("pool", f"a block cannot be put and read back: {error}", _ACL.format(tenant=tenant))
    if not found:
        return problem("pool", "a block that was just put is not there", "see whether it has any memory left")
    return ok(
        "pool",
        f"{store!r:.200} keeps blocks: {TRIAL_NBYTES >> 10} KiB written and read back in {took_s * 1e3:.1f} ms",
    )


def _directory(url: StoreURL, stored_nbytes: int) -> Iterator[Finding]:
    closed = [
        str(folder)
        for folder in (Path(url.path), *(Path(url.path) / part for part in ("tmp", "blocks")))
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    ]
    if closed:
        yield problem(
            "pool",
            f"this user cannot write in {', '.join(closed)}",
            "run as the user of the workers, or give this one the right; mount it writable",
        )
    else:
        yield ok("pool", f"{url.path} is a pool, with {stored_nbytes / 2**20:,.1f} MiB in it")
    usage = shutil.disk_usage(url.path)
    capacity, free = format_nbytes(url.capacity_nbytes), f"{usage.free / 2**30:,.1f} GiB"
    if usage.total < url.capacity_nbytes:
        yield problem(
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
            yield ok("sharing", f'all workers of model "{model}" share one namespace, {first.hex[:8]}')
        for other in others[:MAX_DIFFERENCES_SHOWN]:
            yield note(
                "sharing",
                f'model "{model}" has workers that do not share, in namespaces {first.hex[:8]} (here) and '
                f"{other.hex[:8]} (there): {describe_differences(first, other)}",
                "make these the same where they should share; records of past set-ups go after 30 days",
            )
        if len(others) > MAX_DIFFERENCES_SHOWN:
            yield note("sharing", f"{len(others) - MAX_DIFFERENCES_SHOWN} more namespaces of it differ", "")


def _print(findings: list[Finding], good: bool) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        says = f"{finding.says}\n-> {finding.change}" if finding.change else finding.says
        table.add_row(Text(finding.level, _STYLE[finding.level]), finding.about, Text(says))
    console = Console()
    console.print(table)
    problems = sum(finding.level == "problem" for finding in findings)
    notes = sum(finding.level == "note" for finding in findings)
    verdict = "Everything works" if good else f"To be changed: {problems}"
    console.print(f"{verdict}; could be better: {notes}.", highlight=False)
