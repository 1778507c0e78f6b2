from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvpool.vllm.geometry import Geometry, Group, Room
from kvpool.vllm.load.loads import Loads
from tests.support.clock import Clock
from tests.support.scheduler import BLOCK_TOKENS, request

pytestmark = pytest.mark.vllm

PATIENCE_S = 0.5
HIT_TOKENS = 96
FULL, WINDOWED = Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, window=2 * BLOCK_TOKENS + 1)


def geometry_of(groups: Sequence[Group], hash_block_tokens: int = BLOCK_TOKENS) -> Geometry:
    return Geometry(tuple(groups), hash_block_tokens=hash_block_tokens, step_tokens=32)


def loads_of(groups: Sequence[Group], free_blocks: int = 100, clock: Clock | None = None) -> Loads:
    clock = clock or Clock()
    loads = Loads(geometry_of(groups), patience_s=PATIENCE_S, clock=clock.monotonic)
    loads.bind(BlockPool(1 + free_blocks, True, BLOCK_TOKENS))  # one is the null block
    return loads


def begin(loads: Loads, one: Request, groups: int = 1) -> None:
    loads.begin(one, [range(1, 8)] * groups, 0, HIT_TOKENS, bytes)


def test_a_load_is_waited_for_until_it_takes_too_long() -> None:
    """However long a request stood in vLLM's queue before: only the load's own time counts."""
    clock = Clock()
    loads, first, second = loads_of([FULL], clock=clock), request("a"), request("b")
    assert not loads.bring(second, 0, HIT_TOKENS)
    clock.sleep(60.0)
    begin(loads, first)
    assert loads.bring(second, 0, HIT_TOKENS)
    assert not loads.bring(first, 0, HIT_TOKENS), "it would wait for itself"
    clock.sleep(PATIENCE_S)
    assert not loads.bring(second, 0, HIT_TOKENS)


def test_after_a_failed_load_nobody_waits_for_its_records_again() -> None:
    """Else a burst would try one after the other, each for as long as the pool is slow."""
    loads, first, second, third = loads_of([FULL]), request("a"), request("b"), request("c")
    begin(loads, first)
    loads.fail("a")
    assert not loads.bring(second, 0, HIT_TOKENS)
    begin(loads, second)
    assert not loads.bring(third, 0, HIT_TOKENS)
    for name in ("a", "b"):
        loads.scheduled({name: 4})
    assert not loads.under_way()
    assert not loads._by


def test_with_a_window_a_load_starts_only_where_it_can_go_on() -> None:
    """Its window's rest is at least what computing the prompt from nothing takes: a load may fail."""
    groups = [FULL, WINDOWED]
    room = geometry_of(groups).room_of_load(HIT_TOKENS, 100)
    assert room == Room(loaded=6 + 2, behind=1 + (5 - 2))
    first, second = request("a"), request("b")
    both = 2 * room.loaded + room.behind
    for free_blocks, starts in ((both, True), (both - 1, False)):
        loads = loads_of(groups, free_blocks)
        begin(loads, first, groups=2)
        assert loads._block_pool is not None
        loads._block_pool.get_new_blocks(room.loaded)
        assert loads.leave_room(second, HIT_TOKENS) is starts
    ring = Group(8, scratch=True)
    for groups in ([FULL], [FULL, ring]):
        fits = loads_of(groups, 1).leave_room(second, HIT_TOKENS)
        assert fits, "vLLM counts blocks of full attention itself, and of a ring"
    refilled = replace(WINDOWED, scratch=True)
    assert geometry_of([FULL, ring, refilled]).room_of_load(HIT_TOKENS, 100) == room._replace(
        loaded=room.loaded + 1
    )


def test_a_hit_that_ends_inside_of_a_block_loads_nothing_of_a_ring() -> None:
    groups = [FULL, Group(8, scratch=True), Group(BLOCK_TOKENS, window=2, state=True)]
    loads = Loads(geometry_of(groups, hash_block_tokens=4), patience_s=PATIENCE_S, clock=Clock().monotonic)
    blocks = loads.begin(request("a", 6, hash_tokens=4), [[1], [2], [3]], 0, 4, bytes)
    assert [(block.group, block.block_ids) for block in blocks] == [(0, (1,)), (2, (3,))]
