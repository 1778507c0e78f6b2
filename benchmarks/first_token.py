"""``python -m benchmarks lengths`` and ``outage``: a real engine's time to the first token with a server.

Both start a Valkey server on loopback and vLLM CPU engines with a small random model in float32. One engine
computes and stores all prompts. ``lengths`` alternates fresh engines: without a pool, with the server alone, two with
the first engine's near pool before the server, and one with an empty near pool before it. ``outage`` asks a fresh
engine a new prompt each second, while the server is stopped, continued, killed.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.valkey_shards import ValkeyShards, find_server
from demo.engine_process import EngineProcess, connector_config, small_engine, write_model
from demo.tiny_model import FIRST_WORD, VOCABULARY
from demo.workspace import doing, workspace

BLOCK_TOKENS = 128
ANSWER_TOKENS = 8
TAIL_TOKENS = 20  # of each prompt, after its last whole block
OFF, FILLS, READS = "pool-off", "fills", "kvpool"
NEAR, THIRD, FAR = "near", "third", "far"
HOWS = ("computed", "cold", "local", NEAR, THIRD, FAR, "pool")


@dataclass(frozen=True)
class Timed:
    """One prompt. ``how``: its intended source: computed, cold (computed beside two empty pools), local (the engine's
    own cache), near (of the second engine of the host), third (near, of the third), far (behind an empty near pool) or
    pool (without a near one). ``sent_nbytes``: by the server.
    """

    prompt_tokens: int
    how: str
    first_token_s: float
    pool_tokens: int
    identical: bool
    sent_nbytes: int = 0


@dataclass(frozen=True)
class Moment:
    """One prompt of ``outage``. ``at_s``: since the first; ``server``: its state."""

    at_s: float
    server: str
    first_token_s: float
    pool_tokens: int
    identical: bool


@dataclass(frozen=True)
class _Bench:
    server: ValkeyShards
    folder: Path
    options: dict[str, Any]
    console: Console

    def engine(self, name: str, *, pool: bool, near: str = "") -> EngineProcess:
        """``near``: name of the host whose near pool it has."""
        url = self.server.url
        if near:
            url = f"file://{self.folder}/{near}?capacity=8GiB {url}"
        transfer = {"kv_transfer_config": connector_config(url, {"cost_gate": False})} if pool else {}
        return EngineProcess(name, self.folder, {**self.options, **transfer})

    def started(self, *engines: EngineProcess) -> None:
        with doing(self.console, f"{', '.join(engine.name for engine in engines)}: starting"):
            for engine in engines:
                engine.wait_ready()
        for engine in engines:
            warm_up = _prompt(random.Random(0), max(512, BLOCK_TOKENS * 4))
            for prompt in (warm_up, warm_up, warm_up[::-1]):
                engine.generate(prompt, ANSWER_TOKENS)
            engine.wait_quiet()


def _prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(tokens)]


def _bench(folder: Path, server: Path | None, width: int, layers: int, longest: int, kept: int) -> _Bench:
    """``longest``: tokens of a prompt; ``kept``: tokens in an engine's own cache."""
    console = Console(stderr=True)
    with doing(console, "a small model with random weights is written"):
        model = write_model(folder / "model", width=width, layers=layers)
    options = small_engine(
        model,
        block_tokens=BLOCK_TOKENS,
        longest_tokens=longest + ANSWER_TOKENS,
        kv_cache_nbytes=kept
        * width
        * layers
        * 4,  # half as many KV heads as heads, K and V, 4 bytes a number
    )
    shards = ValkeyShards(find_server(server), folder / "server", shards=1, io_threads=1)
    return _Bench(shards, folder, options, console)


def run_lengths(
    *, server: Path | None, lengths: Sequence[int], rounds: int, width: int, layers: int, as_json: bool
) -> bool:
    """True when all tokens agreed and every prompt came from its source. Errors: ``KVPoolError``."""
    draw = random.Random(11)
    plan = [
        (tokens, _prompt(draw, tokens + TAIL_TOKENS)) for tokens in sorted(lengths) for _ in range(rounds)
    ]
    longest = max(lengths) + TAIL_TOKENS
    rows: list[Timed] = []
    with workspace("kvpool-bench-", Console(stderr=True), keep=False) as folder:
        bench = _bench(folder, server, width, layers, longest, 2 * longest + 8 * BLOCK_TOKENS)
        with bench.server:
            with bench.engine(FILLS, pool=True, near="host-1") as fills:
                bench.started(fills)
                with doing(bench.console, "it computes and stores the prompts"):
                    answers = []
                    for tokens, prompt in plan:
                        said = fills.generate(prompt, ANSWER_TOKENS)
                        answers.append(said["tokens"])
                        rows.append(
                            Timed(tokens, "cold", said["first_token_s"], int(said["pool_tokens"]), True)
                        )
                        fills.wait_quiet()
            with (
                bench.engine(OFF, pool=False) as off,
                bench.engine(READS, pool=True) as reads,
                bench.engine(NEAR, pool=True, near="host-1") as near,
                bench.engine(THIRD, pool=True, near="host-1") as third,
                bench.engine(FAR, pool=True, near="host-2") as far,
            ):
                bench.started(off, reads, near, third, far)
                for (tokens, prompt), answer in zip(plan, answers, strict=True):
                    for engine, how in (
                        (off, "computed"), (off, "local"), (reads, "pool"), (near, NEAR), (third, THIRD), (far, FAR),
                    ):  # fmt: skip
                        rows.append(_timed(bench, engine, how, tokens, prompt, answer))
                        engine.wait_quiet()
    if as_json:
        print(json.dumps({"width": width, "layers": layers, "block_tokens": BLOCK_TOKENS,
                          "rows": [asdict(row) for row in rows]}))  # fmt: skip
    else:
        _show_lengths(rows)
    from_pool = all(
        row.pool_tokens >= row.prompt_tokens for row in rows if row.how in ("pool", NEAR, THIRD, FAR)
    )
    return from_pool and all(row.identical for row in rows)


def _timed(
    bench: _Bench, engine: EngineProcess, how: str, tokens: int, prompt: list[int], answer: list[int]
) -> Timed:
    before_nbytes = bench.server.sent_nbytes()
    said = engine.generate(prompt, ANSWER_TOKENS)
    sent_nbytes = bench.server.sent_nbytes() - before_nbytes
    pool_tokens, identical = int(said["pool_tokens"]), said["tokens"] == answer
    return Timed(tokens, how, said["first_token_s"], pool_tokens, identical, sent_nbytes)


def _show_lengths(rows: Sequence[Timed]) -> None:
    hows = [how for how in HOWS if any(row.how == how for row in rows)]
    table = Table(title="ms to the first token, medians", box=SIMPLE)
    for name in ("prompt tokens", *hows, "pool over computed", "other tokens"):
        table.add_column(name, justify="right")
    sent = Table(title="MB that the server sent for it, medians", box=SIMPLE)
    for name in ("prompt tokens", *hows):
        sent.add_column(name, justify="right")
    for tokens in sorted({row.prompt_tokens for row in rows}):
        found = {how: [row for row in rows if (row.prompt_tokens, row.how) == (tokens, how)] for how in hows}
        of = {how: statistics.median(row.first_token_s for row in found[how]) for how in hows}
        wrong = sum(not row.identical for row in rows if row.prompt_tokens == tokens)
        table.add_row(
            f"{tokens:,}", *(f"{of[how] * 1e3:,.0f}" for how in hows),
            f"{of['pool'] / of['computed']:.2f}", f"{wrong}",
        )  # fmt: skip
        medians = (statistics.median(row.sent_nbytes for row in found[how]) for how in hows)
        sent.add_row(f"{tokens:,}", *(f"{nbytes / 1e6:,.1f}" for nbytes in medians))
    console = Console()
    console.print(sent)
    console.print(table)


def run_outage(
    *, server: Path | None, prompt_tokens: int, phase_s: int, width: int, layers: int, as_json: bool
) -> bool:
    """Print a table or JSON. True when no request failed, all tokens agreed, and the pool was used again.

    Four phases of ``phase_s``: the server runs, is stopped (SIGSTOP), runs again, is killed. Blocks for
    minutes. Errors: ``KVPoolError`` for a failed request.
    """
    draw = random.Random(12)
    prompts = [_prompt(draw, prompt_tokens + TAIL_TOKENS) for _ in range(4 * phase_s)]
    phases = ("runs", "is stopped", "runs again", "is killed")
    actions = {1: signal.SIGSTOP, 2: signal.SIGCONT, 3: signal.SIGKILL}
    moments: list[Moment] = []
    with workspace("kvpool-bench-", Console(stderr=True), keep=False) as folder:
        kept = 4 * (prompt_tokens + TAIL_TOKENS) + 8 * BLOCK_TOKENS
        bench = _bench(folder, server, width, layers, prompt_tokens + TAIL_TOKENS, kept)
        with bench.server:
            computed: list[float] = []
            answers: list[list[int]] = []
            with bench.engine(FILLS, pool=True) as fills:
                bench.started(fills)
                with doing(bench.console, "it computes and stores the prompts"):
                    for prompt in prompts:
                        said = fills.generate(prompt, ANSWER_TOKENS)
                        computed.append(said["first_token_s"])
                        answers.append(said["tokens"])
            with bench.engine(READS, pool=True) as reads:
                bench.started(reads)
                started = time.monotonic()
                for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                    phase, first = divmod(number, phase_s)
                    if first == 0 and phase in actions:
                        bench.server.signal(actions[phase])
                    time.sleep(max(0.0, started + number - time.monotonic()))
                    at_s = time.monotonic() - started
                    said = reads.generate(prompt, ANSWER_TOKENS)
                    moments.append(
                        Moment(at_s, phases[phase], said["first_token_s"], int(said["pool_tokens"]),
                               said["tokens"] == answer)
                    )  # fmt: skip
    if as_json:
        print(json.dumps({"width": width, "layers": layers, "prompt_tokens": prompt_tokens,
                          "computed_s": computed, "moments": [asdict(moment) for moment in moments]}))  # fmt: skip
    else:
        _show_outage(phases, computed, moments)
    again = [moment for moment in moments if moment.server == phases[2]]
    return all(moment.identical for moment in moments) and any(moment.pool_tokens for moment in again)


def _show_outage(phases: Sequence[str], computed: Sequence[float], moments: Sequence[Moment]) -> None:
    table = Table(
        title=f"ms to the first token; computed by an engine that stores: {statistics.median(computed) * 1e3:,.0f}",
        box=SIMPLE,
    )
    for name in ("server", "requests", "from the pool", "median", "most", "other tokens"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for phase in phases:
        of = [moment for moment in moments if moment.server == phase]
        times = [moment.first_token_s * 1e3 for moment in of]
        table.add_row(
            phase, f"{len(of)}", f"{sum(moment.pool_tokens > 0 for moment in of)}",
            f"{statistics.median(times):,.0f}", f"{max(times):,.0f}",
            f"{sum(not moment.identical for moment in of)}",
        )  # fmt: skip
    Console().print(table)
