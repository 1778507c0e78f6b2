"""The report of ``python -m benchmarks encoder``: figures and tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.contest import percentile
from benchmarks.encoder_steps import Step

OFF = "no connector"
FOLDER = "vLLM, folder"
OWN = "kvpool, folder"
OWN_SERVER = "kvpool, Valkey"
ROWS = (OFF, FOLDER, OWN, OWN_SERVER)
FIRST, SECOND = "first", "second"
PARTS = (0.1, 0.5, 0.9)
NEEDED_SHARE = 0.9  # of the images, from kvpool's pool


@dataclass(frozen=True)
class Asked:
    """An image, asked of one worker of a row. ``encoder_runs``, ``encoder_s``: for it, in that worker."""

    row: str
    worker: str
    image: int
    first_token_s: float
    finished_s: float
    encoder_runs: int
    encoder_s: float
    tokens: Sequence[int]


@dataclass(frozen=True)
class Moved:
    """Bytes of outputs that the row's first worker stored and the second one loaded, without headers.

    Of vLLM's folder: its files, and as much of them as the second worker did not compute.
    """

    row: str
    stored_nbytes: int
    loaded_nbytes: int


@dataclass(frozen=True)
class Line:
    """Of one worker of a row; ``p10_s``: a busy machine adds to the others. Ratios: over the same worker's without a
    connector; ``paired``: the median of those for the same image.
    """

    row: str
    worker: str
    encoder_runs: int
    p10_s: float
    p50_s: float
    p90_s: float
    p10_ratio: float
    p50_ratio: float
    p90_ratio: float
    paired: float
    other_tokens: int


@dataclass(frozen=True)
class Report:
    """``refused``: why a connector cannot be measured here; empty: it starts, and nobody measured it."""

    images: int
    image_tokens: int
    output_nbytes: int
    asked: Sequence[Asked]
    moved: Sequence[Moved]
    refused: Mapping[str, str]
    steps: Sequence[Step]
    load: float  # of the machine, before engines started

    @property
    def faults(self) -> list[str]:
        """Why this run is invalid; empty when valid."""
        found = [
            f"{line.row}: the {line.worker} worker gave other tokens for {line.other_tokens} images"
            for line in self.lines()
            if line.other_tokens
        ]
        return found + [
            f"{line.row}: the second worker ran its encoder for {line.encoder_runs} of {self.images} images"
            for line in self.lines()
            if (line.row, line.worker) in ((OWN, SECOND), (OWN_SERVER, SECOND))
            and line.encoder_runs > (1 - NEEDED_SHARE) * self.images
        ]

    @property
    def encoder_s(self) -> float:
        """One run of the encoder in a worker without a connector, median."""
        return statistics.median(one.encoder_s for one in self.asked if one.row == OFF)

    def lines(self) -> list[Line]:
        rows = dict.fromkeys((one.row, one.worker) for one in self.asked)
        return [
            self._line(row, worker) for worker in (FIRST, SECOND) for row in ROWS if (row, worker) in rows
        ]

    def _of(self, row: str, worker: str) -> list[Asked]:
        found = [one for one in self.asked if (one.row, one.worker) == (row, worker)]
        return sorted(found, key=lambda one: one.image)

    def _line(self, row: str, worker: str) -> Line:
        ours, plain, said = self._of(row, worker), self._of(OFF, worker), self._of(OFF, FIRST)
        times, plain_times = (sorted(one.first_token_s for one in of) for of in (ours, plain))
        p10, p50, p90 = (percentile(times, part) for part in PARTS)
        plain_p10, plain_p50, plain_p90 = (percentile(plain_times, part) for part in PARTS)
        return Line(
            row, worker, sum(one.encoder_runs for one in ours), p10, p50, p90,
            p10 / plain_p10, p50 / plain_p50, p90 / plain_p90,
            statistics.median(
                one.first_token_s / other.first_token_s for one, other in zip(ours, plain, strict=True)
            ),
            sum(list(one.tokens) != list(other.tokens) for one, other in zip(ours, said, strict=True)),
        )  # fmt: skip


def show(report: Report, *, as_json: bool) -> None:
    """Print JSON of ``Report`` with ``lines``, ``encoder_s`` and ``faults``, or tables."""
    if as_json:
        more = {
            "lines": [asdict(line) for line in report.lines()],
            "encoder_s": report.encoder_s,
            "faults": report.faults,
        }
        asked = [
            {name: value for name, value in asdict(one).items() if name != "tokens"} for one in report.asked
        ]
        print(json.dumps(asdict(report) | {"asked": asked} | more))
        return
    console = Console()
    console.print(_table(report))
    for row, reason in report.refused.items():
        said = f"does not start here: {reason}" if reason else "starts here, and is not measured"
        console.print(f"vLLM's {row} {said}", highlight=False, markup=False)
    console.print(_steps_table(report.steps))
    console.print(
        f"load of the machine before engines started: {report.load:.1f}", highlight=False, markup=False
    )
    for fault in report.faults:
        console.print(f"This run proves nothing: {fault}.", style="bold red", markup=False)


def _table(report: Report) -> Table:
    table = Table(
        title=f"{report.images} images of {report.image_tokens} tokens, each asked of two workers of every row; an "
        f"output has {report.output_nbytes / 1e6:.2f} MB, a run of the encoder takes {report.encoder_s * 1e3:.0f} ms. "
        "ms to the first token; x: over the same worker's without a connector; paired: median of x of each image. "
        "MB: of an image, stored by the first worker, loaded by the second. other: images with other tokens.",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in (
        "worker",
        "connector",
        "runs",
        "p50",
        "p90",
        "x p50",
        "x p90",
        "paired",
        "MB",
        "other",
    ):
        is_text = name in ("worker", "connector")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    moved = {one.row: one for one in report.moved}
    for line in report.lines():
        of_row = moved[line.row]
        nbytes = of_row.stored_nbytes if line.worker == FIRST else of_row.loaded_nbytes
        table.add_row(
            line.worker, line.row, f"{line.encoder_runs}",
            *(f"{seconds * 1e3:,.0f}" for seconds in (line.p50_s, line.p90_s)),
            *(f"{x:.2f}" for x in (line.p50_ratio, line.p90_ratio, line.paired)),
            f"{nbytes / report.images / 1e6:.2f}", f"{line.other_tokens}",
        )  # fmt: skip
    return table


def _steps_table(steps: Sequence[Step]) -> Table:
    table = Table(
        title="What connectors take of a scheduler's step: microseconds for all requests together",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("connector", "requests", "images each", "that are", "p50", "p90"):
        table.add_column(name, justify="left" if name in ("connector", "that are") else "right")
    for step in steps:
        table.add_row(
            step.connector, f"{step.requests}", f"{step.images}", step.what, f"{step.p50_us:,.0f}",
            f"{step.p90_us:,.0f}",
        )  # fmt: skip
    return table
