"""vLLM's settings that change K or V and that no other fact covers, by ``settings.json``.

The table judges each setting: ``fact`` (under its own name, unless at its default), ``covered`` by other
facts, ``refused``, or ``same`` (K and V stay), with its reason. ``docs/reference/namespace.md`` shows it; a
test compares it with vLLM's configuration classes, so that new settings cannot go unseen. An unknown setting
is a fact unless at its default. ``ParallelConfig`` and ``CompilationConfig`` are exempt: they differ by rank
and host.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig

from kvpool.key.key import Fact
from kvpool.key.order import with_order

MAX_SHOWN_CHARS = 200  # longer values become a digest
TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("settings.json").read_text())
_VERDICTS: dict[tuple[str, str], str] = {
    (section, name): row["verdict"]
    for row in TABLE["settings"]
    for section, names in row["names"].items()
    for name in names.split()
}
_BY_RANK = frozenset(("ParallelConfig", "CompilationConfig"))
_SECTIONS = ("model", "cache", "parallel", "load", "attention", "kernel", "lora")


def settings_facts(config: VllmConfig) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    for section in _sections(config):
        kind = type(section).__name__
        for field in dataclasses.fields(section):
            verdict = _VERDICTS.get((kind, field.name))
            unknown = verdict is None and kind not in _BY_RANK and not field.name.startswith("_")
            if verdict == "fact" or unknown:
                value = _plain(getattr(section, field.name, None))
                if value is not NotImplemented and value != _plain(_default(field)):
                    facts[f"{kind}.{field.name}"] = _fact(value)
    for name, default in TABLE["variables"].items():
        if (value := _plain(getattr(envs, name, default))) != default:
            facts[name] = _fact(value)
    return facts


def _sections(config: VllmConfig) -> Iterator[Any]:
    named = [getattr(config, f"{name}_config", None) for name in _SECTIONS]
    multimodal = getattr(config.model_config, "multimodal_config", None)
    yield from filter(dataclasses.is_dataclass, [config, *named, multimodal])


def _default(field: dataclasses.Field[Any]) -> Any:
    # pydantic wraps a conditional default in its own description.
    source = field if field.default is dataclasses.MISSING else field.default
    factory = getattr(source, "default_factory", None)
    if factory not in (None, dataclasses.MISSING):
        return factory()
    return getattr(source, "default", source)


def _plain(value: Any) -> Any:
    """A JSON value; ``NotImplemented`` without a text common to all processes."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        inner = {str(name): _plain(each) for name, each in value.items()}
        return NotImplemented if NotImplemented in inner.values() else inner
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        items = [_plain(each) for each in value]
        return NotImplemented if NotImplemented in items else items
    return NotImplemented


def _fact(value: Any) -> Fact:
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 1 << 63):
        return value
    text = value if isinstance(value, str) else json.dumps(with_order(value), sort_keys=True)
    return text if len(text) <= MAX_SHOWN_CHARS else hashlib.sha256(text.encode()).hexdigest()[:16]
