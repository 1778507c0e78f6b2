"""What is read in chat templates before they render: the form of content that vLLM gives them, and their variables."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError

from kvpool.index.tokens.chat_template import ChatTemplate
from kvpool.index.tokens.tool_arguments import Arguments
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


VALUE: dict[str, Any] = {
    "role": "user",
    "items": 1,
    "_private": 2,
    "format": "3",
    "text": "a{}b",
    "none": None,
    "__len__": 4,
}
VALUE["raw"] = "{0.__class__}".format  # as no JSON has it


@pytest.mark.parametrize(
    "read",
    [
        "v.role", "v.missing", "v.missing is defined", "v.missing.more", "v.items is callable", "v.items() | list",
        "v._private", "v['items']", "v.get('role')", "v.format", "v.__len__", "v.__class__", "v.keys() | list",
        "v.pop('role')",
        "v.text.strip('a')", "v.text.format('x')", "v.text.format_map({})", "v.text.__class__", "v.text.missing",
        "v.text.split('{')[-1].upper()", "v.none.more", "(1).real", "[1].append(2)", "[1, 2].index(2)",
        "namespace(a=1).a", "namespace(a='{0.__class__}'.format).a(1)", "namespace(a=v.raw).a(1)",
        "namespace(a=1)._Namespace__attrs",
        "namespace(a=1).b", "namespace(a=1).__class__", "namespace(f=v.text.strip).f('b')", "v | attr('role')",
        "[v] | map(attribute='role') | list",
    ],
)  # fmt: skip
def test_attributes_in_a_template_are_what_the_sandbox_gives(read: str) -> None:
    from transformers.utils import chat_template_utils

    loops = "{% for m in [v, 2] %}{{ loop.index0 }}{{ loop.last }}{{ loop.nextitem }}{{ loop.missing }}{% endfor %}"
    source = (
        loops
        + "{% for m in [1, 2] %}{{ loop.cycle('a', 'b') }}{{ loop._iterator }}{% endfor %}{{ "
        + read
        + " }}"
    )

    def render(template: Any, value: Any) -> str:
        try:
            return str(template.render(v=value))
        except (TemplateError, TypeError, LookupError) as error:
            return (
                repr(error)
                .replace(f"{Arguments.__module__}.Arguments", "dict")
                .replace("'Arguments'", "'dict'")
            )

    ChatTemplate.of(source)  # which the library compiles once
    ours: Any = chat_template_utils._compile_jinja_template(source)
    theirs: Any = chat_template_utils._cached_compile_jinja_template(source)
    assert ours is not theirs
    assert "getattr" in vars(ours.environment)
    assert render(ours, dict(VALUE)) == render(ours, Arguments(VALUE)) == render(theirs, dict(VALUE))
