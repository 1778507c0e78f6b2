"""Records on their way to the pool: what is sent, waits and is given up, and which blocks are held meanwhile."""

from __future__ import annotations

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvpool import metrics
from kvpool.metrics import Counters
from kvpool.vllm.plan import BlockRef, Group, PoolMetadata, PoolWorkerMetadata
from kvpool.vllm.store_queue import HeldBlocks, StoreQueue, Wanted

pytestmark = [pytest.mark.vllm]

BLOCKS = 8


class Queue:
    """A queue of an engine of one rank, over a real block pool of which every block is free."""

    def __init__(self, *, write_through: bool = True, window: int | None = None) -> None:
        self.pool, self.counters, held = BlockPool(BLOCKS, True, 16), Counters(), HeldBlocks()
        held.bind(self.pool)
        self.queue = StoreQueue(
            held, [Group(16, window)], ranks=1, write_through=write_through, counters=self.counters
        )

    def offer(self, number: int, *, after: int | None = None) -> PoolMetadata:
        step, parent = PoolMetadata(), None if after is None else (bytes([after]), 0)
        block = BlockRef(bytes([number]), 0, (number,))
        self.queue.offer(step, Wanted(block, parent, (b"content",), 0, None))
        return step

    def held(self) -> list[int]:
        return [block.block_id for block in self.pool.blocks[1:] if block.ref_cnt]


def test_blocks_are_held_from_sending_until_they_are_staged() -> None:
    one = Queue()
    (tag,) = one.offer(1).tags
    assert one.held() == [1]
    assert one.queue.is_under_way((bytes([1]), 0))
    one.queue.update(PoolWorkerMetadata(staged={tag: 1}))
    assert one.held() == []
    assert not one.queue.is_empty, "staged, not stored"
    assert one.queue.update(PoolWorkerMetadata(stored={tag: 1}))
    assert one.queue.is_empty


def test_with_write_back_nothing_is_held() -> None:
    one = Queue(write_through=False)
    assert one.offer(1).stores
    assert one.held() == []


def test_a_record_behind_a_lost_one_is_given_up_until_the_pool_has_that() -> None:
    one = Queue()
    one.queue.lost((bytes([1]), 0))
    assert one.offer(2, after=1).stores == []
    assert one.counters.take() == {f"{metrics.STORE_SKIPPED_BLOCKS.name}/behind_gap": 1}
    one.queue.found((bytes([1]), 0))
    assert one.offer(2, after=1).stores


def test_records_of_a_window_need_none_before_them() -> None:
    one = Queue(window=32)
    one.queue.lost((bytes([1]), 0))
    assert one.offer(2, after=None).stores
    assert not one.queue.gave_up


def test_what_finds_no_room_waits_and_is_given_up_when_its_block_was_used() -> None:
    one = Queue()
    one.queue.update(PoolWorkerMetadata(store_slots=1))
    (tag,) = one.offer(1).tags
    assert one.offer(2).stores == []
    one.queue.update(PoolWorkerMetadata(staged={tag: 1}, stored={tag: 1}))
    later = PoolMetadata()
    one.queue.send_waiting(later)
    assert later.stores == [], "the block holds nothing any more"
    assert one.counters.take() == {f"{metrics.STORE_SKIPPED_BLOCKS.name}/evicted": 1}
