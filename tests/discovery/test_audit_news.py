"""What audits found, in the pool: engines' news, and what others may write in their place."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest

from kvpool.discovery import audit_news, traffic
from kvpool.discovery.announcer import TrafficAnnouncer
from kvpool.discovery.audit_news import AuditFinding, AuditNews, pack_news, unpack_news
from kvpool.discovery.sample import MAX_BLOCKS, MAX_REQUESTS
from kvpool.discovery.traffic import Seen, audits_of, pack_traffic, unpack_traffic
from kvpool.discovery.traffic_slots import Traffic
from kvpool.key.key import traffic_prefix
from tests.support.deadlines import eventually
from tests.support.memory_store import MemoryStore

WRITER, OTHER = "ab" * 16, "cd" * 16
FINDING = AuditFinding((OTHER,), "prefix", "model.layers.3.self_attn.attn", 0.34, 1.8e9, "ef" * 16)
NEWS = AuditNews(
    WRITER, {"same": 990, "differs": 2, "no_floor": 8}, (FINDING,), (OTHER,), "it differs from three writers", "h"
)  # fmt: skip
EMPTY = {name: Seen() for name in traffic.WINDOWS}


def test_news_are_read_as_they_were_written() -> None:
    document = unpack_traffic(pack_traffic(EMPTY, None, NEWS))
    assert document is not None
    assert document.audits == NEWS
    assert (NEWS.judged, NEWS.differing, NEWS.unjudged) == (992, 2, 8)
    bare = AuditNews(WRITER, host="h")
    assert unpack_news(msgpack.unpackb(msgpack.packb(pack_news(bare)))) == bare
    assert bare.judged == bare.unjudged == 0


def test_an_older_engine_has_none_and_an_older_reader_reads_the_rest() -> None:
    older = unpack_traffic(pack_traffic(EMPTY))
    assert older is not None
    assert older.audits is None
    # As an earlier version unpacks them.
    document = pack_traffic(EMPTY, None, _most())
    record = msgpack.unpackb(document, max_map_len=16, max_array_len=16, max_ext_len=0)
    assert record["version"] == 2
    assert set(record["windows"]) == set(traffic.WINDOWS)


def _most() -> AuditNews:
    """More than there is room for."""
    finding = AuditFinding((OTHER,) * 9, "record", "é" * 999, math.inf, 1.8e9, "ef" * 16)
    counts = {"a" * number: audit_news.MAX_COUNT for number in range(1, 30)}
    return AuditNews(WRITER, counts, (finding,) * 30, (OTHER,) * 99, "why\n" * 999, "h" * 999)


def test_more_than_there_is_room_for_is_cut() -> None:
    news = unpack_news(msgpack.unpackb(msgpack.packb(pack_news(_most()))))
    assert news is not None
    assert len(news.findings) == audit_news.MAX_FINDINGS
    assert news.findings[0].distance == audit_news.MAX_DISTANCE
    assert news.findings[0].layer == "é" * 128
    assert len(news.counts) == len(news.put_away) == 16
    assert len(news.doubts) == audit_news.MAX_DOUBTS_NBYTES
    assert news.doubts.isprintable()
    no_number = AuditNews(WRITER, findings=(AuditFinding((), "", "", math.nan, 0.0),), host="h")
    assert unpack_news(pack_news(no_number)).findings[0].distance == audit_news.MAX_DISTANCE  # type: ignore[union-attr]


def test_the_last_findings_are_told() -> None:
    findings = tuple(AuditFinding((OTHER,), "record", f"layer {at}", 0.1, float(at)) for at in range(20))
    news = unpack_news(pack_news(AuditNews(WRITER, findings=findings, host="h")))
    assert news is not None
    assert [one.at_s for one in news.findings] == [float(at) for at in range(12, 20)]


def test_there_is_room_beside_the_largest_sample() -> None:
    sample = {
        "written_s": 1.8e9, "shift": 32, "first": (1 << 50, 1 << 50), "numbers": bytes(8 * MAX_BLOCKS),
        "sampled": bytes(2 * MAX_REQUESTS),
        **{name: bytes(4 * MAX_REQUESTS) for name in ("ages_ms", "requests", "blocks")},
    }  # fmt: skip
    windows = {name: Seen(*[10**15] * 4) for name in traffic.WINDOWS}
    document = pack_traffic(windows, sample, _most())
    assert len(document) <= traffic.MAX_DOCUMENT_NBYTES
    assert len(document) - len(pack_traffic(windows, sample)) <= 6 << 10
    assert unpack_traffic(document) is not None


def _hostile() -> list[Any]:
    good = pack_news(NEWS)
    finding = good["findings"][0]

    def having(**fields: Any) -> dict[str, Any]:
        return good | fields

    def finding_having(**fields: Any) -> dict[str, Any]:
        return having(findings=[finding | fields])

    return [
        7, "news", [], [good], {},
        {name: value for name, value in good.items() if name != "doubts"},
        having(writer=WRITER), having(writer=bytes(15)), having(writer=None),
        having(counts={"same": -1}), having(counts={"same": True}), having(counts={"same": 1 << 60}),
        having(counts={"same": 1.0}), having(counts={"Same!": 1}), having(counts=[1]), having(counts={1: 1}),
        having(counts={"x" * 33: 1}),
        having(findings=[finding] * 9), having(findings={"a": finding}), having(findings=[7]),
        having(put_away=[bytes(16)] * 17), having(put_away=["x"]), having(put_away="x" * 16),
        having(doubts="a\x1b[2Jb"), having(doubts="x" * 513), having(doubts=7), having(doubts="\u202e"),
        having(host="x" * 257), having(host=b"h"), having(host="a\nb"),
        finding_having(writers=[bytes(16)] * 5), finding_having(writers=[bytes(8)]), finding_having(writers=None),
        finding_having(kind="other"), finding_having(kind=["record"]), finding_having(kind=None),
        finding_having(layer="x" * 257), finding_having(layer="a\tb"),
        finding_having(distance=math.nan), finding_having(distance=math.inf), finding_having(distance=-1.0),
        finding_having(distance=1e7), finding_having(distance="1"), finding_having(distance=True),
        finding_having(at_s=-1.0), finding_having(at_s=1e300), finding_having(at_s=1),
        finding_having(namespace="ab"), finding_having(namespace=bytes(3)), finding_having(namespace=None),
    ]  # fmt: skip


@pytest.mark.parametrize("part", _hostile(), ids=range(len(_hostile())))
def test_news_that_make_no_sense_are_passed_over(part: Any) -> None:
    assert unpack_news(part) is None


def test_the_traffic_is_read_beside_news_that_make_no_sense() -> None:
    record = msgpack.unpackb(pack_traffic(EMPTY)) | {"audits": pack_news(NEWS) | {"doubts": 7}}
    document = unpack_traffic(msgpack.packb(record))
    assert document is not None
    assert document.audits is None
    assert document.windows == EMPTY


def test_fields_of_a_later_version_are_passed_over() -> None:
    part = pack_news(NEWS)
    later = part | {"more": 1, "findings": [one | {"more": [1]} for one in part["findings"]]}
    assert unpack_news(later) == NEWS


def test_only_so_many_engines_are_read() -> None:
    document = pack_traffic(EMPTY, None, NEWS)
    documents = {f"{number}": document for number in range(traffic.MAX_ENGINES + 9)}
    assert len(audits_of(documents)) == traffic.MAX_ENGINES
    assert audits_of({"one": b"\xc1", "other": pack_traffic(EMPTY), "third": document}) == [NEWS]


def told(store: MemoryStore) -> list[AuditNews]:
    return audits_of(store.announcements(traffic_prefix("t")))


def test_news_are_in_the_pool_while_the_engine_runs_also_without_traffic() -> None:
    with MemoryStore(1 << 20) as store:
        announcer = TrafficAnnouncer(store, "t", every_s=0.01)
        announcer.tell_audits(NEWS)
        assert eventually(lambda: told(store) == [NEWS])
        later = AuditNews(WRITER, {"same": 1000}, host="h")
        announcer.tell_audits(later)
        assert eventually(lambda: told(store) == [later])
        seen_by = Traffic()
        seen_by.add(bytes(32), 32, salt=1, block_tokens=16, prompt_tokens=16)
        announcer.tell(seen_by.windows(), seen_by.sampled())

        def both() -> bool:
            (document,) = map(unpack_traffic, store.announcements(traffic_prefix("t")).values())
            return document is not None and document.audits == later and document.windows["24h"].blocks == 1

        assert eventually(both)
        announcer.close()
        assert told(store) == []
