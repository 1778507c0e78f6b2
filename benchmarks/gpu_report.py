"""The report of ``python -m benchmarks gpu``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvpool.text import format_nbytes


class Way(NamedTuple):
    """One direction. Processor seconds of all threads, per 10^9 bytes."""

    gb_per_s: float
    client_s_per_gb: float
    server_s_per_gb: float


@dataclass(frozen=True)
class Row:
    """``shards`` 0: files in shared memory. ``near``: these before servers. ``fault``: why it is missing or wrong."""

    shards: int
    io_threads: int
    record_nbytes: int
    blocks_per_record: int
    threads: int
    near: bool = False
    store: Way | None = None
    load: Way | None = None
    fault: str | None = None

    @property
    def pool(self) -> str:
        if not self.shards:
            return "files"
        return f"{'files before ' if self.near else ''}{self.shards} x io-threads {self.io_threads}"

    def line(self) -> str:
        end = self.fault or " ".join(
            f"{name} {way.gb_per_s:.2f}" for name, way in self.ways().items() if way is not None
        )
        return f"{self.pool}, records of {format_nbytes(self.record_nbytes)}, {self.threads} threads: {end}"

    def ways(self) -> dict[str, Way | None]:
        return {"store": self.store, "load": self.load}


@dataclass(frozen=True)
class Report:
    """``plain``: GB/s of one copy of a batch to host memory (``store``) and back."""

    device: str
    batch_nbytes: int
    rounds: int
    plain: dict[str, float]
    rows: list[Row]


def say(line: str) -> None:
    """Progress on standard error, which survives a killed command."""
    print(line, file=sys.stderr, flush=True)


def show(report: Report, as_json: bool) -> None:
    """Print JSON of ``Report``, or a table."""
    if as_json:
        rows = [
            asdict(row) | {name: way and way._asdict() for name, way in row.ways().items()}
            for row in report.rows
        ]
        print(json.dumps(asdict(report) | {"unit": "GB/s", "rows": rows}))
        return
    table = Table(
        title=f"{report.device}: GB/s through a pool on this machine, batches of {format_nbytes(report.batch_nbytes)}, "
        f"median of {report.rounds}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("pool", "record", "threads", "store", "cpu", "server", "load", "cpu", "server"):
        table.add_column(name, justify="left" if name == "pool" else "right", no_wrap=True)
    for row in report.rows:
        cells = [row.pool, format_nbytes(row.record_nbytes), str(row.threads)]
        for way in row.ways().values():
            cells += [f"{figure:.2f}" for figure in way] if way else ["", "", ""]
        table.add_row(*cells)
    out = Console()
    out.print(table)
    plain = report.plain
    out.print(
        "cpu, server: processor seconds a GB, of this process and of the servers. Plain copies: "
        f"{plain['store']:.1f} GB/s to host memory, {plain['load']:.1f} from there.",
        highlight=False,
    )
    for row in report.rows:
        if row.fault:
            out.print(row.line(), highlight=False, soft_wrap=True)
