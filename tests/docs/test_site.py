"""What pages say of the code, and of measurements, against these; that links hold is for ``make docs``."""

from __future__ import annotations

import json
import re
import runpy
import statistics
from pathlib import Path

import pytest

from kvpool import metrics
from tests.support.recipes import DOCS

ROOT = DOCS.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PICTURES = sorted(DOCS.glob("assets/**/*.svg"))


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "cli-reference"))["page"]
    # Of another version of typer values are spelled in another way: names and texts have to be there.
    assert named((DOCS / "reference" / "cli.md").read_text()) == named(page()), "make cli-reference"


def test_the_page_about_installing_names_what_the_build_needs() -> None:
    asked = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert asked is not None
    page = (DOCS / "how-to" / "install.md").read_text()
    assert [name for name in re.findall(r'"(.+?)"', asked[1]) if f"'{name}'" not in page] == []


def named(page: str) -> list[tuple[str, list[str]]]:
    """Each command, and its options."""
    parts = re.split(r"^## `(.*)`$", page, flags=re.MULTILINE)
    return [
        (name, re.findall(r"(?:^\| `|^As of .*?: `|, `).*?(--[\w-]+)", part, re.MULTILINE))
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
    ]


def test_the_page_of_commands_has_all_of_them() -> None:
    commands = named((DOCS / "reference" / "cli.md").read_text())
    assert {"kvpool index", "kvpool router", "kvpool bench store"} <= {name for name, _ in commands}
    assert all(options for _, options in commands)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_what_was_run_where(path: Path) -> None:
    kept = json.loads(path.read_text())
    assert re.fullmatch(r"python -m benchmarks \w+.* --json", kept["command"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"])
    assert kept["machine"]["cpu"]
    assert kept["machine"]["cores"] > 0
    assert kept["result"]


def test_there_are_results_and_pictures() -> None:
    assert len(RESULTS) >= 4
    assert len(PICTURES) >= 7


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_fetches_nothing_and_has_both_themes(path: Path) -> None:
    text = path.read_text()
    addresses = set(
        re.findall(r"https?://[\w./-]+", re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL))
    )
    assert addresses <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd",
    }  # fmt: skip
    if path.stem != "mark":
        assert "prefers-color-scheme:dark" in text


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(
        page.read_text() for page in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "mkdocs.yml")
    )
    assert [path.name for path in PICTURES if path.name not in pages] == []


def test_every_figure_of_the_table_of_first_tokens_is_that_of_the_result() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "lengths.json").read_text())["result"]["rows"]
    said = {
        "computed": "computed",
        "cold": "both pools cold",
        "far": "far pool",
        "pool": "server alone",
        "near": "near pool, second engine",
        "third": "near pool, third engine",
        "local": "own cache",
    }
    page = (DOCS / "explanation" / "performance.md").read_text()
    _, head, table = page.partition("| first token, in ms |")
    assert head
    lengths, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.partition("\n\n")[0].splitlines()
    )
    tokens = [int(re.sub(r"\D", "", cell)) for cell in lengths]
    assert tokens == sorted({row["prompt_tokens"] for row in rows})
    medians = {
        how: [
            statistics.median(
                1e3 * row["first_token_s"]
                for row in rows
                if (row["prompt_tokens"], row["how"]) == (length, how)
            )
            for length in tokens
        ]
        for how in said
    }
    *figures, ratios = lines
    assert {name: [int(each.replace(",", "")) for each in cells] for name, *cells in figures} == {
        name: [round(median) for median in medians[how]] for how, name in said.items()
    }
    assert ratios[0] == "server over computed"
    assert [float(each) for each in ratios[1:]] == pytest.approx(
        [a / b for a, b in zip(medians["pool"], medians["computed"], strict=True)], abs=0.006
    )


def test_every_metric_is_on_its_page() -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    names = set(re.findall(r'"(kvpool_\w+)"', Path(metrics.__file__).read_text()))
    assert len(names) > 40
    # Neighbours in a cell leave out what they have in common.
    short = {name: re.sub(r"^kvpool_(index|router)?", "", name) for name in names}
    assert sorted(name for name in names if name not in page and f"`{short[name]}" not in page) == []
