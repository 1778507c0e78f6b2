"""Honest hits by the thousand: what one engine stores another one loads and audits, and so does its writer.

Engines of a pair differ in how they cut prompts into steps, in threads, in the instructions of their kernels, or in
tensor-parallel size. Every prompt ends elsewhere each time, so that another block is audited.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.audits_engines import (
    FAMILIES,
    Audit,
    audits,
    drafting,
    forget,
    model_of,
    options_of,
    settle,
    state_tokens,
    words,
)
from demo.engine_process import EngineFailed, EngineProcess
from tests.support.engines import passing

PROMPTS = 48  # that a pair knows
MOST_BLOCKS = 12
AT_ONCE = 8  # as many audits as an engine has open
TP2 = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
TWO_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}
OTHER_KERNELS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@dataclass(frozen=True)
class Pair:
    """Two engines. ``writer``, ``reader``: further options; ``environment``: the reader's."""

    name: str
    family: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    writer: Mapping[str, Any] = field(default_factory=dict)
    reader: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    near: bool = False
    drafts: bool = False
    block_tokens: int = 32


def pairs() -> list[Pair]:
    """Those of each family in each dtype come first."""
    chunks = {"max_num_batched_tokens": 96}
    found: list[Pair] = []
    for family, dtype in itertools.product(FAMILIES, ("float32", "bfloat16")):
        if family == "qwen3_next" and dtype == "float32":
            continue  # its kernels compute in bfloat16
        more = {} if FAMILIES[family].states or family == "deepseek" else chunks
        found.append(Pair(f"{family}", family, dtype, reader=more))
    for dtype, cache in (("bfloat16", "fp8"), ("float32", "fp8_e5m2")):
        kept = {"kv_cache_dtype": cache}
        found.append(Pair(f"llama, {cache} cache", "llama", dtype, writer=kept, reader={**kept, **chunks}))
    for family in ("llama", "gemma3", "gpt_oss"):
        for dtype in ("float32", "bfloat16"):
            found.append(
                Pair(f"{family}, other kernels", family, dtype, reader=chunks, environment=OTHER_KERNELS)
            )
    for dtype in ("float32", "bfloat16"):
        found += [
            Pair("llama, two threads", "llama", dtype, reader=chunks, environment=TWO_THREADS),
            Pair("llama, near and far", "llama", dtype, reader=chunks, near=True),
            Pair("llama, with drafts", "llama", dtype, reader=chunks, drafts=True),
            Pair("llama, 2 blocks a record", "llama", dtype, {"blocks_per_record": 2}, reader=chunks, block_tokens=64),
        ]  # fmt: skip
        for family in ("llama", "gemma3") if dtype == "float32" else ("llama",):  # else parts would be small
            of_blocks = {"block_size": 128}
            two = {"tensor_parallel_size": 2, "max_num_batched_tokens": 384, **of_blocks}
            cut = {"share_across_tp": 2}
            found.append(
                Pair(f"{family}, TP 1 and 2", family, dtype, cut, of_blocks, two, TP2, block_tokens=128)
            )
    return found


@dataclass
class Row:
    """``hits``: judged, after the floor was known. ``farthest``: distance of a layer; ``ratio``: over its floor."""

    pair: str
    dtype: str
    hits: int = 0
    alarms: int = 0
    of_others: int = 0  # of the hits, blocks that the other engine stored
    learnt: int = 0
    unjudged: int = 0
    farthest: float = 0.0
    ratio: float = 0.0
    seconds: float = 0.0
    failed: str = ""


def soak(pair: Pair, hits: int, folder: Path, seed: int, most_s: float = 1e9) -> Row:
    """Audit that many honest hits on both engines together, or as many as there is time for."""
    row, began_s = Row(pair.name, pair.dtype), time.monotonic()
    folder.mkdir()
    model = model_of(folder.parent, pair.family)
    far = f"file://{folder}/pool"
    pools: list[str | list[str]] = [far, far]
    if pair.near:
        pools = [[f"file://{folder}/near{number}?capacity=1GiB", far] for number in range(2)]
    drafts = drafting(folder) if pair.drafts else {}
    engines = [
        options_of(pair.family, model, pool, pair.dtype, pair.settings, **drafts, **more)
        for pool, more in zip(pools, (pair.writer, pair.reader), strict=True)
    ]
    draw = random.Random(seed)
    try:
        with (
            passing("writer", folder, engines[0]) as writer,
            passing("reader", folder, engines[1], **pair.environment) as reader,
        ):
            ask = _asked(pair, folder, draw, [writer, reader])
            counts: Counter[str] = Counter()
            while counts["same"] + counts["differs"] < hits and time.monotonic() < began_s + most_s:
                for _ in range(10):
                    ask()
                counts = Counter(settle(writer)) + Counter(settle(reader))
                if not counts:
                    raise EngineFailed("nothing is audited")
    except EngineFailed as error:
        row.failed = str(error)[:200]
    for name in ("writer", "reader"):
        if (log := folder / f"{name}.log").exists():
            _count(row, audits(log))
    if not (row.of_others or row.failed):
        row.failed = "the engines share nothing"
    row.seconds = time.monotonic() - began_s
    return row


def _count(row: Row, found: list[Audit]) -> None:
    for audit in found:
        row.hits += audit.verdict in ("same", "differs")
        row.alarms += audit.verdict == "differs"
        row.of_others += audit.verdict in ("same", "differs") and not audit.own
        row.learnt += audit.verdict == "no_floor"
        row.unjudged += audit.verdict not in ("same", "differs", "no_floor")
        row.farthest = max(row.farthest, audit.farthest)
        if audit.verdict != "no_floor":
            row.ratio = max(row.ratio, audit.ratio)


def _asked(pair: Pair, folder: Path, draw: random.Random, engines: list[EngineProcess]) -> Callable[[], None]:
    """A function that has one engine load prompts; each engine stores half of these first."""
    family = FAMILIES[pair.family]
    block = family.options.get("block_size", pair.block_tokens)
    if family.states:
        block = state_tokens(folder / "pool", engines[0])
    blocks = 4 if family.states or pair.family == "deepseek" else MOST_BLOCKS
    prompts = [words(draw, blocks * block) for _ in range(8 if family.states else PROMPTS)]
    for number, prompt in enumerate(prompts):
        engine = engines[number % 2]
        # States are where prompts end; the blocks before them are of one long step, or of several.
        ends = draw.sample(range(1, blocks + 1), blocks) if family.states else [blocks]
        for end in ends:
            engine.generate([*prompt[: end * block], *words(draw, 1)], 2)
    for engine in engines:
        settle(engine)
    at_once = 1 if pair.family == "deepseek" else AT_ONCE

    def ask() -> None:
        engine = draw.choice(engines)
        forget(engine)
        chosen = draw.sample(prompts, min(len(prompts), draw.randint(1, at_once)))
        asked = []
        for prompt in chosen:
            end = draw.randint(2, blocks) * block
            behind = draw.randint(1, 3 if pair.family == "deepseek" else block - 1)
            asked.append([*prompt[:end], *words(draw, behind)])
        engine.ask({"do": "burst", "prompts": asked, "max_tokens": 3})

    return ask
