"""``python -m benchmarks``: wrong use is one clear line, and hashes beside vLLM's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import benchmark, benchmark_refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["store", "--batch-bytes", "0"], "--batch-bytes"),
        (["store", "--plot", "HERE/x/plot.png"], "cannot write the plot"),
        (["index", "--blocks", "10"], "--blocks"),
        (["index", "--workers", "0"], "--workers"),
        (["e2e", "--pool", "fiel:///x"], 'did you mean "file"?'),
        (["e2e", "--width", "300"], "multiple of 256"),
        (["e2e", "--plot", "HERE/x/plot.png"], "cannot write the plot"),
        (["device", "--tokens", "0"], "--tokens"),
        (["encoder", "--side", "100"], "--side 100 is not a multiple of 14"),
        (["encoder", "--width", "300"], "--width 300 is not a multiple of 256"),
        (["nothing"], "nothing"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    """HERE: a folder with nothing in it."""
    assert says in benchmark_refused(*(one.replace("HERE", str(tmp_path)) for one in arguments))


def test_help_names_every_benchmark() -> None:
    text = benchmark("--help").stdout
    assert all(
        name in text for name in ("hash", "device", "store", "index", "fleet", "e2e", "audits", "encoder")
    )


def test_hashes_are_vllms() -> None:
    report = json.loads(benchmark("hash", "--tokens", "4096", "--rounds", "3", "--json").stdout)
    assert report["hashes_equal"] is True
    assert set(report["median_s"]) == {"kvpool", "vLLM"}
    assert report["times_faster"] > 0
