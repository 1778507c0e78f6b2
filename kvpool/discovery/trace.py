"""``Trace``: recorded requests, which name the blocks of their prompts by number.

Two forms of lines, plain or gzip: a session of an agent as an object with ``turns``, and a request as a list. Both name
blocks by runs of numbers, ``[first, count]`` (docs/how-to/size-a-pool.md). A few digits name many blocks, so
only one prompt's blocks are in memory at a time.
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
import numpy.typing as npt

from kvpool.errors import ConfigError
from kvpool.files import open_file
from kvpool.text import format_nbytes

MAX_TRACE_NBYTES = 1 << 30  # of text
MAX_LINE_NBYTES = 16 << 20
MAX_BLOCKS = 1 << 20  # of one prompt: 16 million tokens at 16
MAX_PARTS = 1 << 22  # prompts and runs of a trace, about 200 bytes each

Run = tuple[int, int]  # the first block, and how many
Hashes = npt.NDArray[np.uint64]


class Runs(NamedTuple):
    """A prompt: the first ``kept`` blocks of the one before, and then runs of blocks.

    ``answer_tokens``: of what was answered, and ``took_s``: how long that took, 0 if unknown.
    """

    at_s: float
    tokens: int
    answer_tokens: int
    took_s: float
    kept: int
    runs: list[Run]

    @property
    def blocks(self) -> int:
        return self.kept + sum(count for _, count in self.runs)


@dataclass
class Session:
    """Prompts that name blocks of their own. Its first ``common_tokens`` are those of all with this ``beginning``.

    ``waits``: each prompt is asked after the answer to the one before; False: they are requests of many callers.
    """

    prompts: list[Runs] = field(default_factory=list)
    beginning: tuple[int, int] = (0, 0)
    waits: bool = True

    @property
    def common_tokens(self) -> int:
        return sum(self.beginning)


class Trace(NamedTuple):
    sessions: list[Session]
    block_tokens: int


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """``block_tokens``: None: as the prompts' tokens and blocks tell. Errors: ``ConfigError`` names file and line."""
    sessions: list[Session] = []
    requests = Session(waits=False)
    parts = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            one = json.loads(line)
            if isinstance(one, dict):
                sessions.append(_session(one))
                new = sessions[-1].prompts
            else:
                at_ms, tokens, answer, runs = one
                new = [_prompt(at_ms / 1000, tokens, answer, 0.0, 0, runs)]
                requests.prompts += new
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}, is no session and no request: {error}") from error
        parts += sum(1 + len(prompt.runs) for prompt in new)
        if parts > MAX_PARTS:
            raise ConfigError(
                f"{path} has more than {MAX_PARTS:,} prompts and runs of blocks: give a part of it"
            )
    if requests.prompts:
        sessions.append(requests)
    blocks = sum(prompt.blocks for session in sessions for prompt in session.prompts)
    if not blocks:
        raise ConfigError(f"{path} has no blocks: it is to have a session or a request a line")
    tokens = sum(prompt.tokens for session in sessions for prompt in session.prompts)
    return Trace(sessions, block_tokens or 1 << max(0, round(math.log2(max(1, tokens) / blocks))))


def prompts(trace: Trace, apart_s: float) -> Iterator[list[int]]:
    """The hashes of the blocks of each prompt, in order of time; sessions begin ``apart_s`` after each other."""
    timed = [_timed(session, number, number * apart_s) for number, session in enumerate(trace.sessions)]
    for _, number, runs in heapq.merge(*timed, key=lambda each: each[:2]):
        yield _hashes_of(trace, number, runs).tolist()


def _timed(session: Session, number: int, start_s: float) -> Iterator[tuple[float, int, list[Run]]]:
    for prompt, runs in zip(session.prompts, _whole(session), strict=True):
        yield start_s + prompt.at_s, number, runs


def session_hashes(trace: Trace, number: int) -> Iterator[Hashes]:
    """The hashes of the blocks of each prompt of a session."""
    for runs in _whole(trace.sessions[number]):
        yield _hashes_of(trace, number, runs)


def _whole(session: Session) -> Iterator[list[Run]]:
    """All runs of each prompt, those of its kept blocks first."""
    runs: list[Run] = []
    for prompt in session.prompts:
        kept, before = prompt.kept, runs
        runs = []
        for first, count in before:
            if kept <= 0:
                break
            runs.append((first, min(count, kept)))
            kept -= count
        runs += prompt.runs
        yield runs


def _hashes_of(trace: Trace, number: int, runs: Iterable[Run]) -> Hashes:
    session = trace.sessions[number]
    common = session.common_tokens // trace.block_tokens
    of_runs = [_hashes(number, session.beginning, common, first, count) for first, count in runs]
    return np.concatenate([np.empty(0, np.uint64), *of_runs])


def _hashes(number: int, beginning: tuple[int, int], common: int, first: int, count: int) -> Hashes:
    """Numbers of 64 bits for a session's blocks; its first ``common`` ones are those of its beginning."""
    blocks = np.arange(first, first + count, dtype=np.uint64)
    of_session = _mixed(np.uint64(number)) ^ np.uint64(1)
    of_beginning = _mixed(_mixed(np.uint64(beginning[0])) ^ np.uint64(beginning[1]))
    owner = np.where((blocks > 0) & (blocks <= common), of_beginning, of_session)
    hashes: Hashes = _mixed(_mixed(blocks) ^ owner)
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
    for start_s, tokens, answer, took_s, _, kept, runs in one["turns"]:
        session.prompts.append(_prompt(start_s, tokens, answer, took_s, kept, runs))
        if kept > (session.prompts[-2].blocks if len(session.prompts) > 1 else 0):
            raise ValueError(f"turn {len(session.prompts)} keeps {kept} blocks of fewer")
    return session


def _prompt(at_s: float, tokens: int, answer: int, took_s: float, kept: int, runs: Iterable[Any]) -> Runs:
    prompt = Runs(
        float(at_s), _count(tokens), _count(answer), float(took_s), _count(kept),
        [(_count(first), _count(count)) for first, count in runs],
    )  # fmt: skip
    if prompt.blocks > MAX_BLOCKS:
        raise ValueError(f"a prompt of {prompt.blocks:,} blocks; {MAX_BLOCKS:,} are read")
    return prompt


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r:.40} is no count")
    return number


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_file(path) as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if packed else raw as file:
                room = MAX_TRACE_NBYTES
                while line := file.readline(MAX_LINE_NBYTES + 1):
                    room -= len(line)
                    if len(line) > MAX_LINE_NBYTES:
                        most = format_nbytes(MAX_LINE_NBYTES)
                        raise ConfigError(f"{path} has a line of more than {most}: it is no trace")
                    if room < 0:
                        most = format_nbytes(MAX_TRACE_NBYTES)
                        raise ConfigError(f"{path} has more than {most} of text: give a part of it")
                    if line.strip():
                        yield line
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {why}") from error
