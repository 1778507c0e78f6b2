"""``bound``: a compiled chat template counts what it reads and makes in the thread's ``TextWork``, before it is made.

A template is its model's, and trusted; the values in it are callers'. In a body of half a MiB one of them is repeated
for each of 800 messages. Counted are output, concatenations (``~``, ``+``, ``*``), set blocks and macros, filters and
methods that make more than they are given (``join``, ``replace``, ``center``, …), and each value read by name or key.
Frequent kinds of values need no checks of Jinja's sandbox, which take 4 us each, of which a chat has a thousand.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from kvpool.index.tokens.text_work import TooMuchText, active
from kvpool.index.tokens.tool_arguments import Arguments, dumping

# What Jinja's sandbox lets any template read.
_OF_MAPS = frozenset(dir(dict))
_PADDING = ("center", "expandtabs", "ljust", "rjust", "zfill")
_GROWING = ("join", "replace", "translate", *_PADDING)
_FORMATS = ("format", "format_map")
_OF_TEXTS = frozenset(name for name in dir(str) if name[0] != "_" and not name.startswith("format"))
_OF_JINJA = frozenset((LoopContext, Namespace))  # what is in a name without a leading "_"
_PLAIN = frozenset((bool, dict, float, int, list, str, type(None)))  # as a value: no function
_MAX_EXPONENT = 64
_MAX_WIDTH = 1024
_IS_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})")
_IS_WIDE_FIELD = re.compile(r":[^{}]*(\{|\d{4})")


def bound(compiled: Any, source: str) -> None:
    """``compiled``: from ``source``; compiled anew in its own environment, which counts."""
    environment = compiled.environment
    environment.getattr = _attributes(environment)
    environment.getitem = _items(environment)
    environment.concat = _concat
    environment.joined = lambda values: _concat(map(str, values))
    filters = environment.filters
    filters["tojson"] = dumping(_writing(filters["tojson"]))
    filters["join"] = _joining(environment, filters["join"])
    filters["replace"] = _replacing(filters["replace"])
    for name, check in _CHECKS.items():
        filters[name] = _checked(filters[name], check)
    environment.intercepted_binops = frozenset(_OPERATORS)
    environment.call_binop = _operate
    environment.code_generator_class = _Generator
    counting = environment.from_string(source)
    compiled.root_render_func, compiled.blocks = counting.root_render_func, counting.blocks


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.joined((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")


def _make(chars: int) -> None:
    if (work := active.work) is not None:
        work.make(chars)


def _concat(parts: Iterable[str]) -> str:
    """Also of a template's output, which stops here when it is too much."""
    work = active.work
    if work is None:
        return "".join(parts)
    made = []
    for part in parts:
        work.make(len(part))
        made.append(part)
    return "".join(made)


def _operate(_: Any, sign: str, left: Any, right: Any) -> Any:
    if sign == "+":
        if isinstance(left, str | list) and isinstance(right, str | list):
            _make(len(left) + len(right))
    elif sign == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(times, int):
                _make(len(one) * max(0, times))
    elif sign == "**":
        if isinstance(right, int) and right > _MAX_EXPONENT:
            raise TooMuchText(f"the chat template raises a number to the power of {right:.3g}")
    elif isinstance(left, str):
        _check_format(left, _IS_WIDE)
    return _OPERATORS[sign](left, right)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod,
}  # fmt: skip


def _check_format(text: str, wide: re.Pattern[str]) -> None:
    if wide.search(text):
        raise TooMuchText("the chat template pads a text to a thousand characters")


def _check_width(width: int) -> None:
    if width > _MAX_WIDTH:
        raise TooMuchText(f"the chat template pads a text to more than {_MAX_WIDTH} characters")


def _count_indent(text: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    chars = len(width) if isinstance(width, str) else max(0, width)
    _make(len(str(text)) + (str(text).count("\n") + 1) * chars)


def _count_rows(_: Any, linecount: int, fill_with: Any = None) -> None:
    if fill_with is not None:
        _make(max(0, linecount))


def _count_slices(_: Any, slices: int, fill_with: Any = None) -> None:
    if (work := active.work) is not None:
        work.step(max(0, slices))


# Before a filter, with its arguments, by Jinja's names.
_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _count_rows,
    "center": lambda _, width=80: _check_width(width),
    "format": lambda text, *_, **__: _check_format(str(text), _IS_WIDE),
    "indent": _count_indent,
    "slice": _count_slices,
}


def _checked(run: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    contexts = 1 if hasattr(run, "jinja_pass_arg") else 0  # which Jinja passes first

    @wraps(run)
    def checked(*args: Any, **options: Any) -> Any:
        if active.work is not None:
            check(*args[contexts:], **options)
        return run(*args, **options)

    return checked


def _replaced_chars(text: str, old: str, new: str, count: int) -> int:
    more = len(new) - len(old)
    if more <= 0:
        return len(text)
    times = text.count(old)
    return len(text) + more * (times if count < 0 else min(times, count))


def _joined_chars(between: str, texts: list[str]) -> int:
    return sum(map(len, texts)) + len(between) * max(0, len(texts) - 1)


def _replacing(replace: Callable[..., str]) -> Callable[..., str]:
    @wraps(replace)
    def counted(context: Any, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        _make(_replaced_chars(text, old, new, -1 if count is None else count))
        return replace(context, text, old, new, count)

    return counted


def _joining(environment: Any, join: Callable[..., str]) -> Callable[..., str]:
    @wraps(join)
    def counted(context: Any, values: Any, between: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = map(make_attrgetter(environment, attribute), values)
        texts = [str(value) for value in values]
        _make(_joined_chars(str(between), texts))
        return join(context, texts, between)

    return counted


def _writing(dumps: Callable[..., str]) -> Callable[..., str]:
    """Of indented JSON each value has a line, which is as long as it is deep: 4 MiB made 4 GB."""

    @wraps(dumps)
    def counted(value: Any, *args: Any, **options: Any) -> str:
        indent = options.get("indent", args[1] if len(args) > 1 else None)
        if indent is not None and active.work is not None:
            _count_lines(value, len(indent) if isinstance(indent, str) else max(0, int(indent)))
        return dumps(value, *args, **options)

    return counted


def _count_lines(value: Any, indent: int) -> None:
    left = [(value, 1)]
    while left:
        one, depth = left.pop()
        if isinstance(one, dict | list | tuple):
            _make(len(one) * (1 + depth * indent) + 1)
            left += [(each, depth + 1) for each in (one.values() if isinstance(one, dict) else one)]


def _grown(text: str, name: str, *args: Any, **options: Any) -> Any:
    """The method of that name."""
    if name == "replace" and len(args) >= 2 and all(isinstance(one, str) for one in args[:2]):
        _make(_replaced_chars(text, args[0], args[1], args[2] if len(args) > 2 else options.get("count", -1)))
    elif name == "join" and len(args) == 1:
        args = (list(args[0]),)
        if all(isinstance(one, str) for one in args[0]):
            _make(_joined_chars(text, args[0]))
    elif name == "translate" and args and isinstance(args[0], dict):
        lengths = [len(one) for one in args[0].values() if isinstance(one, str)]
        _make(len(text) * max([1, *lengths]))
    elif name in _PADDING:
        widths = [one for one in (*args, *options.values()) if isinstance(one, int)]
        _check_width(max(widths, default=0))
        if name == "expandtabs":
            _make(len(text) + text.count("\t") * (widths or [8])[0])
    return getattr(text, name)(*args, **options)


def _attributes(environment: Any) -> Callable[[Any, str], Any]:
    """``environment.getattr``: what ``message.role`` is."""
    checked = type(environment).getattr.__get__(environment)

    def attribute(value: Any, name: str) -> Any:
        if (work := active.work) is not None:
            work.step()
        kind = type(value)
        if (kind is dict or kind is Arguments) and name not in _OF_MAPS:
            return value[name] if name in value else environment.undefined(obj=value, name=name)
        if kind is str and name in _OF_TEXTS:
            return partial(_grown, value, name) if name in _GROWING else getattr(value, name)
        if kind is str and name in _FORMATS and active.work is not None:
            _check_format(value, _IS_WIDE_FIELD)
        if kind in _OF_JINJA and name[:1] != "_" and type(found := getattr(value, name, ...)) in _PLAIN:
            return found
        return checked(value, name)

    return attribute


def _items(environment: Any) -> Callable[[Any, Any], Any]:
    """``environment.getitem``: what ``message['role']`` is."""
    checked, attribute = type(environment).getitem.__get__(environment), environment.getattr

    def item(value: Any, key: Any) -> Any:
        if (work := active.work) is not None:
            work.step()
        try:
            return value[key]
        except (TypeError, LookupError):
            return attribute(value, key) if type(value) is type(key) is str else checked(value, key)

    return item
