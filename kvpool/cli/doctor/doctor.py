"""``kvpool doctor``: working and failing parts of a deployment, and remedies.

On a server it writes one small block and deletes it; all else is only read.
"""

from __future__ import annotations

import json
from collections import Counter

from rich.table import Table
from rich.text import Text

from kvpool.cli.doctor.pool import pool_findings
from kvpool.cli.doctor.rules import Finding
from kvpool.cli.doctor.serving import check_url, front_findings, serving_findings
from kvpool.cli.doctor.workers import Workers
from kvpool.cli.settings import DoctorOptions
from kvpool.cli.tables import console, show
from kvpool.discovery.worker import Worker
from kvpool.key.key import check_tenant

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run_doctor(options: DoctorOptions) -> bool:
    """Examine the named parts and print findings; True: nothing fails, and all named parts are present.

    ``tls_ca``: also the authority of fronts and workers at ``https://``. Blocking, for some seconds. Errors:
    ``ConfigError`` for an invalid URL or tenant.
    """
    urls = [check_url(url, "--front") for url in options.front]
    named, pickers = options.connections(options.index), options.connections(options.picker)
    if named or pickers:  # a pool is examined where gRPC is not installed, too
        from kvpool.cli.doctor import indexes
    findings: list[Finding] = []
    announced: list[Worker] | None = None
    if options.pool is not None:
        findings, announced = pool_findings(options.pool, check_tenant(options.tenant))
    workers = Workers(announced or (), options.tls_ca)
    looks = [indexes.look_at(index) for index in named]
    for look in looks:
        indexes.add_followed(look, workers)
    workers.ask()
    findings += workers.findings()
    for look in looks:
        findings += indexes.index_findings(look, workers)
    for replica in named[1:]:
        findings += indexes.replica_findings(named[0], replica, workers)
    there = [worker for worker in workers.by_id.values() if not workers.is_away(worker)]
    findings += serving_findings(there, workers.pages)
    for url in urls:
        findings += front_findings(url, there, options.tls_ca, has_picker=bool(pickers))
    for picker in pickers:
        findings += indexes.picker_findings(picker)
    left_out = [name for name in ("pool", "index", "front", "picker") if not getattr(options, name)]
    good = all(finding.level != "fail" for finding in findings)
    if options.as_json:
        found_json = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": good, "findings": found_json, "not_examined": left_out}))
    else:
        _print(findings, left_out)
    return good


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
        show(out, f"Not examined, since not named: {', '.join(f'--{option}' for option in left_out)}.")
