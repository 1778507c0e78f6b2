"""What audits cost: engines of one pool that audit no hit, one of 256 and every one take turns at the same prompts."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.audits_engines import forget, settle, words
from benchmarks.contest import percentile
from demo.engine_process import EngineProcess, connector_config, small_engine
from demo.tiny_model import FIRST_WORD
from tests.support.engine_forks import write_model
from tests.support.engines import passing, processes_below

SHARES = (0.0, 1 / 256, 1.0)
BLOCK_TOKENS, BLOCKS, ANSWER_TOKENS = 128, 12, 16
PROMPTS = 6


@dataclass(frozen=True)
class CostRow:
    """Of ``hits``: ``first_ms`` to the first token, ``step_ms`` for each of the next ones. ``read_mb``: a hit.
    ``computed_ms``: to the first token of a prompt that no cache has. Times are of the fastest tenth: a busy machine
    adds to the others.
    """

    share: float
    hits: int
    audits: int
    computed_ms: float
    first_ms: float
    step_ms: float
    read_mb: float


def measure_cost(folder: Path, rounds: int) -> list[CostRow]:
    """Blocks for minutes."""
    draw = random.Random(2)
    model = write_model(folder / "model", kind="llama", width=512, layers=8)
    options = small_engine(model, block_tokens=BLOCK_TOKENS, longest_tokens=2048, kv_cache_nbytes=256 << 20)
    prompts = [words(draw, BLOCKS * BLOCK_TOKENS + 1) for _ in range(PROMPTS)]
    with contextlib.ExitStack() as parts:
        engines: list[EngineProcess] = []
        computed: list[float] = []
        for number, share in enumerate(SHARES):
            settings = {"cost_gate": False, "lookup_timeout_s": 20.0, "audit_share": share}
            transfer = connector_config(f"file://{folder}/pool", settings)
            engine = parts.enter_context(
                passing(f"engine{number}", folder, {**options, "kv_transfer_config": transfer})
            )
            new = [words(draw, BLOCKS * BLOCK_TOKENS + 1) for _ in range(3)]
            computed.append(min(engine.generate(one, 2)["first_token_s"] for one in new))
            engines.append(engine)
        for prompt in prompts:
            engines[0].generate(prompt, 2)
        settle(engines[0])
        for engine in engines:  # learns its floor, if it is to
            own = words(draw, BLOCKS * BLOCK_TOKENS + 1)
            engine.generate(own, 2)
            for _ in range(10):
                forget(engine)
                engine.generate(own, 2)
        before = [sum(settle(engine).values()) for engine in engines]
        read = [_read_nbytes(engine) for engine in engines]
        first: list[list[float]] = [[] for _ in engines]
        step: list[list[float]] = [[] for _ in engines]
        order = list(range(len(engines)))
        for _ in range(rounds):
            for prompt in prompts:
                draw.shuffle(order)
                for place in order:
                    engine = engines[place]
                    forget(engine)
                    said = engine.generate(prompt, ANSWER_TOKENS)
                    if not said["pool_tokens"]:
                        continue  # the machine is busy, and a lookup or a load was given up
                    first[place].append(said["first_token_s"])
                    step[place].append((said["finished_s"] - said["first_token_s"]) / (ANSWER_TOKENS - 1))
                    engine.generate([FIRST_WORD] * 3, 2)
        return [
            CostRow(
                share, len(first[place]), int(sum(settle(engine).values()) - before[place]), computed[place] * 1e3,
                percentile(sorted(first[place]), 0.1) * 1e3, percentile(sorted(step[place]), 0.1) * 1e3,
                (_read_nbytes(engine) - read[place]) / len(first[place]) / 1e6,
            )
            for place, (share, engine) in enumerate(zip(SHARES, engines, strict=True))
        ]  # fmt: skip


def _read_nbytes(engine: EngineProcess) -> int:
    """What the processes of an engine have read so far, of any file."""
    return sum(_read_of(process) for process in processes_below(engine.process_id))


def _read_of(process: int) -> int:
    said: Sequence[str] = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in said)["rchar"])
