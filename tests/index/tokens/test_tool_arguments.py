"""Arguments of tool calls that are read once are what JSON says, in templates too, and their memory is bounded."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from kvpool.index.tokens import tool_arguments
from kvpool.index.tokens.chat_template import ChatTemplate
from kvpool.index.tokens.tool_arguments import Arguments, ToolArguments

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
LONG = "x" * tool_arguments.MIN_CHARS


def rendered(source: str, **values: Any) -> str:
    from transformers.utils import chat_template_utils

    ChatTemplate.of(source)
    template: Any = chat_template_utils._compile_jinja_template(source)
    return str(template.render(**values))


@given(values=st.lists(st.one_of(JSON, st.dictionaries(st.text(max_size=3), JSON)), min_size=1, max_size=5))
def test_they_are_what_json_says(values: list[Any]) -> None:
    kept = ToolArguments()
    for value in (*values, *values):
        for text in (json.dumps(value), json.dumps({"a": value, "long": LONG})):
            read = kept.read(text)
            assert json.dumps(read) == json.dumps(json.loads(text))  # NaN is not equal to itself
            for source in ("{{ v | tojson }}", "{{ [v] | tojson }}", "{{ v | tojson(indent=1) }}", "{{ v }}"):
                assert rendered(source, v=read) == rendered(source, v=json.loads(text))


@pytest.mark.parametrize("text", ["{", "nul", '{"a": ' + "[" * 100_000, "{" + " " * 300])
def test_faults_are_those_of_json(text: str) -> None:
    with pytest.raises((json.JSONDecodeError, RecursionError)):
        ToolArguments().read(text)


def test_long_ones_are_read_once_and_a_template_changes_nothing() -> None:
    kept, text = ToolArguments(), json.dumps({"a": [1], "long": LONG})
    value = kept.read(text)
    assert type(value) is Arguments
    assert kept.read(text) is value
    for change in ("v.update({'b': 1})", "v.pop('a')", "v.clear()", "v.a.append(2)", "v.setdefault('b', 1)"):
        with pytest.raises(TemplateError):
            rendered("{{ " + change + " }}", v=value)
    rendered("{{ v | tojson }}", v=value)
    copied = copy.deepcopy(value)
    assert copied == value == json.loads(text)
    assert copied["a"] is not value["a"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_arguments, "MAX_NBYTES", 20_000)
    kept = ToolArguments()
    for number in range(50):
        value = kept.read(json.dumps({"number": number, "long": LONG}))
        assert kept._nbytes <= 20_000
    assert value in [one for one, _ in kept._known.values()], "the last one stays"
    assert kept._nbytes == sum(nbytes for _, nbytes in kept._known.values()) > 10_000
    kept.read(json.dumps({"more": [[]] * 20_000}))
    assert kept._nbytes == 0


def test_a_text_much_longer_than_the_one_read_is_not_kept() -> None:
    value = ToolArguments().read('{"a": 0' + ', "b": [' + ",".join(["1e15"] * 500) + "]}")
    written = rendered("{{ v | tojson }}", v=value)
    assert len(written) > 8_000
    assert getattr(value, "_dumped", None) is None


def test_threads_may_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_arguments, "MAX_NBYTES", 10_000)
    kept = ToolArguments()
    values = [{"number": number, "long": LONG} for number in range(20)]
    wrong: list[Any] = []

    def ask() -> None:
        for _ in range(50):
            wrong.extend(value for value in values if kept.read(json.dumps(value)) != value)

    with ThreadPoolExecutor(4) as threads:
        for asked in [threads.submit(ask) for _ in range(4)]:
            asked.result()
    assert wrong == []
    assert kept._nbytes == sum(nbytes for _, nbytes in kept._known.values()) <= 10_000
