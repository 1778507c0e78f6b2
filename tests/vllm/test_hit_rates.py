"""What a pool that is too small is worth to a fleet: scripted engines, sessions by Zipf's law, one prefix in common."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.vllm import lifecycle
from tests.vllm.lifecycle import ScriptedEngine, Shape, World
from tests.vllm.test_lifecycle import configured, held_in_order

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]
__all__ = ["configured"]

SESSIONS = 24
REQUESTS = 120
COMMON = [index * 5 % 43 for index in range(28)]  # 7 blocks that all prompts begin with
OWN_TOKENS = 16  # 4 blocks of a session
RECORD_NBYTES = 64 + 64  # of these engines, with its header
POOL_RECORDS = 30  # of the 103 that all sessions have


@pytest.fixture
def small_world() -> Iterator[World]:
    world = World(3, POOL_RECORDS * RECORD_NBYTES)
    yield world
    world.close()


def rates(world: World, configured: Callable[[Shape], Any]) -> tuple[float, float]:
    """(share of the prompts' tokens that nobody had to compute, share of those not held locally that the pool had)."""
    draw = random.Random(7)
    shape = Shape(slots=24)
    engines = [ScriptedEngine(world, copy.deepcopy(configured(shape)), shape) for _ in range(2)]
    admitted: dict[str, tuple[int, int]] = {}
    for engine in engines:
        _listen(engine, admitted)
    weights = [1 / (rank + 1) for rank in range(SESSIONS)]
    total = 0
    for number in range(REQUESTS):
        (session,) = draw.choices(range(SESSIONS), weights)
        prompt = COMMON + [(session * 7 + index) % 47 for index in range(OWN_TOKENS)] + [47, number % 50]
        total += len(prompt)
        engine = draw.choice(engines)
        engine.add(f"r{number}", prompt, 2)
        engine.drain()
    for engine in engines:
        engine.shut_down()
    local, external = (sum(each[i] for each in admitted.values()) for i in range(2))
    return (local + external) / total, external / (total - local)


def _listen(engine: ScriptedEngine, admitted: dict[str, tuple[int, int]]) -> None:
    connector = engine.connector
    assert connector is not None
    ask = connector.get_num_new_matched_tokens

    def asked(request: Any, local_tokens: int) -> Any:
        answer = ask(request, local_tokens)
        if answer[0] is not None:
            admitted[request.request_id] = (local_tokens, answer[0])
        return answer

    connector.get_num_new_matched_tokens = asked  # type: ignore[method-assign]


def test_a_small_pool_keeps_what_many_ask_for(
    small_world: World, configured: Callable[[Shape], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before lookups touched and what was missed was stored: 0.66 and 0.20."""
    monkeypatch.setattr(lifecycle, "DEVICE_BLOCKS", 26)
    spared, from_pool = rates(small_world, configured)
    print(f"spared {spared:.3f}, from the pool {from_pool:.3f}")
    new = ScriptedEngine(small_world, configured(Shape(slots=24)), Shape(slots=24))
    new.add("first", [*COMMON, 1, 2], 1)
    new.drain()
    assert new.loads == 1
    assert held_in_order(new, COMMON) == len(COMMON) // lifecycle.BLOCK_TOKENS
    new.shut_down()
