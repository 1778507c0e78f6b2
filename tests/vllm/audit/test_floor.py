"""How far honest blocks are, as an engine learns it, and what it makes of others."""

from __future__ import annotations

import math
import random

import pytest

from kvpool.key.key import writer_name
from kvpool.metrics import AUDITS
from kvpool.vllm.audit.floor import FACTOR, LEAST, LEAST_PAIRS, MOST_OF_LEAST, Floor, Judged
from kvpool.vllm.plan import DRAFT, AuditedPart, LayerDistance

pytestmark = [pytest.mark.vllm]

OWN, OTHER, THIRD = (writer_name(name) for name in ("this", "another", "a third"))
NAMES = [f"model.layers.{number}.self_attn.attn" for number in (0, 1, 2, 10)]
ELEMENT = "bfloat16"
HONEST = LEAST[ELEMENT] / 2


def layer(name: str, distance: float, element: str = ELEMENT, norm: float = 4.0) -> LayerDistance:
    return LayerDistance(name, element, distance**2 * norm, norm)


def part(*distances: float, writer: bytes = OTHER, element: str = ELEMENT) -> AuditedPart:
    """Of the first layers."""
    named = zip(NAMES, distances, strict=False)
    return AuditedPart("", writer, [layer(name, distance, element) for name, distance in named])


def learnt(*distances: float, element: str = ELEMENT) -> Floor:
    """A floor of pairs that are so far in the first layers."""
    floor = Floor(OWN)
    for _ in range(LEAST_PAIRS):
        assert floor.judge([part(*distances, writer=OWN, element=element)]).verdict == "no_floor"
    return floor


def test_nothing_is_judged_before_there_is_a_floor_and_others_blocks_make_none() -> None:
    floor = Floor(OWN)
    for _ in range(3 * LEAST_PAIRS):
        judged = floor.judge([part(1.0)])
        assert (judged.verdict, judged.far) == ("no_floor", ())
    for _ in range(LEAST_PAIRS - 1):
        floor.judge([part(HONEST, writer=OWN)])
    assert floor.judge([part(1.0)]).verdict == "no_floor"
    floor.judge([part(HONEST, writer=OWN)])
    assert floor.judge([part(1.0)]).verdict == "differs"


def test_an_audit_without_a_floor_says_how_far_all_the_same() -> None:
    judged = Floor(OWN).judge([part(0.5)])
    assert judged.layers == {NAMES[0]: pytest.approx(0.5)}
    assert judged.distance == pytest.approx(0.5)
    assert judged.writers == {OTHER}


def test_an_engine_that_stores_nothing_learns_of_what_others_stored() -> None:
    floor = Floor(None)
    for _ in range(LEAST_PAIRS):
        assert floor.judge([part(HONEST)]).verdict == "no_floor"
    assert floor.judge([part(HONEST)]).verdict == "same"
    assert floor.judge([part(1.0)]).verdict == "differs"


def test_blocks_of_several_writers_are_nobodys_own_pair() -> None:
    floor = Floor(OWN)
    for _ in range(2 * LEAST_PAIRS):
        floor.judge([part(0.001, writer=OWN), part(0.001, writer=OTHER)])
    assert floor.judge([part(1.0)]).verdict == "no_floor"


@pytest.mark.parametrize("element", sorted(LEAST))
def test_a_layer_is_a_finding_beyond_twice_the_floor(element: str) -> None:
    least = LEAST[element]
    floor = learnt(2 * least, element=element)
    limit = FACTOR * 2 * least
    assert floor.judge([part(0.99 * limit, element=element)]).verdict == "same"
    judged = floor.judge([part(1.01 * limit, element=element)])
    assert (judged.verdict, judged.far, judged.limit) == ("differs", [NAMES[0]], pytest.approx(limit))


@pytest.mark.parametrize("element", sorted(LEAST))
def test_a_floor_has_a_least_and_a_most(element: str) -> None:
    """Engines whose own pairs are equal to the bit meet others; and a pair may be wrong itself."""
    least = LEAST[element]
    exact = learnt(0.0, element=element)
    assert exact.judge([part(0.99 * FACTOR * least, element=element)]).verdict == "same"
    assert exact.judge([part(1.01 * FACTOR * least, element=element)]).verdict == "differs"
    floor = Floor(OWN)
    for number in range(LEAST_PAIRS):  # one of them is wrong
        floor.judge([part(0.0 if number else 100 * least, writer=OWN, element=element)])
    most = FACTOR * MOST_OF_LEAST * least
    assert floor.judge([part(0.99 * most, element=element)]).verdict == "same"
    assert floor.judge([part(1.01 * most, element=element)]).verdict == "differs"


def test_each_layer_has_its_own_floor_and_one_wrong_layer_is_enough() -> None:
    floor = learnt(HONEST, 3 * LEAST[ELEMENT])
    far = 4 * LEAST[ELEMENT]
    assert floor.judge([part(HONEST, far)]).verdict == "same"
    judged = floor.judge([part(far, HONEST)])
    assert (judged.verdict, judged.far) == ("differs", [NAMES[0]])


def test_a_layer_in_which_the_engine_is_as_far_from_itself_as_from_others_is_not_judged() -> None:
    noisy = 5 * LEAST[ELEMENT]
    floor = learnt(HONEST, noisy)
    assert floor.judge([part(HONEST, 1.0)]).verdict == "same"
    assert floor.judge([part(1.0, 1.0)]).far == [NAMES[0]]


def test_own_pairs_that_are_a_little_farther_raise_the_floor_and_findings_and_others_never_do() -> None:
    least = LEAST[ELEMENT]
    floor = learnt(0.0)
    for _ in range(5):
        assert floor.judge([part(1.9 * least, writer=OTHER)]).verdict == "same"
        assert floor.judge([part(2.1 * least, writer=OTHER)]).verdict == "differs"
        assert floor.judge([part(50 * least, writer=OWN)]).verdict == "differs"
    assert floor.judge([part(1.5 * least, writer=OWN)]).verdict == "same"
    assert floor.judge([part(2.9 * least)]).verdict == "same"
    assert floor.judge([part(3.1 * least)]).verdict == "differs"
    for _ in range(50):  # it never creeps beyond
        for distance in (2, 4, 8, 16):
            floor.judge([part(distance * least, writer=OWN)])
    assert floor.judge([part(1.01 * FACTOR * MOST_OF_LEAST * least)]).verdict == "differs"


def test_after_other_weights_a_floor_is_learnt_anew() -> None:
    floor = learnt(HONEST)
    floor.forget()
    assert floor.judge([part(1.0)]).verdict == "no_floor"
    for _ in range(LEAST_PAIRS):
        floor.judge([part(HONEST, writer=OWN)])
    assert floor.judge([part(1.0)]).verdict == "differs"


@pytest.mark.parametrize("difference", [math.inf, math.nan])
@pytest.mark.parametrize("norm", [4.0, 0.0])
def test_what_is_no_number_on_one_side_is_a_finding(difference: float, norm: float) -> None:
    floor = learnt(3 * LEAST[ELEMENT])
    judged = floor.judge([AuditedPart("", OTHER, [LayerDistance(NAMES[0], ELEMENT, difference, norm)])])
    assert (judged.verdict, judged.far) == ("differs", [NAMES[0]])
    assert judged.distance == math.inf


def test_a_block_of_zeros_is_a_finding_and_zeros_beside_zeros_are_not() -> None:
    floor = learnt(HONEST)
    zeros, numbers = LayerDistance(NAMES[0], ELEMENT, 4.0, 0.0), LayerDistance(NAMES[0], ELEMENT, 4.0, 4.0)
    assert floor.judge([AuditedPart("", OTHER, [zeros])]).verdict == "differs"
    assert floor.judge([AuditedPart("", OTHER, [numbers])]).verdict == "differs"
    empty = LayerDistance(NAMES[0], ELEMENT, 0.0, 0.0)
    assert floor.judge([AuditedPart("", OTHER, [empty])]).verdict == "same"


def test_the_parts_of_a_layer_are_summed_over_ranks() -> None:
    floor = learnt(HONEST)
    ranks = [[LayerDistance(NAMES[0], ELEMENT, difference, 1.0)] for difference in (0.0, 0.0, 0.25, 0.0)]
    judged = floor.judge([AuditedPart("", OTHER, layers) for layers in ranks])
    assert judged.layers == {NAMES[0]: pytest.approx(0.25)}  # of the squares 0.25 and 4
    assert judged.verdict == "differs"
    assert judged.distance == pytest.approx(0.25)


def test_layers_of_several_stages_are_told_apart_and_shown_in_the_models_order() -> None:
    floor = learnt(*[HONEST] * 4)
    stages = [AuditedPart("", OTHER, [layer(NAMES[3], 1.0), layer(NAMES[2], HONEST)]), part(HONEST, 1.0)]
    judged = floor.judge(stages)
    assert list(judged.layers) == NAMES
    assert judged.far == [NAMES[1], NAMES[3]]


@pytest.mark.parametrize(
    ("distances", "what"),
    [((1.0, 1.0), "record"), ((1.0, HONEST), "record"), ((HONEST, 1.0), "prefix"), ((HONEST, HONEST), "")],
)
def test_the_first_layer_tells_a_wrong_record_from_a_wrong_prefix(
    distances: tuple[float, float], what: str
) -> None:
    assert learnt(HONEST, HONEST).judge([part(*distances)]).what == what


def test_where_the_models_first_layer_is_not_compared_it_may_be_either() -> None:
    floor = learnt(HONEST, HONEST)
    some = AuditedPart("", OTHER, [layer(name, 1.0) for name in NAMES[1:]])
    assert floor.judge([some]).what == ""
    unnamed = AuditedPart("", OTHER, [layer("group0.layer0", 1.0)])
    assert floor.judge([unnamed]).what == ""


@pytest.mark.parametrize("why", ["missing", "store_unavailable", "no_room"])
def test_where_a_part_says_nothing_the_audit_says_nothing_and_nothing_is_learnt(why: str) -> None:
    floor = Floor(OWN)
    for _ in range(2 * LEAST_PAIRS):
        assert floor.judge([part(HONEST, writer=OWN), AuditedPart(why)]) == Judged(why)
    assert floor.judge([part(1.0)]).verdict == "no_floor"
    assert why in (AUDITS.values or ())


def test_parts_without_numbers_stand_beside_others_and_alone_they_say_so() -> None:
    floor = learnt(HONEST)
    assert floor.judge([part(1.0), AuditedPart("no_numbers")]).verdict == "differs"
    assert floor.judge([AuditedPart("no_numbers")]) == Judged("no_numbers")
    assert floor.judge([]) == Judged("gone")


def test_honest_blocks_are_never_a_finding() -> None:
    """Of distances as real engines make them, from seeds: the largest of a few pairs is a bound for many more."""
    draw = random.Random(5)
    for element, typical in (("float32", 2e-6), ("bfloat16", 0.007), ("float8_e4m3fn", 0.033)):
        floor = Floor(OWN)
        verdicts = [
            floor.judge(
                [
                    part(
                        *(typical * draw.uniform(0.7, 1.3) for _ in NAMES),
                        writer=draw.choice((OWN, OTHER, THIRD)),
                        element=element,
                    )
                ]
            ).verdict
            for _ in range(2000)
        ]
        assert set(verdicts) == {"no_floor", "same"}
        assert verdicts.count("no_floor") < 100


def test_layers_that_draft_may_differ_in_a_token_and_are_found_where_they_are_missing() -> None:
    """Of a block's last token they hold what depends on the token behind it."""
    floor = learnt(HONEST)
    drafts = f"{DRAFT}model.layers.11.self_attn.attn"

    def judged(distance: float) -> Judged:
        whole = AuditedPart("", OTHER, [layer(NAMES[0], HONEST), layer(drafts, distance)])
        return floor.judge([whole])

    honest = judged(math.sqrt(2 / 16))  # of 16 tokens, one is another
    assert honest.verdict == "same"
    assert honest.distance == pytest.approx(HONEST), "of the model alone"
    missing = judged(1.0)
    assert (missing.verdict, missing.far, missing.what) == ("differs", [drafts], "")


def test_behind_recurrent_states_and_experts_floors_are_wider() -> None:
    near = 3 * LEAST[ELEMENT]
    for width, verdict in ((1.0, "differs"), (2.0, "same")):
        floor = Floor(OWN, width=width)
        for _ in range(LEAST_PAIRS):
            floor.judge([part(0.0, writer=OWN)])
        assert floor.judge([part(near, writer=OTHER)]).verdict == verdict


def test_what_is_no_number_is_a_finding_also_in_a_layer_that_is_not_judged() -> None:
    floor = learnt(1.0)
    assert floor.judge([part(1.0, writer=OTHER)]).verdict == "same"
    nan = AuditedPart("", OTHER, [LayerDistance(NAMES[0], ELEMENT, math.inf, 1.0)])
    assert floor.judge([nan]).verdict == "differs"
