"""``kvpool bench device``: blocks between KV cache and staging, beside one plain copy of as many bytes."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvpool.text import format_nbytes
from kvpool.transfer.measure import SHAPES, accelerator, measure

NO_ACCELERATOR = (
    "No accelerator here: these are the CPU's copies, made in the step itself. They say nothing about a GPU."
)


def run_bench_device(*, blocks: int, rounds: int, as_json: bool) -> None:
    """Measure every shape, and print a table or JSON. Blocking, for seconds. Errors: ``ConfigError``."""
    device = accelerator()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("copying blocks", total=len(SHAPES) * 2 * rounds)
        rows = [
            measure(name, blocks=blocks, rounds=rounds, advance=lambda: progress.advance(task))
            for name in SHAPES
        ]
    if as_json:
        note = None if device else NO_ACCELERATOR
        report = {"device": device or "cpu", "note": note, "rounds": rounds, "unit": "GB/s"}
        print(json.dumps(report | {"rows": [asdict(row) for row in rows]}))
        return
    table = Table(
        title=f"{blocks} blocks of 16 tokens, {device or 'CPU'}, median of {rounds}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("model", "block", "launches", "copies", "GB/s", "plain", "ratio", "product", "bytes"):
        table.add_column(name, justify="left" if name in ("model", "copies") else "right", no_wrap=True)
    for row in rows:
        for direction, one in (("store", row.store), ("load", row.load)):
            cost = "" if one.product_cost is None else f"{one.product_cost:+.1%}"
            table.add_row(
                row.shape, format_nbytes(row.block_nbytes), str(row.launches), direction, f"{one.gb_per_s:.1f}",
                f"{one.plain_gb_per_s:.1f}", f"{one.over_plain:.2f}", cost, "equal" if row.bytes_equal else "DIFFERENT",
            )  # fmt: skip
    out = Console()
    out.print(table)
    out.print(
        "plain: one copy of as many bytes that lie together. ratio: over plain, within a round. product: how much "
        "longer a matrix product takes with the copies beside it.",
        highlight=False,
    )
    if device is None:
        out.print(NO_ACCELERATOR, highlight=False, soft_wrap=True)
