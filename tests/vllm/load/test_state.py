from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import kvpool.vllm
from kvpool.vllm.load.state import Found, Load, Outcome

pytestmark = pytest.mark.vllm

WRITERS = {
    "found": (Found, "load/offers.py"),
    "load": (Load, "load/loads.py"),
    "outcome": (Outcome, "tell/metrics.py"),
}


def test_each_part_of_a_requests_state_has_one_file_that_writes_it() -> None:
    root = Path(kvpool.vllm.__file__).parent
    writes = {name: set[str]() for name in WRITERS}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                part = ast.unparse(node.value).rpartition(".")[2]
                kind, _ = WRITERS.get(part, (None, ""))
                if kind is not None and node.attr in {field.name for field in dataclasses.fields(kind)}:
                    writes[part].add(str(path.relative_to(root)))
    assert writes == {name: {file} for name, (_, file) in WRITERS.items()}
