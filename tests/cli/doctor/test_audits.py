"""``kvpool doctor`` on what engines' audits found: whose blocks are wrong, who doubts itself, and what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgpack
import pytest

from kvpool import open_store
from kvpool.cli.doctor import audits
from kvpool.cli.doctor.audits import audit_findings
from kvpool.cli.doctor.rules import Finding
from kvpool.discovery.audit_news import AuditFinding, AuditNews, Kind
from kvpool.discovery.traffic import WINDOWS, Seen, pack_traffic
from kvpool.key.key import traffic_key, writer_name
from tests.support.doctor import examined, sentences
from tests.support.memory_store import MemoryStore

EMPTY = {name: Seen() for name in WINDOWS}
NAMESPACE = "3c4efb6caf367535bc192f8a75d8cc86"
HONEST = {"same": 500, "no_floor": 8}


def writer(monkeypatch: pytest.MonkeyPatch, host: str, start: str) -> str:
    with monkeypatch.context() as patched:
        patched.setattr("socket.gethostname", lambda: host)
        return writer_name(start).hex()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Writers by host, and of earlier starts on them."""
    hosts = ("gpu-1", "gpu-2", "gpu-3", "gpu-7")
    return {
        f"{host}{start}": writer(monkeypatch, host, f"{host}{start}")
        for host in hosts
        for start in ("", "-before")
    }


def wrong(
    *writers: str, kind: Kind = "prefix", ago_s: float = 90.0, namespace: str = NAMESPACE
) -> AuditFinding:
    return AuditFinding(writers, kind, "model.layers.3.attn", 0.34, time.time() - ago_s, namespace)


def found(*news: AuditNews) -> list[Finding]:
    with MemoryStore(1 << 20) as store:
        for number, one in enumerate(news):
            store.announce(traffic_key("t", f"{number:016x}"), pack_traffic(EMPTY, None, one), lease_s=60)
        return list(audit_findings(store, "valkey://h", "t"))


def said(findings: Sequence[Finding], level: str) -> list[str]:
    return [f"{one.says} -> {one.change}" for one in findings if one.level == level]


def test_engines_that_find_nothing_are_one_good_line(names: dict[str, str]) -> None:
    assert found() == []
    assert found(AuditNews(names["gpu-1"], host="gpu-1")) == [], "it audits nothing"
    young = AuditNews(names["gpu-1"], {"no_floor": 3, "gone": 2}, host="gpu-1")
    assert said(found(young), "ok") == ["hits are audited by 1 engine, and none is judged yet -> "]
    both = found(
        AuditNews(names["gpu-1"], HONEST, host="gpu-1"), AuditNews(names["gpu-2"], HONEST, host="gpu-2")
    )
    assert said(both, "ok") == ["2 engines audited 1,000 hits, and none differs from what they compute -> "]
    assert len(both) == 1


def test_the_writer_of_wrong_blocks_is_named_with_what_deletes_them(names: dict[str, str]) -> None:
    bad, host = names["gpu-7-before"], names["gpu-7"]
    findings = found(
        AuditNews(
            names["gpu-1"], {"same": 98, "differs": 2}, (wrong(bad), wrong(bad, kind="record")), (bad,), "", "gpu-1"
        ),
        AuditNews(names["gpu-2"], {"same": 99, "differs": 1}, (wrong(bad, ago_s=600.0),), host="gpu-2"),
        AuditNews(host, HONEST, host="gpu-7"),
    )  # fmt: skip
    assert "3 engines audited 700 hits, of which 3 differ" in said(findings, "ok")[0]
    (line,) = said(findings, "fail")
    by = ", ".join(sorted(f"the engine {names[one][16:24]} on {one}" for one in ("gpu-1", "gpu-2")))
    assert line.startswith(
        f"blocks written by {bad} (an earlier or another engine on gpu-7) are not what engines compute: 3 audited hits "
        f"of {by}, the last 2 min ago: model.layers.3.attn in namespace 3c4efb6c, 0.34 away over all layers: "
    )
    assert "1 engine takes its records for missing now" in line
    assert f"kvpool purge --pool valkey://h --tenant t --writer {bad} deletes what it wrote" in line


def test_who_runs_now_is_named_by_its_host(names: dict[str, str]) -> None:
    running, unheard = names["gpu-7"], "12" * 16
    findings = found(
        AuditNews(names["gpu-1"], HONEST, (wrong(running),), host="gpu-1"),
        AuditNews(names["gpu-2"], HONEST, (wrong(unheard),), host="gpu-2"),
        AuditNews(running, HONEST, host="gpu-7"),
    )
    lines = "\n".join(said(findings, "fail"))
    assert f"written by {running} (the engine {running[16:24]} on gpu-7)" in lines
    assert f"written by {unheard} (an engine that tells of no audits)" in lines


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("record", "away over all layers: the record itself is wrong"),
        ("prefix", "the record is right by itself, and its prefix, or the weights, differ"),
        ("", "the record is wrong, or its prefix"),
    ],
)
def test_what_is_wrong_is_said(names: dict[str, str], kind: Kind, says: str) -> None:
    (line,) = said(
        found(AuditNews(names["gpu-1"], HONEST, (wrong("12" * 16, kind=kind),), host="gpu-1")), "fail"
    )
    assert says in line


def test_who_wrote_a_part_of_wrong_prefixes_is_not_accused(names: dict[str, str]) -> None:
    bad, one, other = "ab" * 16, "12" * 16, "34" * 16
    findings = found(
        AuditNews(names["gpu-1"], HONEST, (wrong(bad, one), wrong(bad, other), wrong(bad, one)), host="gpu-1")
    )
    (line,) = said(findings, "fail")
    assert f"written by {bad} " in line
    assert one not in line
    assert other not in line
    (line,) = said(found(AuditNews(names["gpu-1"], HONEST, (wrong(bad, one),), host="gpu-1")), "fail")
    assert f"written by {one} or {bad} are not" in line, "nothing tells them apart"
    assert f"--writer {one} and " in line
    both = (wrong(one, bad), wrong(one), wrong(bad))
    first, second = said(found(AuditNews(names["gpu-1"], HONEST, both, host="gpu-1")), "fail")
    assert f"written by {one} (" in first
    assert f"written by {bad} (" in second


def test_a_block_without_a_writer_is_purged_by_its_namespace(names: dict[str, str]) -> None:
    nobody = AuditNews(names["gpu-1"], HONEST, (wrong("00" * 16), wrong(namespace="")), host="gpu-1")
    (line,) = said(found(nobody), "fail")
    assert "blocks that name no writer are not what engines compute: 2 audited hits" in line
    assert "0000" not in line
    (line,) = said(found(AuditNews(names["gpu-1"], HONEST, (wrong(),), host="gpu-1")), "fail")
    assert (
        f"kvpool purge --pool valkey://h --tenant t --namespace {NAMESPACE} deletes them with all others"
        in line
    )


def test_a_finding_of_another_day_fails_nothing(names: dict[str, str]) -> None:
    old = AuditNews(names["gpu-1"], HONEST, (wrong("12" * 16, ago_s=3 * 86400.0),), host="gpu-1")
    assert said(found(old), "fail") == []
    assert "the last 3.0 days ago" in said(found(old), "warn")[0]
    ahead = AuditNews(names["gpu-1"], HONEST, (wrong("12" * 16, ago_s=-9999.0),), host="gpu-1")
    assert "the last 0 s ago" in said(found(ahead), "fail")[0], "its clock is ahead"


def test_an_engine_that_doubts_itself_and_one_that_never_can_judge(names: dict[str, str]) -> None:
    findings = found(
        AuditNews(names["gpu-1"], {"differs": 3}, doubts="it computes other than 3 writers", host="gpu-1"),
        AuditNews(names["gpu-2"], {"no_floor": audits.ENOUGH_UNJUDGED}, host="gpu-2"),
        AuditNews(names["gpu-3"], {"no_floor": audits.ENOUGH_UNJUDGED - 1}, host="gpu-3"),
        AuditNews(names["gpu-7"], {"no_floor": 900, "same": 1}, host="gpu-7"),
    )
    (line,) = said(findings, "fail")
    assert line.startswith(
        f"the engine {names['gpu-1'][16:24]} on gpu-1 doubts itself, and goes on without the pool: it computes other "
        "than 3 writers -> "
    )
    assert f"--writer {names['gpu-1']}" in line
    (line,) = said(findings, "warn")
    assert line.startswith(
        f"the engine {names['gpu-2'][16:24]} on gpu-2 compared 64 blocks and can judge none"
    )


def test_many_writers_are_some_lines(names: dict[str, str]) -> None:
    """As a client may announce that names a hundred of them."""
    news = [
        AuditNews(
            names["gpu-1"], HONEST, tuple(wrong(f"{at:02x}{of:02x}" * 8) for at in range(8)), host="gpu-1"
        )
        for of in range(20)
    ]
    findings = found(*news)
    assert len(said(findings, "fail")) == audits.MAX_SHOWN
    assert said(findings, "warn") == ["152 more writers of such blocks -> look at these first"]


def test_the_doctor_of_a_pool_tells_it_and_passes_nonsense_over(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    news = AuditNews("ab" * 16, HONEST, (wrong("12" * 16),), host="gpu-1")
    record = msgpack.unpackb(pack_traffic(EMPTY, None, news))
    hostile = record | {"audits": record["audits"] | {"host": "\x1b[2Jgpu-1", "doubts": "{of} {0}"}}
    braces = record | {
        "audits": record["audits"] | {"findings": [], "host": "{of}{0}[red]", "doubts": "{it}[/]"}
    }
    with open_store(url) as store:
        for number, document in enumerate((record, hostile, braces)):
            store.announce(traffic_key("default", f"{number:016x}"), msgpack.packb(document), lease_s=60)
    code, findings = examined("--pool", url)
    assert code == 1
    fails = sentences(findings, "fail")
    assert fails.count("blocks written by 12121212") == 1
    assert "on {of}{0}[red] doubts itself, and goes on without the pool: {it}[/]" in fails
    assert "2 engines audited 1,000 hits" in sentences(findings, "ok")
