"""Audited hits on scripted engines: what is honest is the same, and what is wrong in the pool is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvpool import BlockHasher, metrics
from kvpool.key.key import parse_key
from kvpool.vllm.engine import internals
from tests.support.lifecycle import ScriptedEngine, Shape, World

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

PROMPT = list(range(30))
AUDITED = {
    "full": Shape(slots=24),
    "ranks": Shape(2, overlapping=True, slots=24, late=True),
    "stages": Shape(4, overlapping=True, windowed=True, slots=24, latent=True, stages=2),
    "windows": Shape(2, windowed=True, slots=24, late=True),
    "latent vectors": Shape(2, latent=True, slots=24),
    "small windows": Shape(small=True, latent=True, slots=40),
    "states": Shape(states=True, slots=24),
    "windows and states": Shape(2, windowed=True, states=True, slots=40, late=True),
    "tails": Shape(states=True, tails=True, slots=24),
    "heads": Shape(2, slots=48, cut=True, late=True),
    "an indexer": Shape(latent=True, indexed=True, slots=24),
    "rings": Shape(latent=True, ring=True, slots=24),
    "a window that is filled again": Shape(2, latent=True, ring=True, refilled=True, slots=24),
    "records of three blocks": Shape(2, slots=24, blocks_per_record=3),
    "drafts": Shape(overlapping=True, windowed=True, slots=24, drafts=3),
}
SHAPES = [pytest.param(replace(shape, audited=True), id=name) for name, shape in AUDITED.items()]
Start = Callable[..., ScriptedEngine]


def hit_of(shape: Shape) -> int:
    """Tokens of the prompt that are found."""
    step = max(shape.align_tokens, *(shape.record_tokens(group) for group in range(3)))
    return (len(PROMPT) - 1) // step * step


def withheld(shape: Shape) -> int:
    """Tokens of the last record of a hit."""
    return max(shape.align_tokens, *(shape.record_tokens(group) for group in range(3)))


def generated(engine: ScriptedEngine, name: str, prompt: Sequence[int] = PROMPT, tokens: int = 3) -> None:
    engine.add(name, prompt, tokens)
    engine.drain()


def stored(engine: ScriptedEngine) -> None:
    """The prompt, with states where the audited hit ends and one block before."""
    generated(engine, "stored before", PROMPT[: hit_of(engine.shape) - withheld(engine.shape) + 2], 1)
    generated(engine, "stored")
    engine.rest()


def spoil(world: World, tokens: int) -> list[str]:
    """Write other bytes, with their checksum, into the first record that ends at so many tokens; all its keys."""
    (block_hash,) = [
        one for (_, one), values in world.values.items() if len(values) == tokens and _is_of(world, one)
    ]
    keys = [
        block.key
        for blocks in world.records.scan()
        for block in blocks
        if parse_key(block.key).hash == block_hash
    ]
    first = min(keys, key=lambda key: parse_key(key).group * 1000 + parse_key(key).rank)
    nbytes = next(block.nbytes for blocks in world.records.scan() for block in blocks if block.key == first)
    payload = bytearray(nbytes - 80)
    assert world.records.get_many_into([first], [payload]) == [True]
    payload[:] = bytes(byte ^ 0x11 for byte in payload)
    world.records.delete_many([first])
    assert world.records.put_many([first], [bytes(payload)]) == [True]
    world.is_honest = False
    return keys


def _is_of(world: World, block_hash: bytes) -> bool:
    return block_hash in BlockHasher(world.shape.hash_tokens).hashes(PROMPT)


def cached(engine: ScriptedEngine) -> int:
    """How many blocks of the prompt are in the engine's own cache."""
    blocks = internals.cached_blocks(engine.scheduler.kv_cache_manager.block_pool) or {}
    hashes = BlockHasher(engine.shape.hash_tokens).hashes(PROMPT)
    return sum(internals.cache_key(one, group) in blocks for one in hashes for group in range(4))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_an_engine_of_the_same_kind_stored_is_the_same(engine: Start, shape: Shape) -> None:
    first, second = engine(shape), engine(shape)
    stored(first)
    generated(second, "audited")
    assert (second.loads, second.loads_failed) == (1, 0)
    counters = second.counters()
    loaded = counters[metrics.LOADED_TOKENS.name]
    assert loaded == hit_of(shape) - withheld(shape), "the last record is computed, and no more"
    assert second.verdicts == {"same": 1}
    assert cached(second)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_record_is_found_and_taken_out_of_the_pool_and_of_the_engine(
    world: World, engine: Start, shape: Shape
) -> None:
    """All that a request computes is what the model says, as ever."""
    first, second = engine(shape), engine(shape)
    stored(first)
    keys = spoil(world, hit_of(shape))
    generated(second, "audited")
    second.rest()
    assert second.verdicts == {"differs": 1}
    assert not any(world.records.contains_many(keys))
    assert not cached(second)
    loads = second.loads
    generated(second, "again")
    assert second.loads == loads, "the prefix is gone with it"
    second.rest()
    assert all(world.records.contains_many(keys)), "written anew, as it should be"
    assert not second.planner._broken


def set_halted(engine: ScriptedEngine, halted: bool) -> None:
    for rank in engine.ranks:
        assert rank.device is not None
        rank.device.halted = halted


def begin_late(engine: ScriptedEngine) -> None:
    """An audit whose copy has not begun."""
    engine.add("audited", PROMPT, 2)
    while not engine.loads:
        engine.step()
    set_halted(engine, True)
    while not any(audit.open for audit in engine.planner._audits._audits.values()):
        engine.step()


LATE = [pytest.param(Shape(ranks, slots=24, late=True, audited=True), id=f"{ranks}") for ranks in (1, 2)]


@pytest.mark.parametrize("shape", LATE)
@pytest.mark.parametrize("aborted", [False, True])
def test_a_block_is_compared_as_it_was_computed_whoever_needs_the_memory(
    engine: Start, shape: Shape, aborted: bool
) -> None:
    """Its copy begins when others have filled the engine's memory."""
    first, second = engine(shape), engine(shape)
    stored(first)
    begin_late(second)
    if aborted:
        second.abort("audited")
    for number in range(4):
        second.add(f"other{number}", [40 + number, *PROMPT], 20)
    for _ in range(60):
        second.step()
    assert second.planner._audits._audits
    set_halted(second, False)
    second.rest()
    assert second.verdicts == {"same": 1}


@pytest.mark.parametrize("shape", LATE)
def test_an_engine_that_loses_its_pool_in_the_midst_of_an_audit_keeps_no_block(
    engine: Start, shape: Shape
) -> None:
    first, second = engine(shape), engine(shape)
    stored(first)
    begin_late(second)
    worker = second.ranks[0].connector._worker
    assert worker is not None
    worker.switch_off("as a fault does")
    set_halted(second, False)
    second.rest()
    assert not second.verdicts, "of what the other ranks have found alone"
    assert second.counters()[f"{metrics.AUDITS.name}/gone"] == 1


@pytest.mark.parametrize("shape", LATE)
def test_an_audit_under_way_when_weights_change_says_nothing(engine: Start, shape: Shape) -> None:
    first, second = engine(shape), engine(shape)
    stored(first)
    begin_late(second)
    second.abort("audited")
    second.write_weights(1)
    for _ in range(3):
        second.step()
    set_halted(second, False)
    second.drain()
    assert second.scheduler.reset_prefix_cache(False, True)
    second.rest()
    assert not second.verdicts
    assert second.counters()[f"{metrics.AUDITS.name}/gone"] == 1


def test_a_request_that_is_aborted_before_it_computes_the_block_leaves_no_audit(engine: Start) -> None:
    shape = Shape(slots=24, audited=True)
    first, second = engine(shape), engine(shape)
    stored(first)
    second.add("audited", PROMPT, 2)
    while not second.planner._audits._of_request:
        second.step()
    second.abort("audited")
    second.rest()
    assert not second.verdicts
    assert second.counters()[f"{metrics.AUDITS.name}/gone"] == 1
