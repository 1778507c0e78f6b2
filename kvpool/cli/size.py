"""``kvpool size``: what a larger or a smaller pool would hold of the requests in a trace.

Two forms of lines, plain or gzip: a session of an agent as an object with ``turns``, and a request as a list. Both name
blocks by runs of numbers, ``[first, count]`` (docs/how-to/size.md).
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpool.cli.settings import SizeOptions
from kvpool.cli.tables import Column, add_row, console, fitted, progress_bar, show
from kvpool.discovery.reuse import Point, ReuseCurve
from kvpool.errors import ConfigError
from kvpool.text import format_nbytes, parse_nbytes

MAX_TRACE_NBYTES = 1 << 30  # of text
MAX_BLOCKS = 1 << 24  # of one prompt
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)  # of the hits of the largest pool


class Runs(NamedTuple):
    """A prompt: the first ``kept`` blocks of the one before, and then runs of blocks."""

    at_s: float
    tokens: int
    kept: int
    runs: list[tuple[int, int]]

    @property
    def blocks(self) -> int:
        return self.kept + sum(count for _, count in self.runs)


@dataclass
class Session:
    """Prompts that name blocks of their own. Its first ``common_tokens`` are those of all with this ``beginning``."""

    prompts: list[Runs] = field(default_factory=list)
    beginning: tuple[int, int] = (0, 0)

    @property
    def common_tokens(self) -> int:
        return sum(self.beginning)


class Trace(NamedTuple):
    sessions: list[Session]
    block_tokens: int


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


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """``block_tokens``: None: as the prompts' tokens and blocks tell. Errors: ``ConfigError`` names file and line."""
    sessions: list[Session] = []
    requests = Session()
    for number, line in enumerate(_lines(path), 1):
        try:
            one = json.loads(line)
            if isinstance(one, dict):
                sessions.append(_session(one))
            else:
                at_ms, tokens, _, runs = one
                requests.prompts.append(_prompt(at_ms / 1000, tokens, 0, runs))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}, is no session and no request: {error}") from error
    if requests.prompts:
        sessions.append(requests)
    blocks = sum(prompt.blocks for session in sessions for prompt in session.prompts)
    if not blocks:
        raise ConfigError(f"{path} has no blocks: it is to have a session or a request a line")
    tokens = sum(prompt.tokens for session in sessions for prompt in session.prompts)
    return Trace(sessions, block_tokens or 1 << max(0, round(math.log2(max(1, tokens) / blocks))))


def prompts(trace: Trace, apart_s: float) -> Iterator[list[int]]:
    """The hashes of the blocks of each prompt, in order of time; sessions begin ``apart_s`` after each other."""
    timed = [
        _timed(number, session, number * apart_s, trace.block_tokens)
        for number, session in enumerate(trace.sessions)
    ]
    for _, _, hashes in heapq.merge(*timed, key=lambda each: each[:2]):
        yield hashes


def _timed(
    number: int, session: Session, start_s: float, block_tokens: int
) -> Iterator[tuple[float, int, list[int]]]:
    common = session.common_tokens // block_tokens
    before: list[int] = []
    for prompt in session.prompts:
        hashes = before[: prompt.kept]
        for first, count in prompt.runs:
            hashes += _hashes(number, session.beginning, common, first, count)
        yield start_s + prompt.at_s, number, hashes
        before = hashes


def _hashes(number: int, beginning: tuple[int, int], common: int, first: int, count: int) -> list[int]:
    """Numbers of 64 bits for a session's blocks; its first ``common`` ones are those of its beginning."""
    blocks = np.arange(first, first + count, dtype=np.uint64)
    of_session = _mixed(np.uint64(number)) ^ np.uint64(1)
    of_beginning = _mixed(_mixed(np.uint64(beginning[0])) ^ np.uint64(beginning[1]))
    owner = np.where((blocks > 0) & (blocks <= common), of_beginning, of_session)
    hashes: list[int] = _mixed(_mixed(blocks) ^ owner).tolist()
    return hashes


def _mixed(numbers: Any) -> Any:
    """SplitMix64: each bit of a number changes half of those of its hash."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))


def _session(one: dict[str, Any]) -> Session:
    session = Session(beginning=(_count(one["tools"]), _count(one["system"])))
    for start_s, tokens, _, _, _, kept, runs in one["turns"]:
        session.prompts.append(_prompt(start_s, tokens, kept, runs))
        if kept > (session.prompts[-2].blocks if len(session.prompts) > 1 else 0):
            raise ValueError(f"turn {len(session.prompts)} keeps {kept} blocks of fewer")
    return session


def _prompt(at_s: float, tokens: int, kept: int, runs: Iterable[Any]) -> Runs:
    prompt = Runs(
        float(at_s), _count(tokens), _count(kept), [(_count(first), _count(count)) for first, count in runs]
    )
    if prompt.blocks > MAX_BLOCKS:
        raise ValueError(f"a prompt of {prompt.blocks:,} blocks; {MAX_BLOCKS:,} are read")
    return prompt


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r:.40} is no count")
    return number


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if packed else raw as file:
                room = MAX_TRACE_NBYTES
                while line := file.readline(room + 1):
                    room -= len(line)
                    if room < 0:
                        most = format_nbytes(MAX_TRACE_NBYTES)
                        raise ConfigError(f"{path} has more than {most} of text: give a part of it")
                    if line.strip():
                        yield line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


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
