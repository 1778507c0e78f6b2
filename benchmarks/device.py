"""``python -m benchmarks device``: the speed of kvpool's copies on this device, and their cost to an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.measure import (
    BLOCK_TOKENS,
    CACHES,
    LAYOUTS,
    TARGET_FROM_NBYTES,
    TARGET_OVER_PLAIN,
    TARGET_SLOWER,
    Arena,
    CallsMeasured,
    CopiesMeasured,
    EngineMeasured,
    measure_calls,
    measure_copies,
    measure_engine,
)
from kvpool.cli.tables import console, progress_bar, show
from kvpool.errors import KVPoolError
from kvpool.text import format_nbytes

NO_ACCELERATOR = (
    "No accelerator here: these are the CPU's copies, made in the step itself. They say nothing about a GPU, and what "
    "needs one is left out."
)
# cudaMemcpyAsync on an H100, blocks of 2 MB, pinned memory, nothing beside; the first is "about".
PUBLISHED_ONE_WAY, PUBLISHED_BOTH_WAYS = 50.0, 83.4
PUBLISHED_SOURCE = "https://blog.vllm.ai/2026/01/08/kv-offloading-connector.html"


def run_device(
    *,
    blocks: int | None = None,
    tokens: Sequence[int] | None = None,
    rounds: int,
    trace: Path | None = None,
    as_json: bool,
) -> None:
    """Print tables or JSON. None: the default. Errors: ``KVPoolError``, also when blocks returned damaged."""
    # Below 6 the profiler of torch 2.13 writes its progress to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    arena, sizes = Arena(), tokens or BLOCK_TOKENS
    with progress_bar() as progress:
        task = progress.add_task("tracing calls", total=(len(CACHES) * len(sizes) * 3 + 1) * rounds)
        calls = measure_calls(arena, blocks=blocks, trace=trace)
        progress.update(task, description="copying blocks")
        copies = [
            measure_copies(
                arena, cache, size, blocks=blocks, rounds=rounds, advance=lambda: progress.advance(task)
            )
            for cache in CACHES
            for size in sizes
        ]
        progress.update(task, description="computing beside copies")
        engine = measure_engine(arena, blocks=blocks, rounds=rounds, advance=lambda: progress.advance(task))
    if as_json:
        _print_json(arena, rounds, copies, engine, calls)
    else:
        batch = f"about {format_nbytes(arena.batch_nbytes)}" if blocks is None else f"{blocks} blocks"
        _print_copies(copies, f"Copies, GB/s: {arena.name}, {batch} at once, median of {rounds}")
        _print_engine(engine)
        _print_calls(calls)
        if not arena.accelerator:
            show(console(), NO_ACCELERATOR)
    wrong = [f"{row.model} {row.layout} {row.block_tokens}" for row in copies if not row.bytes_equal]
    wrong += [name for name, one in (("engine", engine), ("pool", calls)) if not one.bytes_equal]
    if wrong:
        raise KVPoolError(
            f"blocks came back with other bytes ({', '.join(wrong)}): do not use kvpool on this device, and report it"
        )


def _print_json(
    arena: Arena, rounds: int, copies: Sequence[CopiesMeasured], engine: EngineMeasured, calls: CallsMeasured
) -> None:
    report = {
        "device": arena.accelerator or "cpu",
        "name": arena.name,
        "note": None if arena.accelerator else NO_ACCELERATOR,
        "rounds": rounds,
        "targets": {
            "over_plain": TARGET_OVER_PLAIN,
            "from_block_nbytes": TARGET_FROM_NBYTES,
            "store_slower": TARGET_SLOWER,
            "synchronizing": 0,
        },
        "published": {
            "one_way_gb_per_s": PUBLISHED_ONE_WAY,
            "both_ways_gb_per_s": PUBLISHED_BOTH_WAYS,
            "source": PUBLISHED_SOURCE,
        },
        "rows": [asdict(row) for row in copies],
        "engine": asdict(engine),
        "calls": asdict(calls),
    }
    print(json.dumps(report))


def _print_copies(rows: Sequence[CopiesMeasured], title: str) -> None:
    table = Table(title=title, box=SIMPLE, padding=0)  # so that 14 columns fit into 100 characters
    for name in ("model", "layout", "tokens", "block"):
        table.add_column(name, justify="left" if name in ("model", "layout") else "right", no_wrap=True)
    for name in ("store", "load", "both"):
        for column in (name, "plain", "ratio"):
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for row in rows:
        figures = [
            text
            for speed in (row.store, row.load, row.both)
            for text in (f"{speed.gb_per_s:.1f}", f"{speed.plain_gb_per_s:.1f}", f"{speed.over_plain:.2f}")
        ]
        target = (row.target or "") if row.bytes_equal else "BYTES!"
        table.add_row(
            row.model, row.layout, str(row.block_tokens), format_nbytes(row.block_nbytes), *figures, target
        )
    out = console()
    show(out, table)
    layouts = "; ".join(f"{name}: {text}" for name, text in LAYOUTS.items())
    out.print(
        f"Layouts of vLLM 0.32: {layouts}. plain: one copy of as many bytes that lie together. both: a store and a "
        f"load at once. ratio: within a round. target: {TARGET_OVER_PLAIN} of plain in all three, from "
        f"{format_nbytes(TARGET_FROM_NBYTES)} a block on. vLLM publishes for its own copies on an H100, blocks of "
        f"2 MB: about {PUBLISHED_ONE_WAY:.0f} one way, {PUBLISHED_BOTH_WAYS} both ways ({PUBLISHED_SOURCE}).\n",
        highlight=False,
    )


def _print_engine(engine: EngineMeasured) -> None:
    def slower(ratio: float | None, needs: str = "needs an accelerator") -> str:
        return needs if ratio is None else f"{ratio:+.2%}"

    def call(milliseconds: float | None) -> str:
        return "" if milliseconds is None else f"{milliseconds:.2f} ms"

    step = "" if engine.step_ms is None else f", {engine.step_ms:.0f} ms of matrix products"
    table = Table(
        title=f"Cost to an engine: a step of {engine.step_tokens} tokens{step}, {format_nbytes(engine.step_nbytes)}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("beside", "slower", "our calls, a step", "target"):
        table.add_column(name, justify="left" if name in ("beside", "target") else "right", no_wrap=True)
    target = "" if engine.target is None else f"{engine.target} (at most {TARGET_SLOWER:.0%})"
    table.add_row("products, with stores", slower(engine.store_slower), call(engine.store_call_ms), target)
    table.add_row("products, with loads", slower(engine.load_slower), call(engine.load_call_ms), "")
    graph = slower(engine.graph_slower, "needs CUDA")
    table.add_row("a replayed CUDA graph, with loads all the time", graph, "", "")
    show(console(), table)


def _print_calls(calls: CallsMeasured) -> None:
    out = console()
    if not calls.runtime:
        out.print("Calls that wait for the device: to see them needs an accelerator.\n", highlight=False)
        return
    names = ", ".join(f"{count} {name}" for name, count in sorted(calls.runtime.items()))
    out.print(
        f"Calls that wait for the device, in stores, loads and polls of {calls.blocks} blocks: {calls.synchronizing} "
        f"(target 0). Calls that allocate or free: {calls.allocating}. All calls: {names}.\n",
        highlight=False,
    )
