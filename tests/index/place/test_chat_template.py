"""What is read in chat templates before they render: the form of content that vLLM gives them, and their variables."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.index.place.chat_template import ChatTemplate
from tests.support import chat_shapes


def test_templates_of_all_shapes_get_the_form_of_content_that_vllm_gives_them(
    vllm_server: dict[str, Any],
) -> None:
    ours = [ChatTemplate.of(source).takes_parts for source in chat_shapes.templates()]
    for source, mine, theirs in zip(chat_shapes.templates(), ours, vllm_server["in_parts"], strict=True):
        assert mine == theirs, source
    assert 20 < sum(ours) < len(ours) / 2


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{{ a }}{% set b = 1 %}{{ b }}", {"a"}),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}", {"a"}),
        ("{{ range(2) }}{% generation %}{{ a }}{% endgeneration %}", {"a"}),
    ],
)
def test_the_variables_of_a_template_are_those_that_it_reads(source: str, variables: set[str]) -> None:
    assert ChatTemplate.of(source).variables == variables
