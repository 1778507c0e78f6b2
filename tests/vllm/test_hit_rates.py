"""What a pool that is too small is worth to a fleet: scripted engines, sessions by Zipf's law, one prefix in common."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.vllm.stores import StorePlanner
from tests.support.lifecycle import ScriptedEngine, Shape, World
from tests.support.memory_store import MemoryStore

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]
SESSIONS = 24
REQUESTS = 120
COMMON = [index * 5 % 43 for index in range(28)]  # 7 blocks that all prompts begin with
OWN_TOKENS = 16  # 4 blocks of a session
RECORD_NBYTES = 64 + 64  # of these engines, with its header
POOL_RECORDS = 30  # of the 103 that all sessions have


def rates(world: World, configured: Callable[[Shape], Any], lifetime: int) -> tuple[float, float]:
    """(share of the prompts' tokens that nobody had to compute, share of those not held locally that the pool had).

    ``lifetime``: requests after which one of the two engines ends, and another one starts.
    """
    draw = random.Random(7)
    shape = Shape(slots=24)
    engines = [ScriptedEngine(world, copy.deepcopy(configured(shape)), shape) for _ in range(2)]
    admitted: dict[str, tuple[int, int]] = {}
    for engine in engines:
        _listen(engine, admitted)
    weights = [1 / (rank + 1) for rank in range(SESSIONS)]
    total = 0
    for number in range(REQUESTS):
        if number and number % lifetime == 0:
            engines.pop(0).shut_down()
            engines.append(ScriptedEngine(world, copy.deepcopy(configured(shape)), shape))
            _listen(engines[-1], admitted)
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


def prefix_loaded(world: World, configured: Callable[[Shape], Any]) -> int:
    """How many tokens of the common prefix an engine gets that has just started."""
    new = ScriptedEngine(world, configured(Shape(slots=24)), Shape(slots=24))
    admitted: dict[str, tuple[int, int]] = {}
    _listen(new, admitted)
    new.add("first", [*COMMON, 1, 2], 1)
    new.drain()
    new.shut_down()
    return admitted["first"][1]


def measured(configured: Callable[[Shape], Any], lifetime: int) -> tuple[float, float, int]:
    world = World(3, POOL_RECORDS * RECORD_NBYTES)
    try:
        return *rates(world, configured, lifetime), prefix_loaded(world, configured)
    finally:
        world.close()


@pytest.mark.parametrize("lifetime", [12, REQUESTS])
def test_a_small_pool_keeps_what_many_ask_for(
    configured: Callable[[Shape], Any], monkeypatch: pytest.MonkeyPatch, lifetime: int
) -> None:
    """Engines that live on pay for what new ones get: they have the prefix, and the pool has less room for the rest."""
    spared, from_pool, prefix_tokens = measured(configured, lifetime)
    with monkeypatch.context() as without:
        without.setattr(MemoryStore, "touch_many", MemoryStore.contains_many)
        without.setattr(StorePlanner, "admitted", _admitted_unread)
        before = measured(configured, lifetime)
    print(
        f"lifetime {lifetime}: {spared:.3f} spared, {from_pool:.3f} from the pool, prefix {prefix_tokens}; {before}"
    )
    assert prefix_tokens == len(COMMON)
    if lifetime < REQUESTS:
        assert spared > before[0]
        assert from_pool > before[1]


_admitted = StorePlanner.admitted


def _admitted_unread(planner: StorePlanner, request_id: str, told: Any) -> None:
    """Store what is computed, and nothing of what is held."""
    _admitted(planner, request_id, None)
