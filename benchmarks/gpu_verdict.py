"""The verdict of ``scripts/gpu-proof``: targets, their results, and the table.

Imports nothing of kvpool, whose core may be unbuilt.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

Report = list[Any]  # the JSON documents printed by a part
LOAD_GB_PER_S = 10.0


class Target(NamedTuple):
    """``wanted`` empty: a figure without a target, which counts as held. ``held`` None: no figure."""

    what: str
    wanted: str
    found: str
    held: bool | None


@dataclass
class Part:
    """``status``: "held", "not held" (a target), "failed" (before its end), "not run", or "ran" (a dry run)."""

    name: str
    limit_s: int
    status: str = "not run"
    says: str = ""
    seconds: float = 0.0
    command: list[str] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    report: Report = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"targets": [target._asdict() for target in self.targets]}


def judge_tests(report: Report) -> list[Target]:
    counts = report[0]
    ran = counts["tests"] - counts["skipped"]
    passed = ran - counts["failed"]
    return [Target("tests marked gpu", "all pass", f"{passed} of {ran}", passed == ran > 0)]


def judge_copies(report: Report) -> list[Target]:
    """Of ``python -m benchmarks device --json``, which states its targets."""
    (told,) = report
    targets = told["targets"]
    ratios = [
        row[way]["over_plain"]
        for row in told["rows"]
        if row["block_nbytes"] >= targets["from_block_nbytes"]
        for way in ("store", "load", "both")
    ]
    engine, calls = told["engine"], told["calls"]
    equal = all(one["bytes_equal"] for one in (*told["rows"], engine, calls))
    return [
        Target("copies: bytes", "equal", "equal" if equal else "DIFFERENT", equal),
        _at_least(
            f"copies over a plain copy, from {targets['from_block_nbytes'] >> 10} KiB on",
            targets["over_plain"],
            min(ratios, default=None),
        ),
        _at_most(
            "an engine's step beside stores is longer by", targets["store_slower"], engine["store_slower"]
        ),
        _at_most(
            "calls of copies that wait for the device", targets["synchronizing"], calls["synchronizing"]
        ),
    ]


def judge_pool(report: Report) -> list[Target]:
    rows = report[0]["rows"]
    good = [row for row in rows if row["fault"] is None]
    loads = [row["load"]["gb_per_s"] for row in good if row["shards"] and not row["near"]]
    return [
        Target("pool: rows measured, bytes equal", "all", f"{len(good)} of {len(rows)}", good == rows),
        _at_least("pool: loads from servers, GB/s", LOAD_GB_PER_S, max(loads, default=None)),
    ]


def judge_engines(report: Report, part: str = "engines") -> list[Target]:
    cases = [line for line in report if "ok" in line]
    good = [case for case in cases if case["ok"]]
    return [
        Target(f"{part}: cases as they must be", "all", f"{len(good)} of {len(cases)}", good == cases != [])
    ]


def judge_latency(report: Report, part: str = "latency") -> list[Target]:
    """Every prompt came from its intended source; the rest are figures without a target."""
    cases = [line for line in report if "ok" in line]
    good = [case for case in cases if case["ok"]]
    targets = [
        Target(
            f"{part}: prompts found in cache and pool",
            "all",
            f"{len(good)} of {len(cases)}",
            good == cases != [],
        )
    ]
    for case in good:
        for one in case["lengths"]:
            for way, first_ms in one["first_token_ms"].items():
                what = f"{case['case']}, {one['tokens']} tokens, {way}: first, next ms"
                targets.append(Target(what, "", f"{first_ms:.1f}, {one['between_tokens_ms'][way]:.2f}", True))
    return targets


def _at_least(what: str, wanted: float, found: float | None) -> Target:
    if found is None:
        return Target(what, f">= {wanted:g}", "", None)
    return Target(what, f">= {wanted:g}", f"{found:.2f}", found >= wanted)


def _at_most(what: str, wanted: float, found: float | None) -> Target:
    if found is None:
        return Target(what, f"<= {wanted:g}", "", None)
    return Target(what, f"<= {wanted:g}", f"{found:.3f}", found <= wanted)


def table(proof: dict[str, Any], parts: list[Part]) -> str:
    facts = proof["machine"]
    lines = [
        f"{facts['accelerator'] or 'no accelerator'}, driver {facts['driver'] or '-'}, torch {facts['torch']}",
        f"{facts['cores']} cores ({facts['processor']}), {facts['memory_nbytes'] >> 30} GiB, kernel {facts['kernel']}",
        f"kvpool {proof['commit']}",
        "",
        f"{'part':8} {'seconds':>7}  status",
    ]
    for part in parts:
        says = f": {part.says}" if part.says else ""
        lines.append(f"{part.name:8} {part.seconds:7.0f}  {part.status}{says}")
    lines += ["", f"{'target':46} {'wanted':>8} {'found':>16}"]
    for target in (target for part in parts for target in part.targets):
        if proof["small"] or not target.wanted:
            verdict = ""
        else:
            verdict = "no figure" if target.held is None else "held" if target.held else "NOT HELD"
        lines.append(f"{target.what:46} {target.wanted:>8} {target.found:>16}  {verdict}".rstrip())
    if proof["small"]:
        lines += ["", "A dry run: the figures say nothing about an accelerator, and are not judged."]
    return "\n".join(lines)
