"""The facts of an engine of several pipeline stages: of each stage, where they differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import EngineRefused
from kvpool.key.key import Fact
from kvpool.vllm.engine.identity import (
    facts_of_engine,
)

pytestmark = [pytest.mark.vllm, pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process")]

MODEL: dict[str, Fact] = {"model": "m", "pipeline_parallel": 2}
FIRST: dict[str, Fact] = {**MODEL, "group0.layers": 1, "group0.attention": "full"}
SECOND: dict[str, Fact] = {**MODEL, "group0.layers": 3, "group0.attention": "full", "fp8_layers": "a"}

FACTS = st.dictionaries(st.sampled_from("abc"), st.sampled_from((0, 1, True, "1", "")))


def test_of_one_stage_they_are_those_of_its_ranks() -> None:
    assert facts_of_engine([FIRST] * 3, 1) == FIRST


def test_where_stages_differ_each_has_facts_of_its_own() -> None:
    assert facts_of_engine([FIRST, FIRST, SECOND, SECOND], 2) == {
        **MODEL,
        "group0.attention": "full",
        "stage0.group0.layers": 1,
        "stage1.group0.layers": 3,
        "stage1.fp8_layers": "a",
    }


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        ([FIRST, SECOND], 1),
        ([FIRST, FIRST, SECOND, FIRST], 2),
        ([FIRST, SECOND, FIRST, SECOND], 2),  # they come stage by stage
    ],
)
def test_ranks_of_one_stage_must_agree(ranks: list[dict[str, Fact]], stages: int) -> None:
    with pytest.raises(EngineRefused, match="its ranks differ"):
        facts_of_engine(ranks, stages)


OTHER = {**SECOND, "weights": "0123", "group0.layers": 4}


@pytest.mark.parametrize(
    ("ranks", "stages", "says"),
    [
        (
            [FIRST, FIRST, SECOND, OTHER],
            2,
            "group0.layers is 3 on rank 2 and 4 on rank 3; give all ranks the same model",
        ),
        (
            [{**FIRST, "weights": "4567"}, {**FIRST, "weights": "0123"}],
            1,
            'weights is "4567" on rank 0 and "0123" on rank 1;',
        ),
        ([FIRST, OTHER], 1, "fp8_layers is absent on rank 0 and "),
    ],
)
def test_the_fact_in_which_ranks_of_a_stage_differ_is_named(
    ranks: list[dict[str, Fact]], stages: int, says: str
) -> None:
    """Another checkpoint on another node, as often as another layout."""
    with pytest.raises(EngineRefused) as refused:
        facts_of_engine(ranks, stages)
    assert str(refused.value).startswith(f"its ranks differ: {says}")


@given(one=st.lists(FACTS, min_size=2, max_size=2), other=st.lists(FACTS, min_size=2, max_size=2))
def test_engines_have_the_same_facts_when_each_stage_has(
    one: list[dict[str, Fact]], other: list[dict[str, Fact]]
) -> None:
    def exact(facts: dict[str, Fact] | None) -> dict[str, str]:
        return {name: repr(value) for name, value in (facts or {}).items()}

    alike = [exact(facts) for facts in one] == [exact(facts) for facts in other]
    assert (exact(facts_of_engine(one, 2)) == exact(facts_of_engine(other, 2))) == alike
