"""Engines of ``python -m benchmarks audits``: small models of each family, every hit audited, and what audits found.

They are those of the end-to-end tests, which have what vLLM lacks on a CPU: see ``tests.support.cpu_platform`` and
``cpu_states``.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.audits_watch import MARK
from demo.engine_process import EngineProcess, connector_config, small_engine
from demo.tiny_model import FIRST_WORD, VOCABULARY, Kind
from tests.support.engine_forks import write_model
from tests.support.engines import call, records

WIDTH = 256
LONGEST = 2048
KV_CACHE_NBYTES = 96 << 20
RESET_TRIES = 50
STATES = {"worker_cls": "tests.support.cpu_states.StatesCpuWorker"}


@dataclass(frozen=True)
class Family:
    """``block_tokens``: of a block that has a state, as vLLM makes it; 0: of the option. ``options``: of engines."""

    kind: Kind
    layers: int
    window: int = 0
    states: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family("llama", 4),
    "gemma3": Family("gemma3", 6, window=128),
    "gpt_oss": Family("gpt_oss", 4, window=128),
    "llama4": Family("llama4", 4, window=256),
    # Its kernel for prompts cannot begin behind a hit; a token a step is computed by another one.
    "deepseek": Family(
        "deepseek", 2, options={
            "attention_backend": "CPU_MLA", "block_size": 16, "max_num_batched_tokens": 1, "max_num_seqs": 1,
        },
    ),
    "granite4": Family("granite4", 4, states=True, options=STATES),
    "qwen3_next": Family("qwen3_next", 4, states=True),
}  # fmt: skip


def model_of(folder: Path, name: str, **more: Any) -> Path:
    family = FAMILIES[name]
    written = folder / "-".join(["model", name, *(f"{key}{value}" for key, value in more.items())])
    if not written.exists():
        given: dict[str, Any] = {"kind": family.kind, "width": WIDTH, "layers": family.layers, **more}
        write_model(written, **given, **({"window": family.window} if family.window else {}))
    return written


def drafting(folder: Path) -> dict[str, Any]:
    """Options of an engine of ``llama`` that drafts by a layer of its own."""
    drafts = folder / "drafts"
    if not drafts.exists():
        write_model(drafts, kind="eagle", width=WIDTH, layers=1, seed=1)
    return {"speculative_config": {"method": "eagle", "model": str(drafts), "num_speculative_tokens": 3}}


def options_of(
    name: str, model: Path, pool: str | Sequence[str], dtype: str, settings: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Of ``vllm.LLM``: an engine that audits every hit."""
    given = {"cost_gate": False, "lookup_timeout_s": 20.0, "audit_share": 1.0, **settings}
    if not isinstance(pool, str):
        given["pool"] = list(pool)
    family = FAMILIES[name]
    return {
        **small_engine(model, block_tokens=32, longest_tokens=LONGEST, kv_cache_nbytes=KV_CACHE_NBYTES),
        "dtype": dtype,
        "kv_transfer_config": connector_config(pool if isinstance(pool, str) else pool[0], given),
        **family.options,
        **more,
    }


def words(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(tokens)]


def forget(engine: EngineProcess) -> None:
    """Empty the engine's own cache. Blocks of an audit leave with a step."""
    for _ in range(RESET_TRIES):
        if call(engine, "reset_prefix_cache"):
            return
        engine.generate([FIRST_WORD] * 3, 2)
        time.sleep(0.01)
    raise RuntimeError(f"{engine.name} keeps its blocks")


@dataclass(frozen=True)
class Audit:
    """``own``: of a block that the engine stored itself. ``ratio``: the most of a layer's distance over its floor."""

    verdict: str
    own: bool
    distance: float
    what: str
    far: int
    ratio: float
    farthest: float


def audits(log: Path) -> list[Audit]:
    """All that have ended so far, from the log of an engine."""
    found = []
    for text in re.findall(re.escape(MARK) + r"(\{.*\})", log.read_text(errors="replace")):
        said = json.loads(text.replace("Infinity", "1e9"))
        layers = said["layers"].values()
        found.append(
            Audit(
                said["verdict"], said["own"], said["distance"], said["what"], said["far"],
                max((distance / floor for distance, floor in layers), default=0.0),
                max((distance for distance, _ in layers), default=0.0),
            )
        )  # fmt: skip
    return found


def settle(engine: EngineProcess) -> dict[str, float]:
    """Let audits end; the count of each verdict."""
    before: dict[str, float] | None = None
    while True:
        engine.generate([FIRST_WORD] * 3, 2)
        name = "kvpool_audits_total/"
        counts = {
            key.removeprefix(name): value
            for key, value in engine.ask({"do": "metrics"}).items()
            if key.startswith(name) and value
        }
        if counts == before:
            return counts
        before = counts
        time.sleep(0.1)


def state_tokens(pool: Path, engine: EngineProcess) -> int:
    """Of a block: vLLM makes one of attention as large as a state."""
    probe = words(random.Random(0), 1500)
    engine.generate(probe, 2)
    settle(engine)
    return next(count for count in range(32, 1500, 32) if records(pool, probe, count))
