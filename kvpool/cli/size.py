"""``kvpool size``: what a larger or a smaller pool would hold of requests: of those that an index knows, or of a trace.

docs/how-to/size-a-pool.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.text import Text

from kvpool.cli.model import print_kv_cache, read_kv_cache
from kvpool.cli.options import IndexConnection
from kvpool.cli.settings import CacheType, SizeOptions
from kvpool.cli.tables import Column, add_row, console, fitted, progress_bar, show
from kvpool.discovery.reuse import Point, ReuseCurve
from kvpool.discovery.trace import prompts, read_trace
from kvpool.errors import ConfigError, IndexUnavailable
from kvpool.text import UNIT_NBYTES, counted, format_size, parse_nbytes

TIMEOUT_S = 5.0
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)  # of the hits of the largest pool
SIZES = {"a quarter": 0.25, "half": 0.5, "as it is": 1.0, "twice": 2.0, "four times": 4.0}  # of today's


def run_size(options: SizeOptions, index: IndexConnection) -> None:
    """Print a table or JSON. Errors: ``ConfigError`` for the options and the files; of ``IndexClient``."""
    token_nbytes = parse_nbytes(options.token_bytes) if options.token_bytes is not None else 0
    if options.tenant is not None and (options.model is not None or options.trace is not None):
        raise ConfigError("--tenant is of an index's requests: leave it out beside --model or --trace")
    if options.model is not None:
        if options.token_bytes is not None:
            raise ConfigError("--model says what a token takes: leave --token-bytes out")
        cache = read_kv_cache(options.model).on_ranks(options.tp)
        if options.trace is None:
            if options.price is not None:
                raise ConfigError("--price is of pools of several sizes: add --trace, or leave --model out")
            print_kv_cache(cache, options)
            return
        token_nbytes = cache.token_nbytes[options.dtype is CacheType.FP8]
    elif options.dtype or (options.tp, options.prefill) != (1, 1000):
        raise ConfigError("--dtype, --tp and --prefill are for a --model")
    if options.trace is None:
        _live(options, index, token_nbytes)
        return
    trace = read_trace(options.trace, options.block_tokens)
    block_nbytes = trace.block_tokens * token_nbytes
    block_price = _block_price(options.price, block_nbytes)
    curve = ReuseCurve(options.most_blocks)
    total = sum(len(session.prompts) for session in trace.sessions)
    with progress_bar() as progress:
        for hashes in progress.track(prompts(trace, options.apart), total=total, description="requests"):
            curve.ask(hashes)
    points = curve.points()
    if options.as_json:
        print(_json(points, trace.block_tokens, block_price))
        return
    head = _head(curve.requests, curve.asked_blocks, trace.block_tokens, curve.distinct_blocks, curve.share)
    _print(head, points, trace.block_tokens, block_nbytes, block_price)


def _live(options: SizeOptions, index: IndexConnection, token_nbytes: int) -> None:
    with index.open(TIMEOUT_S) as client:
        curve = client.hit_curve(options.tenant)
    points = [Point(*each) for each in zip(curve.sizes, curve.hit_rates, strict=True)]
    if not points:
        of_whom = f"of tenant {options.tenant}" if options.tenant else "yet"
        raise IndexUnavailable(
            f"the index at {index.target} knows no request {of_whom}: it needs --pool, and engines of this pool that "
            "were asked for something since it started, half a minute ago or more"
        )
    block_tokens = round(options.block_tokens or curve.block_tokens)
    block_nbytes = block_tokens * token_nbytes or curve.block_nbytes
    block_price = _block_price(options.price, block_nbytes)
    today = {"pool_blocks": curve.pool_blocks or None, "block_nbytes": curve.block_nbytes or None}
    if options.as_json:
        of_curve = ("requests", "requested_blocks", "share", "since_s")
        today |= {name: getattr(curve, name) for name in of_curve}
        print(_json(points, block_tokens, block_price, **today))
        return
    since = datetime.fromtimestamp(curve.since_s).astimezone().isoformat(" ", "minutes")
    head = _head(curve.requests, curve.requested_blocks, block_tokens, curve.sizes[-1], curve.share)
    _print(f"since {since}: {head}", points, block_tokens, block_nbytes, block_price)
    if points[-1].hit_rate:
        show(console(), Text(_today(curve.pool_blocks, block_nbytes, curve.at)))


def _today(pool_blocks: int, block_nbytes: float, at: Any) -> str:
    if not pool_blocks:
        return "today's size is not known: the index knows no block in the pool"
    nbytes = f", {format_size(pool_blocks * block_nbytes)}" if block_nbytes else ""
    rates = ", ".join(f"{name} {at(size * pool_blocks):.1%}" for name, size in SIZES.items())
    return f"today's size, {pool_blocks:,} blocks{nbytes}: {rates}"


def _head(requests: int, blocks: int, block_tokens: int, distinct: int, share: float) -> str:
    exact = "exact" if share == 1 else f"estimated from one block in {1 / share:,.0f}"
    asked = f"{counted(requests, 'request')} for {counted(blocks, 'block')} of {block_tokens} tokens"
    return f"{asked}, {distinct:,} of them distinct; {exact}"


def _block_price(price: float | None, block_nbytes: float) -> float | None:
    """A month of a block. Errors: ``ConfigError`` where the bytes of a block are not known."""
    if price is None:
        return None
    if not block_nbytes:
        raise ConfigError(
            "--price is of a GiB: say what a token takes, by --token-bytes or a trace's --model"
        )
    return price * block_nbytes / UNIT_NBYTES["GiB"]


def _json(points: Sequence[Point], block_tokens: int, block_price: float | None, **more: object) -> str:
    of_points = [point._asdict() for point in points]
    if block_price is not None:
        of_points = [one | {"price": one["blocks"] * block_price} for one in of_points]
    return json.dumps({"block_tokens": block_tokens, "points": of_points, **more})


def _print(
    head: str, points: Sequence[Point], block_tokens: int, block_nbytes: float, block_price: float | None
) -> None:
    out = console()
    show(out, head)
    if not points[-1].hit_rate:
        show(out, "no block was asked for twice: a pool of no size has a hit")
        return
    columns = [Column("of the most hits"), Column("hit rate"), Column("blocks"), Column("tokens", drop=1)]
    if block_nbytes:
        columns.append(Column("size"))
    if block_price is not None:
        columns += [Column("a month"), Column("a point more")]
    most, before = points[-1].hit_rate, Point(0, 0.0)
    for share in SHARES:
        least = next(point for point in points if point.hit_rate >= share * most)
        more = [format_size(least.blocks * block_nbytes)] if block_nbytes else []
        if block_price is not None:
            gained = 100 * (least.hit_rate - before.hit_rate)
            step = f"{(least.blocks - before.blocks) * block_price / gained:,.2f}" if gained else "-"
            more += [f"{least.blocks * block_price:,.2f}", step]
        tokens = f"{least.blocks * block_tokens:,}"
        add_row(columns, f"{share:.0%}", f"{least.hit_rate:.1%}", f"{least.blocks:,}", tokens, *more)
        before = least
    show(out, *fitted(columns, out.width))
