"""``kvpool demo``: the main job on real engines, in two tables.

Two vLLM CPU engines, one after the other, share a pool. The first computes long prompts and offloads their
blocks; the second, fresh, loads them. Both generate; the tokens must be the same. An index follows both and is
asked before and after each prompt what the engine holds of it.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpool.cli.activity import doing
from kvpool.cli.engine_process import (
    EngineProcess,
    connector_config,
    free_ports,
    small_engine,
    write_model,
)
from kvpool.cli.index_process import IndexProcess
from kvpool.cli.tiny_model import FIRST_WORD, VOCABULARY
from kvpool.cli.workspace import workspace
from kvpool.config import PoolConfig
from kvpool.errors import KVPoolError, UnknownModel
from kvpool.index.client.client import IndexClient
from kvpool.store import open_store

PROMPT_TOKENS = (2050, 2650, 3300, 3950)
WARMUP_TOKENS = 2100
INDEX_TIMEOUT_S = 30.0  # for an engine to be found, or for what it announced to arrive
GENERATED_TOKENS = 16
NEEDED_SHARE = 0.9  # of the full blocks of each prompt
KV_CACHE_NBYTES = 256 << 20
SEED = 7


@dataclass(frozen=True)
class Held:
    """What the index says that an engine holds of a prompt: leading blocks on its device, and in the pool."""

    device_blocks: int
    pool_blocks: int


@dataclass(frozen=True)
class Row:
    """One prompt on both engines; times in seconds, from the request to its first token.

    ``first`` and ``second``: what the index said of the engine before and after it had the prompt.
    """

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
        """Whether the index knew what there was to know."""
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
    """Run the demo and print its table; True when every prompt was identical and came from the pool.

    Blocking, for about two minutes on two cores. Errors: ``KVPoolError`` with one line.
    """
    console = Console(stderr=True)
    with workspace("kvpool-demo-", console, keep=keep) as folder:
        pool = pool or f"file://{folder}/pool?capacity=2GiB"
        # What is wrong with the pool shows now and not half a minute later, when an engine starts.
        open_store(PoolConfig.load({"pool": pool, **settings}, environ={}).pool).close()
        with doing(console, "a tiny model with random weights is written"):
            model = write_model(folder / "model")
        options = small_engine(
            model, block_tokens=block_tokens, longest_tokens=4608, kv_cache_nbytes=KV_CACHE_NBYTES
        )
        options |= engine_options
        fleet = _Fleet(folder, options, pool, settings, console)
        rows = fleet.run(block_tokens)
    good = all(
        row.identical and row.index_right and row.pool_blocks >= NEEDED_SHARE * row.full_blocks
        for row in rows
    )
    _print(rows, good, as_json, pool)
    return good


class _Fleet:
    """Two engines, one after the other, and the index that follows them."""

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
                # What it shows is a hit, whatever the machine is busy with.
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
    """One engine, and what the index says of it before and after a prompt."""

    def __init__(
        self, client: IndexClient, name: str, engine: EngineProcess, model: str, block_tokens: int
    ) -> None:
        self._client, self._name, self._engine = client, name, engine
        self._model, self._block_tokens = model, block_tokens
        if not self._eventually(self._is_followed):
            raise KVPoolError(
                f"the index does not follow engine {name}: run the demo with --keep and see index.log"
            )

    def generate(self, prompt: list[int]) -> _Answer:
        before = self._held(prompt)
        said = self._engine.generate(prompt, GENERATED_TOKENS)
        # The last blocks are announced when their store has ended.
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


def _print(rows: list[Row], good: bool, as_json: bool, pool: str) -> None:
    cold_s = statistics.median(row.cold_s for row in rows)
    warm_s = statistics.median(row.warm_s for row in rows)
    if as_json:
        print(
            json.dumps(
                {
                    "rows": [asdict(row) for row in rows],
                    "median_cold_s": cold_s,
                    "median_warm_s": warm_s,
                    "warm_over_cold": warm_s / cold_s,
                    "ok": good,
                }
            )
        )
        return
    table = Table(title="A second engine reuses the blocks that a first one computed")
    for name in ("engine", "prompt tokens", "from the pool (blocks)", "first token", "tokens identical"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for row in rows:
        table.add_row("first", f"{row.prompt_tokens:,}", "0", f"{row.cold_s * 1e3:,.0f} ms cold", "")
        share = f"{row.pool_tokens:,} ({row.pool_blocks} of {row.full_blocks})"
        same = "yes" if row.identical else "NO"
        table.add_row("second", f"{row.prompt_tokens:,}", share, f"{row.warm_s * 1e3:,.0f} ms warm", same)
        table.add_section()
    console = Console()
    console.print(table)
    console.print(_index_table(rows))
    console.print(
        f"Median time to first token: {cold_s * 1e3:,.0f} ms cold, {warm_s * 1e3:,.0f} ms warm: "
        f"{warm_s / cold_s:.2f} of the cold one.",
        highlight=False,
    )
    if not good:
        console.print(
            "Something is wrong: tokens differ, blocks did not come from the pool, or the index did not know.",
            style="bold red",
        )


def _index_table(rows: list[Row]) -> Table:
    table = Table(title="What the index answers, in leading blocks of the prompt")
    table.add_column("engine")
    for name in (
        "prompt blocks",
        "before: on the engine",
        "in the pool",
        "after: on the engine",
        "in the pool",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        for engine, (before, after) in (("first", row.first), ("second", row.second)):
            blocks = (before.device_blocks, before.pool_blocks, after.device_blocks, after.pool_blocks)
            table.add_row(engine, str(row.full_blocks), *map(str, blocks))
        table.add_section()
    return table
