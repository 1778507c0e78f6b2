"""What engines' audits found, for ``kvpool doctor``: writers of wrong blocks, and engines that doubt themselves.

An engine may announce anything: what is said here is what it says. Findings that name several writers are put to those
that most findings name, so that who wrote only a part of a wrong prefix is not accused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvpool.cli.doctor.rules import Finding, Rule, Rules, always, judge
from kvpool.cli.doctor.subjects import Auditor, Audits, Suspect
from kvpool.discovery.audit_news import AuditFinding, AuditNews
from kvpool.discovery.traffic import audits_of
from kvpool.key.key import is_writer_of, traffic_prefix
from kvpool.store import Store
from kvpool.store.header import NOBODY
from kvpool.text import counted, format_duration, listed

RECENT_S = 24 * 3600.0
ENOUGH_UNJUDGED = 64  # eight of its own are enough to know a floor
MAX_SHOWN = 8
MAX_NAMES_SHOWN = 3

_WHAT = {
    "record": "the record itself is wrong",
    "prefix": "the record is right by itself, and its prefix, or the weights, differ",
    "": "the record is wrong, or its prefix",
}
_COMPARE = "compare the version, settings, weights and hardware of that engine with the others'"

AUDITS: Rules[Audits] = (
    Rule("ok", lambda of: of.judged and not of.differing, "{of.engines} audited {of.judged:,} hits, and none differs "
         "from what they compute"),
    Rule("ok", lambda of: of.judged, "{of.engines} audited {of.judged:,} hits, of which {of.differing:,} differ from "
         "what they compute"),
    Rule("ok", always, "hits are audited by {of.engines}, and none is judged yet"),
)  # fmt: skip
_DIFFER = "blocks {of.whose} are not what engines compute: {of.findings}, the last {of.ago} ago: {of.last}: {of.what}"
SUSPECT: Rules[Suspect] = (
    Rule("fail", lambda of: of.is_recent, _DIFFER, "{of.remedy}"),
    Rule("warn", always, _DIFFER, "{of.remedy}"),
)
AUDITOR: Rules[Auditor] = (
    Rule("fail", lambda of: of.doubts, "{of.name} doubts itself, and goes on without the pool: {it}", _COMPARE +
         ", and start it anew; {of.purge} deletes what it wrote"),
    Rule("warn", lambda of: not of.learns and of.unjudged >= ENOUGH_UNJUDGED, "{of.name} compared {of.unjudged:,} "
         "blocks and can judge none: it never knew how far honest ones are", "it learns from eight blocks that it "
         "stored itself and meets again: keep sessions at their workers (kvpool index, kvpool router), or send it some "
         "prompts twice"),
)  # fmt: skip


class _Told(NamedTuple):
    finding: AuditFinding
    by: AuditNews


def audit_findings(store: Store, name: str, tenant: str) -> Iterator[Finding]:
    """Of the engines of a tenant that announce audits. ``name``: of the pool. Errors: ``StoreUnavailable``."""
    return _judged(audits_of(store.announcements(traffic_prefix(tenant))), name, tenant, time.time())


def _judged(engines: Sequence[AuditNews], pool: str, tenant: str, now_s: float) -> Iterator[Finding]:
    engines = [news for news in engines if any(news.counts.values()) or news.findings or news.doubts]
    if not engines:
        return
    judged, differing = (
        sum(count) for count in zip(*((one.judged, one.differing) for one in engines), strict=True)
    )
    of_all = Audits(counted(len(engines), "engine"), judged, differing)
    yield from judge("audits", AUDITS, of_all, first=True)
    purge = f"kvpool purge --pool {pool} --tenant {tenant}"
    told = [_Told(finding, news) for news in engines for finding in news.findings]
    groups = list(_by_suspect(told))
    for writers, of_writers in groups[:MAX_SHOWN]:
        suspect = _suspect(writers, of_writers, engines, purge, now_s)
        yield from judge("audits", SUSPECT, suspect, first=True)
    if (more := len(groups) - MAX_SHOWN) > 0:
        yield Finding(
            "warn", "audits", f"{counted(more, 'more writer')} of such blocks", "look at these first"
        )
    for news in engines:
        engine = Auditor(
            _name(news), f"{purge} --writer {news.writer}", news.doubts, news.unjudged, news.judged > 0
        )
        yield from judge("audits", AUDITOR, engine, first=True)


def _by_suspect(told: Sequence[_Told]) -> Iterator[tuple[list[str], list[_Told]]]:
    """Findings by the writers that most of them name, those of the most findings first."""
    left = list(told)
    while left:
        named = Counter(writer for one in left for writer in _named(one.finding))
        if not named:
            yield [], left
            return
        most = max(named.values())
        first = min(writer for writer, count in named.items() if count == most)
        of_first = [one for one in left if first in _named(one.finding)]
        in_all = set.intersection(*(_named(one.finding) for one in of_first))
        yield sorted(writer for writer in in_all if named[writer] == most), of_first
        left = [one for one in left if first not in _named(one.finding)]


def _named(finding: AuditFinding) -> set[str]:
    return set(finding.writers) - {NOBODY.hex()}


def _suspect(
    writers: Sequence[str], told: Sequence[_Told], engines: Sequence[AuditNews], purge: str, now_s: float
) -> Suspect:
    last = max(told, key=lambda one: one.finding.at_s).finding
    ago_s = max(0.0, now_s - last.at_s)
    where = f" in namespace {last.namespace:.8}" if last.namespace else ""
    if writers:
        purges = " and ".join(f"{purge} --writer {writer}" for writer in writers)
        whose, remedy = (
            f"written by {' or '.join(writers)}{_engine_of(writers, engines)}",
            f"{_COMPARE}; {purges} deletes what it wrote",
        )
    else:
        part = f" --namespace {last.namespace}" if last.namespace else ""
        whose, remedy = (
            "that name no writer",
            f"see the workers' logs; {purge}{part} deletes them with all others",
        )
    return Suspect(
        whose=whose,
        findings=f"{counted(len(told), 'audited hit')} of {listed((_name(one.by) for one in told), MAX_NAMES_SHOWN)}",
        ago=format_duration(ago_s),
        last=f"{last.layer or 'a layer'}{where}, {last.distance:.2g} away over all layers",
        what=_WHAT[last.kind] + _put_away(writers, engines),
        remedy=remedy,
        is_recent=ago_s < RECENT_S,
    )


def _engine_of(writers: Sequence[str], engines: Sequence[AuditNews]) -> str:
    """Where the one runs, or ran, as far as the engines that audit tell."""
    if len(writers) != 1:
        return ""
    (writer,) = writers
    for news in engines:
        if news.writer == writer:
            return f" ({_name(news)})"
    for news in engines:
        if is_writer_of(news.host, bytes.fromhex(writer)):
            return f" (an earlier or another engine on {news.host})"
    return " (an engine that tells of no audits)"


def _put_away(writers: Sequence[str], engines: Sequence[AuditNews]) -> str:
    count = sum(any(writer in news.put_away for writer in writers) for news in engines)
    if not count:
        return ""
    return f". {counted(count, 'engine')} {'takes' if count == 1 else 'take'} its records for missing now"


def _name(news: AuditNews) -> str:
    """By what tells the starts on a host apart."""
    return f"the engine {news.writer[16:24]} on {news.host}"
