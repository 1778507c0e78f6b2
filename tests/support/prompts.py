"""Chats and texts, by chat template: vLLM's own server and the tokenizer of the index make tokens of them."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support import chat_shapes
from tests.support.tiny_tokenizer import EITHER, PARTS, PLAIN

TEMPLATES = {"plain": PLAIN, "parts": PARTS, "either": EITHER}

TOOLS = [
    {
        "function": {"parameters": {"type": "object", "properties": {"b": {}, "a": {}}}, "name": "ask"},
        "type": "function",
    },
    {"type": "function", "function": {"name": "say", "description": "aloud", "strict": True}},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "ask", "arguments": '{"b": "\u00e9", "a": 1}'}}

FOUR = {"type": "text", "text": "4"}

BODIES: dict[str, dict[str, Any]] = {
    "one message": {"messages": [{"role": "user", "content": "the user asks"}]},
    "no generation prompt": {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False},
    "several turns": {
        "messages": [
            {"role": "system", "content": "the system"},
            {"role": "user", "content": "a\nb", "name": "ann"},
            {"role": "assistant", "content": "the assistant answers <|im_end|>"},
            {"role": "user", "content": "\u00fcber \U0001f9c2  end "},
        ]
    },
    "parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "user", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "how many?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": [FOUR, {"type": "text", "text": "2"}], "tool_call_id": "c1"},
            {"role": "assistant", "content": "42", "tool_calls": []},
        ],
        "tools": TOOLS,
        "tool_choice": "none",
    },
    "calls whose arguments are no object": {
        "messages": [
            {"role": "user", "content": "x"},
            *(
                {"role": "assistant", "content": "", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "ask", "arguments": arguments}}]}
                for arguments in ("", "[1]", "{broken", "{}")
            ),
        ]
    },
    "a developer": {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "x"},
        ]
    },
    "a developer beside the system": {
        "messages": [
            {"role": "system", "content": "first"},
            {"role": "user", "content": "x"},
            {"role": "developer", "content": "second"},
        ]
    },
    "thoughts": {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y", "reasoning": "because"},
            {"role": "user", "content": "z"},
        ],
        "reasoning_effort": "low",
    },
    "options of the template": {
        "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": False},
    },
    "an answer to go on with": {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "it is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "a line that differs in each request": {
        "messages": [
            {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nbe good"},
            {"role": "system", "content": "x-anthropic-billing-header: cch=2;"},
            {"role": "user", "content": "x-anthropic-billing-header"},
        ]
    },
}  # fmt: skip
SHAPES = list(chat_shapes.shapes(seed=1, count=400))
USER = {"role": "user", "content": "x"}
TEXTS = ["the user asks", " x", "<|im_start|>user\n\u00e9", "a" * 3000]
NAMES: list[tuple[str, str]] = []
CASES: list[tuple[str, str, dict[str, Any]]] = []
for (_template, _source), (_name, _body) in itertools.product(TEMPLATES.items(), BODIES.items()):
    NAMES.append((_template, _name))
    CASES.append((_source, "chat/completions", _body))
for _text in TEXTS:
    NAMES.append(("text", _text))
    CASES.append((PLAIN, "completions", {"prompt": _text}))
for _number, (_template, _body) in enumerate(SHAPES):
    NAMES.append(("shape", str(_number)))
    CASES.append((chat_shapes.TEMPLATES[_template], "chat/completions", _body))
