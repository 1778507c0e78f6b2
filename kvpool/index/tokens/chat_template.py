"""``ChatTemplate``: what vLLM reads in a chat template before it renders a chat with it.

vLLM 0.32 decides the form of content by the template's loops, and passes only options that the template reads
(``vllm/renderers/hf.py``: ``_detect_content_format``, ``resolve_chat_template_kwargs``). A test compares both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import meta, nodes

from kvpool.index.tokens import template_environment


class ChatTemplate(NamedTuple):
    """``takes_parts``: content is a list of parts, not text. ``variables``: names that it reads and does not set."""

    source: str
    takes_parts: bool
    variables: frozenset[str]
    knows_developers: bool

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, source: str) -> ChatTemplate:
        """Errors: any of Jinja's, for a template that it cannot read."""
        from transformers.utils import chat_template_utils

        compiled: Any = chat_template_utils._compile_jinja_template(source)  # which the library renders
        template_environment.bound(compiled, source)
        root = compiled.environment.parse(source)
        return cls(
            source,
            _takes_parts(root),
            frozenset(meta.find_undeclared_variables(root)),
            any(quoted in source for quoted in ('"developer"', "'developer'")),
        )


class _Unclear(Exception):
    """An assignment or a loop with several names: vLLM reads no further."""


def _takes_parts(root: nodes.Template) -> bool:
    """Whether a loop goes over the content of a message: its own, a macro's parameter, or the name ``content``."""
    loops = list(root.find_all(nodes.For))
    try:
        lists = _copies(root, "messages")
        messages = [_name(loop.target) for loop in loops if any(_is(loop.iter, name) for name in lists)]
        parameters = _parameters_with_content(root, messages)
        for loop in loops:
            over = loop.iter
            if any(_is(over, message, "content") for message in messages):
                return bool(_name(loop.target))
            names = parameters.get(id(loop), frozenset(("content",)))
            if isinstance(over, nodes.Name) and over.name in names:
                return bool(_name(loop.target))
    except _Unclear:
        pass
    return False


def _copies(root: nodes.Template, variable: str) -> set[str]:
    """The variable, and each that is assigned from it."""
    found, last = {variable}, set[str]()
    while found != last:
        last = set(found)
        for one in root.find_all(nodes.Assign):
            if any(_is(one.node, name) for name in last):
                found.add(_name(one.target))
    return found


def _parameters_with_content(root: nodes.Template, messages: list[str]) -> dict[int, frozenset[str]]:
    """By each loop in a macro: the parameters that some call gives a message's content."""
    found = {}
    for macro in root.find_all(nodes.Macro):
        names = [one.name for one in macro.args]
        given: set[str] = set()
        for call in root.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                pairs = [*zip(names, call.args, strict=False), *((one.key, one.value) for one in call.kwargs)]
                given |= {
                    name
                    for name, value in pairs
                    if name in names and any(_is(value, message, "content") for message in messages)
                }
        for loop in macro.find_all(nodes.For):
            found[id(loop)] = frozenset(given)
    return found


def _is(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether the node is the variable, or this key of it: whole, sliced, filtered or tested."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getattr):
            named: Any = node.attr
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            named = node.arg.value
        else:
            return False
        if named != key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unclear
    return target.name
