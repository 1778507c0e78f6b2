"""The report of ``python -m benchmarks store``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.plot import new_figure, save_figure
from benchmarks.store_clients import BARE, BARE_AGAIN, LMCACHE, OWN
from kvpool.cli.doctor.server import congestion_control_name
from kvpool.text import format_nbytes

CELLS = ("put_idle", "put_busy", "get_idle", "get_busy")


@dataclass(frozen=True)
class Row:
    """One client at one size.

    ``values``: moved per turn, by cell of ``CELLS``. ``gb_per_s``: medians, 10^9 bytes. ``busy_over_idle``:
    by verb, and ``over_bare``, by cell: medians of ratios within a round; the latter empty without a bare
    loop. ``cpu_s_per_gb``: by verb, of this process, idle; empty for a client in another. ``server_memory``: the
    server's bytes per payload byte. ``exists_ms``: by mood; empty if unsupported.
    """

    client: str
    value_nbytes: int
    values: dict[str, int]
    gb_per_s: dict[str, float]
    busy_over_idle: dict[str, float]
    over_bare: dict[str, float]
    cpu_s_per_gb: dict[str, float]
    server_memory: float | None
    exists_ms: dict[str, float]


@dataclass(frozen=True)
class Report:
    pool: str  # without secrets
    rounds: int
    batch_nbytes: int
    exists_keys: int
    rows: list[Row]


def over(rows: list[Row], value_nbytes: int, others: list[str]) -> dict[str, float]:
    """kvpool's speed in each cell over the fastest of ``others``; empty when none was measured."""
    at = {row.client: row.gb_per_s for row in rows if row.value_nbytes == value_nbytes}
    there = [at[name] for name in others if name in at]
    return {cell: at[OWN][cell] / max(each[cell] for each in there) for cell in CELLS} if there else {}


def compared(rows: list[Row]) -> dict[str, list[str]]:
    """kvpool's rivals: the fastest of the Python clients, and LMCache's native one."""
    python = dict.fromkeys(row.client for row in rows)
    return {
        "best": [name for name in python if name not in (OWN, BARE, BARE_AGAIN, LMCACHE)],
        LMCACHE: [LMCACHE],
    }


def show(report: Report, as_json: bool) -> None:
    """Print JSON of ``Report`` with ``over_best`` and ``over_lmcache``, or tables."""
    sizes = sorted({row.value_nbytes for row in report.rows})
    if as_json:
        times = {
            f"over_{name}": {size: over(report.rows, size, others) for size in sizes}
            for name, others in compared(report.rows).items()
        }
        print(json.dumps(asdict(report) | {"unit": "GB/s"} | times))
        return
    console = Console()
    console.print(_speeds(report, sizes))
    console.print(_processors(report, sizes))
    if any(row.exists_ms for row in report.rows):
        console.print(_existence(report))
    console.print(
        "busy: beside a pure-Python thread that spins. ratio: busy over idle, within a round. bare: idle, over the "
        "bare loop of plain SET and GET (or pwrite and pread; on a disk past the page cache), within a round. mem: the "
        "server's bytes for a byte of payload. over best: kvpool over the fastest of the clients in Python.",
        highlight=False,
    )
    if (control := congestion_control_name()) == "bbr":
        console.print(
            f"This host's TCP uses {control}, which paces what it sends; between neighbours, cubic is faster: "
            "sysctl net.ipv4.tcp_congestion_control=cubic, here and on the server's host.",
            highlight=False,
        )


def _speeds(report: Report, sizes: list[int]) -> Table:
    table = Table(
        title=f"{report.pool}: GB/s, median of {report.rounds}; batches of {format_nbytes(report.batch_nbytes)}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("value", "client"):
        table.add_column(name, justify="right" if name == "value" else "left", no_wrap=True)
    for verb in ("put", "get"):
        for name in (verb, "busy", "ratio", "bare"):
            table.add_column(name, justify="right")
    table.add_column("mem", justify="right")
    for size in sizes:
        for row in report.rows:
            if row.value_nbytes == size:
                table.add_row(format_nbytes(size), row.client, *_shown(row), _number(row.server_memory))
        for name, others in compared(report.rows).items():
            if times := over(report.rows, size, others):
                put_idle, put_busy, get_idle, get_busy = (f"{times[cell]:.1f}x" for cell in CELLS)
                table.add_row("", f"over {name}", put_idle, put_busy, "", "", get_idle, get_busy, "", "", "")
        table.add_section()
    return table


def _shown(row: Row) -> list[str]:
    texts: list[str] = []
    for verb in ("put", "get"):
        texts += [_number(row.gb_per_s[f"{verb}_{mood}"]) for mood in ("idle", "busy")]
        texts += [_number(row.busy_over_idle[verb]), _number(row.over_bare.get(f"{verb}_idle"))]
    return texts


def _processors(report: Report, sizes: list[int]) -> Table:
    table = Table(title="processors of this process, idle: seconds a GB", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("value", "client", "put", "get"):
        table.add_column(name, justify="left" if name == "client" else "right")
    for size in sizes:
        for row in report.rows:
            if row.value_nbytes == size and row.cpu_s_per_gb:
                spent = (f"{row.cpu_s_per_gb[verb]:.3f}" for verb in ("put", "get"))
                table.add_row(format_nbytes(size), row.client, *spent)
        table.add_section()
    return table


def _existence(report: Report) -> Table:
    table = Table(title=f"existence of {report.exists_keys:,} keys, ms")
    table.add_column("client")
    table.add_column("idle", justify="right")
    table.add_column("busy", justify="right")
    for row in report.rows:
        if row.exists_ms:
            table.add_row(row.client, *(_number(row.exists_ms[mood]) for mood in ("idle", "busy")))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(rows: list[Row], path: Path) -> None:
    """Write a PNG; without rows, check that this is possible. Errors: ``ConfigError``."""
    figure = new_figure(12, 8)
    panels = figure.subplots(2, 2, sharex=True)
    sizes = sorted({row.value_nbytes for row in rows})
    for panel, cell in zip(panels.flat, ("put_idle", "get_idle", "put_busy", "get_busy"), strict=True):
        for client in dict.fromkeys(row.client for row in rows):
            if client != BARE_AGAIN:
                speeds = [row.gb_per_s[cell] for row in rows if row.client == client]
                panel.plot(sizes, speeds, marker="o", linestyle="--" if client == BARE else "-", label=client)
        panel.set_title(cell.replace("_", ", "))
        panel.set_ylabel("GB/s")
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0)
        if rows:
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [format_nbytes(size) for size in sizes])
            panel.legend()
    save_figure(figure, path)
