"""``python -m benchmarks hash``: the block-hash chain, native against vLLM's function, interleaved."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvpool.cli.tables import Column, add_row, console, fitted, show
from kvpool.key.hashing import BlockHasher

SEED = 3
VOCABULARY = 128_000


def run_hash(*, tokens: int, block_tokens: int, rounds: int, as_json: bool) -> None:
    """Measure, compare the hashes, and print a table or JSON. Blocking, for a few seconds."""
    draw = random.Random(SEED)
    prompt = [draw.randrange(VOCABULARY) for _ in range(tokens)]
    hasher = BlockHasher(block_tokens)
    runs: dict[str, Callable[[], list[bytes]]] = {"kvpool": lambda: hasher.hashes(prompt)}
    if importlib.util.find_spec("vllm") is not None:
        runs["vLLM"] = _vllm_hasher(prompt, block_tokens)
    answers = {name: run() for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("hashing", total=rounds)
        for _ in range(rounds):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - started)
            progress.advance(task)
    medians = {name: statistics.median(values) for name, values in times.items()}
    equal = all(answer == answers["kvpool"] for answer in answers.values())
    report: dict[str, Any] = {
        "tokens": tokens,
        "block_tokens": block_tokens,
        "algorithm": "sha256_cbor",
        "rounds": rounds,
        "median_s": medians,
        "hashes_equal": equal,
    }
    if "vLLM" in medians:
        report["times_faster"] = medians["vLLM"] / medians["kvpool"]
    if as_json:
        print(json.dumps(report))
        return
    rows = [
        (
            name,
            f"{seconds * 1e3:.2f}",
            f"{seconds / medians['kvpool']:.1f}",
            "equal" if answers[name] == answers["kvpool"] else "DIFFERENT",
        )
        for name, seconds in medians.items()
    ]
    columns = [
        Column("function", left=True),
        Column("milliseconds"),
        Column("times kvpool's"),
        Column("hashes"),
    ]
    for cells in rows:
        add_row(columns, *cells)
    out = console()
    show(out, f"sha256_cbor of {tokens:,} tokens in blocks of {block_tokens}, median of {rounds}")
    show(out, *fitted(columns, out.width))
    if "vLLM" not in medians:
        show(out, "vLLM is not installed here, so there is nothing to compare with.")


def _vllm_hasher(token_ids: list[int], block_tokens: int) -> Callable[[], list[bytes]]:
    """Hashes the full blocks of ``token_ids`` as vLLM's scheduler does, without extra keys."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256_cbor)

    def run() -> list[bytes]:
        hashes: list[bytes] = []
        parent = None
        for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
            block = token_ids[start : start + block_tokens]
            parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, block, None)
            hashes.append(parent)
        return hashes

    return run
