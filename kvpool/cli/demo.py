"""``kvpool demo``: the main job on real engines, in one table.

Two vLLM CPU engines, one after the other, share a pool. The first computes long prompts and offloads their
blocks; the second, fresh, loads them. Both generate; the tokens must be the same.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpool.cli.engine_process import EngineProcess, child_environment, connector_config
from kvpool.config import PoolConfig
from kvpool.errors import KVPoolError
from kvpool.stores import open_store

PROMPT_TOKENS = (2050, 2650, 3300, 3950)
WARMUP_TOKENS = 2100
GENERATED_TOKENS = 16
VOCABULARY = 8192
NEEDED_SHARE = 0.9  # of the full blocks of each prompt
KV_CACHE_NBYTES = 256 << 20
SEED = 7


@dataclass(frozen=True)
class Row:
    """One prompt on both engines; times in seconds, from the request to its first token."""

    prompt_tokens: int
    full_blocks: int
    pool_blocks: int
    pool_tokens: int
    cold_s: float
    warm_s: float
    identical: bool


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
    with _workspace(keep, console) as folder:
        pool = pool or f"file://{folder}/pool?capacity=2GiB"
        # What is wrong with the pool shows now and not half a minute later, when an engine starts.
        open_store(PoolConfig.load({"pool": pool, **settings}, environ={}).pool).close()
        model = _write_model(folder / "model", console)
        options = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",  # local hits and cold runs agree bit for bit; see docs/vllm.md
            "enforce_eager": True,
            "block_size": block_tokens,
            "max_model_len": 4608,
            "max_num_batched_tokens": 4608,
            "kv_cache_memory_bytes": KV_CACHE_NBYTES,
            "prefix_caching_hash_algo": "sha256_cbor",
            "disable_log_stats": False,
            "kv_transfer_config": connector_config(pool, settings),
            **engine_options,
        }
        rows = _run_engines(folder, options, block_tokens, console)
    good = all(row.identical and row.pool_blocks >= NEEDED_SHARE * row.full_blocks for row in rows)
    _print(rows, good, as_json, pool)
    return good


def _run_engines(folder: Path, options: dict[str, Any], block_tokens: int, console: Console) -> list[Row]:
    draw = random.Random(SEED)
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(count)] for count in PROMPT_TOKENS]
    warmups = [[draw.randrange(10, VOCABULARY) for _ in range(WARMUP_TOKENS)] for _ in range(2)]
    cold: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    with _engine("first", folder, options, console) as engine:
        engine.generate(warmups[0], GENERATED_TOKENS)
        for prompt in prompts:
            with _doing(console, f"first engine computes {len(prompt):,} tokens"):
                cold.append(engine.generate(prompt, GENERATED_TOKENS))
                again.append(engine.generate(prompt, GENERATED_TOKENS))
    rows = []
    with _engine("second", folder, options, console) as engine:
        engine.generate(warmups[1], GENERATED_TOKENS)
        for prompt, first, reference in zip(prompts, cold, again, strict=True):
            with _doing(console, f"second engine loads {len(prompt):,} tokens"):
                warm = engine.generate(prompt, GENERATED_TOKENS)
            rows.append(
                Row(
                    prompt_tokens=len(prompt),
                    full_blocks=len(prompt) // block_tokens,
                    pool_blocks=int(warm["pool_tokens"]) // block_tokens,
                    pool_tokens=int(warm["pool_tokens"]),
                    cold_s=first["first_token_s"],
                    warm_s=warm["first_token_s"],
                    identical=warm["tokens"] == reference["tokens"] == first["tokens"],
                )
            )
    return rows


@contextlib.contextmanager
def _engine(name: str, folder: Path, options: dict[str, Any], console: Console) -> Iterator[EngineProcess]:
    with EngineProcess(name, folder, options) as engine:
        with _doing(console, f"{name} engine starts"):
            engine.wait_ready()
        yield engine


def _write_model(folder: Path, console: Console) -> Path:
    with _doing(console, "a tiny model with random weights is written"):
        written = subprocess.run(
            [sys.executable, "-m", "kvpool.vllm.tiny_model", str(folder)],
            env=child_environment({"TMPDIR": str(folder.parent)}),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    if written.returncode:
        last = written.stderr.strip().splitlines()[-1:] or ["no output"]
        raise KVPoolError(f"cannot write the model: {last[0]}; the demo needs vLLM (make demo installs it)")
    return folder


@contextlib.contextmanager
def _workspace(keep: bool, console: Console) -> Iterator[Path]:
    """A folder that goes away with the demo, on Ctrl-C and on termination too."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="kvpool-demo-"))
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, previous)
        if keep:
            console.print(f"kept: {folder}", highlight=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _doing(console: Console, what: str) -> Iterator[None]:
    """Show that something goes on: a spinner on a terminal, a line before and after elsewhere."""
    started = time.monotonic()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        console.print(f"... {what}", highlight=False)
        yield
    console.print(f"[{time.monotonic() - started:5.1f} s] {what}", highlight=False, markup=False)


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
    console.print(
        f"Median time to first token: {cold_s * 1e3:,.0f} ms cold, {warm_s * 1e3:,.0f} ms warm: "
        f"{warm_s / cold_s:.2f} of the cold one.",
        highlight=False,
    )
    if not good:
        console.print(
            "Something is wrong: tokens differ, or blocks did not come from the pool.", style="bold red"
        )
