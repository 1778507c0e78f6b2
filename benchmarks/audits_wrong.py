"""Wrong hits of many kinds, right by name and checksum, and after how many audited hits each is found.

A writer fills the pool; its records are changed, or replaced by those of an engine that has other weights, another
adapter or another rope; then a reader, which has learnt its floor, loads and audits them.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.audits_engines import (
    FAMILIES,
    audits,
    drafting,
    forget,
    model_of,
    options_of,
    settle,
    state_tokens,
    words,
)
from demo.engine_process import EngineProcess
from kvpool import BlockHasher
from tests.support.engines import passing, write_adapter
from tests.support.wrong_records import (
    SHARED_DIGITS,
    Spoil,
    attention_of,
    group_of,
    heads_exchanged,
    keys_as_values,
    keys_before_values,
    last_layer_missing,
    layers_exchanged,
    namesake,
    payload,
    put,
    spoilt,
)  # fmt: skip

PROMPTS = 16  # of a kind of fault
BLOCKS = 12
STATE_BLOCKS = 4
MOST_HITS = 200
TP2 = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
Prompt = list[int]


@dataclass
class WrongRow:
    """``found_after``: audited hits, the first finding counted; 0: none. ``distance``: of all layers together, and
    ``ratio``: of the farthest layer over its floor, both of the median hit; a finding is a ratio above 2.
    """

    wrong: str
    family: str
    dtype: str
    audited: int = 0
    found: int = 0
    found_after: int = 0
    what: str = ""
    distance: float = 0.0
    ratio: float = 0.0


@dataclass(frozen=True)
class _Wrong:
    """``spoil``: given a prompt's records, block by block, and those of another prompt. ``other``: the engine that
    wrote what is served instead. ``last``: whether the audited block is wrong, too: of hits that end anywhere.
    """

    name: str
    spoil: Callable[[_Place], None]
    other: str = ""


@dataclass
class _Place:
    blocks: list[list[Path]]
    others: list[list[Path]]  # of another prompt
    layers: int
    pool: Path
    other_pool: Path

    def all(self) -> list[Path]:
        return [record for block in self.blocks for record in block]


def _spoil_all(how: Spoil) -> Callable[[_Place], None]:
    def spoil(at: _Place) -> None:
        for record in at.all():
            put(record, spoilt(payload(record), at.layers, how))

    return spoil


def _spoil_drafts(at: _Place) -> None:
    for record in at.all():
        put(record, spoilt(payload(record), at.layers + 1, last_layer_missing))


def _zeros(at: _Place) -> None:
    for record in at.blocks[1]:
        put(record, bytes(len(payload(record))))


def _of_another_prompt(at: _Place) -> None:
    for record, other in zip(at.blocks[1], at.others[1], strict=True):
        put(record, payload(other))


def _of_another_engine(at: _Place) -> None:
    for record in at.all():
        put(record, payload(namesake(at.other_pool, record)))


def _one_of_another_engine(at: _Place) -> None:
    for record in at.blocks[1]:
        put(record, payload(namesake(at.other_pool, record)))


def _window_of_zeros(at: _Place) -> None:
    attention = attention_of(at.pool, at.all()[0].name.split(".")[1])
    for record in at.all():
        if attention[group_of(record)].startswith("sliding_window"):
            put(record, bytes(len(payload(record))))


def _state_of_an_earlier_place(at: _Place) -> None:
    attention = attention_of(at.pool, at.all()[0].name.split(".")[1])
    states = [[one for one in block if attention[group_of(one)] == "state"] for block in at.blocks]
    before = [[payload(one) for one in block] for block in states]
    for block, earlier in zip(states[1:], before, strict=False):
        for record, content in zip(block, earlier, strict=True):
            put(record, content)


def _ranks_exchanged(at: _Place) -> None:
    for block in at.blocks:
        contents = [payload(record) for record in block]
        for record, content in zip(block, reversed(contents), strict=True):
            put(record, content)


ATTENTION = [
    _Wrong("K and V exchanged", _spoil_all(keys_as_values)),
    _Wrong("keys of all heads before values", _spoil_all(keys_before_values)),
    _Wrong("zeros of a failed store, one block", _zeros),
    _Wrong("one block of another request", _of_another_prompt),
    _Wrong("heads exchanged", _spoil_all(heads_exchanged)),
    _Wrong("layers exchanged", _spoil_all(layers_exchanged)),
    _Wrong("a checkpoint that differs by 1 %", _of_another_engine, "percent"),
    _Wrong("stale blocks: weights before an update", _of_another_engine, "stale"),
    _Wrong("rope theta of another length, x 1.1", _of_another_engine, "rope"),
]


@dataclass(frozen=True)
class _Set:
    """Faults that share a writer and a reader. ``more``: options of their engines; ``others``: who else writes."""

    family: str
    dtype: str
    wrongs: Sequence[_Wrong]
    more: Mapping[str, Any] = field(default_factory=dict)
    others: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def sets() -> list[_Set]:
    found: list[_Set] = []
    for dtype in ("float32", "bfloat16"):
        adapters = {"enable_lora": True, "max_lora_rank": 8}
        found += [
            _Set("llama", dtype, ATTENTION, others=("percent", "stale", "rope")),
            _Set("llama", dtype, [_Wrong("blocks of another adapter", _of_another_engine, "adapter")], adapters,
                 ("adapter",)),
            _Set("gemma3", dtype, [_Wrong("a window filled with zeros", _window_of_zeros)]),
            _Set("llama", dtype, [_Wrong("parts of two TP ranks exchanged", _ranks_exchanged)],
                 {"tensor_parallel_size": 2}, environment=TP2),
            _Set("llama", dtype, [_Wrong("layers of drafts missing", _spoil_drafts)], {"drafts": True}),
        ]  # fmt: skip
    state = [_Wrong("states of an earlier place", _state_of_an_earlier_place)]
    return [*found, _Set("granite4", "float32", state), _Set("qwen3_next", "bfloat16", state)]


def changed(folder: Path, model: Path, how: str) -> Path:
    """A copy of a model with other weights, or another rope."""
    other = folder / f"{model.name}-{how}"
    if other.exists():
        return other
    shutil.copytree(model, other)
    if how == "rope":
        path = other / "config.json"
        config = json.loads(path.read_text())
        of_rope = config.get("rope_parameters") or config
        of_rope["rope_theta"] = 1.1 * of_rope.get("rope_theta", 10000.0)
        path.write_text(json.dumps(config))
        return other
    torch.manual_seed(3)
    tensors = load_file(other / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            size = tensor.float().std()
            if how == "percent":
                change = torch.randn(tensor.shape) * 0.01
            else:  # of low rank, a tenth of the weights
                left, right = torch.randn(tensor.shape[0], 8), torch.randn(8, tensor.shape[1])
                change = 0.1 * left @ right / 8**0.5
            tensors[name] = (tensor.float() + size * change).to(tensor.dtype)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return other


def run_set(one: _Set, folder: Path, begins: Callable[[str], None]) -> Iterator[WrongRow]:
    """A row for each fault. Blocks for a minute."""
    folder.mkdir()
    begins(f"{one.family} in {one.dtype}: {', '.join(wrong.name for wrong in one.wrongs)}")
    draw = random.Random(5)
    model = model_of(folder.parent, one.family)
    more = dict(one.more)
    if more.pop("drafts", False):
        more |= drafting(folder)
    adapter: list[Any] | None = ["adapter", 1, str(folder / "lora")] if "enable_lora" in more else None

    def options(of: Path, pool: str) -> dict[str, Any]:
        return options_of(one.family, of, f"file://{folder}/{pool}", one.dtype, {}, **more)

    def engine(name: str, of: Path, pool: str) -> contextlib.AbstractContextManager[EngineProcess]:
        if adapter is not None:  # at the same path, so that its blocks have the same hashes
            write_adapter(Path(adapter[2]), model, seed=1 + (name == "adapter"))
        return passing(name, folder, options(of, pool), **one.environment)

    with engine("writer", model, "pool") as writer:
        states = FAMILIES[one.family].states
        block = state_tokens(folder / "pool", writer) if states else 32
        blocks = STATE_BLOCKS if states else BLOCKS
        prompts = [[words(draw, blocks * block) for _ in range(PROMPTS)] for _ in one.wrongs]
        for prompt in (prompt for of_wrong in prompts for prompt in of_wrong):
            _store(writer, prompt, block, states, adapter)
        settle(writer)
    for number, wrong in enumerate(one.wrongs):
        if wrong.other:
            of = model if adapter else changed(folder.parent, model, wrong.other)
            with engine(wrong.other, of, wrong.other) as other:
                for prompt in prompts[number]:
                    _store(other, prompt, block, states, adapter)
                settle(other)
    with engine("reader", model, "pool") as reader:
        own = [words(draw, blocks * block) for _ in range(8)]
        for prompt in own:
            _store(reader, prompt, block, states, adapter)
        settle(reader)
        for _ in range(2):
            forget(reader)
            for prompt in own:
                _hit(reader, prompt, blocks, block, draw, adapter)
        settle(reader)
        for number, wrong in enumerate(one.wrongs):
            of_prompts = [_records(folder / "pool", prompt, block, adapter) for prompt in prompts[number]]
            for place, of_prompt in enumerate(of_prompts):
                at = _Place(
                    of_prompt,
                    of_prompts[(place + 1) % PROMPTS],
                    FAMILIES[one.family].layers,
                    folder / "pool",
                    folder / wrong.other,
                )
                for record in at.all():
                    put(record, payload(record))  # nobody's, so that no writer is put away
                wrong.spoil(at)
            yield _count(wrong.name, one, reader, prompts[number], blocks, block, draw, adapter, folder)


def _records(pool: Path, prompt: Prompt, block: int, adapter: list[Any] | None) -> list[list[Path]]:
    """Block by block."""
    lora = None if adapter is None else (adapter[0], adapter[2])
    hashes = BlockHasher(block).hashes(prompt, lora=lora)
    found = [sorted((pool / "blocks").glob(f"*/*{one.hex()[-SHARED_DIGITS:]}.*")) for one in hashes]
    assert all(found)
    return found


def _store(
    engine: EngineProcess, prompt: Prompt, block: int, states: bool, adapter: list[Any] | None
) -> None:
    for end in range(block, len(prompt) + 1, block) if states else [len(prompt)]:
        engine.ask({"do": "generate", "tokens": [*prompt[:end], 11], "max_tokens": 2, "adapter": adapter})


def _hit(
    engine: EngineProcess,
    prompt: Prompt,
    blocks: int,
    block: int,
    draw: random.Random,
    adapter: list[Any] | None,
) -> None:
    tokens = [*prompt[: draw.randint(3, blocks) * block], *words(draw, draw.randint(1, block - 1))]
    engine.ask({"do": "generate", "tokens": tokens, "max_tokens": 2, "adapter": adapter})


def _count(
    name: str, one: _Set, reader: EngineProcess, prompts: Sequence[Prompt], blocks: int, block: int,
    draw: random.Random, adapter: list[Any] | None, folder: Path,
) -> WrongRow:  # fmt: skip
    row = WrongRow(name, one.family, one.dtype)
    log = folder / "reader.log"
    before = len(audits(log))
    for _ in range(MOST_HITS // len(prompts)):
        for prompt in prompts:
            forget(reader)
            _hit(reader, prompt, blocks, block, draw, adapter)
        settle(reader)
        found = audits(log)[before:]
        judged = [audit for audit in found if audit.verdict in ("same", "differs")]
        if not judged or any(audit.verdict == "differs" for audit in judged):
            break
    row.audited, wrong = len(judged), [audit for audit in judged if audit.verdict == "differs"]
    row.found = len(wrong)
    if judged:
        row.found_after = 1 + judged.index(wrong[0]) if wrong else 0
        row.what = wrong[0].what if wrong else ""
        row.distance = sorted(audit.distance for audit in judged)[len(judged) // 2]
        row.ratio = sorted(audit.ratio for audit in judged)[len(judged) // 2]
    return row
