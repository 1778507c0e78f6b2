"""At every length about the end of a block, a window, a step or a tail the pool gives as much as vLLM's own cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput

from kvpool.vllm.engine.support import groups_of
from kvpool.vllm.geometry import Geometry
from tests.support.lifecycle import (
    BLOCK_TOKENS,
    REFILLED_WINDOW,
    SMALL_BLOCK_TOKENS,
    WINDOW,
    ScriptedEngine,
    Shape,
    World,
)
from tests.support.scheduler import request
from tests.support.specs import CHUNKED, FULL, LATENT, SMALL_WINDOW, cache_of
from tests.support.specs import WINDOW as WINDOWED

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("quiet"),
    pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process"),
]

STEP_TOKENS = 24  # at most
BASE = Shape(slots=24)
SHAPES = {
    "attention": BASE,
    "windows": replace(BASE, windowed=True),
    "windows and drafts": replace(BASE, windowed=True, drafts=3),
    "latents": replace(BASE, latent=True, ranks=2),
    "small windows": replace(BASE, latent=True, small=True),
    "states": replace(BASE, states=True),
    "states and windows": replace(BASE, states=True, windowed=True),
    "states, ahead": replace(BASE, states=True, overlapping=True),
    "tails": replace(BASE, states=True, tails=True),
    "tails, ahead": replace(BASE, states=True, tails=True, overlapping=True),
    "rings": replace(BASE, latent=True, ring=True),
    "rings, states and tails": replace(BASE, latent=True, ring=True, states=True, tails=True),
    "a window that is filled again": replace(BASE, latent=True, ring=True, refilled=True),
    "drafts beside it": replace(BASE, latent=True, ring=True, refilled=True, drafts=3),
}
ENDS = (BLOCK_TOKENS, 2 * SMALL_BLOCK_TOKENS + BLOCK_TOKENS, REFILLED_WINDOW, WINDOW, STEP_TOKENS, 32)
LENGTHS = sorted({end + beside for end in ENDS for beside in (-1, 0, 1)})


def asked(engine: ScriptedEngine, name: str, prompt: list[int]) -> int:
    """How many tokens of a prompt the engine has without computing them; it answers with one."""
    begun: dict[str, int] = {}
    check = engine._check_stores

    def watch(planned: SchedulerOutput) -> None:
        begun.update({new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs})
        check(planned)

    engine._check_stores = watch  # type: ignore[method-assign]
    engine.add(name, prompt, 1)
    engine.drain()
    engine._check_stores = check  # type: ignore[method-assign]
    return begun[name]


@pytest.mark.parametrize("name", SHAPES)
def test_another_engine_has_as_much_of_a_prompt_as_vllms_own_cache(
    name: str, world: World, engine: Callable[..., ScriptedEngine]
) -> None:
    shape = SHAPES[name]
    own, found = {}, {}
    alone = engine(shape)
    alone.planner._loads = alone.planner._stores = False
    first = engine(shape)
    for tokens in LENGTHS:
        prompt = [(7 * place + tokens) % 50 for place in range(tokens)]
        assert asked(alone, f"{tokens} alone", prompt) == 0
        own[tokens] = asked(alone, f"{tokens} again", prompt)
        assert asked(first, f"{tokens} first", prompt) == 0
        alone.reset(running=False, connector=False)
        first.reset(running=False, connector=False)
    second = engine(shape)
    for tokens in LENGTHS:
        prompt = [(7 * place + tokens) % 50 for place in range(tokens)]
        found[tokens] = asked(second, f"{tokens} second", prompt)
        second.reset(running=False, connector=False)
    assert found == own


# Of groups that scripted engines have not: chunks, and layers that draft with the next token.

GROUPS = {
    "attention": (FULL,),
    "chunks": (FULL, CHUNKED),
    "windows": (FULL, replace(WINDOWED, block_size=32, sliding_window=80)),
    "latents and small windows": (LATENT, SMALL_WINDOW),
}
WHERE = sorted({end + beside for end in (32, 64, 80, 96, 128, 160, 192) for beside in (-1, 0, 1)})


@pytest.mark.parametrize("tokens", WHERE)
@pytest.mark.parametrize(
    ("name", "reads_ahead"),
    [(name, ahead) for name in GROUPS for ahead in (False, True) if not (ahead and name == "chunks")],
)
def test_the_longest_hit_of_what_is_stored_is_vllms_own(name: str, reads_ahead: bool, tokens: int) -> None:
    """Of a prompt whose answer has two tokens: so the one behind the prompt was computed, too."""
    cache = cache_of(*GROUPS[name])
    cache.num_blocks = 400
    for group in cache.kv_cache_groups:
        group.is_eagle_group = reads_ahead
    groups = groups_of(cache, reads_ahead=reads_ahead)
    sizes = [group.block_tokens for group in groups]
    align, hash_tokens = math.lcm(*sizes), math.gcd(*sizes)
    manager = KVCacheManager(cache, 4096, align, hash_tokens, use_eagle=reads_ahead)
    asked, again = (request(one, tokens, hash_tokens=hash_tokens) for one in ("a", "b"))
    assert manager.allocate_slots(asked, tokens) is not None
    manager.free(asked)
    _, own, *_ = manager.get_computed_blocks(again)
    geometry = Geometry(tuple(groups), align_tokens=align)
    present = []
    for group, pattern in zip(groups, geometry.reached, strict=True):
        stored = (tokens + 1 - group.reads_ahead) // group.record_tokens
        all_records = range(tokens // group.record_tokens)
        present.append(bytes(at < stored or not pattern[at % len(pattern)] for at in all_records))
    most = (tokens - 1) // align * align
    hit = geometry.longest_hit(present, local_tokens=0, max_tokens=most)
    # Of one group vLLM drops the last block that it may use, and not the one behind it.
    more = align if reads_ahead and len(groups) == 1 and tokens % align == 0 and tokens > align else 0
    assert hit == own + more
