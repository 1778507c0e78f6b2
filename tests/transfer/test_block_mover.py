"""``BlockMover`` on memory of the caller: bounds, verdicts by block, and what one fault ends."""

from __future__ import annotations

import pytest

from kvpool import _native, metrics
from kvpool.metrics import Counters
from kvpool.transfer import BlockMover, HostMemory, Moved, Need, Record
from kvpool.transfer.memory import MAX_PARTS
from tests.support.scripted_store import ScriptedStore, key


class Bench:
    """A mover whose parts have ``part_items`` records of one byte."""

    def __init__(self, part_items: int = 1) -> None:
        self.store = ScriptedStore()
        self.counters = Counters()
        self.mover = BlockMover(self.store, HostMemory(part_items), self.counters)

    def end(self) -> Moved:
        """End every batch as it comes, in order, until the only job is reported."""
        while True:
            finished = self.mover.poll()
            if ended := [*finished.loads, *finished.stores]:
                (moved,) = ended
                return moved
            self.store.end_all()


def records(*numbers: int) -> list[Record]:
    return [Record(key(number, 0), memoryview(bytearray([number]))) for number in numbers]


def test_no_more_parts_are_under_way_than_there_may_be() -> None:
    at = Bench()
    at.mover.store("job", records(*range(20)))
    assert len(at.store.under_way) == MAX_PARTS
    assert at.end().moved == [True] * 20
    assert sorted(at.store.records) == sorted(key(number, 0) for number in range(20))


@pytest.mark.parametrize(
    ("need", "moved", "count"),
    [
        (Need.ALL, [False] * 4, 0),
        (Need.LEADING, [True, False, False, False], 1),
        (Need.EACH, [True, False, True, True], 3),
    ],
)
def test_which_blocks_of_a_load_are_of_use_when_one_is_missing(
    need: Need, moved: list[bool], count: int
) -> None:
    at = Bench()
    at.store.records |= {key(number, 0): bytes([number]) for number in (0, 2, 3)}
    wanted = records(0, 1, 2, 3)
    at.mover.load("job", wanted, timeout_s=60, max_s=60, need=need)
    ended = at.end()
    assert (ended.cause, ended.moved, ended.missing[0]) == ("missing", moved, 1)
    counted = at.counters.take()
    assert counted[f"{metrics.LOAD_REQUESTS.name}/missing"] == 1
    assert counted.get(metrics.LOADED_BLOCKS.name, 0) == count


def test_of_a_block_of_several_records_only_what_is_missing_is_sent() -> None:
    at = Bench(part_items=4)
    at.store.records |= {key(number, 0): b"x" for number in (0, 1, 2)}
    at.mover.store("job", records(0, 1, 2, 3, 4, 5), width=2)
    ended = at.end()
    assert (ended.moved, ended.sent, ended.nbytes) == ([True] * 3, 2, 3)
    assert at.store.records[key(0, 0)] == b"x"
    counted = at.counters.take()
    assert counted[f"{metrics.STORE_SKIPPED_BLOCKS.name}/already_there"] == 1
    assert counted[metrics.STORED_BLOCKS.name] == 2


def test_a_fault_ends_its_job_and_no_other() -> None:
    at = Bench()
    at.store.records |= {key(number, 0): bytes([number]) for number in range(4)}
    at.mover.load("bad", records(0, 1), timeout_s=60, max_s=60)
    at.mover.load("good", records(2, 3), timeout_s=60, max_s=60)
    at.store.end(0, fault=True)
    at.mover.poll()
    assert [batch.cancelled for batch in at.store.under_way] == [True, False, False]
    at.store.end_all()
    assert {load.job: load.cause for load in at.mover.poll().loads} == {
        "bad": "store_unavailable",
        "good": "",
    }


@pytest.mark.parametrize(
    ("status", "cause", "counted"),
    [(_native.REFUSED, "refused", "refused"), (_native.FAULT, "store_unavailable", "store_unavailable")],
)
def test_what_is_stored_beside_a_record_that_is_not_is_told_and_that_one_counted(
    status: int, cause: str, counted: str
) -> None:
    at = Bench(part_items=4)
    at.store.ends[key(1, 0)] = status
    at.mover.store("job", records(0, 1, 2, 3))
    ended = at.end()
    assert (ended.cause, ended.moved, ended.sent) == (cause, [True, False, True, True], 3)
    assert list(ended.refused) == [False, status == _native.REFUSED, False, False]
    seen = at.counters.take()
    assert seen[metrics.STORED_BLOCKS.name] == 3
    assert seen[f"{metrics.STORE_SKIPPED_BLOCKS.name}/{counted}"] == 1


def test_a_record_that_is_refused_for_itself_ends_no_other_part_of_its_job() -> None:
    at = Bench()
    at.store.ends[key(0, 0)] = _native.REFUSED
    at.mover.store("job", records(*range(20)))
    assert at.end().moved == [False] + [True] * 19


def test_a_cancelled_job_is_reported_once_when_nothing_touches_its_memory() -> None:
    at = Bench()
    at.mover.load("job", records(0, 1), timeout_s=60, max_s=60)
    at.mover.cancel("job")
    at.mover.cancel("job")
    assert at.mover.poll().loads == []
    at.store.end_all()
    assert [load.cause for load in at.mover.poll().loads] == ["cancelled"]
    assert at.mover.poll().loads == []
    assert not at.mover.busy


def test_a_job_of_nothing_is_reported() -> None:
    at = Bench()
    at.mover.store("job", [])
    assert (at.end().ok, at.mover.busy) == (True, False)
