"""What is made of a text is counted before it is made: characters, steps of a template, memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvpool.errors import KVPoolError
from kvpool.index.limits import Limits
from kvpool.index.tokens import text_work
from kvpool.index.tokens.chat_template import ChatTemplate
from kvpool.index.tokens.text_work import SHORT, WHOLE, Bounds, LongText, TextWork, TooMuchText, working

MIB = 1 << 20


def test_of_short_texts_only_so_many_characters_are_made_into_tokens() -> None:
    work = TextWork(Bounds(100, 9, 60))
    for _ in range(2):
        with work.encoding("x" * 40):
            pass
    with pytest.raises(LongText), work.encoding("x" * 21):
        pass
    with pytest.raises(LongText), TextWork(Bounds(100, 9, 60)).encoding("x" * 61):
        pass


def test_a_long_piece_takes_memory_while_it_is_made() -> None:
    limits = Limits(64 * MIB)
    with closing(TextWork(limits=limits)) as work:
        with work.encoding("x" * (text_work.UNIT_CHARS + 1)):
            assert limits.used_nbytes > text_work.ENCODED_NBYTES * text_work.UNIT_CHARS
        assert limits.used_nbytes == 0
        with (
            pytest.raises(
                KVPoolError, match=r"there is no room to make tokens of this text, .*: send it again"
            ),
            work.encoding("x" * (4 * MIB)),
        ):
            raise AssertionError("it began")
    assert limits.used_nbytes == 0


def test_digits_take_more_memory_than_letters() -> None:
    """Each may be a piece of its own to a tokenizer."""
    limits = Limits()
    with closing(TextWork(limits=limits)) as work:
        with work.encoding("x" * MIB):
            letters = limits.used_nbytes
        with work.encoding("1" * MIB):
            assert limits.used_nbytes == letters + text_work.SPLIT_NBYTES * MIB
        with pytest.raises(KVPoolError, match="there is no room"), work.encoding("1" * (2 * MIB)):
            pass


def test_the_longest_text_has_room_without_a_limit() -> None:
    with closing(TextWork(limits=Limits())) as work:
        work.make(4 * MIB + 64 * 1024)
        with work.encoding("x" * (4 * MIB)):
            pass


@contextmanager
def rendering(source: str, work: TextWork) -> Iterator[Any]:
    from transformers.utils import chat_template_utils

    ChatTemplate.of(source)  # which the library compiles once
    with closing(work), working(work):
        yield chat_template_utils._compile_jinja_template(source).render


LARGE = "e" * (MIB // 2)
MULTIPLIES = {
    "output": "{% for m in messages %}{{ m.content }}{{ eos }}{% endfor %}",
    "joined": "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t ~ eos %}{% endfor %}{{ n.t }}",
    "added": "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t + eos %}{% endfor %}{{ n.t }}",
    "lists": "{% set n = namespace(t=[]) %}{% for m in messages %}{% set n.t = n.t + [1] * 99999 %}{% endfor %}",
    "kept": "{% macro all() %}{% for m in messages %}{{ m.content ~ eos }}{% endfor %}{% endmacro %}{{ all() }}",
    "macro": "{% macro all() %}{% for m in messages %}{{ eos }}{% endfor %}{% endmacro %}{{ all() | length }}",
    "set": "{% set all %}{% for m in messages %}{{ eos }}{% endfor %}{% endset %}{{ all | length }}",
    "times": "{{ (eos * messages | length) | length }}",
    "times, turned": "{{ (messages | length * eos) | length }}",
    "replaced": "{{ (eos | replace('e', eos)) | length }}",
    "replaced by method": "{{ eos.replace('e', eos) | length }}",
    "joined by filter": "{{ (messages | join(eos)) | length }}",
    "joined attributes": "{{ (messages | join(eos, attribute='content')) | length }}",
    "joined by method": "{{ eos.join(['a'] * messages | length) | length }}",
    "power": "{{ 10 ** eos | length }}",
    "padded": "{{ 'a'.center(2 * eos | length) | length }}",
    "formatted": "{{ '%*d' % (eos | length, 1) }}",
    "formatted by a filter": "{{ '%*d' | format(eos | length, 1) }}",
    "formatted by a method": "{{ '{:>{}}'.format(1, eos | length) }}",
    "formatted by a name": "{{ '{:>{}}'['format'](1, eos | length) }}",
    "formatted by a map": "{{ '{a:>1000000}'.format_map({'a': 1}) }}",
    "centred": "{{ 'a' | center(2 * eos | length) | length }}",
    "indented": "{{ lines | indent(eos | length) | length }}",
    "indented by a text": "{% for m in messages %}{% set x = lines | indent(lines) %}{% endfor %}",
    "rows": "{{ messages | batch(1000000000, 'x') | list | length }}",
    "columns": "{{ messages | slice(1000000000) | list | length }}",
    "translated": "{{ eos.translate({101: eos}) | length }}",
    "JSON": "{{ deep | tojson(indent=4) | length }}",
}
ALWAYS_TOO_MUCH = {"lists", "padded", "formatted", "rows", "columns"} | {
    f"formatted by a {what}" for what in ("filter", "method", "map", "name")
}
FEW = """{{ '%5d' | format(1) }}{{ '{:>5}'.format(1) }}{{ '{a:>5}'.format_map({'a': 1}) }}{{ 'a' | center(5) }}
{{ 'a\\nb' | indent }}{{ 'a\\nb' | indent('>', true) }}{{ messages | batch(2, 'x') | list }}
{{ messages | slice(slices=2) | list }}
{{ messages | batch(linecount=2) | list }}{{ 'b' | center(width=4) }}
{{ 'abc'.translate({97: 'xy'}) }}{{ 'abc'['upper']() }}"""


@pytest.mark.parametrize("name", MULTIPLIES)
def test_a_template_that_repeats_a_callers_value_ends_before_it_is_large(name: str) -> None:
    messages = [{"role": "user", "content": "x"}] * 800
    deep: Any = list(range(50_000))
    for _ in range(150):
        deep = [deep]
    limits = Limits(64 * MIB)
    with rendering(MULTIPLIES[name], TextWork(limits=limits)) as render:
        tracemalloc.start()
        try:
            with pytest.raises(KVPoolError, match=r"its template|chat template|no room"):
                render(messages=messages, eos=LARGE, deep=deep, lines="\n" * 4000)
            assert tracemalloc.get_traced_memory()[1] < 32 * MIB
        finally:
            tracemalloc.stop()
    assert limits.used_nbytes == 0


@pytest.mark.parametrize("name", sorted(MULTIPLIES.keys() - ALWAYS_TOO_MUCH))
def test_what_is_counted_is_made_as_before(name: str) -> None:
    check_as_before(MULTIPLIES[name])


def test_a_few_are_made_as_before() -> None:
    check_as_before(FEW)


def check_as_before(source: str) -> None:
    from transformers.utils import chat_template_utils

    values = {
        "messages": [{"role": "user", "content": "xé"}] * 3,
        "eos": "ee",
        "deep": [1, {"a": [2, []]}, "b"],
        "lines": "a\nb",
    }
    plain: Any = chat_template_utils._cached_compile_jinja_template(source)
    with rendering(source, TextWork()) as render:
        assert render(**values) == plain.render(**values)


@pytest.mark.parametrize("read", ["m.role", "m['role']"])
def test_a_template_takes_so_many_steps(read: str) -> None:
    source = (
        "{% for m in messages %}{% for o in messages %}{% if "
        + read
        + " %}{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user"}] * 3000
    with rendering(source, TextWork(SHORT)) as render, pytest.raises(LongText):
        render(messages=messages)
    with rendering(source, TextWork(WHOLE)) as render, pytest.raises(TooMuchText, match="steps"):
        render(messages=messages)


def test_a_thread_counts_its_own_work() -> None:
    assert text_work.active.work is None
    with working(TextWork()):
        assert text_work.active.work is not None
    assert text_work.active.work is None
