"""At every length about the end of a block, a window, a step or a tail the pool gives as much as vLLM's own cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.lifecycle import (
    BLOCK_TOKENS,
    REFILLED_WINDOW,
    SMALL_BLOCK_TOKENS,
    WINDOW,
    ScriptedEngine,
    Shape,
    World,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("quiet"),
    pytest.mark.allow_leaks("vLLM keeps helpers of its own for a process"),
]

STEP_TOKENS = 24  # at most
BASE = Shape(slots=24, weights_never_change=True)
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
