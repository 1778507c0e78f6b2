"""Audited hits on real engines: honest ones are the same, and what is wrong under a right checksum is found.

``python -m benchmarks audits`` has more kinds of faults, and honest hits by the thousand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import EngineProcess
from demo.tiny_model import Kind
from kvpool.vllm.audit.floor import LEAST_PAIRS
from tests.support.deadlines import eventually
from tests.support.engine_forks import write_model
from tests.support.engines import ask, call, engine_options, passing, prompt, records, started
from tests.support.file_record import payload_nbytes
from tests.support.wrong_records import (
    Spoil,
    attention_of,
    group_of,
    heads_exchanged,
    keys_as_values,
    last_layer_missing,
    layers_exchanged,
    payload,
    put,
    spoilt,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

BLOCK, BLOCKS, LAYERS = 32, 6, 4
TP2 = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
HONEST, OTHER = prompt(50, BLOCKS * BLOCK + 1), prompt(51, BLOCKS * BLOCK + 1)


def options_of(model: Path, pool: Path, **more: Any) -> dict[str, Any]:
    given = {"block_size": BLOCK, "settings": {"audit_share": 1.0}, "max_model_len": 1024, **more}
    return engine_options(model, f"file://{pool}", **given)


def counts(engine: EngineProcess) -> dict[str, int]:
    """How many audits have ended how."""
    name = "kvpool_audits_total/"
    found = engine.ask({"do": "metrics"}).items()
    return {key.removeprefix(name): int(value) for key, value in found if key.startswith(name) and value}


def audited(engine: EngineProcess, tokens: list[int], block: int = BLOCK, withheld: int = 1) -> str:
    """Ask for a prompt of which the pool alone has whole blocks: the verdict of its audit."""

    def step() -> None:
        engine.generate(prompt(99, 20), 2)  # reports what its workers found, and an audit's blocks leave

    assert eventually(lambda: call(engine, "reset_prefix_cache") or step())
    before = counts(engine)
    said = ask(engine, tokens)
    whole = (len(tokens) - 1) // block * block
    assert said["pool_tokens"] == whole - withheld * block, "the last block is computed"
    ended: dict[str, int] = {}

    def has_ended() -> bool:
        step()
        after = counts(engine)
        ended.update({verdict: after[verdict] - before.get(verdict, 0) for verdict in after})
        return sum(ended.values()) > 0

    assert eventually(has_ended)
    (verdict,) = [verdict for verdict, count in ended.items() if count]
    return verdict


def settle(engine: EngineProcess, blocks: int) -> None:
    """Wait until so many blocks are stored, and no more come."""
    last = 0.0

    def is_still() -> bool:
        nonlocal last
        engine.generate(prompt(99, 20), 2)
        time.sleep(0.5)
        before, last = last, engine.ask({"do": "metrics"})["kvpool_stored_blocks_total"]
        return last >= blocks and last == before

    assert eventually(is_still)


def learn(
    engine: EngineProcess,
    blocks: int = BLOCKS,
    block: int = BLOCK,
    withheld: int = 1,
    *,
    states: bool = False,
) -> None:
    """Let an engine learn its floor from what it has stored itself. ``states``: these are where prompts end."""
    own = [prompt(60 + number, blocks * block + 1) for number in range(2)]
    for tokens in own:
        for end in range(1, blocks + 1) if states else [blocks]:
            ask(engine, tokens[: end * block + 1])
    settle(engine, len(own) * blocks)
    for number in range(LEAST_PAIRS):
        assert audited(engine, own[number % 2], block, withheld) == "no_floor"


@dataclass
class Pair:
    """``reader`` has a floor; what ``prompts`` asks for another engine has stored."""

    pool: Path
    reader: EngineProcess


@pytest.fixture(scope="module")
def pair(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("audits")
    options = options_of(llama, folder / "pool", dtype="bfloat16")
    with started("writer", folder, options) as writer:
        for tokens in (HONEST, OTHER, *WRONG.values()):
            ask(writer, tokens)
    with passing("reader", folder, {**options, "max_num_batched_tokens": 96}) as reader:
        learn(reader)
        yield Pair(folder / "pool", reader)


def test_a_hit_that_another_engine_has_stored_is_the_same(pair: Pair) -> None:
    assert audited(pair.reader, HONEST) == "same"
    assert audited(pair.reader, OTHER) == "same"


def _all(how: Spoil) -> Callable[[Pair, list[Path]], None]:
    def spoil(_: Pair, found: list[Path]) -> None:
        for record in found:
            put(record, spoilt(payload(record), LAYERS, how))

    return spoil


def _zeros(_: Pair, found: list[Path]) -> None:
    put(found[1], bytes(payload_nbytes(found[1])))


def _of_another_prompt(pair: Pair, found: list[Path]) -> None:
    put(found[1], payload(records(pair.pool, OTHER, BLOCK)[1]))


SPOIL = {
    "keys and values exchanged": (_all(keys_as_values), "record"),
    "heads exchanged": (_all(heads_exchanged), "record"),
    "layers exchanged": (_all(layers_exchanged), "prefix"),
    "one block of zeros": (_zeros, "prefix"),
    "one block of another request": (_of_another_prompt, "prefix"),
}
WRONG = {name: prompt(70 + number, BLOCKS * BLOCK + 1) for number, name in enumerate(SPOIL)}


@pytest.mark.parametrize("name", SPOIL)
def test_a_wrong_hit_is_found_by_its_first_audit(pair: Pair, name: str) -> None:
    tokens, (spoil, what) = WRONG[name], SPOIL[name]
    found = records(pair.pool, tokens, BLOCK)
    for record in found:
        put(record, payload(record))  # nobody's: no writer is put away, and the reader has no doubts
    spoil(pair, found)
    log = pair.reader.log.read_text()
    assert audited(pair.reader, tokens) == "differs"
    said = pair.reader.log.read_text()[len(log) :]
    told = {
        "record": "the record itself is wrong",
        "prefix": "its first layer is right, so the prefix differs",
    }
    assert told[what] in said
    assert eventually(lambda: not any(record.exists() for record in found)), (
        "what the request loaded is deleted"
    )


@dataclass
class Family:
    kind: Kind
    layers: int = 4
    block: int = BLOCK
    states: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


STATES = {"worker_cls": "tests.support.cpu_states.StatesCpuWorker"}
A_TOKEN_A_STEP = {"attention_backend": "CPU_MLA", "max_num_batched_tokens": 1, "max_num_seqs": 1}
FAMILIES = {
    "windows": Family("gemma3", 6),
    "chunks": Family("llama4"),
    "latents": Family("deepseek", 2, block=16, options=A_TOKEN_A_STEP),
    "states": Family("granite4", block=0, states=True, options=STATES),
    "fp8": Family("llama", options={"kv_cache_dtype": "fp8"}),
    "ranks": Family("llama", options={"tensor_parallel_size": 2}, environment=TP2),
    "drafts": Family(
        "llama", options={"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}
    ),
}


@pytest.mark.rare
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_audited(name: str, tmp_path: Path) -> None:
    """Zeros in the place of what layers see: of a window, of states, of drafts; else of one block."""
    family, pool = FAMILIES[name], tmp_path / "pool"
    more = {} if family.kind in ("llama", "deepseek", "granite4") else {"window": 128}
    model = write_model(tmp_path / "model", kind=family.kind, width=256, layers=family.layers, **more)
    options = options_of(model, pool, **family.options)
    if name == "drafts":
        drafts = write_model(tmp_path / "drafts", kind="eagle", width=256, layers=1, seed=1)
        options["speculative_config"]["model"] = str(drafts)
    if family.block:
        options["block_size"] = family.block
    with started("engine", tmp_path, options, **family.environment) as engine:
        block = family.block or block_of_states(engine, pool)
        honest, wrong = (prompt(seed, 3 * block + 1) for seed in (80, 81))
        for tokens in (honest, wrong):
            # States are where prompts end.
            for end in (1, 2, 3) if family.states else (3,):
                ask(engine, tokens[: end * block + 1])
        withheld = 2 if name == "drafts" else 1  # a hit ends where the block behind is known
        learn(engine, 3, block, withheld, states=family.states)
        assert audited(engine, honest, block, withheld) == "same"
        found = records(pool, wrong, block)
        attention = attention_of(pool, found[0].name.split(".")[1])
        special = {"windows": "sliding_window:128", "chunks": "chunk:128", "states": "state"}.get(name)
        for record in found:
            content = payload(record)
            if name == "drafts":
                put(record, spoilt(content, family.layers + 1, last_layer_missing))
            elif special in (None, attention[group_of(record)]) and record != found[-1]:
                put(record, bytes(len(content)))
        assert audited(engine, wrong, block, withheld) == "differs"


def block_of_states(engine: EngineProcess, pool: Path) -> int:
    """vLLM makes a block of attention as large as a state."""
    tokens = prompt(90, 800)
    ask(engine, tokens)
    return next(count for count in range(32, 800, 32) if records(pool, tokens, count))
