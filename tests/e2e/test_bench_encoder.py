"""``python -m benchmarks encoder`` as small as it goes: what it measures on real engines."""

from __future__ import annotations

import json

import pytest

from benchmarks.encoder import NOT_HERE
from benchmarks.encoder_report import FIRST, OFF, OWN, OWN_SERVER, ROWS, SECOND
from tests.support.command_line import benchmark
from tests.support.engine_forks import ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.rare,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (ROOT / ".cache" / "vision").is_dir(), reason="make .cache/vision/.stamp fetches what it imports"
    ),
]
IMAGES = 2


def test_bench_encoder_counts_runs_and_bytes() -> None:
    ended = benchmark(
        "encoder", "--images", str(IMAGES), "--side", "112", "--vision-width", "128", "--vision-layers", "3",
        "--width", "256", "--json", timeout_s=900,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["faults"] == []
    assert report["refused"][NOT_HERE], "else it is to be measured"
    of = {(line["row"], line["worker"]): line for line in report["lines"]}
    assert set(of) == {(row, worker) for row in ROWS for worker in (FIRST, SECOND)}
    for (row, worker), line in of.items():
        assert line["encoder_runs"] == (0 if row != OFF and worker == SECOND else IMAGES), (row, worker)
        assert 0 < line["p50_s"] <= line["p90_s"]
        assert line["other_tokens"] == 0
    moved = {one["row"]: (one["stored_nbytes"], one["loaded_nbytes"]) for one in report["moved"]}
    assert report["output_nbytes"] == 64 * 256 * 4
    assert moved[OWN] == moved[OWN_SERVER] == (IMAGES * 64 * 256 * 4,) * 2
