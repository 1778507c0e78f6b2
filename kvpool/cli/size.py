"""``kvpool size``: what a larger or a smaller pool would hold of the requests in a trace (docs/how-to/size.md)."""

from __future__ import annotations

import json

from kvpool.cli.settings import SizeOptions
from kvpool.cli.tables import Column, add_row, console, fitted, progress_bar, show
from kvpool.discovery.reuse import Point, ReuseCurve
from kvpool.discovery.trace import prompts, read_trace
from kvpool.text import parse_nbytes

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)  # of the hits of the largest pool


def run_size(options: SizeOptions) -> None:
    """Print the curve as a table or JSON. Errors: ``ConfigError`` for the options and the file."""
    token_nbytes = parse_nbytes(options.token_bytes) if options.token_bytes is not None else 0
    trace = read_trace(options.trace, options.block_tokens)
    curve = ReuseCurve(options.most_blocks)
    total = sum(len(session.prompts) for session in trace.sessions)
    with progress_bar() as progress:
        for hashes in progress.track(prompts(trace, options.apart), total=total, description="requests"):
            curve.ask(hashes)
    points = curve.points()
    if options.as_json:
        table = [point._asdict() for point in points]
        print(json.dumps({"block_tokens": trace.block_tokens, "points": table}))
        return
    _print(curve, points, trace.block_tokens, token_nbytes)


def _print(curve: ReuseCurve, points: list[Point], block_tokens: int, token_nbytes: int) -> None:
    out = console()
    exact = "exact" if curve.share == 1 else f"estimated from one block in {1 / curve.share:,.0f}"
    show(
        out,
        f"{curve.requests:,} requests for {curve.asked_blocks:,} blocks of {block_tokens} tokens, "
        f"{curve.distinct_blocks:,} of them distinct; {exact}",
    )
    columns = [Column("of the most hits"), Column("hit rate"), Column("blocks"), Column("tokens", drop=1)]
    if token_nbytes:
        columns.append(Column("GiB"))
    most = points[-1].hit_rate
    for share in SHARES:
        least = next(point for point in points if point.hit_rate >= share * most)
        tokens = least.blocks * block_tokens
        of_bytes = [f"{tokens * token_nbytes / (1 << 30):,.1f}"] if token_nbytes else []
        add_row(
            columns, f"{share:.0%}", f"{least.hit_rate:.1%}", f"{least.blocks:,}", f"{tokens:,}", *of_bytes
        )
    show(out, *fitted(columns, out.width))
