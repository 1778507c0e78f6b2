"""``python -m benchmarks pools``: what a near pool and a far one behind it, of several sizes, have of agents' prompts.

No engines and no bytes: each prompt is looked up, loaded and stored when it was asked for (``pools_held.py``).
"""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.agents_model import TOKEN_NBYTES
from benchmarks.agents_pool import Held
from benchmarks.agents_traffic import Traffic, made_up, traffic
from benchmarks.pools_held import Blocks, Directory, NearFar
from kvpool import _native
from kvpool.cli.model import read_kv_cache
from kvpool.discovery.trace import Hashes, Trace, read_trace
from kvpool.errors import ConfigError

SEED = 42
DAY_S = 86400

COLUMNS = ("near", "far", "far gets", "hits", "of ideal", "from device", "near", "far", "written", "again", "read",
           "W/R", "ever read", "fills", "s")  # fmt: skip

Cell = tuple[int, int, str]  # bytes near and far, and what goes far


class Prompt(NamedTuple):
    """``findable``: leading blocks that could be found: one token is always computed. ``ideal``: that an endless pool
    has.
    """

    at_s: float
    session: int
    blocks: Blocks
    findable: int
    ideal: int


class Engines(NamedTuple):
    """Each keeps its sessions, and in ``cache_nbytes`` the blocks used last. 0: the pools are asked for all."""

    workers: int
    cache_nbytes: int


@dataclass(frozen=True)
class Row:
    """``hits``: tokens, by where they came from; ``ideal``: of an endless pool. ``written_gb``: to the far pool,
    ``again_gb`` of it what it had evicted while near had it. ``read_share``: of what was written, what was read at
    least once before it was evicted. ``fills_a_day``: of the far pool, by what is written. None: nothing to divide by.
    """

    near_nbytes: int
    far_nbytes: int
    far_gets: str
    hits: int
    ideal: int
    hits_of_ideal: float
    device_hits: int
    near_hits: int
    far_hits: int
    written_gb: float
    again_gb: float
    read_gb: float
    written_of_read: float | None
    read_share: float | None
    fills_a_day: float | None
    took_s: float


def run_pools(
    *,
    trace: Path | None,
    model: str | None,
    sessions: int,
    apart_s: float,
    engines: Engines,
    near: Sequence[int],
    far: Sequence[int],
    as_json: bool,
) -> None:
    """Print a table or JSON. ``trace``: None: made-up sessions. ``model``: None: that of ``agents``. ``sessions``: a
    trace's, again from the first where it has fewer; they begin ``apart_s`` after each other. ``near``, ``far``: bytes,
    each alone and each with each. Takes minutes. Errors: ``ConfigError``.
    """
    token_nbytes = TOKEN_NBYTES if model is None else read_kv_cache(model).token_nbytes[0]
    recorded = made_up(sessions, SEED) if trace is None else repeated(read_trace(trace), sessions)
    of = traffic(recorded, sessions=sessions, apart_s=apart_s)
    asked = list(prompts(recorded, of, apart_s))
    lasts_s = len(of.sessions) * apart_s if of.are_sessions else asked[-1].at_s - asked[0].at_s
    block_nbytes = of.block_tokens * token_nbytes + _native.RECORD_HEADER_NBYTES
    if small := [size for size in (*near, *far) if size < block_nbytes]:
        raise ConfigError(f"a pool of {min(small):,} bytes holds no block of {block_nbytes:,}")
    cells: list[Cell] = [(0, 0, "all")] * (engines.workers > 0)
    cells += [*((size, 0, "all") for size in near), *((0, size, "all") for size in far)]
    cells += [(*sizes, gets) for sizes in itertools.product(near, far) for gets in ("all", "reused")]
    console = Console(stderr=True)
    rows = []
    for number, cell in enumerate(cells, 1):
        console.print(f"{number}/{len(cells)}", soft_wrap=True)
        rows.append(simulate(asked, of.hashes, engines, cell, of.block_tokens, block_nbytes, lasts_s))
    if as_json:
        shown = {"trace": trace and trace.name, "model": model, "token_nbytes": token_nbytes, "sessions": sessions,
                 **engines._asdict()}  # fmt: skip
        print(json.dumps(shown | {"apart_s": apart_s, "turns": len(asked), "rows": list(map(asdict, rows))}))
        return
    out = Console()
    if not out.is_terminal:  # a file has no width, and columns would be cut
        out = Console(width=160)
    all_tb = len(of.hashes) * block_nbytes / 1e12
    what = f"{len(asked):,} prompts; all their blocks, {token_nbytes:,} bytes a token: {all_tb:.2f} TB"
    out.print(_table(rows, what))


def repeated(trace: Trace, sessions: int) -> Trace:
    """So many sessions; the same again has other blocks, but for the beginning that all like it share."""
    if not trace.sessions[0].waits:
        return trace
    return trace._replace(sessions=list(itertools.islice(itertools.cycle(trace.sessions), sessions)))


def prompts(trace: Trace, of: Traffic, apart_s: float) -> Iterator[Prompt]:
    """In order of time, as recorded."""
    timed = [
        [(number * apart_s + prompt.at_s, turn) for prompt, turn in zip(session.prompts, turns, strict=True)]
        for number, (session, turns) in enumerate(zip(trace.sessions, of.sessions, strict=True))
    ] if of.are_sessions else [[(turn.pause_s, turn)] for [turn] in of.sessions]  # fmt: skip
    seen = np.zeros(len(of.hashes), bool)
    for at_s, turn in heapq.merge(*timed, key=lambda one: (one[0], one[1].session)):
        findable = min(len(turn.blocks), (turn.tokens - 1) // of.block_tokens)
        known = seen[turn.blocks[:findable]]
        ideal = findable if known.all() else int(np.argmin(known))
        yield Prompt(at_s, turn.session, turn.blocks, findable, ideal)
        seen[turn.blocks] = True


def simulate(
    asked: Sequence[Prompt],
    hashes: Hashes,
    engines: Engines,
    cell: Cell,
    block_tokens: int,
    block_nbytes: int,
    lasts_s: float,
) -> Row:
    """0 bytes: there is no such pool."""
    began_s = time.perf_counter()
    near_nbytes, far_nbytes, far_gets = cell
    near, far = (Directory(nbytes // block_nbytes, hashes) for nbytes in (near_nbytes, far_nbytes))
    pools = NearFar(near, far, far_gets_all=far_gets == "all")
    caches = [Held(engines.cache_nbytes // block_nbytes) for _ in range(engines.workers)]
    hits = device_hits = 0
    for one in asked:
        device = 0
        if caches:
            cache, blocks = caches[one.session % len(caches)], one.blocks.tolist()
            device = sum(1 for _ in itertools.takewhile(cache.__contains__, blocks[: one.findable]))
            cache.add(blocks[::-1])  # as vLLM: the last block is evicted first
        device_hits += device
        hits += pools.ask(one.blocks, one.findable, one.at_s, device)
    ideal = sum(one.ideal for one in asked)
    counts = pools.counts
    written = counts.written
    return Row(
        near_nbytes=near_nbytes,
        far_nbytes=far_nbytes,
        far_gets=far_gets if far_nbytes else "",
        hits=hits * block_tokens,
        ideal=ideal * block_tokens,
        hits_of_ideal=hits / max(1, ideal),
        device_hits=device_hits * block_tokens,
        near_hits=counts.near * block_tokens,
        far_hits=counts.far * block_tokens,
        written_gb=written * block_nbytes / 1e9,
        again_gb=counts.again * block_nbytes / 1e9,
        read_gb=counts.far * block_nbytes / 1e9,
        written_of_read=written / counts.far if counts.far else None,
        read_share=counts.read_once / written if written else None,
        fills_a_day=written / far.most * DAY_S / lasts_s if far.most and lasts_s else None,
        took_s=time.perf_counter() - began_s,
    )


def _table(rows: Sequence[Row], what: str) -> Table:
    table = Table(
        title=f"{what}. Hits of an endless pool: {rows[0].ideal:,} tokens. From: of them. GB of the far pool: written, "
        "again: of that what it had evicted, read. W/R: written for each byte read. Ever read: of what was written. "
        "Fills: of the far pool a day, by what is written.",
        box=SIMPLE, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        sizes = (f"{size / 1e9:,.0f} GB" if size else "-" for size in (row.near_nbytes, row.far_nbytes))
        parts = (f"{one / max(1, row.ideal):.1%}" for one in (row.device_hits, row.near_hits, row.far_hits))
        moved = (f"{one:,.0f}" for one in (row.written_gb, row.again_gb, row.read_gb))
        rates = (
            "-" if one is None else f"{one:{spec}}"
            for one, spec in ((row.written_of_read, ".2f"), (row.read_share, ".1%"), (row.fills_a_day, ".1f"))
        )
        hits = (f"{row.hits:,}", f"{row.hits_of_ideal:.2%}")
        table.add_row(*sizes, row.far_gets, *hits, *parts, *moved, *rates, f"{row.took_s:.0f}")
    return table
