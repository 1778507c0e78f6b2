"""``kvpool purge``: delete a pool's keys of a tenant, a namespace, a writer or everyone, after a preview.

It scans, asks, and scans again to delete, so that a pool's keys are never all in memory.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

import typer
from rich.console import Console

from kvpool.cli.settings import PurgeOptions
from kvpool.cli.tables import Column, add_row, console, fitted, progress_bar, show
from kvpool.discovery.facts import announced_namespaces
from kvpool.discovery.worker_record import announced_workers
from kvpool.errors import ConfigError, KVPoolError, StoreUnavailable
from kvpool.key.key import KEY_PREFIX, namespace_prefix, parse_key, tenant_of, tenant_prefix
from kvpool.store import Store, StoreURL, open_for_inspection
from kvpool.store.file import pool_id
from kvpool.store.header import NOBODY
from kvpool.store.store import StoredBlock, WrittenBlock
from kvpool.text import counted, format_size, listed, redact, unknown

DELETE_TIMEOUT_S = 60.0  # of about a thousand blocks
MAX_SHOWN = 20
MAX_WRITERS = 4096  # kept, of those that are not sought

_DIGITS = re.compile(r"[0-9a-f]{8,32}")  # logs and the doctor write the first 8


class NothingThere(KVPoolError):
    """The pool has no such keys; the text says which it has."""


@dataclass
class Share:
    """One namespace's part of a pool. ``model``: as its workers announce it, else as its facts say; empty: unknown.

    ``pool``: "near" or "far", where there are two.
    """

    tenant: str
    namespace: str
    pool: str = ""
    model: str = ""
    blocks: int = 0
    nbytes: int = 0  # of records


@dataclass
class Sought:
    """The writer whose blocks go, by its first ``digits``, and what a scan met: it (one at most), and some others."""

    digits: str
    namespace: str  # first digits of those that count
    found: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    def of(self, blocks: Iterable[WrittenBlock]) -> list[WrittenBlock]:
        """Those that it wrote. Errors: ``ConfigError`` when ``digits`` begin several writers."""
        return [block for block in blocks if self._has_written(block)]

    def _has_written(self, block: WrittenBlock) -> bool:
        if block.writer == NOBODY or not parse_key(block.key).fingerprint.hex().startswith(self.namespace):
            return False
        writer = block.writer.hex()
        if not writer.startswith(self.digits):
            if len(self.others) < MAX_WRITERS:
                self.others.add(writer)
            return False
        self.found.add(writer)
        if len(self.found) > 1:
            several = listed(self.found, MAX_SHOWN)
            raise ConfigError(f'--writer "{self.digits}" begins several: {several}; write more digits')
        return True


@dataclass
class Plan:
    """Keys to delete: all under ``prefixes``, or of these what ``writer`` wrote, and no announcement."""

    prefixes: tuple[str, ...]
    parts: list[Share]
    announcements: int  # found without a scan of the pool
    near_pools: int = 0  # of hosts whose workers announce them, beside what is purged
    writer: str = ""  # 32 hex digits

    @property
    def blocks(self) -> int:
        return sum(part.blocks for part in self.parts)

    def __str__(self) -> str:
        nbytes = sum(part.nbytes for part in self.parts)
        namespaces = len({(part.tenant, part.namespace) for part in self.parts})
        blocks = (
            f"{counted(self.blocks, 'block')} ({format_size(nbytes)}) in {counted(namespaces, 'namespace')}"
        )
        if self.writer:
            return f"{blocks}, written by {self.writer}"
        return f"{blocks}, and at least {counted(self.announcements, 'announcement')}"


def run_purge(options: PurgeOptions) -> None:
    """Scan, ask, delete; prints a table, or JSON at the end. With ``dry_run`` it scans and prints.

    Blocking, for two scans of the pool. Errors: ``ConfigError`` for the arguments, and without a terminal to
    ask; ``NothingThere``; ``StoreUnavailable``; ``typer.Abort`` for "no".
    """
    tenant, namespace, dry_run = options.tenant, options.namespace, options.dry_run
    pool, yes, as_json = redact(options.pool), options.yes, options.as_json
    writer = options.writer
    is_part = tenant is not None or namespace is not None or writer is not None
    everything = options.everything or (dry_run and not is_part)
    if everything == is_part:
        raise ConfigError(
            "say what to delete: --tenant T, --namespace HEX (of one --tenant T), --writer HEX, or --everything; "
            "--dry-run alone shows what is there"
        )
    for name, digits in (("--namespace", namespace), ("--writer", writer)):
        if digits is not None and not _DIGITS.fullmatch(digits):
            raise ConfigError(f'{name} "{digits}": write 8 to 32 lowercase hex digits')
    sought = Sought(writer, namespace or "") if writer is not None else None
    within = KEY_PREFIX if tenant is None else tenant_prefix(tenant)
    shown = console(stderr=as_json)
    with _advised(), ExitStack() as opened:
        urls = StoreURL.parse(options.pool).pools()
        found = [opened.enter_context(open_for_inspection(url)) for url in urls]
        stores = {"": found[0]} if len(found) == 1 else dict(zip(("near", "far"), found, strict=True))
        parts, announced, near = _survey(stores, within, sought)
        plan = _plan(within, parts, announced, namespace)
        if sought is not None:
            plan.announcements, plan.writer = 0, "".join(sought.found)
            sought.digits = plan.writer or sought.digits
        plan.near_pools = len(near - {pool_id(url.path) for url in urls if url.scheme == "file"})
        if not plan.parts and not plan.announcements and not everything:
            if not dry_run:  # what a tenant had may all be evicted
                _delete_evicted(stores)
            why = _not_there(stores, tenant, namespace, parts) if sought is None else _not_written(sought)
            raise NothingThere(f"{pool}: {why}")
        if not (dry_run or yes or sys.stdin.isatty()):
            raise ConfigError(
                f"{pool}: would delete {plan}; there is no terminal to ask on: add --yes to do it"
            )
        if not (as_json and (dry_run or yes)):
            _print(plan, pool, shown)
        if not (dry_run or yes):
            typer.confirm("Delete this?", abort=True, err=as_json)
        blocks, announcements = (0, 0) if dry_run else _delete(stores, plan, sought)
    if as_json:
        left_out = {"pool"} if len(stores) == 1 else set()
        parts_of = [
            {name: value for name, value in asdict(part).items() if name not in left_out}
            for part in plan.parts
        ]
        report: dict[str, object] = {"pool": pool, "namespaces": parts_of}
        if sought is not None:
            report["writer"] = plan.writer
        deleted = {"deleted_blocks": blocks, "deleted_announcements": announcements}
        print(json.dumps(report | deleted | {"near_pools_left": plan.near_pools}))
    elif dry_run:
        shown.print("Nothing was deleted: --dry-run.", highlight=False)
    else:
        deleted_too = "" if sought is not None else f" and {counted(announcements, 'announcement')}"
        shown.print(f"Deleted {counted(blocks, 'block')}{deleted_too}.", highlight=False)


def _survey(
    stores: Mapping[str, Store], within: str, sought: Sought | None = None
) -> tuple[list[Share], set[str], set[str]]:
    """Contents of the prefix ``within``: namespaces, some with facts and no block; keys of announcements; near pools
    that workers announce. With ``sought``: namespaces with blocks that this writer wrote, and no others.
    """
    found: dict[tuple[str, str, str], Share] = {}
    announced = {key for store in stores.values() for key in store.announcements(within)}
    with progress_bar("blocks") as progress:
        task = progress.add_task("looking", total=None)
        for pool, store in stores.items():
            for walked, batch in _walk(store, within, sought):
                for block in batch:
                    tenant, fingerprint, *_ = parse_key(block.key)
                    name = (tenant, fingerprint.hex(), pool)
                    part = found.setdefault(name, Share(*name))
                    part.blocks += 1
                    part.nbytes += block.nbytes
                progress.advance(task, walked)
    models: dict[tuple[str, str], str] = {}  # of two pools the far one has the facts
    announced_models: dict[tuple[str, str], set[str]] = {}  # of workers: for these names requests ask
    near: set[str] = set()
    for tenant in {part.tenant for part in found.values()} | set(filter(None, map(tenant_of, announced))):
        for pool, store in stores.items():
            announced |= store.announcements(tenant_prefix(tenant)).keys()  # not every tenant is listed
            for model, namespaces in announced_namespaces(store, tenant).items():
                for namespace in namespaces:
                    models[tenant, namespace.hex] = model
                    name = (tenant, namespace.hex, pool)
                    found.setdefault(name, Share(*name))
            for told in filter(None, announced_workers(store, tenant)):
                announced_models.setdefault((tenant, told.worker.namespace), set()).add(told.worker.model)
                near |= {told.worker.near} - {""}
    for part in found.values():
        known = announced_models.get((part.tenant, part.namespace), ())
        part.model = " and ".join(sorted(known)) or models.get((part.tenant, part.namespace), "")
    of_writer = [name for name in sorted(found) if sought is None or found[name].blocks]
    return [found[name] for name in of_writer], announced, near


def _walk(
    store: Store, prefix: str, sought: Sought | None
) -> Iterator[tuple[int, Sequence[StoredBlock | WrittenBlock]]]:
    """How many blocks were looked at, and those of them that count: all, or what one writer wrote."""
    if sought is None:
        for batch in store.scan(prefix):
            yield len(batch), batch
    else:
        for written in store.scan_writers(prefix):
            yield len(written), sought.of(written)


def _plan(within: str, parts: list[Share], announced: set[str], namespace: str | None) -> Plan:
    prefixes: tuple[str, ...] = (within,)
    if namespace is not None:
        parts = [part for part in parts if part.namespace.startswith(namespace)]
        if len({part.namespace for part in parts}) > 1:
            several = listed((part.namespace for part in parts), MAX_SHOWN)
            raise ConfigError(f'--namespace "{namespace}" begins several: {several}; write more digits')
        prefixes = tuple({namespace_prefix(part.tenant, part.namespace): None for part in parts})
    return Plan(prefixes, parts, sum(key.startswith(prefixes) for key in announced))


def _not_written(sought: Sought) -> str:
    if not sought.others:
        return f'no block was written by "{sought.digits}"; kvpool purge --dry-run shows what is there'
    there = listed(sought.others, MAX_SHOWN)
    return f'no block was written by "{sought.digits}"; there are {there}'


def _not_there(
    stores: Mapping[str, Store], tenant: str | None, namespace: str | None, parts: list[Share]
) -> str:
    if namespace is not None and parts:
        there = listed((part.namespace[:8] for part in parts), MAX_SHOWN)
        return f'no namespace begins with "{namespace}"; there are {there}'
    everyones, announced, _ = _survey(stores, KEY_PREFIX)
    tenants = {part.tenant for part in everyones} | set(filter(None, map(tenant_of, announced)))
    if not tenants:
        return "it is empty: there is nothing to delete"
    if tenant is None or tenant in tenants:
        return "there are announcements, and no namespace"
    return f"{unknown('tenant', tenant, ())}{listed(tenants, MAX_SHOWN)}"


def _delete(stores: Mapping[str, Store], plan: Plan, sought: Sought | None) -> tuple[int, int]:
    """Deleted (blocks, announcements). Announcements last: after an interruption the rest is still visible."""
    blocks = 0
    with progress_bar("blocks") as progress:
        task = progress.add_task("deleting", total=plan.blocks)
        for store in stores.values():
            for prefix in plan.prefixes:
                for _, batch in _walk(store, prefix, sought):
                    blocks += store.delete_many([block.key for block in batch], timeout_s=DELETE_TIMEOUT_S)
                    progress.update(task, completed=blocks)
    _delete_evicted(stores)
    if sought is not None:
        return blocks, 0
    return blocks, sum(store.withdraw_all(prefix) for store in stores.values() for prefix in plan.prefixes)


def _delete_evicted(stores: Mapping[str, Store]) -> None:
    for store in stores.values():
        store.delete_evicted()


@contextmanager
def _advised() -> Iterator[None]:
    """Name the server's rule for purging users when it forbids a command or key."""
    try:
        yield
    except StoreUnavailable as error:
        # The native client tells the server's words behind its address.
        if ": NOPERM " not in str(error) and type(error.__cause__).__name__ != "NoPermissionError":
            raise
        raise StoreUnavailable(
            f"{error}; docs/how-to/valkey.md says what a user must be allowed for a purge"
        ) from error


def _print(plan: Plan, pool: str, out: Console) -> None:
    columns = [
        *([Column("pool", left=True)] if any(part.pool for part in plan.parts) else []),
        Column("tenant", left=True), Column("namespace", left=True), Column("model", wraps=True), Column("blocks"),
        Column("size"),
    ]  # fmt: skip
    rows = [
        (part.pool, part.tenant, part.namespace, part.model, f"{part.blocks:,}", format_size(part.nbytes))
        for part in plan.parts[:MAX_SHOWN]
    ]
    if len(plan.parts) > MAX_SHOWN:
        rows.append(("", "", f"{len(plan.parts) - MAX_SHOWN:,} more", "", "", ""))
    for row in rows:
        add_row(columns, *row[-len(columns) :])
    show(out, f"{pool}: to be deleted")
    if rows:
        show(out, *fitted(columns, out.width))
    show(out, f"In all: {plan}.")
    if plan.near_pools:
        show(
            out,
            f"Near pools of workers' hosts ({plan.near_pools} announced) keep theirs, and send here what is used: "
            "stop these workers, and purge both pools on each host, --pool 'NEAR FAR'.",
        )
