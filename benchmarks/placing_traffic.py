"""Made-up sessions for ``python -m benchmarks placing``, as agents' are: they differ in length by tens. Pure.

Medians and nineties are those of recorded sessions (``agents_traffic.py``) divided by about two, so that a fleet of 32
workers is simulated in seconds. Sessions begin at random, with one of a few common beginnings.
"""

from __future__ import annotations

import random

import numpy as np

from benchmarks.agents_traffic import PAUSE_P50_S, PAUSE_P90_S, Z90, Traffic, Turn

BLOCK_TOKENS = 256
SYSTEMS, SYSTEM_TOKENS = 4, 12_000
SESSIONS = 20  # a worker of the fleet
LIVE = 9  # of them at a time, roughly
FIRST_TOKENS = (4_000, 16_000)  # in the middle, and of one in ten more
TURN_TOKENS = (1_000, 6_000)
ANSWER_TOKENS = 300
TURNS = (12, 40)
MAX_TURNS, MAX_TOKENS = 80, 120_000
MAX_PAUSE_S = 600.0


def sessions_of(workers: int, seed: int) -> Traffic:
    """The same for equal arguments."""
    draw = random.Random(seed)
    number = 0

    def drawn(middle: float, nineties: float, most: float) -> float:
        return min(most, draw.lognormvariate(np.log(middle), np.log(nineties / middle) / Z90))

    def blocks(count: int) -> list[int]:
        nonlocal number
        number += count
        return list(range(number - count, number))

    systems = [blocks(SYSTEM_TOKENS // BLOCK_TOKENS) for _ in range(SYSTEMS)]
    lengths = [round(drawn(*TURNS, MAX_TURNS)) or 1 for _ in range(SESSIONS * workers)]
    pauses = [[drawn(PAUSE_P50_S, PAUSE_P90_S, MAX_PAUSE_S) for _ in range(turns)] for turns in lengths]
    lasts_s = sum(map(sum, pauses)) / len(pauses)
    at_s = 0.0
    made: list[list[Turn]] = []
    for session, (turns, waits) in enumerate(zip(lengths, pauses, strict=True)):
        at_s += draw.expovariate(LIVE * workers / lasts_s)
        said, tokens = list(draw.choice(systems)), SYSTEM_TOKENS
        those = []
        for turn in range(turns):
            more = drawn(*(TURN_TOKENS if turn else FIRST_TOKENS), MAX_TOKENS)
            tokens += round(more) + (ANSWER_TOKENS if turn else 0)
            if tokens > MAX_TOKENS:
                break
            said += blocks(tokens // BLOCK_TOKENS - len(said))
            pause_s = waits[turn] if turn else at_s
            those.append(Turn(session, turn, np.array(said, np.int32), tokens, ANSWER_TOKENS, pause_s))
        if those:
            made.append([one._replace(session=len(made)) for one in those])
    hashes = np.random.default_rng(seed).integers(1, 1 << 63, number, np.uint64)
    return Traffic(made, hashes, BLOCK_TOKENS, are_sessions=True)


def live_tokens(traffic: Traffic) -> float:
    """Of all sessions under way, on average while half of them have begun and none of those to come is the last."""
    ends: list[tuple[float, int]] = []  # time, change
    for session in traffic.sessions:
        at_s, tokens = 0.0, 0
        for turn in session:
            at_s += turn.pause_s
            ends.append((at_s, turn.tokens + turn.answer_tokens - tokens))
            tokens = turn.tokens + turn.answer_tokens
        ends.append((at_s, -tokens))
    ends.sort()
    began = sorted(session[0].pause_s for session in traffic.sessions)
    since_s, until_s = began[len(began) // 2], began[-1]
    live, weighted, last_s = 0, 0.0, since_s
    for at_s, change in ends:
        if at_s > since_s:
            weighted += live * (min(at_s, until_s) - last_s)
            last_s = min(at_s, until_s)
        live += change
        if at_s >= until_s:
            break
    return weighted / max(1e-9, until_s - since_s)
