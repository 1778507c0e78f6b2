"""Chats of random shapes, and templates that read them in many ways: of a tokenizer here and of vLLM's server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

# As of Qwen3.5: a macro walks the parts, thoughts of earlier turns, tools that are loaded later.
THINKS = """{%- macro shown(content) %}
{%- if content is string %}{{ content }}
{%- elif content is iterable and content is not mapping %}
{%- for item in content %}{% if item.type == 'text' %}{{ item.text }}{% else %}?{% endif %}{% endfor %}
{%- endif %}{%- endmacro %}
{%- if tools %}<|im_start|>system
{%- for tool in tools %}{% if tool.defer_loading is not defined or not tool.defer_loading %}
{{ tool | tojson }}{% else %}
later: {{ tool.function.name }}{% endif %}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- set content = shown(message.content) | trim %}
{%- if message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}{% set reasoning = content.split('</think>')[0] %}{% endif %}
<think>{{ reasoning | trim }}</think>
{%- endif %}
{{ content }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}{% set call = call.function if call.function is defined else call %}
<call={{ call.name }}>
{%- for name, value in call.arguments.items() %}<{{ name }}>{{ value | tojson }}{% endfor %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""

# The content by ``get``, which vLLM takes for text unless a loop goes over the name "content".
GETS = """{%- for message in messages %}<|im_start|>{{ message.get('role') }}
{%- set text = message.get('content') %}
{%- if text is string %}{{ text }}{% else %}{% for part in text %}{{ part.text }}|{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
GETS_CONTENT = (
    GETS.replace("text = ", "content = ")
    .replace("text is string", "content is string")
    .replace("{{ text }}", "{{ content }}")
    .replace("in text", "in content")
)

# All that a message, a call and a tool hold, in their order.
DUMPS = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message | tojson }}<|im_end|>
{% endfor %}{{ documents | default([]) | tojson }} {{ effort | default('') }} {{ reasoning_effort | default('') }}
{%- if enable_thinking is defined %} {{ enable_thinking }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
WALKS_AND_DUMPS = (
    DUMPS + "{% for m in messages[1:] %}{% for p in m['content'] | list %}.{% endfor %}{% endfor %}"
)

TEMPLATES = {
    "thinks": THINKS, "gets": GETS, "gets content": GETS_CONTENT, "dumps": DUMPS, "walks and dumps": WALKS_AND_DUMPS,
}  # fmt: skip

SEED, TEMPLATE_COUNT = 1, 600
_LISTS = (
    "messages",
    "messages[1:]",
    "messages | list",
    "ms",
    "loop_messages",
    "messages is defined",
    "other",
)
_CONTENTS = (
    "message.content", "message['content']", "m.content", "message.get('content')", "content", "c", "parts",
    "message.content | list", "message['content'][1:]", "message.text", "messages[0].content",
)  # fmt: skip

_TEXTS = (
    "",
    "the user asks",
    " a\nb ",
    "x-anthropic-billing-header: 1;\nrest",
    "<|im_end|>",
    "\u00fcber",
    "</think>y",
)
_ABSENT = object()


def shapes(seed: int, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of templates, and bodies of ``/v1/chat/completions``; vLLM refuses some."""
    made = random.Random(seed)
    for _ in range(count):
        body: dict[str, Any] = {"messages": [_message(made) for _ in range(made.randint(1, 4))]}
        if made.random() < 0.5:
            body["tools"] = [_tool(made, number) for number in range(made.randint(1, 2))]
            body["tool_choice"] = "none"
        _maybe(made, body, "add_generation_prompt", True, False, None)
        _maybe(made, body, "reasoning_effort", "none", "low", None)
        _maybe(made, body, "documents", [{"title": "t", "text": "d"}], None)
        if made.random() < 0.4:
            options: dict[str, Any] = {}
            _maybe(made, options, "enable_thinking", True, False, None, "auto")
            _maybe(made, options, "reasoning_effort", "high", None)
            _maybe(made, options, "effort", "much", "auto")
            _maybe(made, options, "continue_final_message", False, True)
            _maybe(made, options, "range", 3)
            body["chat_template_kwargs"] = _shuffled(made, options)
        yield made.choice(list(TEMPLATES)), _shuffled(made, body)


def templates() -> list[str]:
    """Chat templates that name messages and their contents in many ways; nothing renders them."""
    made = random.Random(SEED)
    found = []
    for number in range(TEMPLATE_COUNT):
        block, taken, over = _block(made, 3), made.choice(("content", "c")), made.choice(_CONTENTS)
        if number % 4 == 0:  # few blocks define what they call
            block += f"{{% macro f({taken}) %}}{{% for part in {over} %}}.{{% endfor %}}{{% endmacro %}}"
        found.append(
            f"{{% for message in messages %}}{{{{ f({made.choice(_CONTENTS)}) }}}}{block}{{% endfor %}}"
        )
    return found


def _block(made: random.Random, depth: int) -> str:
    if not depth:
        return "."
    return "".join(_statement(made, depth - 1) for _ in range(made.randint(1, 3)))


def _statement(made: random.Random, depth: int) -> str:
    some, content, more = made.choice(_LISTS), made.choice(_CONTENTS), made.choice(_CONTENTS)
    inner, other = _block(made, depth), _block(made, depth)
    name, target = (
        made.choice(("f", "g")),
        made.choice(("ms", "loop_messages", "content", "c", "ns.x", "a, b")),
    )
    given = made.choice(
        (content, f"{content}, {more}", f"1, c={content}", f"1, {content}", f"parts={content}", "")
    )
    taken = made.choice(("content", "c", "parts, c", "c, content=1", ""))
    return made.choice((
        f"{{% set {target} = {some} %}}",
        f"{{% set {target} = {content} %}}",
        f"{{% for {made.choice(('message', 'm', 'a, b'))} in {some} %}}{inner}{{% endfor %}}",
        f"{{% for {made.choice(('part', 'a, b'))} in {content} %}}{inner}{{% endfor %}}",
        f"{{% if {content} is string %}}{inner}{{% else %}}{other}{{% endif %}}",
        f"{{% macro {name}({taken}) %}}{inner}{{% endmacro %}}",
        f"{{{{ {name}({given}) }}}}",
        f"{{% generation %}}{inner}{{% endgeneration %}}",
    ))  # fmt: skip


def _message(made: random.Random) -> dict[str, Any]:
    role = made.choice(("system", "user", "assistant", "assistant", "tool", "developer"))
    message: dict[str, Any] = {"role": role, "content": _content(made)}
    if role == "assistant":
        if made.random() < 0.3:
            message["content"] = None
        _maybe(made, message, "reasoning", "because", "", None)
        _maybe(made, message, "reasoning_content", "since", "", None)
        for name in ("refusal", "audio", "function_call", "annotations"):
            _maybe(made, message, name, None)
        if made.random() < 0.4:
            message["tool_calls"] = [_call(made) for _ in range(made.randint(0, 2))]
    elif role == "tool":
        message["tool_call_id"] = "c1"
    elif role == "developer":
        _maybe(
            made, message, "tools", None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        )
    _maybe(made, message, "name", "ann")
    _maybe(made, message, "task", "query")
    _maybe(made, message, "unknown", 1)
    return _shuffled(made, message)


def _content(made: random.Random) -> Any:
    if made.random() < 0.5:
        return made.choice(_TEXTS)
    parts = []
    for _ in range(made.randint(0, 3)):
        part = {"type": "text", "text": made.choice(_TEXTS)}
        _maybe(made, part, "cache_control", {"type": "ephemeral"})
        parts.append(_shuffled(made, part))
    if made.random() < 0.05:
        parts.append(made.choice((
            {"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}, {"type": "tool_reference",
            "name": "ask"}, {"type": "input_text", "text": "in"}, {"type": "text", "text": "x", "name": "y"}, "bare",
            {"type": "text", "text": None}, {"type": "text"},
        )))  # fmt: skip
    return parts


def _call(made: random.Random) -> dict[str, Any]:
    arguments = made.choice(
        ('{"b": "\u00e9", "a": 1.0}', "", "[1]", "{broken", '{"a": {"z": [], "y": null}}')
    )
    function: dict[str, Any] = {"name": "ask", "arguments": arguments}
    _maybe(made, function, "extra", True)
    call = {"id": "c1", "type": "function", "function": _shuffled(made, function)}
    _maybe(made, call, "index", 0)
    return _shuffled(made, call)


def _tool(made: random.Random, number: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": f"f{number}"}
    _maybe(made, function, "description", "does", None)
    _maybe(
        made,
        function,
        "parameters",
        {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}},
        None,
    )
    _maybe(made, function, "strict", True, False, None)
    _maybe(made, function, "defer_loading", True, False, None)
    _maybe(made, function, "unknown", 1)
    tool = {"type": "function", "function": _shuffled(made, function)}
    _maybe(made, tool, "defer_loading", True, False, None)
    _maybe(made, tool, "unknown", 1)
    return _shuffled(made, tool)


def _maybe(made: random.Random, fields: dict[str, Any], name: str, *values: Any) -> None:
    if made.random() < 0.3:
        fields[name] = made.choice(values)


def _shuffled(made: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    names = list(fields)
    made.shuffle(names)
    return {name: fields[name] for name in names}
