"""The scripted engine of ``python -m benchmarks agents``: when its first tokens come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.agents_engine import Clock, Engine, Job
from benchmarks.agents_model import SLOW_NBYTES_S, TOKEN_NBYTES, EngineModel
from benchmarks.agents_pool import Found, Held
from benchmarks.agents_traffic import Turn

BLOCK_TOKENS = 64


class Told:
    def __init__(self) -> None:
        self.ends: list[tuple[float, Job]] = []
        self.clock = Clock()

    def changed(
        self, engine: Engine, stored: Sequence[int], evicted: Sequence[int], after: int | None
    ) -> None: ...

    def put(self, engine: Engine, stored: Sequence[int]) -> None: ...

    def near_changed(self, engine: Engine, stored: Sequence[int], evicted: Sequence[int]) -> None: ...

    def far_evicted(self, blocks: Sequence[int]) -> None: ...

    def ended(self, engine: Engine, job: Job) -> None:
        self.ends.append((self.clock(), job))


class Has:
    """A far pool of the first ``blocks``, behind a near one that has those of ``near``."""

    def __init__(self, blocks: int, near: Sequence[int] | None = None) -> None:
        self.blocks = blocks
        self.near: Held | None = None
        if near is not None:
            self.near = Held(1 << 20)
            self.near.add(near)

    def use(self, blocks: Sequence[int]) -> None: ...

    def find(self, blocks: Sequence[int]) -> Found:
        there = [block for block in blocks if block < self.blocks]
        near = [block for block in there if self.near is not None and block in self.near]
        return Found(near, [block for block in there if block not in near])

    def count_absent(self, blocks: Sequence[int]) -> int:
        return len(blocks)

    def put(self, blocks: Sequence[int]) -> list[int] | None: ...


def first_tokens(
    prompts: Sequence[Sequence[int]],
    pool: Has | None = None,
    *,
    cache: int = 10_000,
    far_nbytes_s: float | None = None,
    at_once: bool = True,
) -> list[float]:
    """Seconds until each prompt's first token at one engine, with answers of 100 tokens. ``at_once``: False: each comes
    when the one before was answered.
    """
    told = Told()
    model = EngineModel(cache * BLOCK_TOKENS * TOKEN_NBYTES, BLOCK_TOKENS)
    engine = Engine("0", model, told.clock, pool, told)
    if far_nbytes_s is not None:
        engine.slow_far(far_nbytes_s)
    jobs = []
    for number, blocks in enumerate(prompts):
        turn = Turn(number, 0, np.array(blocks, np.int32), len(blocks) * BLOCK_TOKENS + 1, 100, 0.0)
        jobs.append(Job(turn, list(blocks), 0, told.clock()))
        engine.submit(jobs[-1])
        while not at_once and len(told.ends) <= number:
            assert told.clock.step()
    while told.clock.step():
        pass
    assert {job for _, job in told.ends} == set(jobs)
    assert engine.cache.usage == 0
    assert all(at_s > (job.first_s or 0) for at_s, job in told.ends)
    return [(job.first_s or 0) - job.came_s for job in jobs]


def test_an_engine_computes_what_it_lacks_in_turns() -> None:
    long = list(range(1000))
    model = EngineModel()
    [alone] = first_tokens([long])
    assert alone == pytest.approx(model.compute_s(0, 1000 * BLOCK_TOKENS + 1))
    first, second, again = first_tokens([long, list(range(1000, 2000)), long])
    assert first == alone
    assert second > 2 * alone  # it decodes the first answer meanwhile
    assert again - second < alone / 50
    [loaded] = first_tokens([long], Has(1000))
    assert model.move_s(1000) < loaded < alone


def test_an_engine_computes_others_while_it_loads() -> None:
    long, other = list(range(1000)), list(range(5000, 5050))
    assert first_tokens([long, other], Has(1000))[1] < EngineModel().move_s(1000)


def test_an_engine_loads_near_and_far_at_once() -> None:
    long, model = list(range(1000)), EngineModel()
    pools = [Has(1000, long[:blocks]) for blocks in (0, 500, 1000)]
    far, half, near = (first_tokens([long], pool)[0] for pool in pools)
    assert far - half == pytest.approx(model.move_s(500))
    assert model.move_s(1000) / 5 < near < half < far
    assert pools[0].near is not None
    assert all(block in pools[0].near for block in long)


def test_an_engine_computes_what_is_too_slow_to_load() -> None:
    prompts = [list(range(at, at + 1000)) for at in range(0, 8000, 1000)]
    cache = 10_000
    longest_s = EngineModel().move_s(cache)
    computed = first_tokens(prompts, cache=cache, at_once=False)
    slow = first_tokens(prompts, Has(8000), cache=cache, far_nbytes_s=SLOW_NBYTES_S, at_once=False)
    late = [one - other for one, other in zip(slow, computed, strict=True)]
    assert late[:3] == pytest.approx([longest_s] * 3, abs=0.1)
    assert late[3] < 0.1  # three that brought nothing close the gate
    just = 1000 * EngineModel().block_nbytes / (longest_s - 0.1)
    [loaded] = first_tokens(prompts[:1], Has(1000), cache=cache, far_nbytes_s=just)
    assert loaded == pytest.approx(longest_s - 0.1, rel=0.01)


def test_an_engine_without_room_lets_requests_wait() -> None:
    one, two = list(range(100)), list(range(100, 200))
    wide, narrow = (first_tokens([one, two], cache=cache)[1] for cache in (300, 150))
    assert narrow > wide
