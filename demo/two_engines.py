"""``make demo``: the main job on real engines, in two tables.

Two vLLM CPU engines, one after the other, share a pool. The first computes long prompts and offloads their
blocks; the second, fresh, loads them. Both must generate the same tokens. An index follows both; the demo
asks it before and after each prompt for the engine's blocks.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from demo.engine_process import (
    EngineProcess,
    connector_config,
    free_ports,
    small_engine,
    write_model,
)
from demo.index_process import IndexProcess
from demo.tiny_model import FIRST_WORD, VOCABULARY
from demo.workspace import doing, workspace
from kvpool.cli.tables import Column, add_row, console, fitted, show
from kvpool.cli.vllm import DEFAULT_POOL
from kvpool.config import PoolConfig
from kvpool.errors import KVPoolError, UnknownModel
from kvpool.index.client.client import IndexClient
from kvpool.store import open_store

PROMPT_TOKENS = (2050, 2650, 3300, 3950)
WARMUP_TOKENS = 2100
INDEX_TIMEOUT_S = 120.0  # for an engine to be found, or for its events to arrive
GENERATED_TOKENS = 16
NEEDED_SHARE = 0.9  # of the full blocks of each prompt
KV_CACHE_NBYTES = 256 << 20
SEED = 7


@dataclass(frozen=True)
class Held:
    """The index's count of an engine's leading blocks of a prompt: on its device, and in the pool."""

    device_blocks: int
    pool_blocks: int


@dataclass(frozen=True)
class Row:
    """One prompt on both engines: seconds to the first token, and the index's answers before and after."""

    prompt_tokens: int
    full_blocks: int
    pool_blocks: int
    pool_tokens: int
    cold_s: float
    warm_s: float
    identical: bool
    first: tuple[Held, Held]
    second: tuple[Held, Held]

    @property
    def index_right(self) -> bool:
        nothing, everything = Held(0, 0), Held(self.full_blocks, self.full_blocks)
        expected = (nothing, everything), (Held(0, self.full_blocks), everything)
        return (self.first, self.second) == expected


def run_demo(
    *,
    pool: str | None,
    settings: dict[str, Any],
    engine_options: dict[str, Any],
    block_tokens: int,
    keep: bool,
    as_json: bool,
) -> bool:
    """Run the demo; True if every prompt was identical and came from the pool. Errors: ``KVPoolError``."""
    progress = console(stderr=True)
    rows: list[Row] = []
    with workspace("kvpool-demo-", progress, keep=keep, good=lambda: not wrong_with(rows)) as folder:
        pool = pool or f"file://{folder}/pool?capacity=2GiB"
        # Reports a wrong pool now, not half a minute later when an engine starts.
        open_store(PoolConfig.load({"pool": pool, **settings}, environ={}).pool).close()
        with doing(progress, "a tiny model with random weights is written"):
            model = write_model(folder / "model")
        options = small_engine(
            model, block_tokens=block_tokens, longest_tokens=4608, kv_cache_nbytes=KV_CACHE_NBYTES
        )
        options |= engine_options
        rows += _Fleet(folder, options, pool, settings, progress).run(block_tokens)
    if as_json:
        _print_json(rows)
    else:
        _print(rows)
    return not wrong_with(rows)


def wrong_with(rows: Sequence[Row]) -> list[str]:
    """The failed claims of the demo, in sentences; empty: none failed."""
    wrong = []
    for row in rows:
        prompt = f"prompt of {row.prompt_tokens:,} tokens"
        if not row.identical:
            wrong.append(f"{prompt}: the second engine generated other tokens")
        if row.pool_blocks < NEEDED_SHARE * row.full_blocks:
            wrong.append(f"{prompt}: {row.pool_blocks} of {row.full_blocks} blocks came from the pool")
        if not row.index_right:
            wrong.append(f"{prompt}: the index did not know what the engines held")
    return wrong


class _Fleet:
    def __init__(
        self, folder: Path, options: dict[str, Any], pool: str, settings: dict[str, Any], console: Console
    ) -> None:
        self._folder, self._options, self._pool = folder, options, pool
        self._settings, self._console = settings, console

    def run(self, block_tokens: int) -> list[Row]:
        draw = random.Random(SEED)
        prompts = [[draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)] for count in PROMPT_TOKENS]
        warmups = [[draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(WARMUP_TOKENS)] for _ in range(2)]
        cold: list[_Answer] = []
        again: list[dict[str, Any]] = []
        rows = []
        with IndexProcess(self._folder, self._pool) as index, IndexClient(index.address) as client:
            with self._engine("first") as engine:
                asked = _Asked(client, "first", engine, str(self._options["model"]), block_tokens)
                engine.generate(warmups[0], GENERATED_TOKENS)
                for prompt in prompts:
                    with doing(self._console, f"first engine computes {len(prompt):,} tokens"):
                        cold.append(asked.generate(prompt))
                        again.append(engine.generate(prompt, GENERATED_TOKENS))
            with self._engine("second") as engine:
                asked = _Asked(client, "second", engine, str(self._options["model"]), block_tokens)
                engine.generate(warmups[1], GENERATED_TOKENS)
                for prompt, first, reference in zip(prompts, cold, again, strict=True):
                    with doing(self._console, f"second engine loads {len(prompt):,} tokens"):
                        second = asked.generate(prompt)
                    pool_tokens = int(second.said["pool_tokens"])
                    rows.append(
                        Row(
                            prompt_tokens=len(prompt),
                            full_blocks=len(prompt) // block_tokens,
                            pool_blocks=pool_tokens // block_tokens,
                            pool_tokens=pool_tokens,
                            cold_s=first.said["first_token_s"],
                            warm_s=second.said["first_token_s"],
                            identical=second.said["tokens"] == reference["tokens"] == first.said["tokens"],
                            first=(first.before, first.after),
                            second=(second.before, second.after),
                        )
                    )
        return rows

    @contextlib.contextmanager
    def _engine(self, name: str) -> Iterator[EngineProcess]:
        events, replay = free_ports(2)
        options = {
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            },
            "kv_transfer_config": connector_config(
                self._pool,
                # The demo shows a hit, however busy the machine is.
                {"worker": name, "advertise_host": "127.0.0.1", "cost_gate": False, **self._settings},
            ),
            **self._options,
        }
        with EngineProcess(name, self._folder, options) as engine:
            with doing(self._console, f"{name} engine starts"):
                engine.wait_ready()
            yield engine


@dataclass(frozen=True)
class _Answer:
    said: dict[str, Any]
    before: Held
    after: Held


class _Asked:
    def __init__(
        self, client: IndexClient, name: str, engine: EngineProcess, model: str, block_tokens: int
    ) -> None:
        self._client, self._name, self._engine = client, name, engine
        self._model, self._block_tokens = model, block_tokens
        if not self._eventually(self._is_followed):
            raise KVPoolError(
                f"the index does not follow engine {name} after {INDEX_TIMEOUT_S:g} s: its log says why"
            )

    def generate(self, prompt: list[int]) -> _Answer:
        before = self._held(prompt)
        said = self._engine.generate(prompt, GENERATED_TOKENS)
        # The last blocks are announced after their store.
        blocks = len(prompt) // self._block_tokens
        self._eventually(lambda: self._held(prompt) == Held(blocks, blocks))
        return _Answer(said, before, self._held(prompt))

    def _held(self, prompt: list[int]) -> Held:
        for row in self._client.lookup(self._model, token_ids=prompt, workers=[self._name]):
            if not row.stale:
                return Held(row.device_blocks, row.pool_blocks)
        return Held(0, 0)

    def _is_followed(self) -> bool:
        try:
            rows = self._client.lookup(self._model, token_ids=[0], workers=[self._name])
        except UnknownModel:
            return False
        return any(not row.stale for row in rows)

    @staticmethod
    def _eventually(holds: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + INDEX_TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _medians(rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds to the first token, cold and warm."""
    return statistics.median(row.cold_s for row in rows), statistics.median(row.warm_s for row in rows)


def _print_json(rows: Sequence[Row]) -> None:
    cold_s, warm_s = _medians(rows)
    wrong = wrong_with(rows)
    report = {
        "rows": [asdict(row) for row in rows],
        "median_cold_s": cold_s,
        "median_warm_s": warm_s,
        "warm_over_cold": warm_s / cold_s,
        "times_sooner": cold_s / warm_s,
        "ok": not wrong,
        "wrong": wrong,
    }
    print(json.dumps(report))


def _print(rows: Sequence[Row]) -> None:
    out = console()
    show(
        out,
        "A second engine loads the blocks that a first one computed:",
        _engine_table(rows, out.width),
        "What the index answered, in leading blocks of the prompt:",
        _index_table(rows, out.width),
        "",
        verdict(rows),
    )
    if not wrong_with(rows):
        show(
            out,
            "",
            "Next, a model of your own. Engines of this host that are started like this share their blocks:",
        )
        for command in next_commands():
            # One line of any length, for copying.
            out.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def next_commands() -> list[str]:
    """Commands for an engine with the reader's own model, and to examine its pool."""
    kvpool = _typed(Path(sys.executable).with_name("kvpool"))
    return [
        f"{kvpool} vllm --pool '{DEFAULT_POOL}' -- serve MODEL",
        f"{kvpool} doctor --pool '{DEFAULT_POOL}'",
    ]


def _typed(program: Path) -> str:
    """The shell's spelling of this environment's program: its name if the shell finds it, else its path."""
    found = shutil.which(program.name)
    if found is not None and Path(found) == program:
        return program.name
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)


def verdict(rows: Sequence[Row]) -> str:
    cold_s, warm_s = _medians(rows)
    if wrong := wrong_with(rows):
        return "\n".join([*wrong, "FAIL"])
    return (
        f"First token {cold_s / warm_s:.1f} times sooner ({cold_s * 1e3:,.0f} ms computed, {warm_s * 1e3:,.0f} ms "
        f"from the pool, medians of {len(rows)} prompts), same tokens: PASS"
    )


def _engine_table(rows: Sequence[Row], width: int) -> RenderableType:
    columns = [
        Column("engine", left=True), Column("prompt tokens"), Column("loaded tokens"), Column("loaded blocks"),
        Column("first token"), Column("same tokens"),
    ]  # fmt: skip
    for row in rows:
        first = (
            "first",
            f"{row.prompt_tokens:,}",
            "0",
            f"0 of {row.full_blocks}",
            f"{row.cold_s * 1e3:,.0f} ms",
            "",
        )
        second = (
            "second", f"{row.prompt_tokens:,}", f"{row.pool_tokens:,}", f"{row.pool_blocks} of {row.full_blocks}",
            f"{row.warm_s * 1e3:,.0f} ms", "yes" if row.identical else "NO",
        )  # fmt: skip
        for cells in (first, second):
            add_row(columns, *cells)
    return fitted(columns, width)[0]


def _index_table(rows: Sequence[Row], width: int) -> RenderableType:
    columns = [
        Column("engine", left=True), Column("prompt"), Column("before: here"), Column("in the pool"),
        Column("after: here"), Column("in the pool"),
    ]  # fmt: skip
    for row in rows:
        for engine, (before, after) in (("first", row.first), ("second", row.second)):
            blocks = (before.device_blocks, before.pool_blocks, after.device_blocks, after.pool_blocks)
            add_row(columns, engine, row.full_blocks, *blocks)
    return fitted(columns, width)[0]
