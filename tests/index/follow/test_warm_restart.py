"""An index that stops and begins with a snapshot, with real publishers: warm at once, and never believed too far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpool.discovery.worker import Worker
from kvpool.index.fleet.fleet import Fleet
from kvpool.index.fleet.snapshot import Snapshot, pack, unpack
from kvpool.index.follow import subscriber as feed_module
from kvpool.index.follow.subscriber import Subscriber
from tests.support.deadlines import eventually
from tests.support.feeds import Misbehaving, misbehaving, worker_of
from tests.support.wire import batch, packed64, stored

PROMPT = list(range(1, 11))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PROBE_S", 0.2)
    monkeypatch.setattr(feed_module, "ANSWER_S", 0.5)


class Index:
    """One life of an index, without its port."""

    def __init__(self, snapshot: bytes | None = None, flags: list[Worker] | None = None) -> None:
        self.feed = Subscriber()
        self.fleet = Fleet(feed=self.feed)
        if snapshot is not None:
            ids = {worker.id for worker in flags or ()}
            self.fleet.restore(unpack(snapshot), age_s=0.0, flags=ids, life="")
        for worker in flags or ():
            self.fleet.add(worker, "flag")

    def taken(self) -> bytes:
        return b"".join(pack(Snapshot(time.time(), "", self.fleet.snapshot())))

    def row(self) -> tuple[int, int, bool]:
        """Device blocks, sequence, stale."""
        (row,) = self.fleet.lookup("m", hashes64=packed64(PROMPT))
        return row.device_blocks, row.sequence, row.stale

    def settles_at(self, blocks: int, sequence: int) -> bool:
        return eventually(lambda: self.row() == (blocks, sequence, False))

    def problems(self) -> tuple[int, str]:
        ((one,),) = (status.publishers for status in self.fleet.workers())
        return one.resets, one.problem


@contextmanager
def an_index(snapshot: bytes | None = None, flags: list[Worker] | None = None) -> Iterator[Index]:
    index = Index(snapshot, flags)
    try:
        yield index
    finally:
        index.fleet.close()


def until_four(publisher: Misbehaving) -> bytes:
    """The snapshot of an index that has seen batches 0 to 3, one block each."""
    for number in range(4):
        publisher.publish(batch(stored([PROMPT[number]]), at_s=number))
    with an_index(flags=[worker_of(publisher.publisher)]) as index:
        assert index.settles_at(4, 3)
        return index.taken()


def test_nobody_is_credited_before_the_publisher_has_answered() -> None:
    with misbehaving() as publisher:
        worker = worker_of(publisher.publisher)
        snapshot = until_four(publisher)
        publisher.mute = True
        asked = len(publisher.asked)
        with an_index(snapshot, [worker]) as index:
            assert eventually(lambda: len(publisher.asked) >= asked + 2)
            assert index.row() == (0, 3, True)
            assert index.fleet.joining == 1
            publisher.mute = False
            assert index.settles_at(4, 3)
            assert index.fleet.joining == 0


@pytest.mark.parametrize("published", [0, 4])
def test_a_publisher_that_was_started_anew_meanwhile(published: int) -> None:
    with misbehaving() as first:
        worker = worker_of(first.publisher)
        snapshot = until_four(first)
    with misbehaving(first.ports) as second:
        for number in range(published):
            second.publish(batch(stored([PROMPT[number]]), at_s=100 + number))
        with an_index(snapshot, [worker]) as index:
            seen = set()

            def settled() -> bool:
                seen.add(index.row())
                return index.row() == (published, max(0, published - 1), False) and index.problems()[0] == 1

            assert eventually(settled), index.row()
            assert all(blocks <= published for blocks, _, _ in seen), (
                "what the first life held is not credited"
            )
            assert index.problems() == (1, "")
