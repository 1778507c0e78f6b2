"""``python -m benchmarks encoder`` without engines: what it makes of answers, encoders' runs, and a step's cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import encoder_watch
from benchmarks.encoder_report import (
    FIRST,
    FOLDER,
    OFF,
    OWN,
    ROWS,
    SECOND,
    Asked,
    Moved,
    Report,
    show,
)
from benchmarks.encoder_steps import DECODE, IMAGES, REQUESTS, Step, measure_steps
from benchmarks.encoder_watch import Runs, runs

WORKERS = (FIRST, SECOND)
TIMES = (1.0, 4.0, 2.0)  # of an image, without a connector


def _asked(row: str, worker: str, image: int) -> Asked:
    """kvpool's second worker takes a half; of the second image a quarter."""
    loads = row != OFF and worker == SECOND
    share = (0.25 if image == 1 else 0.5) if loads and row == OWN else 1.0
    return Asked(
        row, worker, image, TIMES[image] * share, 9.0, int(not loads), 0.0 if loads else 0.8, [image, 7]
    )


def _report() -> Report:
    """Images come in another order than they are compared in."""
    asked = [_asked(row, worker, image) for image in (2, 0, 1) for row in ROWS for worker in WORKERS]
    moved = [Moved(row, 3_000_000 * (row != OFF), 1_500_000 * (row != OFF)) for row in ROWS]
    step = Step("kvpool", REQUESTS, IMAGES, DECODE, 21.0, 28.0)
    return Report(3, 256, 524_288, asked, moved, {"ECCPUConnector": "it requires [x]"}, [step], 0.5)


def test_workers_are_compared_with_those_without_a_connector() -> None:
    report = _report()
    assert report.faults == []
    assert report.encoder_s == 0.8
    lines = report.lines()
    assert [(line.worker, line.row) for line in lines] == [
        (worker, row) for worker in WORKERS for row in ROWS
    ]
    of = {(line.row, line.worker): line for line in lines}
    assert (of[OFF, FIRST].p10_s, of[OFF, FIRST].p50_s, of[OFF, FIRST].p90_s) == (1.0, 2.0, 4.0)
    own = of[OWN, SECOND]
    assert (own.p10_s, own.p50_s, own.p90_s) == (0.5, 1.0, 1.0)
    assert (own.p10_ratio, own.p50_ratio, own.p90_ratio, own.paired) == (0.5, 0.5, 0.25, 0.5)
    assert [of[row, worker].encoder_runs for row in (OFF, OWN) for worker in WORKERS] == [3, 3, 3, 0]


@pytest.mark.parametrize(
    ("row", "worker", "change", "faults"),
    [
        (OWN, SECOND, {"tokens": [1, 7]}, [f"{OWN}: the second worker gave other tokens for 2 images"]),
        (FOLDER, FIRST, {"tokens": []}, [f"{FOLDER}: the first worker gave other tokens for 3 images"]),
        (OWN, SECOND, {"encoder_runs": 1}, [f"{OWN}: the second worker ran its encoder for 3 of 3 images"]),
        (FOLDER, SECOND, {"encoder_runs": 1}, []),  # is its own affair
    ],
)  # fmt: skip
def test_a_run_that_proves_nothing_says_so(
    row: str, worker: str, change: dict[str, Any], faults: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = _report()
    changed = replace(
        report,
        asked=[
            replace(one, **change) if (one.row, one.worker) == (row, worker) else one for one in report.asked
        ],
    )
    assert changed.faults == faults
    show(changed, as_json=False)
    assert ("This run proves nothing" in capsys.readouterr().out) == bool(faults)


def test_report_is_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    show(_report(), as_json=False)
    said = capsys.readouterr().out
    assert "ECCPUConnector does not start here: it requires [x]" in said
    assert max(map(len, said.splitlines())) <= 80
    [line] = [line for line in said.splitlines() if SECOND in line and OWN in line]
    assert line.split() == [
        "second", *OWN.split(), "0", "1,000", "1,000", "0.50", "0.25", "0.50", "0.50", "0",
    ]  # fmt: skip
    show(_report(), as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["faults"] == []
    assert len(shown["lines"]) == len(ROWS) * len(WORKERS)
    assert len(shown["asked"]) == 3 * len(ROWS) * len(WORKERS)


@pytest.mark.vllm
def test_runs_of_an_encoder_are_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.setattr(
        GPUModelRunner, "_execute_mm_encoder", lambda self, scheduled: ["output"] * scheduled.items
    )
    encoder_watch.watch()
    runner: Any = GPUModelRunner
    for items in (2, 0, 1):
        outputs = runner._execute_mm_encoder(None, SimpleNamespace(items=items))
        assert outputs == ["output"] * items
    log = tmp_path / "log"
    log.write_text(f"INFO something\n{capsys.readouterr().out}")
    assert log.read_text().count(encoder_watch.MARK) == 2, "a step without items is no run"
    found = runs(log)
    assert found == Runs(3, found.took_s)
    assert found.took_s > 0


@pytest.mark.vllm
def test_a_schedulers_step_is_measured_on_the_connectors_own_objects() -> None:
    steps = measure_steps(3)
    assert (steps[0].connector, steps[0].what) == ("kvpool", DECODE)
    assert len({(step.connector, step.what) for step in steps}) == len(steps) == 4
    assert all((step.requests, step.images) == (REQUESTS, IMAGES) for step in steps)
    assert all(0 < step.p50_us <= step.p90_us for step in steps)
