"""Sessions of agents, and requests, for ``python -m benchmarks agents``: of a trace, or made up. Pure.

A turn begins when its session's last one was answered and the recorded pause is over, so slow answers delay what
follows. Requests without a session come when they came.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.discovery.trace import Hashes, Runs, Session, Trace, session_hashes

COMMON_TOKENS = 20_000  # vLLM's recipe for its pool: a system prompt, a task, and thirty turns
FIRST_TOKENS = 10_000
TURN_TOKENS = 2_048
ANSWER_TOKENS = 900
TURNS = 30
PAUSE_P50_S, PAUSE_P90_S = 12.0, 186.0  # of recorded sessions
Z90 = 1.2816  # of the standard normal distribution
MADE_UP_BLOCK_TOKENS = 64


class Turn(NamedTuple):
    """``blocks``: numbers of its full blocks. ``pause_s``: since the answer before it, or since the start."""

    session: int
    number: int
    blocks: npt.NDArray[np.int32]
    tokens: int
    answer_tokens: int
    pause_s: float


@dataclass(frozen=True)
class Traffic:
    """``hashes``: of each block, by its number. ``are_sessions``: False: each request stands alone."""

    sessions: Sequence[Sequence[Turn]]
    hashes: Hashes
    block_tokens: int
    are_sessions: bool

    @property
    def turns(self) -> int:
        return sum(map(len, self.sessions))

    @property
    def longest_tokens(self) -> int:
        """Of a prompt and its answer."""
        return max(turn.tokens + turn.answer_tokens for session in self.sessions for turn in session)


def made_up(sessions: int, seed: int) -> Trace:
    """Sessions of ``TURNS`` turns that begin alike; pauses are log-normal."""
    draw = random.Random(seed)
    spread = np.log(PAUSE_P90_S / PAUSE_P50_S) / Z90
    made = []
    for _ in range(sessions):
        session = Session(beginning=(COMMON_TOKENS, 0))
        at_s, blocks = 0.0, 0
        for turn in range(TURNS):
            tokens = COMMON_TOKENS + FIRST_TOKENS + turn * (TURN_TOKENS + ANSWER_TOKENS)
            new = tokens // MADE_UP_BLOCK_TOKENS - blocks
            session.prompts.append(Runs(at_s, tokens, ANSWER_TOKENS, 0.0, blocks, [(blocks + 1, new)]))
            at_s += draw.lognormvariate(np.log(PAUSE_P50_S), spread)
            blocks += new
        made.append(session)
    return Trace(made, MADE_UP_BLOCK_TOKENS)


def traffic(trace: Trace, *, sessions: int, apart_s: float) -> Traffic:
    """``sessions``: the first of them. ``apart_s``: between their beginnings. Requests all come, each alone."""
    are_sessions = trace.sessions[0].waits
    chosen = trace.sessions[:sessions] if are_sessions else trace.sessions
    hashes = [list(session_hashes(trace, number)) for number in range(len(chosen))]
    known = np.unique(
        np.concatenate(
            [
                prompt[runs.kept :]
                for session, prompts in zip(chosen, hashes, strict=True)
                for runs, prompt in zip(session.prompts, prompts, strict=True)
            ]
        )
    )
    numbered = [[np.searchsorted(known, one).astype(np.int32) for one in prompts] for prompts in hashes]
    made = [
        [
            Turn(
                number,
                at,
                blocks[: runs.tokens // trace.block_tokens],
                runs.tokens,
                runs.answer_tokens,
                pause_s,
            )
            for at, (runs, blocks, pause_s) in enumerate(
                zip(session.prompts, prompts, _pauses(session, number * apart_s), strict=True)
            )
        ]
        for number, (session, prompts) in enumerate(zip(chosen, numbered, strict=True))
    ]
    if not are_sessions:
        made = [
            [turn._replace(session=number, number=0)]
            for number, turn in enumerate(itertools.chain.from_iterable(made))
        ]
    return Traffic(made, known, trace.block_tokens, are_sessions)


def _pauses(session: Session, start_s: float) -> list[float]:
    if not session.waits:
        return [prompt.at_s for prompt in session.prompts]
    ends = [0.0, *(prompt.at_s + prompt.took_s for prompt in session.prompts[:-1])]
    pauses = [max(0.0, prompt.at_s - end) for prompt, end in zip(session.prompts, ends, strict=True)]
    return [start_s + pauses[0], *pauses[1:]]
