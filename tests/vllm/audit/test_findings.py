"""What follows from findings: writers that are put away, and an engine that doubts itself."""

from __future__ import annotations

import itertools

import pytest

from kvpool.key.key import Namespace, writer_name
from kvpool.vllm.audit.findings import (
    LATELY,
    LATELY_OWN,
    MAX_REMEMBERED,
    NOBODY,
    PUT_AWAY_S,
    REMEMBERED_S,
    Findings,
    describe,
)
from kvpool.vllm.audit.floor import Judged
from tests.support.clock import Clock

pytestmark = [pytest.mark.vllm]

BEGINS = (b"%d" % number for number in itertools.count())
OWN, A, B, C, D = (writer_name(name) for name in ("own", "a", "b", "c", "d"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def findings(clock: Clock) -> Findings:
    return Findings(OWN, clock.monotonic)


def add(findings: Findings, *writers: bytes, begin: bytes | None = None) -> str:
    return findings.add(frozenset(writers), next(BEGINS) if begin is None else begin)


def test_two_findings_put_a_writer_away_for_a_while(findings: Findings, clock: Clock) -> None:
    assert add(findings, A) == ""
    assert findings.put_away() == frozenset(), "one may be chance"
    clock.now_s += 100
    assert add(findings, A) == ""
    assert findings.put_away() == {A}
    clock.now_s += PUT_AWAY_S - 1
    assert findings.put_away() == {A}
    clock.now_s += 1
    assert findings.put_away() == frozenset()


def test_a_writer_that_is_found_again_is_put_away_again(findings: Findings, clock: Clock) -> None:
    for _ in range(2):
        add(findings, A)
    clock.now_s += PUT_AWAY_S - 1
    add(findings, A)
    clock.now_s += PUT_AWAY_S - 1
    assert findings.put_away() == {A}
    clock.now_s += 2
    assert not findings.put_away()
    add(findings, A)
    assert findings.put_away() == {A}, "its earlier findings still count"


def test_findings_of_a_day_ago_count_no_more(findings: Findings, clock: Clock) -> None:
    add(findings, A)
    clock.now_s += REMEMBERED_S
    add(findings, A)
    assert not findings.put_away()
    assert add(findings, B) == ""
    clock.now_s += REMEMBERED_S
    assert add(findings, C) == "", "nor those of three writers"


def test_every_writer_of_a_hit_is_named_and_those_named_twice_are_put_away(findings: Findings) -> None:
    add(findings, A, B)
    add(findings, B, C)
    assert findings.put_away() == {B}
    add(findings, C, D)
    assert findings.put_away() == {B, C}


def test_three_findings_without_a_common_writer_are_rather_of_this_engine(findings: Findings) -> None:
    assert add(findings, A) == ""
    assert add(findings, B) == ""
    assert "3 writers" in add(findings, C)


def test_one_wrong_engine_that_restarts_is_no_reason_for_doubt(findings: Findings) -> None:
    for incarnation in (A, B, C):
        for _ in range(LATELY - 1):
            findings.agree(frozenset({D}))
        assert [add(findings, incarnation), add(findings, incarnation)] == ["", ""]
        assert incarnation in findings.put_away()


def test_whoever_wrote_a_common_prefix_is_not_put_away_with_those_behind_it(findings: Findings) -> None:
    for wrong in (B, C):
        for _ in range(LATELY):
            findings.agree(frozenset({A, D}))
        add(findings, A, wrong)
        add(findings, wrong)
    assert findings.put_away() == {B, C}


def test_of_many_own_records_two_may_be_far_by_chance(findings: Findings) -> None:
    for _ in range(5):
        assert add(findings, OWN) == ""
        for _ in range(LATELY_OWN - 1):
            findings.agree(frozenset({OWN}))


def test_own_records_behind_one_prefix_of_another_are_no_reason_for_doubt(findings: Findings) -> None:
    assert [add(findings, OWN, begin=b"system prompt") for _ in range(5)] == [""] * 5
    assert "itself" in add(findings, OWN, begin=b"another")


def test_that_own_records_are_the_same_says_nothing_of_others(findings: Findings) -> None:
    for writer, why in ((A, ""), (B, ""), (C, "3 writers")):
        for _ in range(LATELY_OWN):
            findings.agree(frozenset({OWN}))
            findings.agree(frozenset({NOBODY}))
        assert why in add(findings, writer)
    assert findings.doubts
    add(findings, A)
    assert findings.doubts, "until it is forgotten"


def test_an_engine_that_was_right_for_long_doubts_itself_as_soon(findings: Findings) -> None:
    for _ in range(100):
        findings.agree(frozenset({D}))
    assert [bool(add(findings, writer)) for writer in (A, B, C)] == [False, False, True]


def test_findings_among_any_three_of_which_a_writer_is_named_twice_are_not(findings: Findings) -> None:
    assert [add(findings, A), add(findings, A, B), add(findings, B), add(findings, A, B)] == [""] * 4
    assert findings.put_away() == {A, B}
    assert "3 writers" in add(findings, C), "A, B and C"


def test_an_engine_that_finds_its_own_records_wrong_twice_doubts_itself(findings: Findings) -> None:
    assert add(findings, OWN) == ""
    assert "itself" in add(findings, OWN)
    assert not findings.put_away(), "it is not put away by itself"


def test_own_records_beside_those_of_others_are_no_reason_for_doubt(findings: Findings) -> None:
    for _ in range(3):
        assert add(findings, OWN, A) == ""
    assert findings.put_away() == {A}


def test_records_without_a_name_are_of_nobody(findings: Findings) -> None:
    for _ in range(5):
        assert add(findings, NOBODY) == ""
    assert not findings.put_away()
    add(findings, NOBODY, A)
    add(findings, NOBODY, A)
    assert findings.put_away() == {A}


def test_records_without_a_name_are_never_this_engines_own() -> None:
    nameless = Findings(NOBODY, Clock().monotonic)
    assert [add(nameless, NOBODY) for _ in range(4)] == [""] * 4


def test_it_remembers_a_bounded_number(findings: Findings, clock: Clock) -> None:
    for _ in range(2):
        add(findings, A)
    for number in range(3 * MAX_REMEMBERED):
        add(findings, A, writer_name(str(number)))
        findings.put_away()
        clock.now_s += 1
    assert len(findings._by_writer) == MAX_REMEMBERED
    assert len(findings._put_away) <= PUT_AWAY_S
    assert findings.put_away() == {A}


def test_an_engine_that_is_another_one_begins_anew(findings: Findings) -> None:
    add(findings, A)
    add(findings, A)
    add(findings, B)
    findings.forget()
    assert not findings.put_away()
    assert add(findings, C) == ""
    assert add(findings, A) == ""
    assert not findings.put_away()


@pytest.mark.parametrize(
    ("what", "said"),
    [("record", "the record itself is wrong"), ("prefix", "its first layer is right"), ("", "or its prefix")],
)
def test_a_finding_is_described_by_layer_distance_and_writers(what: str, said: str) -> None:
    layers = {"layers.0": 0.5, "layers.1": 0.001, "layers.2": 0.7}
    judged = Judged("differs", 0.4, layers, ["layers.0", "layers.2"], what, frozenset({A}), 0.02)
    namespace = Namespace("default", {"model": "test"})
    text = describe(judged, {A, NOBODY}, namespace)
    assert "layers.0 is 0.5 away" in text
    assert "within 0.02" in text
    assert "2 of 3 layers" in text
    assert said in text
    assert A.hex() in text
    assert NOBODY.hex() not in text
    assert namespace.hex[:8] in text


def test_a_finding_of_many_writers_names_a_few() -> None:
    judged = Judged("differs", 1.0, {"layers.0": 1.0}, ["layers.0"], "record", frozenset(), 0.02)
    writers = [writer_name(str(number)) for number in range(40)]
    assert len(describe(judged, writers, None)) < 900
    assert "nobody with a name" in describe(judged, [NOBODY], None)
