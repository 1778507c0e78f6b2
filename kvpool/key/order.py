"""``with_order``: a configuration of which the order is told where it decides. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The first that matches a module decides for it: of PEFT's adapters, of GPTQModel's and compressed-tensors' layers.
ORDERED = frozenset(("rank_pattern", "alpha_pattern", "dynamic", "config_groups"))


def with_order(value: Any, counts: bool = False) -> Any:
    """A JSON value; its text tells the order of such patterns also when its names are sorted."""
    if isinstance(value, Mapping):
        inner = {name: with_order(each, name in ORDERED) for name, each in value.items()}
        return [list(pair) for pair in inner.items()] if counts else inner
    return [with_order(inner) for inner in value] if isinstance(value, (list, tuple)) else value
