"""What is stored of states, of the beginnings of blocks, and of small windows: on the scheduler half."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvpool.store import Store
from kvpool.vllm.geometry import Group
from kvpool.vllm.plan import PoolMetadata
from tests.support.scheduler import (
    BLOCK_TOKENS,
    NAMESPACE,
    answer,
    half,
    output,
    put,
    request,
)

pytestmark = [pytest.mark.vllm]

# States, of which the engine says where they lie.


def with_states(store: Store, asked: Request, offered: dict[int, int], **settings: Any) -> PoolMetadata:
    """The step that computes a prompt of 100 tokens; ``offered``: tokens before a state, and its block."""
    scheduler = half(store, groups=(Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, 2, state=True)), **settings)
    pool = BlockPool(32, True, BLOCK_TOKENS)
    scheduler.bind_block_pool(pool)
    scheduler.allocated(asked, ([], []), 0)
    step = output(asked, asked.num_tokens, ([0] * 7, [0] * 7))
    assert step.kv_connector_block_state is not None
    step.kv_connector_block_state.boundary_state_offloads["a"] = [
        (1, block_id, tokens) for tokens, block_id in offered.items()
    ]
    return scheduler.plan(step)


@pytest.mark.parametrize(
    ("offered", "stop", "settings", "stored"),
    [
        ({32: 5, 96: 7}, 0, {}, [(96, 7)]),
        ({32: 5, 96: 7}, 32, {}, [(32, 5), (96, 7)]),
        ({24: 5, 96: 7}, 24, {}, [(96, 7)]),  # inside of a block
        ({96: 7, 112: 8}, 0, {}, [(96, 7), (112, 8)]),
        ({96: 7, 112: 8}, 0, {"store_decode": False}, [(96, 7)]),
        ({96: 7}, 0, {"min_requests_to_store": 2}, []),
    ],
)
def test_states_are_stored_where_a_request_resumes(
    store: Store, offered: dict[int, int], stop: int, settings: dict[str, Any], stored: list[tuple[int, int]]
) -> None:
    asked = request("a")
    asked.append_output_token_ids(list(range(500, 520)))
    asked.shared_prefix_boundary = stop
    step = with_states(store, asked, offered, **settings)
    assert [(block.block_hash, block.group, block.block_ids) for block in step.stores] == [
        (asked.block_hashes[tokens // BLOCK_TOKENS - 1], 1, (block_id,)) for tokens, block_id in stored
    ]


def test_a_state_that_the_engine_has_and_the_pool_lacks_is_stored(store: Store) -> None:
    asked = request("a")
    scheduler = half(store, groups=(Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, 2, state=True)))
    put(store, asked.block_hashes)
    assert answer(scheduler, asked, local_tokens=80) == 0
    scheduler.allocated(asked, ([], []), 0)
    asked.num_computed_tokens = 80
    step = scheduler.plan(output(asked, 4, (list(range(1, 7)), [0, 0, 0, 0, 9, 10])))
    assert [(block.block_hash, block.group, block.block_ids) for block in step.stores] == [
        (asked.block_hashes[4], 1, (9,))
    ]
    assert asked.shared_prefix_boundary == 96, "where the next one may go on, too"


TAILS = {"hash_block_tokens": BLOCK_TOKENS // 4, "match_tokens": BLOCK_TOKENS // 4}


def test_the_beginning_of_a_block_is_stored_with_its_state_and_found_again(store: Store) -> None:
    groups = (Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, 2, state=True))
    asked = request("a", 93, hash_tokens=4)
    scheduler = half(store, groups=groups, **TAILS)
    scheduler.allocated(asked, ([], []), 0)
    tables = (list(range(1, 8)), [0] * 5 + [20, 21])
    scheduler.plan(output(asked, 92, tables))
    asked.num_computed_tokens = 92
    step = output(asked, 1, tables)
    assert step.kv_connector_block_state is not None
    step.kv_connector_block_state.boundary_state_offloads["a"] = [(1, 30, 92)]
    stores = scheduler.plan(step).stores
    tail = asked.block_hashes[22]
    assert [(one.block_hash, one.group, one.block_ids) for one in stores] == [
        (tail, 1, (30,)),
        (tail, 0, (6,)),
    ]

    second = half(store, groups=groups, **TAILS)
    for group in (0, 1):
        hashes = [*asked.block_hashes[3:20:4], tail] if group == 0 else [tail]
        keys = NAMESPACE.keys(hashes, group, 0)
        assert all(store.put_many(keys, [b"x"] * len(keys)))
    longer = request("b", 130, hash_tokens=4)
    assert answer(second, longer) == 92, "five blocks and three quarters of the next"
    second.allocated(longer, (list(range(1, 8)), [0] * 5 + [20, 21]), 92)
    (load,) = second.plan(SchedulerOutput.make_empty()).loads
    assert [(one.group, one.block_ids) for one in load.blocks] == [
        *((0, (block,)) for block in range(1, 7)),
        (1, (20,)),
    ]
    store.delete_many(NAMESPACE.keys([tail], 1, 0))
    assert answer(half(store, groups=groups, **TAILS), request("c", 130, hash_tokens=4)) == 0


def test_a_prompt_without_a_whole_block_is_found_too(store: Store) -> None:
    asked = request("a", 13, hash_tokens=4)
    scheduler = half(store, groups=(Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, 2, state=True)), **TAILS)
    assert answer(scheduler, asked) == 0
    for group in (0, 1):
        assert all(store.put_many(NAMESPACE.keys([asked.block_hashes[2]], group, 0), [b"x"]))
    asked = request("b", 13, hash_tokens=4)
    assert answer(scheduler, asked) == 12
    scheduler.allocated(asked, ([1], [2]), 12)
    (load,) = scheduler.plan(SchedulerOutput.make_empty()).loads
    assert [(one.group, one.block_ids) for one in load.blocks] == [(0, (1,)), (1, (2,))]


def test_no_tail_is_offered_behind_what_its_hash_covers(store: Store) -> None:
    """The sound inside of a video is in no hash until the video ends."""
    asked = request("a", 13, hash_tokens=4)
    for group in (0, 1):
        assert all(store.put_many(NAMESPACE.keys(asked.block_hashes[1:3], group, 0), [b"x"] * 2))
    asked.mm_features = [
        MultiModalFeatureSpec(None, kind, kind, PlaceholderRange(first, 13 - first))
        for kind, first in (("video", 6), ("audio", 8))
    ]
    scheduler = half(store, groups=(Group(BLOCK_TOKENS), Group(BLOCK_TOKENS, 2, state=True)), **TAILS)
    assert answer(scheduler, asked) == 8


# Windows of smaller blocks, of which hits need the last in front of each end.


def test_a_window_keeps_what_hits_need(store: Store) -> None:
    asked = request("a", 4 * BLOCK_TOKENS * 2 + 1)
    groups = (Group(4 * BLOCK_TOKENS, latent=True), Group(BLOCK_TOKENS, BLOCK_TOKENS + 2, latent=True))
    scheduler = half(store, groups=groups)
    scheduler.allocated(asked, ([], []), 0)
    step = scheduler.plan(output(asked, asked.num_tokens, ([1, 2, 3], list(range(1, 10)))))
    assert [(block.group, block.block_ids) for block in step.stores] == [
        (0, (1,)), (0, (2,)), (1, (3,)), (1, (4,)), (1, (7,)), (1, (8,)),
    ]  # fmt: skip
