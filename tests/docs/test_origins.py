"""The page of origins names files and tests that are there, wherever they move."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.recipes import DOCS

ROOT = DOCS.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "explanation" / "origins.md").read_text().splitlines()
    if line.startswith("|") and "`" in line
]


def names(column: int) -> set[str]:
    return {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[column])}


def test_each_idea_names_files_and_tests() -> None:
    assert len(ROWS) > 15
    assert [row[0] for row in ROWS if len(row) != 5 or "`" not in row[1] or "`" not in row[2]] == []


def test_files_of_origins_are_there() -> None:
    held = {path.name for path in (ROOT / "kvpool").rglob("*") if path.is_file()}
    assert names(1) - held == set()


def test_tests_of_origins_are_there() -> None:
    texts = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    assert {name for name in names(2) if f"def {name}(" not in texts} == set()
