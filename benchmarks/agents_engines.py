"""Real engines under made-up sessions of agents: a list of ``python -m benchmarks agents``.

Two vLLM CPU engines with a small random model, a Valkey server and an index, each in its process; lengths are divided
by ``DIVISOR``. One turn runs at a time, as the engines share the cores: hits count, and times beside each other.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.agents_traffic import ANSWER_TOKENS, COMMON_TOKENS, FIRST_TOKENS, TURN_TOKENS
from benchmarks.contest import percentile
from benchmarks.valkey_shards import ValkeyShards
from demo.engine_process import EngineProcess, connector_config, free_ports, small_engine, write_model
from demo.index_process import IndexProcess
from demo.tiny_model import FIRST_WORD, VOCABULARY
from demo.workspace import workspace
from kvpool.errors import KVPoolError, UnknownModel
from kvpool.index.client.client import IndexClient

DIVISOR = 32
POLICIES = ("none", "pool", "kvpool")
ENGINES, SESSIONS, TURNS = 2, 3, 6
BLOCK_TOKENS = 32
ANSWERED = 8  # tokens of an answer that are generated
WIDTH, LAYERS = 512, 4
TOKEN_NBYTES = WIDTH * LAYERS * 4  # K and V of half the model's heads, 4 bytes a number
CACHE_TOKENS = 2048  # of an engine: one session and a half
FOLLOW_TIMEOUT_S = 120.0
SEED = 9


@dataclass(frozen=True)
class EngineRow:
    """``hits_of_ideal``, ``moved_gb``, ``sessions_moved``, ``moves``: as in ``Row``. ``other_tokens``: answers that
    differ from those without a pool.
    """

    policy: str
    workers: int
    turns: int
    hits_of_ideal: float
    ttft_p50_s: float
    ttft_p90_s: float
    moved_gb: float
    sessions_moved: int
    moves: int
    other_tokens: int


@dataclass(frozen=True)
class _Prompt:
    session: int
    tokens: list[int]
    ideal: int  # tokens that an endless cache would have


def run_engines(server: str, begins: Callable[[str], None]) -> list[EngineRow]:
    """A row for each policy. ``begins``: told of each. Blocks for minutes. Errors: ``KVPoolError``."""
    prompts = _prompts()
    rows: list[EngineRow] = []
    answers: list[list[int]] = []
    with workspace("kvpool-bench-", Console(stderr=True), keep=False) as folder:
        begins("a small model with random weights is written")
        model = write_model(folder / "model", width=WIDTH, layers=LAYERS)
        options = small_engine(
            model, block_tokens=BLOCK_TOKENS, longest_tokens=max(len(one.tokens) for one in prompts) + ANSWERED,
            kv_cache_nbytes=CACHE_TOKENS * TOKEN_NBYTES,
        )  # fmt: skip
        for policy in POLICIES:
            begins(f"{policy} with real engines")
            own = folder / policy
            own.mkdir()
            said, placed = _run(policy, prompts, options, server, own)
            answers = answers or [one["tokens"] for one in said]
            rows.append(_row(policy, prompts, said, placed, answers))
    return rows


def _prompts() -> list[_Prompt]:
    """All sessions' first turns, then their second ones, and so on. Answers in them are drawn: the same for all."""
    draw = random.Random(SEED)

    def words(tokens: int) -> list[int]:
        return [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(tokens // DIVISOR)]

    said = [words(COMMON_TOKENS)] * SESSIONS
    said = [[*one, *words(FIRST_TOKENS)] for one in said]
    prompts: list[_Prompt] = []
    common = COMMON_TOKENS // DIVISOR // BLOCK_TOKENS * BLOCK_TOKENS
    for turn, session in itertools.product(range(TURNS), range(SESSIONS)):
        ideal = common if session else 0
        if turn:
            ideal = len(said[session]) // BLOCK_TOKENS * BLOCK_TOKENS
            said[session] = [*said[session], *words(ANSWER_TOKENS), *words(TURN_TOKENS)]
        prompts.append(_Prompt(session, said[session], ideal))
    return prompts


def _run(
    policy: str, prompts: Sequence[_Prompt], options: Mapping[str, Any], server: str, folder: Path
) -> tuple[list[dict[str, Any]], list[int]]:
    """What was answered, and by which engine."""
    with ExitStack() as parts:
        url = parts.enter_context(ValkeyShards(server, folder / "server", shards=1, io_threads=1)).url
        client = None
        if policy == "kvpool":
            index = parts.enter_context(IndexProcess(folder, url))
            client = parts.enter_context(IndexClient(index.address))
        engines = [
            parts.enter_context(
                _engine(f"{policy}-{number}", options, None if policy == "none" else url, folder)
            )
            for number in range(ENGINES)
        ]
        for engine in engines:
            engine.wait_ready()
        draw = random.Random(0)
        for engine in engines:
            engine.generate([draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(600)], ANSWERED)
        names = [engine.name for engine in engines]
        if client is not None:
            _wait_followed(client, str(options["model"]), names)
        turns = itertools.cycle(range(ENGINES))
        said, placed = [], []
        for prompt in prompts:
            if client is None:
                at = next(turns)
            else:
                ranking = client.route(
                    str(options["model"]),
                    token_ids=prompt.tokens,
                    limit=1,
                    session_id=f"session-{prompt.session}",
                )
                at = names.index(ranking.picks[0].worker)
            said.append(engines[at].generate(prompt.tokens, ANSWERED))
            placed.append(at)
            engines[at].wait_quiet()
        return said, placed


@contextlib.contextmanager
def _engine(name: str, options: Mapping[str, Any], pool: str | None, folder: Path) -> Iterator[EngineProcess]:
    given = dict(options)
    if pool is not None:
        events, replay = free_ports(2)
        given["kv_events_config"] = {
            "enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}",
        }  # fmt: skip
        settings = {"worker": name, "advertise_host": "127.0.0.1", "cost_gate": False}
        given["kv_transfer_config"] = connector_config(pool, settings)
    with EngineProcess(name, folder, given) as engine:
        yield engine


def _wait_followed(client: IndexClient, model: str, names: Sequence[str]) -> None:
    ends_s = time.monotonic() + FOLLOW_TIMEOUT_S
    while True:
        with contextlib.suppress(UnknownModel):
            rows = client.lookup(model, token_ids=[0])
            if {row.worker for row in rows if not row.stale} >= set(names):
                return
        if time.monotonic() > ends_s:
            raise KVPoolError(f"the index does not follow the engines after {FOLLOW_TIMEOUT_S:g} s")
        time.sleep(0.1)


def _row(
    policy: str,
    prompts: Sequence[_Prompt],
    said: Sequence[Mapping[str, Any]],
    placed: Sequence[int],
    answers: Sequence[list[int]],
) -> EngineRow:
    first_s = sorted(one["first_token_s"] for one in said)
    hits = sum(min(one["cached_tokens"], prompt.ideal) for one, prompt in zip(said, prompts, strict=True))
    moves = [
        sum(a != b for a, b in itertools.pairwise(placed[session::SESSIONS])) for session in range(SESSIONS)
    ]
    return EngineRow(
        policy=policy,
        workers=ENGINES,
        turns=len(said),
        hits_of_ideal=hits / sum(prompt.ideal for prompt in prompts),
        ttft_p50_s=statistics.median(first_s),
        ttft_p90_s=percentile(first_s, 0.9),
        moved_gb=sum(one["pool_tokens"] for one in said) * TOKEN_NBYTES / 1e9,
        sessions_moved=sum(map(bool, moves)),
        moves=sum(moves),
        other_tokens=sum(one["tokens"] != answer for one, answer in zip(said, answers, strict=True)),
    )


def engines_table(rows: Sequence[EngineRow]) -> Table:
    table = Table(
        title=f"Real engines on {SESSIONS} made-up sessions of {TURNS} turns, lengths divided by "
        f"{DIVISOR}, one turn at a time. TTFT: ms to the first token.",
        box=SIMPLE, padding=(0, 1, 0, 0),
    )  # fmt: skip
    columns = (
        "policy",
        "engines",
        "ideal",
        "TTFT p50",
        "p90",
        "moved MB",
        "moved sessions",
        "moves",
        "other tokens",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy, f"{row.workers}", f"{row.hits_of_ideal:.1%}", f"{row.ttft_p50_s * 1e3:.0f}",
            f"{row.ttft_p90_s * 1e3:.0f}", f"{row.moved_gb * 1e3:.0f}", f"{row.sessions_moved}", f"{row.moves}",
            f"{row.other_tokens}",
        )  # fmt: skip
    return table
