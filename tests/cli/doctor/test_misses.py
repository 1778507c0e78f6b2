"""``kvpool doctor`` on why prompts were computed: the greatest reason of all workers, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpool import metrics
from kvpool.cli.doctor.misses import ENOUGH_REQUESTS, MISSES, miss_findings
from kvpool.cli.doctor.rules import Finding
from kvpool.discovery.worker import Publisher, Worker
from tests.support.doctor import announced, examined, worker
from tests.support.feeds import misbehaving
from tests.support.metrics_pages import PageServer, answer, serving_page

PROMPTS = b"""kvpool_requests_total{engine="0",model_name="m",result="hit"} 60.0
kvpool_lookup_requests_total{engine="0",model_name="m"} 7.0
kvpool_prompt_tokens_total{engine="0",model_name="m",source="pool"} 300.0
kvpool_prompt_tokens_total{engine="0",model_name="m",source="computed"} 700.0
"""


def missed(**reasons: int) -> bytes:
    line = 'kvpool_missed_tokens_total{engine="0",model_name="m",reason="%s"} %.1f\n'
    return PROMPTS + "".join(line % one for one in reasons.items()).encode()


def sums(
    prompt_tokens: float = 1000.0,
    skipped: dict[str, float] | None = None,
    requests: float = ENOUGH_REQUESTS,
    **reasons: float,
) -> Any:
    return {
        metrics.REQUESTS.name: {"hit": requests - 1, "miss": 1.0},
        metrics.PROMPT_TOKENS.name: {"computed": prompt_tokens},
        metrics.MISSED_TOKENS.name: reasons,
        metrics.STORE_SKIPPED_BLOCKS.name: skipped or {},
    }


def found(*workers: Worker, **given: Any) -> Finding:
    (finding,) = miss_findings(sums(**given), workers)
    return finding


def one(name: str, namespace: str, **more: Any) -> Worker:
    return worker(name, Publisher(0, "tcp://10.0.0.1:5557"), namespace=namespace * 32, **more)


def test_each_reason_has_what_to_do_next() -> None:
    assert set(MISSES) == set(metrics.MISS_REASONS)
    for reason in metrics.MISS_REASONS:
        finding = found(**{reason: 400.0})
        assert finding.change, reason
        assert (finding.level == "ok") is (reason in ("new", "role", "audited")), reason
        assert (
            f"40% of 1,000 prompt tokens were computed, where a pool might have had them: {reason} 100%."
            in finding.says
        )


def test_the_greatest_reason_decides_and_all_are_shown() -> None:
    finding = found(new=100.0, evicted=250.0, expired=50.0, gate=0.0)
    assert finding.level == "warn"
    assert "evicted 62%, new 25%, expired 12%. Most were in the pool, and lost" in finding.says
    assert "kvpool size" in finding.change


def test_the_first_requests_of_a_fleet_get_no_advice_but_of_faults() -> None:
    for reason in metrics.MISS_REASONS:
        early, late = (found(requests=number, **{reason: 900.0}) for number in (2.0, ENOUGH_REQUESTS))
        if reason in ("new", "not_stored", "evicted", "expired", "gate", "no_room"):
            assert (early.level, early.change) == ("ok", ""), reason
            assert early.says.endswith(f"{reason} 100%. Advice needs 100 requests; these were 2"), reason
        else:
            assert early == late, reason
    assert found(one("a", "1"), one("b", "2"), requests=2.0, new=400.0).level == "warn", "and of settings"


def test_few_misses_are_no_fault() -> None:
    finding = found(evicted=99.0)
    assert (finding.level, finding.change) == ("ok", "")
    assert found(evicted=101.0).level == "warn"


@pytest.mark.parametrize(
    "given", [{}, {"new": 0.0}, {"new": 5.0, "prompt_tokens": 0.0}, {"of_a_later_kvpool": 5.0}]
)
def test_nothing_is_said_where_nothing_is_known(given: dict[str, float]) -> None:
    assert not [*miss_findings(sums(**given), [])]
    assert not [*miss_findings({}, [])]


def test_new_blocks_may_be_those_of_another_namespace() -> None:
    apart = found(one("a", "1"), one("b", "2"), new=400.0)
    assert apart.level == "warn"
    assert 'Workers of model "m" are in several namespaces' in apart.says
    for others in (
        [one("b", "1")],
        [one("b", "2", model="n")],
        [one("b", "2", tenant="t")],
        [worker("c", Publisher(0, ""))],
    ):
        assert found(one("a", "1"), *others, new=400.0).level == "ok"
    assert "namespaces" not in found(one("a", "1"), one("b", "2"), gate=400.0).says


def test_blocks_that_were_not_stored_are_named_by_cause() -> None:
    skipped = {"already_there": 9000.0, "staging_full": 1200.0, "queue_full": 0.0}
    assert found(not_stored=400.0, skipped=skipped).says.endswith("were not stored: staging_full 1,200")
    assert "min_requests_to_store" in found(not_stored=400.0, skipped={"already_there": 9.0}).change


def shows(pages: PageServer, body: bytes) -> None:
    pages.say = lambda connection: connection.sendall(answer(body, "200 OK"))


def test_the_pages_of_all_workers_are_added(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool"
    with misbehaving() as publisher, serving_page() as first, serving_page() as second:
        shows(first, missed(new=300))
        shows(second, missed(evicted=500, new=100))
        workers = [
            worker(name, publisher.publisher, address=at.address)
            for name, at in (("a", first), ("b", second))
        ]
        with announced(url, *workers):
            _, findings = examined("--pool", url)
    (finding,) = [one for one in findings if one["about"] == "misses"]
    assert finding["level"] == "warn"
    assert finding["says"].startswith("45% of 2,000 prompt tokens were computed")
    assert "evicted 56%, new 44%" in finding["says"]
